"""Factors of the whole matrix, or of each row."""

import torch

from moebius_worker.engine.weights.schemes.module import Module


def row_factors(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """fp32 [rows, 1] of one factor, or of one a row."""
    return scale.float().reshape(-1, 1).expand(rows, 1).contiguous()


def need_row_factors(module: Module, suffix: str, layout: str, dtypes: str, rows: int) -> None:
    """Checks that a tensor holds one factor, or one a row, in any of the shapes that producers give it."""
    info = module.find(suffix)
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows,))
    wanted = info.shape if info is not None and info.shape in shapes else (rows, 1)
    module.need(suffix, layout, dtypes, wanted)
