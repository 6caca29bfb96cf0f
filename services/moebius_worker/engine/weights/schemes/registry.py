"""The scheme that a checkpoint's config declares."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.errors import CheckpointError, understanding
from moebius_worker.checkpoint.quantization import declared_quantization, quantization_name
from moebius_worker.engine.weights.scheme import Scheme
from moebius_worker.engine.weights.schemes.awq import awq_scheme
from moebius_worker.engine.weights.schemes.compressed_tensors import compressed_tensors_scheme
from moebius_worker.engine.weights.schemes.declared import DeclaredScheme
from moebius_worker.engine.weights.schemes.fp8 import fp8_scheme
from moebius_worker.engine.weights.schemes.ggml import GgmlScheme
from moebius_worker.engine.weights.schemes.gptq import gptq_scheme
from moebius_worker.engine.weights.schemes.modelopt import modelopt_scheme
from moebius_worker.engine.weights.schemes.mxfp4 import mxfp4_scheme

DIALECTS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = MappingProxyType(
    {
        "modelopt": modelopt_scheme,
        "compressed-tensors": compressed_tensors_scheme,
        "fp8": fp8_scheme,
        "mxfp4": mxfp4_scheme,
        "awq": awq_scheme,
        "gptq": gptq_scheme,
    }
)


def scheme_of(checkpoint: Checkpoint) -> Scheme:
    """Raises CheckpointError, with what is supported, for a quantisation that is not."""
    if checkpoint.container == "gguf":
        return GgmlScheme()
    with understanding(f"The quantisation that {checkpoint.path} declares"):
        return _declared_scheme(checkpoint)


def _declared_scheme(checkpoint: Checkpoint) -> Scheme:
    declared = declared_quantization(checkpoint.config)
    if declared is None:
        return DeclaredScheme("not quantised", lambda module: None)
    dialect = DIALECTS.get(str(declared.get("quant_method")))
    if dialect is None:
        raise CheckpointError(
            f"{checkpoint.path} is quantised with {quantization_name(checkpoint.config)}, which is not "
            f"supported. Supported are {', '.join(DIALECTS)}, GGUF files, and what is not quantised."
        )
    try:
        return dialect(declared)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
