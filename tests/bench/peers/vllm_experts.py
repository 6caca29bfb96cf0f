"""vLLM's Triton experts, out of an unpacked wheel (0.33) of which nothing else is imported.

Its kernel and its choice of tiles are its own; ours replace its compiled alignment, activation and sum.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from moebius_kernels.activations import Activation
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.router import Route
from moebius_kernels.triton.activations import gated
from tests.bench.peers.blocks import Blocks, blocks_of, weighted_sum

_LAYERS = "vllm/model_executor/layers"
_GROUP = 128


class VllmExperts:
    """BF16, or FP8 by 128x128 with activations that are quantised by token and 128 columns."""

    def __init__(self, layers: Sequence[ExpertWeights], activation: Activation, package: Path) -> None:
        self.layers, self.activation = layers, activation
        self.fp8 = isinstance(layers[0].down.format, Fp8)
        self.module = _load(package / _LAYERS / "fused_moe/fused_moe.py")
        if self.fp8:
            self.quantise = _load(package / _LAYERS / "quantization/utils/fp8_utils.py")

    def __call__(self, x: torch.Tensor, route: Route, index: int) -> torch.Tensor:
        layer = self.layers[index]
        tokens, top_k = route.experts.shape
        config = self._tiles(tokens, top_k)
        blocks = self._blocks(route, config["BLOCK_SIZE_M"])
        shape, flat = (tokens, top_k), (tokens * top_k, 1)
        gate_up = self._multiply(x, layer.gate_up[0], blocks, shape, config, layer.gate_up_bias)
        middle = gated(gate_up.flatten(0, 1), self.activation)
        outputs = self._multiply(middle, layer.down, blocks, flat, config, layer.down_bias)
        return weighted_sum(outputs.view(tokens, top_k, -1), route.weights)

    def _tiles(self, tokens: int, top_k: int) -> dict[str, Any]:
        down = self.layers[0].down
        experts, hidden, inner = down.shape
        kind, block = ("fp8_w8a8", [_GROUP, _GROUP]) if self.fp8 else (None, None)
        tuned = self.module.get_moe_configs(experts, inner, kind, *(block or (0, 0)))
        if tuned:
            found: dict[str, Any] = tuned[min(tuned, key=lambda count: abs(count - tokens))]
            return found
        usual: dict[str, Any] = self.module.get_default_config(
            tokens, experts, inner, hidden, top_k, kind, block
        )
        return usual

    def _blocks(self, route: Route, size: int) -> Blocks:
        experts = self.layers[0].num_slots
        # Its own rule: so few pairs that each is a block.
        if route.experts.numel() * 4 > experts:
            return blocks_of(route.experts, experts, size)
        rows = torch.full((1,), route.experts.numel() * size, dtype=torch.int32, device=route.experts.device)
        return Blocks(torch.empty(0), route.experts.flatten().int(), rows)

    def _multiply(
        self,
        x: torch.Tensor,
        matrix: StoredMatrix,
        blocks: Blocks,
        shape: tuple[int, int],
        config: dict[str, Any],
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        parts, x_scale = matrix.parts, None
        if self.fp8:
            x, x_scale = self._quantised(x)
        outputs = torch.empty(*shape, parts["data"].shape[1], dtype=torch.bfloat16, device=x.device)
        self.module.invoke_fused_moe_triton_kernel(
            x,
            parts["data"],
            outputs,
            x_scale,
            parts.get("scale"),
            None,
            blocks.pairs if blocks.pairs.numel() else None,
            blocks.experts,
            blocks.rows,
            False,
            shape[1],
            config,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=self.fp8,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
            block_shape=[_GROUP, _GROUP] if self.fp8 else None,
            B_bias=bias,
        )
        return outputs

    def _quantised(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = x.shape
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
        scale = torch.empty(rows, columns // _GROUP, dtype=torch.float32, device=x.device)
        self.quantise._per_token_group_quant_fp8[(scale.numel(),)](
            x, codes, scale, _GROUP, columns, x.stride(0), 1e-10,
            fp8_min=-448.0, fp8_max=448.0, use_ue8m0=False, BLOCK=_GROUP, num_warps=1, num_stages=1,
        )  # fmt: skip
        return codes, scale


class _Anything:
    """Stands for whatever a module imports and the calls here never reach."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__
    __getitem__ = __call__

    def __bool__(self) -> bool:
        return False


_GIVEN = {
    "tl": tl,
    "triton": triton,
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_TUNED_CONFIG_FOLDER": None,
    "resolve_moe_use_td": lambda: False,
    # As of compute capability 9.0.
    "enable_swap_ab": lambda rows, columns: rows < 64 and columns >= 64,
    "get_device_name_as_file_name": lambda: torch.cuda.get_device_name().replace(" ", "_"),
}


class _Imports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: _given(name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _given(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _GIVEN.get(name, _Anything())


@contextmanager
def _stubs() -> Iterator[None]:
    finder = _Imports()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _stubs():
        spec.loader.exec_module(module)
    return module
