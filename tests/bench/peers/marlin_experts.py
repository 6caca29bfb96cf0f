"""vLLM's Marlin experts, whose weights of 4 or 8 bits meet BF16 in its compiled kernel (0.33).

Of an unpacked wheel the one library with that kernel is loaded. It is called as vLLM does; the weights are
laid out for it here, and what comes before, between and after its products is ours.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from moebius_kernels.activations import Activation
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.codes import pack_nibbles, unpack_nibbles
from moebius_kernels.formats.format import Format, StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.router import Route
from moebius_kernels.triton.activations import gated
from tests.bench.peers.blocks import Blocks, blocks_of, weighted_sum

_LIBRARY = "vllm/_moe_C_stable_libtorch.abi3.so"
# Its numbers of types: bits of exponent, of mantissa << 8, signed << 16, zero point << 17, finite << 49, and
# what is not a number << 50.
_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
_E4M3 = 4 | 3 << 8 | 1 << 16 | 1 << 49 | 2 << 50
_INT4 = 4 << 8 | 8 << 17 | 1 << 50
# It widens codes by moving their bits, which leaves this out of their exponents: factors make up for it, but
# for MXFP4.
_E2M1_SHORT, _E4M3_SHORT = 126, 120


@dataclass(frozen=True, slots=True)
class Product:
    """As the kernel reads it: `data` int32 [E, C/16, R*16*bits/32], `scale` [E, C/group, R], `factor` fp32
    [E], `bias` [E, R]."""

    kind: int
    rows: int
    columns: int
    data: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def copy(self) -> "Product":
        return replace(self, data=self.data.clone(), scale=self.scale.clone())


class MarlinExperts:
    def __init__(self, layer: ExpertWeights, activation: Activation, sets: int, package: Path) -> None:
        torch.ops.load_library(str(package / _LIBRARY))
        self.experts, self.hidden, inner = layer.down.shape
        self.activation = activation
        hidden, inner = padded(layer.down.format, self.hidden, inner)
        first = laid_out(layer.gate_up[0], layer.gate_up_bias, 2, inner, hidden)
        second = laid_out(layer.down, layer.down_bias, 1, hidden, inner)
        copies = ((first.copy(), second.copy()) for _ in range(sets - 1))
        self.weights = [(first, second), *copies]
        device = first.data.device
        # As many as it may have blocks; it leaves them as it found them.
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.locks = torch.zeros(4 * processors, dtype=torch.int32, device=device)

    def __call__(self, x: torch.Tensor, route: Route, index: int) -> torch.Tensor:
        tokens, top_k = route.experts.shape
        first, second = self.weights[index]
        size = block_size(tokens * top_k, self.experts)
        blocks = blocks_of(route.experts, self.experts, size)
        if first.columns > self.hidden:
            # vLLM does too, in each layer.
            x = F.pad(x, (0, first.columns - self.hidden))
        middle = gated(self._multiply(x, first, blocks, size, route, top_k), self.activation)
        outputs = self._multiply(middle, second, blocks, size, route, 1)
        return weighted_sum(outputs.view(tokens, top_k, -1), route.weights)[:, : self.hidden]

    def _multiply(
        self, x: torch.Tensor, product: Product, blocks: Blocks, size: int, route: Route, top_k: int
    ) -> torch.Tensor:
        outputs = torch.empty(len(x) * top_k, product.rows, dtype=x.dtype, device=x.device)
        activation_scale = zero_points = None
        # The route's weights are in our sum. As vLLM has it: fp32 sums, none atomic, and tiles of its choice.
        weighted, atomic, wide, float_zero_points = False, False, True, False
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x, outputs, product.data, product.bias, product.scale, activation_scale, product.factor,
            zero_points, self.locks, blocks.pairs, blocks.experts, blocks.rows, route.weights, size, top_k,
            weighted, product.kind, len(x), product.rows, product.columns, atomic, wide, float_zero_points,
            -1, -1, -1,
        )  # fmt: skip
        return outputs


def block_size(pairs: int, experts: int) -> int:
    """vLLM's rule: pairs of a block."""
    return next((size for size in (8, 16, 32, 48) if pairs / experts / size < 0.9), 64)


def padded(form: Format, hidden: int, inner: int) -> tuple[int, int]:
    """To what vLLM fills up a layer, so that the kernel has whole tiles and groups."""
    if isinstance(form, Mxfp4):
        return _up(hidden, 256), _up(inner, 128)
    return hidden, _up(inner, math.lcm(128 if hidden % 128 else 64, _group(form)))


