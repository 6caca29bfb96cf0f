"""Checkpoints of compressed-tensors, which llm-compressor makes.

`config_groups` give layers, by name, regular expression or class, a format and its arguments. Source:
https://github.com/vllm-project/compressed-tensors, quantization/quant_config.py and compressors/.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.weights.schemes.declared import DeclaredScheme, Layout
from moebius_worker.engine.weights.schemes.fp8_layout import Fp8Layout, block_size
from moebius_worker.engine.weights.schemes.int_layouts import Int8Layout, PackedIntLayout
from moebius_worker.engine.weights.schemes.mxfp4_layout import Mxfp4Layout
from moebius_worker.engine.weights.schemes.nvfp4_layout import Nvfp4Layout
from moebius_worker.engine.weights.schemes.patterns import matcher

Arguments = Mapping[str, Any]


def compressed_tensors_scheme(config: Mapping[str, Any]) -> DeclaredScheme:
    """Raises CheckpointError for what is not supported."""
    for feature in ("sparsity_config", "transform_config"):
        if (declared := config.get(feature)) and declared.get("format") != "dense":
            raise CheckpointError(f"The checkpoint has a {feature} of compressed-tensors: not supported.")
    ignored = matcher(config.get("ignore") or ())
    by_name: list[tuple[Callable[[str], bool], Layout]] = []
    by_class: Layout | None = None
    for name, group in (config.get("config_groups") or {}).items():
        layout = _group_layout(name, group, config.get("format"))
        targets = group.get("targets") or ()
        by_name.append((matcher(target for target in targets if not _is_class(target)), layout))
        if any(map(_is_class, targets)):
            by_class = by_class or layout

    def layout_of(module: str) -> Layout | None:
        if ignored(module):
            return None
        return next((layout for matches, layout in by_name if matches(module)), by_class)

    return DeclaredScheme(f"compressed-tensors {config.get('format')}", layout_of)


def _is_class(target: str) -> bool:
    """Names of classes, such as "Linear", have no dots; all that is quantised counts as of such a one."""
    return not target.startswith("re:") and "." not in target and target[:1].isupper()


def _group_layout(name: str, group: Any, format: str | None) -> Layout:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise CheckpointError(f"The config group {name} of compressed-tensors does not describe its weights.")
    format = str(group.get("format") or format)
    if format not in _LAYOUTS:
        raise CheckpointError(
            f"compressed-tensors {format}, which the config group {name} has, is not supported. "
            f"Of compressed-tensors', {', '.join(_SUPPORTED)} are."
        )
    layout = _LAYOUTS[format](format, group["weights"])
    inputs = group.get("input_activations") or {}
    if isinstance(layout, Fp8Layout) and (inputs.get("type"), inputs.get("num_bits")) == ("float", 8):
        return replace(layout, activations=True)
    return layout


def _nvfp4(format: str, weights: Arguments) -> Layout:
    _only(format, weights, type=("float",), num_bits=(4,), group_size=(16,), symmetric=(True,))
    return Nvfp4Layout("weight_packed", "weight_global_scale", reciprocal=True)


def _mxfp4(format: str, weights: Arguments) -> Layout:
    _only(format, weights, type=("float",), num_bits=(4,), group_size=(32,), symmetric=(True,))
    return Mxfp4Layout("weight_packed", "weight_scale", blocks=False)


def _packed(format: str, weights: Arguments) -> Layout:
    _only(format, weights, type=("int",), num_bits=(4, 8), strategy=("channel", "group"))
    _only(format, weights, actorder=(None, "weight", "static"))
    return PackedIntLayout(weights["num_bits"], _group(format, weights), weights.get("symmetric", True))


def _float(format: str, weights: Arguments) -> Layout:
    _only(format, weights, type=("float",), num_bits=(8,), symmetric=(True,))
    _only(format, weights, strategy=("tensor", "channel", "block", "group"))
    if weights["strategy"] == "block":
        return Fp8Layout(
            "weight_scale", block_size(weights.get("block_structure"), f"compressed-tensors {format}")
        )
    if weights["strategy"] == "group":
        return Fp8Layout("weight_scale", (1, _group(format, weights) or 0))
    return Fp8Layout("weight_scale")


def _int(format: str, weights: Arguments) -> Layout:
    _only(format, weights, type=("int",), num_bits=(8,), strategy=("tensor", "channel", "group"))
    _only(format, weights, actorder=(None, "weight", "static"))
    return Int8Layout(_group(format, weights), weights.get("symmetric", True))


def _naive(format: str, weights: Arguments) -> Layout:
    return (_int if weights.get("type") == "int" else _float)(format, weights)


_LAYOUTS: Mapping[str, Callable[[str, Arguments], Layout]] = MappingProxyType(
    {
        "nvfp4-pack-quantized": _nvfp4,
        "mxfp4-pack-quantized": _mxfp4,
        "pack-quantized": _packed,
        "float-quantized": _float,
        "int-quantized": _int,
        "naive-quantized": _naive,
    }
)
# The last one: each group tells its own.
_SUPPORTED = (*_LAYOUTS, "mixed-precision")


def _group(format: str, weights: Arguments) -> int | None:
    """The group size; None for channels and tensors."""
    if weights["strategy"] != "group":
        return None
    size = weights.get("group_size")
    if not isinstance(size, int) or size <= 0:
        _refuse(format, "group_size", size, ("a positive number",))
    return size


def _only(format: str, weights: Arguments, **supported: tuple[Any, ...]) -> None:
    for key, values in supported.items():
        if (declared := weights.get(key, True if key == "symmetric" else None)) not in values:
            _refuse(format, key, declared, values)


def _refuse(format: str, key: str, declared: object, supported: tuple[Any, ...]) -> NoReturn:
    raise CheckpointError(
        f"compressed-tensors {format} with {key} {declared} is not supported; "
        f"{' and '.join(map(str, supported))} are."
    )
