"""How far results are from those of the reference, and how far they may be. Choices have files of their own:
`compare_routes.py`, `compare_draws.py`."""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from moebius_kernels.registry import Query
from moebius_kernels.router import Route
from moebius_kernels.sampling import Drawn
from moebius_kernels.tensor_tree import tensors_of

# Relative to the length of the reference's result, over all of it; `ROW_SLACK` times that in a single row.
# By the dtype of the activations: sums and intermediate values rounded to it (fp32: to TF32 in products).
DTYPE_LIMITS: Mapping[str, float] = MappingProxyType({"float32": 1e-3, "float16": 4e-3, "bfloat16": 1.5e-2})
# By how the name of a stored form begins, for what its implementations may do beyond reading it exactly: GGUF
# types multiply activations rounded to blocks of 8 bits. The others get nothing on top.
FORMAT_LIMITS: Mapping[str, float] = MappingProxyType({"q": 2e-2, "iq": 2e-2, "tq": 2e-2})
ROW_SLACK = 4.0
# Of backends that round activations to E4M3, against a reference that rounds them too (`Backend.reference`).
# Hopper adds up FP8 products with 14 bits: 3e-3, which moves some codes of what is between two products to
# their neighbours, each by 1/8: 1.3e-2 for routed experts. Without the reference's rounding they would be off
# by 4.3e-2, so whatever rounds elsewhere than it, or not at all, does not pass.
DECLARED_LIMIT = 2.5e-2


def limit_of(query: Query, *, declared: bool = False) -> float:
    """The relative error that is allowed; `declared`: to a backend with a reference of its own."""
    limits = [DECLARED_LIMIT] if declared else []
    limits += [DTYPE_LIMITS[dtype] for dtype in _dtypes(query.arguments.values()) if dtype in DTYPE_LIMITS]
    for matrix in query.matrices:
        name = matrix.format.name.lower()
        limits += (limit for start, limit in FORMAT_LIMITS.items() if name.startswith(start))
    return max(limits, default=DTYPE_LIMITS["float32"])


def difference(result: Any, expected: Any, limit: float) -> tuple[float, str | None]:
    """The relative error, and what is wrong, None if nothing is: results are tensors, or records of them."""
    if isinstance(expected, Route | Drawn):
        raise TypeError("choices are compared with the scores that they were made from")
    found, wanted = tensors_of(result), tensors_of(expected)
    if len(found) != len(wanted):
        return math.inf, f"{len(found)} tensors instead of {len(wanted)}"
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        error, wrong = tensor_difference(one, other, limit)
        worst = max(worst, error)
        if wrong is not None:
            return worst, wrong
    return worst, None


def tensor_difference(result: torch.Tensor, expected: torch.Tensor, limit: float) -> tuple[float, str | None]:
    if result.shape != expected.shape:
        return math.inf, f"shape {list(result.shape)} instead of {list(expected.shape)}"
    if result.dtype != expected.dtype:
        return math.inf, f"{result.dtype} instead of {expected.dtype}"
    # In fp32, also for the numbers of a quantised cache, whose rounding may go either way.
    result, expected = result.float(), expected.float()
    if bad := int((result.isnan() & ~expected.isnan()).sum()):
        return math.inf, f"{bad} of {result.numel()} numbers are NaN"
    odd = ~(result.isfinite() & expected.isfinite())
    if not torch.equal(result.isnan(), expected.isnan()) or not torch.equal(
        result[odd].nan_to_num(0.0), expected[odd].nan_to_num(0.0)
    ):
        return math.inf, "NaN or infinite numbers elsewhere than in the reference"
    result, expected = (one.nan_to_num(0.0, 0.0, 0.0) for one in (result, expected))
    error = _relative((result - expected).norm().item(), expected.norm().item())
    if error > limit:
        return error, f"relative error {error:.1e}, allowed {limit:.0e}"
    if result.dim() > 1 and len(result) > 1:
        lengths = expected.flatten(1).norm(dim=1)
        # A row that is small beside the others may be off by what those may.
        floor = 0.1 * lengths.square().mean().sqrt()
        rows = (result - expected).flatten(1).norm(dim=1) / lengths.maximum(floor).clamp_min(1e-30)
        worst = rows.max().item()
        if worst > ROW_SLACK * limit:
            row = int(rows.argmax())
            return worst, f"relative error {worst:.1e} in row {row}, allowed {ROW_SLACK * limit:.0e}"
    return error, None


def _relative(error: float, length: float) -> float:
    if error == 0:
        return 0.0
    return error / length if length > 0 else math.inf


def _dtypes(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        if isinstance(value, Mapping):
            yield from _dtypes(value.values())
        elif isinstance(value, tuple):
            yield from _dtypes(value)
        elif isinstance(dtype := getattr(value, "dtype", None), str):
            yield dtype
