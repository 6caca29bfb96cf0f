"""NVIDIA ModelOpt's checkpoints: NVFP4 and FP8 per tensor, also mixed by layer.

`hf_quant_config.json` (exclude_modules) and `config.json` (ignore) say the same in two ways. Source:
https://github.com/NVIDIA/Model-Optimizer/blob/main/modelopt/torch/export/convert_hf_config.py
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.weights.schemes.declared import DeclaredScheme, Layout
from moebius_worker.engine.weights.schemes.fp8_layout import Fp8Layout
from moebius_worker.engine.weights.schemes.nvfp4_layout import Nvfp4Layout
from moebius_worker.engine.weights.schemes.patterns import matcher

_NVFP4 = Nvfp4Layout(data="weight", global_scale="weight_scale_2", reciprocal=False)
# W4A16 has no scale of the activations, and is otherwise the same. FP8 is W8A8.
_LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"NVFP4": _NVFP4, "W4A16_NVFP4": _NVFP4, "FP8": Fp8Layout("weight_scale", activations=True)}
)
_MIXED = "MIXED_PRECISION"
_SUPPORTED = (*_LAYOUTS, _MIXED)


def modelopt_scheme(config: Mapping[str, Any]) -> DeclaredScheme:
    """Raises CheckpointError for what is not supported."""
    config = config.get("quantization", config)
    algorithm = config.get("quant_algo")
    excluded = matcher(config.get("exclude_modules") or config.get("ignore") or ())
    if algorithm is None:
        # Only keys and values are quantised, which is not a matter of the weights.
        declared: Callable[[str], Layout | None] = lambda module: None  # noqa: E731
    elif algorithm == _MIXED:
        declared = _mixed(config.get("quantized_layers") or {})
    else:
        declared = _everywhere(_layout(config))
    return DeclaredScheme(
        f"modelopt {algorithm}", lambda module: None if excluded(module) else declared(module)
    )


def _everywhere(layout: Layout) -> Callable[[str], Layout | None]:
    return lambda module: layout


def _mixed(layers: Mapping[str, Mapping[str, Any]]) -> Callable[[str], Layout | None]:
    if not layers:
        raise CheckpointError(f"The config declares modelopt {_MIXED}, but no quantized_layers.")
    named: dict[Layout, list[str]] = {}
    for name, declared in layers.items():
        named.setdefault(_layout(declared), []).append(name)
    matchers = [(layout, matcher(names)) for layout, names in named.items()]
    return lambda module: next((layout for layout, matches in matchers if matches(module)), None)


def _layout(declared: Mapping[str, Any]) -> Layout:
    algorithm = str(declared.get("quant_algo"))
    if algorithm not in _LAYOUTS:
        raise CheckpointError(
            f"modelopt {algorithm} is not supported. Of modelopt's, {', '.join(_SUPPORTED)} are."
        )
    layout = _LAYOUTS[algorithm]
    if layout is _NVFP4 and declared.get("group_size") not in (None, 16):
        raise CheckpointError(
            f"modelopt {algorithm} with the group size {declared['group_size']} is not supported; 16 is."
        )
    return layout
