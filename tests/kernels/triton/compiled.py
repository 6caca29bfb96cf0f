"""Compiles the experts' product for sm_90, which needs no GPU, and prints what came of it as JSON.

A program of its own: where Triton's interpreter is on, nothing can be compiled.
"""

import json
import re
import sys
from collections.abc import Mapping

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from moebius_kernels.triton.decode import load_tile
from moebius_kernels.triton.decode_words import word_factors
from moebius_kernels.triton.grouped_gemm import grouped_gemm
from moebius_kernels.triton.layouts import Layout, layout_of
from tests.kernels.triton.matrices import FORMATS

_TYPES = {
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}
_ROWS, _WARPS = 64, 4


def compiled(name: str) -> dict[str, int]:
    """Of a down product with 8 tokens a tile: instructions of the tensor cores in a step, and how often its
    loop puts numbers into shared memory. Of those with 16 and with 128: how many products there are, the most
    that may be under way when the loop has waited, and numbers put into shared memory."""
    few, some, many = _product(name, 8, 128), _product(name, 16, 128), _product(name, 128, 64)
    return {
        "mma": len(re.findall(r"mma\.sync\.aligned\.m16n8k16", few["ptx"])),
        "copies": _copies(few),
        "products": min(len(re.findall(r"wgmma\.mma_async", one["ptx"])) for one in (some, many)),
        "under_way": max(_under_way(one["ptx"]) for one in (some, many)),
        "copies_of_products": max(_copies(one) for one in (some, many)),
    }


def constants() -> str:
    """All that Triton knows the product by, besides the text of its functions."""
    assert grouped_gemm.cache_key
    # Keys of functions that it calls are part of its own.
    functions = (grouped_gemm, load_tile, word_factors)
    return str([value for one in functions for value, _ in one.used_global_vals.values()])


def _copies(product: Mapping[str, str]) -> int:
    loop = product["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
    return loop.count("ttg.local_alloc") + len(re.findall(r"ttg\.convert_layout.*xbf16", loop))


def _under_way(ptx: str) -> int:
    return max(map(int, re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx)))


def _product(name: str, tokens: int, columns: int) -> Mapping[str, str]:
    """What the compiler made of it, by stage."""
    layout = layout_of(FORMATS[name], 2048)
    assert isinstance(layout, Layout), layout
    constants = {
        "N": 768, "C": 2048, "CODE": layout.code, "SCALES": layout.scales, "GROUP": layout.group,
        "BLOCK_ROWS": layout.block_rows, "ROW_SCALE": layout.row_scale is not None, "BIAS": False,
        "ACTIVATION": "", "LIMIT": 0.0, "ALPHA": 0.0, "ROUTING": "single", "PAIRS": 1, "SLOTS": False,
        "PAIRS_OF_X": 1, "TOKENS": tokens, "PARTS": 1, "ROWS": _ROWS, "COLUMNS": columns,
        "SPLITS": 1, "DEPTH": 1, "SWAP": True, "POLICY": "evict_first", "ASM": True, "OVERLAP": True,
        "PREFETCH": True, "IN_ORDER": tokens > 8,
    }  # fmt: skip
    codes = _pointer(layout.codes, "*i32")
    pointers = {
        "codes": codes,
        "high": _pointer(layout.high, codes),
        "scale": _pointer(layout.scale, codes),
        "extra": _pointer(layout.extra, codes),
        "row_scale": "*fp32",
    }
    signature = {"x": "*bf16", "y": "*bf16", "bias": "*bf16", "experts": "*i64", "slots": "*i64"}
    signature |= {"sorted_pairs": "*i32", "tiles": "*i32"}
    signature |= pointers | {f"up_{part}": kind for part, kind in pointers.items()}
    kinds = {
        argument: "constexpr" if argument in constants else signature.get(argument, "i32")
        for argument in grouped_gemm.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(kinds.values()) if kind[0] in "*i"
    }
    source = ASTSource(grouped_gemm, signature=kinds, constexprs=constants, attrs=aligned)
    options = {"num_warps": _WARPS, "num_stages": 4, "launch_pdl": True}
    kernel = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    found: Mapping[str, str] = kernel.asm
    return found


def _pointer(part: tuple[str, torch.dtype] | None, otherwise: str) -> str:
    return otherwise if part is None else _TYPES[part[1]]


if __name__ == "__main__":
    products = {name: compiled(name) for name in sys.argv[1:]}
    json.dump({"products": products, "constants": constants()}, sys.stdout)
