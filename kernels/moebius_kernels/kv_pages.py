"""Keys and values of one layer in pages, as the model computed them or quantised."""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import torch
import torch.nn.functional as F


class KvFormat(StrEnum):
    """How the numbers are kept.

    MODEL: in the model's dtype. FP8: e4m3 with an fp32 scale for each token and head. INT8: blocks of 32
    along the head with a bf16 scale each, as large as ggml's q8_0; bf16 reaches as far as the numbers do.
    """

    MODEL = "model"
    FP8 = "fp8"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class _Quantisation:
    """Numbers up to `largest`, and a scale for each `block` of them (None: the whole head)."""

    numbers: torch.dtype
    largest: float
    scales: torch.dtype
    block: int | None

    def block_len(self, dim: int) -> int:
        return self.block or dim

    def num_blocks(self, dim: int) -> int:
        return -(-dim // self.block_len(dim))


_QUANTISATIONS: Mapping[KvFormat, _Quantisation] = {
    KvFormat.FP8: _Quantisation(torch.float8_e4m3fn, 448.0, torch.float32, None),
    KvFormat.INT8: _Quantisation(torch.int8, 127.0, torch.bfloat16, 32),
}


@dataclass(frozen=True, slots=True)
class StoredRows:
    """`numbers` [pages, page_size, KV, D]; if quantised, `scales` [pages, page_size, KV, blocks]."""

    format: KvFormat
    numbers: torch.Tensor
    scales: torch.Tensor | None

    @property
    def dim(self) -> int:
        return self.numbers.shape[-1]

    def write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Finite rows [T, KV, D] to the places `slots` int64 [T], page * page_size + offset."""
        if self.scales is None:
            _flat(self.numbers).index_copy_(0, slots, rows)
            return
        numbers, scales = _quantise(rows, _QUANTISATIONS[self.format])
        _flat(_indexable(self.numbers)).index_copy_(0, slots, _indexable(numbers))
        _flat(self.scales).index_copy_(0, slots, scales)

    def gather(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """All rows of `pages` int64 [N], one page after another: [N * page_size, KV, D]."""
        numbers = _indexable(self.numbers).index_select(0, pages).flatten(0, 1).view(self.numbers.dtype)
        if self.scales is None:
            return numbers.to(dtype)
        scales = self.scales.index_select(0, pages).flatten(0, 1)
        return _dequantise(numbers, scales, _QUANTISATIONS[self.format]).to(dtype)


@dataclass(frozen=True, slots=True)
class KvPages:
    """What one layer keeps: keys [pages, page_size, KV, Dk] and values [pages, page_size, KV, Dv].

    `values` None: the first `value_dim` numbers of a key are its value (multi-head latent attention).
    """

    keys: StoredRows
    values: StoredRows | None
    value_dim: int

    @property
    def kv_heads(self) -> int:
        return self.keys.numbers.shape[2]

    @property
    def key_dim(self) -> int:
        return self.keys.dim

    @classmethod
    def allocate(
        cls,
        format: KvFormat,
        pages: int,
        page_size: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        values_in_keys: bool = False,
    ) -> Self:
        """`dtype` is the model's. Zeroed: padding multiplies what nobody wrote by zero, and zero times NaN
        is no zero."""

        def rows(dim: int) -> StoredRows:
            leading = (pages, page_size, kv_heads)
            if format is KvFormat.MODEL:
                return StoredRows(format, _zeros((*leading, dim), dtype, device), None)
            form = _QUANTISATIONS[format]
            return StoredRows(
                format,
                _zeros((*leading, dim), form.numbers, device),
                _zeros((*leading, form.num_blocks(dim)), form.scales, device),
            )

        return cls(rows(key_dim), None if values_in_keys else rows(value_dim), value_dim)

    def gather(self, pages: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [N * page_size, KV, Dk] and values [N * page_size, KV, Dv] of `pages` int64 [N]."""
        keys = self.keys.gather(pages, dtype)
        if self.values is None:
            return keys, keys[..., : self.value_dim]
        return keys, self.values.gather(pages, dtype)


def bytes_per_page(
    format: KvFormat,
    page_size: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    values_in_keys: bool = False,
) -> int:
    """What one page of one layer takes; `dtype` is the model's."""

    def row_bytes(dim: int) -> int:
        if format is KvFormat.MODEL:
            return dim * dtype.itemsize
        form = _QUANTISATIONS[format]
        return dim * form.numbers.itemsize + form.num_blocks(dim) * form.scales.itemsize

    return page_size * kv_heads * (row_bytes(key_dim) + (0 if values_in_keys else row_bytes(value_dim)))


def _quantise(rows: torch.Tensor, form: _Quantisation) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite [..., D] -> numbers [..., D] and scales [..., blocks]."""
    dim = rows.shape[-1]
    blocks, length = form.num_blocks(dim), form.block_len(dim)
    padded = F.pad(rows.float(), (0, blocks * length - dim)).unflatten(-1, (blocks, length))
    scales = (padded.abs().amax(dim=-1) / form.largest).to(form.scales)
    # What is so small that its scale is zero becomes zero.
    divisors = scales.float().masked_fill(scales == 0, math.inf).unsqueeze(-1)
    numbers = (padded / divisors).clamp_(-form.largest, form.largest).flatten(-2)[..., :dim]
    if not form.numbers.is_floating_point:
        numbers = numbers.round()
    return numbers.to(form.numbers), scales


def _dequantise(numbers: torch.Tensor, scales: torch.Tensor, form: _Quantisation) -> torch.Tensor:
    """The inverse of `_quantise`, in fp32."""
    dim = numbers.shape[-1]
    spread = scales.float().unsqueeze(-1).expand(*scales.shape, form.block_len(dim)).flatten(-2)
    return numbers.float() * spread[..., :dim]


def _flat(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(-1, *pages.shape[2:])


def _indexable(numbers: torch.Tensor) -> torch.Tensor:
    """PyTorch copies float8 by index on some devices only, bytes on all."""
    return numbers.view(torch.uint8) if numbers.dtype.itemsize == 1 else numbers


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Straight from the kernel, which zeroes each page of memory when it is first written: what is not used
    # yet costs neither time at the start nor memory.
    nbytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
