"""Dequantisers of each dialect in plain numpy, written from the layouts' descriptions. All take a module's
tensors by their last names, FP8 as its codes, and give fp32 [R, C]."""

from collections.abc import Mapping

import numpy as np

from tests.kernels.formats.numbers import E2M1, e4m3, e8m0, nibbles

Tensors = Mapping[str, np.ndarray]
ONE = np.float32(1)


def per_block(scale: np.ndarray, shape: tuple[int, ...], rows: int, columns: int) -> np.ndarray:
    return scale[(np.arange(shape[0]) // rows)[:, None], (np.arange(shape[1]) // columns)[None, :]]


def words(packed: np.ndarray, bits: int) -> np.ndarray:
    """The integers in 32-bit words [..., n], the lowest first: [..., n * 32/bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = packed.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return fields.reshape(*packed.shape[:-1], -1).astype(np.int64)


def _two_level(packed: np.ndarray, scale: np.ndarray, factor: np.ndarray) -> np.ndarray:
    codes = E2M1[nibbles(packed)]
    return codes * per_block(e4m3(scale), codes.shape, 1, 16) * factor


def modelopt_nvfp4(t: Tensors) -> np.ndarray:
    return _two_level(t["weight"], t["weight_scale"], t["weight_scale_2"])


def ct_nvfp4(t: Tensors) -> np.ndarray:
    return _two_level(t["weight_packed"], t["weight_scale"], ONE / t["weight_global_scale"])


def ct_mxfp4(t: Tensors) -> np.ndarray:
    codes = E2M1[nibbles(t["weight_packed"])]
    return (codes * per_block(e8m0(t["weight_scale"]), codes.shape, 1, 32)).astype(np.float32)


def oss_mxfp4(t: Tensors) -> np.ndarray:
    """Blocks [R, C/32, 16]."""
    values = E2M1[nibbles(t["weight_blocks"])] * e8m0(t["weight_scales"])[..., None]
    return values.reshape(len(values), -1).astype(np.float32)


def fp8(t: Tensors, block: tuple[int, int] | None = None, scale: str = "weight_scale") -> np.ndarray:
    """Of one factor, one a row, or one a block."""
    values = e4m3(t["weight"])
    factors = t[scale].astype(np.float32)
    if block is None:
        return values * factors.reshape(-1, 1)
    return values * per_block(factors, values.shape, *block)


def ct_packed(t: Tensors, bits: int, group: int | None) -> np.ndarray:
    rows, columns = t["weight_shape"]
    codes = words(t["weight_packed"], bits)[:, :columns].astype(np.float32)
    per = group or columns
    zero = np.float32(2 ** (bits - 1))
    if "weight_zero_point" in t:
        zero = per_block(words(t["weight_zero_point"].T.copy(), bits)[:, :rows].T, codes.shape, 1, per)
    return (codes - zero).astype(np.float32) * per_block(t["weight_scale"], codes.shape, 1, per)


def gptq(t: Tensors, bits: int = 4, version: int = 1) -> np.ndarray:
    codes = words(t["qweight"].T.copy(), bits).T  # [C, R]
    zeros = words(t["qzeros"], bits)[:, : codes.shape[1]]
    if version == 1:
        zeros = (zeros + 1) % 2**bits
    groups = t["g_idx"] if "g_idx" in t else np.arange(len(codes)) // -(-len(codes) // len(zeros))
    return ((codes - zeros[groups]).astype(np.float32) * t["scales"][groups].astype(np.float32)).T


def awq(t: Tensors) -> np.ndarray:
    def in_order(packed: np.ndarray) -> np.ndarray:
        by_nibble = words(packed, 4).reshape(len(packed), -1, 8)
        columns = np.empty_like(by_nibble)
        # Nibbles 0 to 7 hold columns 0 2 4 6 1 3 5 7.
        columns[..., [0, 2, 4, 6, 1, 3, 5, 7]] = by_nibble
        return columns.reshape(len(packed), -1)

    codes, zeros = in_order(t["qweight"]), in_order(t["qzeros"])
    groups = np.arange(len(codes)) // (len(codes) // len(zeros))
    return ((codes - zeros[groups]).astype(np.float32) * t["scales"][groups].astype(np.float32)).T
