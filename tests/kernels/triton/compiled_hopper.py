"""Compiles products that divide their labour for sm_90, without a GPU, and prints what came of it as JSON.

A program of its own: where Triton's interpreter is on, nothing can be compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton

from moebius_kernels.activations import SILU
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.jit.triton_ahead import pretend
from moebius_kernels.triton import bf16_gemm_hopper, fp8_gemm_hopper, words_gemm_hopper
from moebius_kernels.triton.align import Alignment
from moebius_kernels.triton.fp8_activations import Rounded
from moebius_kernels.triton.gemm import Gated
from moebius_kernels.triton.tiling import Tiling
from tests.gpu import handed_over
from tests.kernels.triton.matrices import FORMATS

_META = torch.device("meta")
_TOOL = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"
_PAIRS, _TOP_K = 4096, 8
_HIDDEN, _INNER = 2048, 768
# As `expert_tiling.py` has it for many tokens.
_FP8_TILING = Tiling(128, 128, 128, stages=4)


def compiled(name: str) -> dict[str, Any]:
    """`name`: "up" or "down" and a form, or "handed over". Counts of instructions, bytes of shared memory and
    of spills."""
    if name == "handed over":
        numbers = _empty(handed_over.STEPS, handed_over.NUMBERS, dtype=torch.float32)
        handed_over.hand_over(numbers, numbers)
        return counts(handed_over._hand_over)
    gated, form = name.startswith("up"), name.split()[1]
    rows, columns = (2 * _INNER, _HIDDEN) if gated else (_HIDDEN, _INNER)
    matrix = StoredMatrix.empty(FORMATS[form], (128, rows, columns), _META)
    alignment = Alignment(_empty(_PAIRS, dtype=torch.int32), _empty(160, 3, dtype=torch.int32))
    activation = Gated(SILU, matrix, _INNER) if gated else None
    height = _INNER if gated else _HIDDEN
    if form == "fp8_block":
        fp8_gemm_hopper._fp8_gemm.device_caches.clear()
        y = Rounded.empty(_PAIRS, height, _META) if gated else _empty(_PAIRS, height)
        x = Rounded.empty(_PAIRS, columns, _META)
        fp8_gemm_hopper.fp8_gemm(x, matrix, y, alignment, _FP8_TILING, activation)
        return counts(fp8_gemm_hopper._fp8_gemm)
    product, kernel = (
        (bf16_gemm_hopper.bf16_gemm, bf16_gemm_hopper._bf16_gemm)
        if form == "bf16"
        else (words_gemm_hopper.words_gemm, words_gemm_hopper._words_gemm)
    )
    kernel.device_caches.clear()
    product(
        _empty(_PAIRS // _TOP_K if gated else _PAIRS, columns), matrix, _empty(_PAIRS, height), alignment,
        pairs_of_x=_TOP_K if gated else 0, gated=activation,
    )  # fmt: skip
    return counts(kernel)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def counts(kernel: Any) -> dict[str, Any]:
    """Of the one that has been compiled since its caches were cleared. `between`: exponentials in front of
    each wait for all products that comes after one for all but one. `ptx`: the program."""
    [[cache, *_]] = kernel.device_caches.values()
    [made] = cache.values()
    ptx = made.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        sass = _told("nvdisasm", "-c", file.name)
        used = _told("cuobjdump", "--dump-resource-usage", file.name)
    overlapped = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", sass, re.DOTALL)
    return {
        "products": len(re.findall(r"wgmma\.mma_async", ptx)),
        "instructions": len(re.findall(r"\b[HQ]GMMA\.", sass)),
        "waits": len(re.findall(r"wgmma\.wait_group", ptx)),
        "waited": len(re.findall(r"WARPGROUP\.DEPBAR", sass)),
        "tiles": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        "gathers": len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)),
        "between": [len(re.findall(r"MUFU\.EX2", one)) for one in overlapped],
        "shared": made.metadata.shared,
        "stack": max(map(int, re.findall(r"STACK:(\d+)", used))),
        "ptx": ptx,
    }


def _told(tool: str, *args: str) -> str:
    return subprocess.run([_TOOL / tool, *args], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    pretend((9, 0))
    json.dump({name: compiled(name) for name in sys.argv[1:]}, sys.stdout)
