"""Weights in safetensors, mapped into memory one shard at a time."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.safetensors import read_headers


class SafetensorsReader:
    """The tensors of the safetensors files in a directory."""

    def __init__(self, directory: Path) -> None:
        self.tensors = read_headers(directory)
        self._open_file: str | None = None
        self._handle: Any = None

    def read(self, name: str) -> torch.Tensor:
        info = self.tensors[name]
        try:
            if self._open_file != info.file:
                self._handle = safe_open(info.file, framework="pt")
                self._open_file = info.file
            return self._handle.get_tensor(name)
        # TypeError and AttributeError: a dtype that this torch does not have.
        except (SafetensorError, OSError, TypeError, AttributeError) as error:
            raise CheckpointError(f"Cannot read {name} ({info.dtype}) in {info.file}: {error}") from error
