"""Experts' products for Hopper on what is here: on the GPU, or on a machine of threads and tensors.

To be imported where Triton is installed; skips the module that does on any other GPU.
"""

import pytest
import torch

from moebius_kernels.activations import SILU
from moebius_kernels.calls import shapes_of
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.e2m1_words import E2m1Words
from moebius_kernels.formats.format import Format, StoredMatrix
from moebius_kernels.formats.int_words import IntWords
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.registry import Backend, Device, Query, TokenRange, refusal
from moebius_kernels.router import topk_softmax
from moebius_kernels.triton import bf16_gemm_hopper, fp8_gemm_hopper, words_gemm_hopper
from tests.kernels.triton.gluon_machine import Machine

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs Hopper, or no GPU", allow_module_level=True)

H200 = Device("cuda", "NVIDIA H200", (9, 0))
NVFP4, MXFP4 = E2m1Words(Nvfp4()), E2m1Words(Mxfp4())


def simulated(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Launches of the products go there."""
    made = Machine(replaced={"_word_factors": _word_factors, "_expanded": _expanded})
    monkeypatch.setattr(fp8_gemm_hopper, "serves", lambda x, matrix, tiling: True)
    for module in (bf16_gemm_hopper, fp8_gemm_hopper, words_gemm_hopper):
        monkeypatch.setattr(module, "launch", made.launch)
        monkeypatch.setattr(module, "multiprocessors", made.multiprocessors)
    return made


def _word_factors(words: torch.Tensor, per: int, code: str, rows: int, asm: bool) -> torch.Tensor:
    """As `decode_words.word_factors` has them without ASM: the bits, one factor's or two's each."""
    if per == 1:
        return words
    shift = torch.arange(per) * (32 // per)
    return (words.long()[:, :, None] >> shift & (1 << 32 // per) - 1).reshape(rows, -1)


def _expanded(
    words: torch.Tensor,
    factors: torch.Tensor,
    code: str,
    scales: str,
    rows: int,
    columns: int,
    asm: bool,
    in_order: bool,
) -> torch.Tensor:
    """By the format itself: a small matrix of these words, of E2M1 times 2^-8 as with ASM."""
    factors = factors.as_subclass(torch.Tensor)
    data = words.as_subclass(torch.Tensor).contiguous().view(torch.uint8)
    if code == "int4_words":
        form = IntWords(columns // factors.shape[1], scales == "centred")
        pairs = factors.int().contiguous().view(torch.bfloat16)
        scale = pairs if form.centred else pairs[..., 0::2]
        return form.dequantize({"data": data, "scale": scale}, columns).bfloat16()
    e2m1 = NVFP4 if code == "nvfp4_words" else MXFP4
    scale = torch.stack((factors & 255, factors >> 8), -1).flatten(1) if e2m1 is NVFP4 else factors
    parts = {"data": data, "scale": scale.to(torch.uint8), "row_scale": torch.ones(rows)}
    return (e2m1.dequantize(parts, columns) / 256).bfloat16()


def reason(
    backend: Backend,
    form: Format,
    tokens: TokenRange,
    *,
    experts: int = 4,
    hidden: int = 512,
    inner: int = 256,
) -> str:
    """Why experts of such sizes, two for each token, are refused on an H200; "None" if they are not."""
    meta = torch.device("meta")
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    gate_up, down = (StoredMatrix.empty(form, shape, meta) for shape in shapes)
    call = {
        "x": torch.zeros(2, hidden, dtype=torch.bfloat16),
        "route": topk_softmax(torch.zeros(2, experts), 2),
        "weights": ExpertWeights([gate_up], down),
        "activation": SILU,
    }
    return str(refusal(backend, Query("routed_experts", shapes_of("routed_experts", call), tokens, H200)))