def laid_out(matrix: StoredMatrix, bias: torch.Tensor | None, parts: int, rows: int, columns: int) -> Product:
    """`parts`: gate and up, or one; each is filled up with zeros to `rows` of `columns`."""
    form, experts = matrix.format, matrix.shape[0]
    group = _group(form)
    if columns % group:
        raise ValueError(f"Marlin is not given ragged groups: {columns} columns by {group}")

    def filled(part: torch.Tensor, per: int) -> torch.Tensor:
        part = part.reshape(experts, parts, -1, part.shape[-1])
        part = F.pad(part, (0, columns // per - part.shape[-1], 0, rows - part.shape[-2]))
        return part.flatten(1, 2)

    codes, bits = matrix.parts["data"].view(torch.uint8), 8 if isinstance(form, Fp8) else 4
    codes = filled(unpack_nibbles(codes) if bits == 4 else codes, 1)
    scale, factor = matrix.parts["scale"], None
    match form:
        case Nvfp4():
            kind = _E2M1
            scale = _as_words(_by_lane(filled(scale.view(torch.uint8), group)))
            scale, shift = _without_sign(scale.view(torch.float8_e4m3fn))
            factor = matrix.parts["row_scale"][:, 0, 0] * 2.0 ** (_E2M1_SHORT - shift)
        case Mxfp4():
            kind = _E2M1
            scale = _as_words(_by_lane(filled(scale, group))).view(torch.float8_e8m0fnu)
        case IntGroup():
            kind, scale = _INT4, _by_lane(filled(scale, group))
        case _:
            kind, scale = _E4M3, scale.repeat_interleave(128, 1)[:, : matrix.shape[1]].bfloat16()
            scale = _by_lane(filled(scale, group)) * 2.0**_E4M3_SHORT
    if bias is not None:
        # Of 32 rows, pairs that are 8 apart.
        bias = filled(bias[..., None], columns).view(experts, -1, 4, 4, 2)
        bias = bias.transpose(-3, -2).reshape(experts, -1)
    return Product(kind, parts * rows, columns, tiles(codes, bits), scale, factor, bias)


def tiles(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [E, R, C] -> int32 [E, C/16, R*16*bits/32]: a lane's codes of 64 rows by 16 columns together.

    Lane 4 r + c holds, of each 8 rows, row r, and of the 16 columns 2 c, 2 c + 1, and those 8 farther on, as
    `mma.m16n8k16` takes them. Neighbours are half a word apart, so that both are widened at once.
    """
    experts, rows, columns = codes.shape
    # Numbered as in the order below: 64 rows, 16, 8, 1; 16 columns, 8, 2, 1.
    codes = codes.view(experts, rows // 64, 4, 2, 8, columns // 16, 2, 4, 2)
    within = (8, 3, 6) if bits == 4 else (3, 8, 6)
    codes = codes.permute(0, 5, 1, 4, 7, 2, *within).reshape(experts, columns // 16, -1)
    if bits == 4:
        codes = pack_nibbles(codes)
    return codes.view(torch.int32)


def _by_lane(scale: torch.Tensor) -> torch.Tensor:
    """[E, R, groups] -> [E, groups, R]: of each 64 rows those together that are 8 apart."""
    scale = scale.mT
    return scale.reshape(*scale.shape[:2], -1, 8, 8).mT.reshape(scale.shape)


def _as_words(scale: torch.Tensor) -> torch.Tensor:
    """Of each four bytes the middle ones change places: neighbours are half a word apart, as with codes."""
    return scale.reshape(*scale.shape[:-1], -1, 2, 2).mT.reshape(scale.shape)


def _without_sign(scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    """E4M3 times 2^(7 + shift), in fp16 without its sign and last 7 bits; 7 + shift."""
    shift = math.floor(math.log2(448 / float(scale.float().max())))
    wide = (scale.float() * 2.0 ** (7 + shift)).half()
    # Smaller ones the kernel does not know.
    bits = torch.where(wide < 2, 0, wide).view(torch.int16) >> 7
    return bits.to(torch.uint8).view(torch.float8_e4m3fn), 7 + shift


def _group(form: Format) -> int:
    match form:
        case Nvfp4():
            return 16
        case Mxfp4():
            return 32
        case IntGroup(bits=4, zero_point=False, scale_dtype=torch.bfloat16, group=int(group)):
            return group
        case Fp8(block_rows=128, block_columns=128):
            return 128
    raise ValueError(f"Marlin is not given {form.name} here")


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
