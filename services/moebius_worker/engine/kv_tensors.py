"""The keys and values of all layers, in pages."""

import math
import mmap
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one position keeps: a key and a value of each KV head of each layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * page_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KvTensors:
    """Keys and values of layer i, [pages, page_size, KV heads, head_dim] each."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(
        cls, shape: KvShape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Zeroed: padding multiplies what nobody wrote by zero, and zero times NaN is no zero."""
        sizes = (shape.num_layers, 2, num_pages, page_size, shape.num_kv_heads, shape.head_dim)
        if device.type == "cpu":
            # Straight from the kernel, which zeroes each page of memory when it is first written: what is
            # not used yet costs neither time at the start nor memory.
            nbytes = math.prod(sizes) * dtype.itemsize
            memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            storage = torch.frombuffer(memory, dtype=dtype).view(sizes)
        else:
            storage = torch.zeros(sizes, dtype=dtype, device=device)
        keys, values = storage.unbind(1)
        return cls(keys.unbind(0), values.unbind(0))
