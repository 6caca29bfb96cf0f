"""A Triton kernel to compile."""

import triton
import triton.language as tl


@triton.jit
def copy_one(source, destination):
    tl.store(destination, tl.load(source))
