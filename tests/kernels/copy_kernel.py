"""Compiles a Triton kernel for a GPU that need not be there, twice; prints what was compiled."""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moebius_kernels.jit.triton_cache import watch_compilations


@triton.jit
def copy_one(source, destination):
    tl.store(destination, tl.load(source))


def main() -> None:
    watch_compilations(lambda name: sys.stdout.write(f"{name}\n") and None)
    source = ASTSource(fn=copy_one, signature={"source": "*fp32", "destination": "*fp32"}, constexprs={})
    for _ in range(2):
        triton.compile(source, target=GPUTarget("cuda", 90, 32))


if __name__ == "__main__":
    main()
