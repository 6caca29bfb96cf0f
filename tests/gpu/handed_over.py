"""One warp copies numbers to shared memory, four others read them there: handed over and given back as in
`fp8_gemm_hopper.py`, and right. racecheck is tried on it before it is believed (`sanitize.py`).

`python -m tests.gpu.handed_over` prints RIGHT where the numbers have come.
"""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from moebius_kernels.launch import launch

RIGHT = "what was handed over is right"
NUMBERS, STEPS = 128, 12
_NUMBERS, _STAGES, _LANES = gl.constexpr(NUMBERS), gl.constexpr(2), gl.constexpr(32)
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Of which four lanes have the same, as with factors of products.
_ROWS = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])))
_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


def hand_over(source: torch.Tensor, target: torch.Tensor) -> None:
    """Both fp32 [steps, 128]."""
    launch(_hand_over, (1,), source, target, len(source), num_warps=4, maxnreg=128)


@gluon.jit(do_not_specialize=["steps"])
def _hand_over(source, target, steps):
    numbers = gl.allocate_shared_memory(gl.float32, [_STAGES, _NUMBERS], _LINE)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        # Each lane says that its own copies are there.
        mbarrier.init(full.index(stage), count=_LANES)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    memory = (numbers, full, empty)
    gl.warp_specialize([(_read, (target, steps, memory)), (_fetch, (source, steps, memory))], [1], [64])


@gluon.jit
def _fetch(source, steps, memory):
    numbers, full, empty = memory
    lane = gl.arange(0, _NUMBERS, _WARP)
    for step in range(steps):
        stage = step % _STAGES
        # At first a stage is empty, as if a round before this one had been through.
        mbarrier.wait(empty.index(stage), (step // _STAGES & 1) ^ 1)
        async_copy.async_copy_global_to_shared(numbers.index(stage), source + step * _NUMBERS + lane)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _read(target, steps, memory):
    numbers, full, empty = memory
    lane = gl.arange(0, _NUMBERS, _ROWS)
    for step in range(steps):
        stage = step % _STAGES
        mbarrier.wait(full.index(stage), step // _STAGES & 1)
        value = numbers.index(stage).load(_ROWS)
        # By one thread, when all have read.
        mbarrier.arrive(empty.index(stage), count=1)
        gl.store(target + step * _NUMBERS + lane, value)


def main() -> int:
    source = torch.arange(STEPS * NUMBERS, dtype=torch.float32, device="cuda").view(STEPS, NUMBERS)
    target = torch.zeros_like(source)
    hand_over(source, target)
    right = torch.equal(source, target)
    print(RIGHT if right else f"wrong: {target.tolist()}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
