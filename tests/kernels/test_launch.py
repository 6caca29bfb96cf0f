"""What the door refuses, what it reports, and whom it blames."""

import pytest
import torch

from moebius_kernels.launch import (
    Door,
    Geometry,
    LatchedError,
    LaunchError,
    Limits,
    launch,
    misfit,
)

LIMITS = Limits(shared=227 * 1024)
ORDINARY = Geometry((65_536 * 8, 1, 1), (128, 1, 1))


def _after_start(*args: object) -> None:
    raise AssertionError("nothing was to be launched")


class _Cuda:
    """An error state that kernels set, as CUDA's runtime has it."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.waits = 0

    def peek(self) -> int:
        return self.code

    def clear(self) -> int:
        code, self.code = self.code, 0
        return code

    def wait(self) -> None:
        self.waits += 1

    def door(self, *, synchronise: bool = False) -> Door:
        explain = {1: "invalid argument", 700: "an illegal memory access was encountered"}.__getitem__
        return Door(LIMITS, self.peek, self.clear, explain, self.wait if synchronise else None)


def _kernel() -> None:
    """Its name is what errors name."""


@pytest.mark.parametrize(
    ("geometry", "reason"),
    [
        (ORDINARY, None),
        (Geometry((2**31 - 1, 65535, 65535), (32, 8, 4), 227 * 1024), None),
        # 65,536 pairs on the wrong axis.
        (Geometry((1, 1, 65536), (32, 1, 1)), "grid.z is 65536, allowed are 1 to 65535"),
        (Geometry((1, 65536, 1), (32, 1, 1)), "grid.y is 65536"),
        (Geometry((2**31, 1, 1), (32, 1, 1)), "grid.x is 2147483648"),
        (Geometry((1, 1, -1), (32, 1, 1)), "grid.z is -1"),
        (Geometry((1, 1, 1), (0, 1, 1)), "block.x is 0"),
        (Geometry((1, 1, 1), (1, 1, 65)), "block.z is 65"),
        (Geometry((1, 1, 1), (-2, -2, 1)), "block.x is -2"),
        (Geometry((1, 1, 1), (33, 32, 1)), "1056 threads, allowed are 1024"),
        (Geometry((1, 1, 1), (1025, 1, 1)), "block.x is 1025"),
        (
            Geometry((1, 1, 1), (32, 1, 1), 227 * 1024 + 1),
            "232449 bytes of shared memory, the device has 232448",
        ),
    ],
)
def test_what_the_device_cannot_launch_is_refused_before(geometry: Geometry, reason: str | None) -> None:
    found = misfit(geometry, LIMITS)
    assert (found is None) if reason is None else (found is not None and reason in found)
    if reason is not None:
        with pytest.raises(LaunchError, match="_kernel") as raised:
            _Cuda().door().launch(_kernel, "cuda", geometry, _after_start, (torch.zeros(3, 4), 7))
        assert not isinstance(raised.value, LatchedError)
        error = raised.value
        assert (error.kernel, error.backend, error.geometry) == ("_kernel", "cuda", geometry)
        assert error.shapes == ("float32[3, 4]", "7")
        assert reason in str(error)


def test_an_error_from_before_is_not_the_fault_of_this_kernel() -> None:
    cuda = _Cuda(code=1)
    with pytest.raises(LatchedError, match=r"earlier work .* failed.*_kernel.*invalid argument"):
        cuda.door().launch(_kernel, "triton", ORDINARY, _after_start, ())
    # Reported once; the next launch is innocent too.
    launched = []
    cuda.door().launch(_kernel, "triton", ORDINARY, launched.append, (1,))
    assert launched == [1]


def test_an_error_that_the_launch_left_is_its_own() -> None:
    cuda = _Cuda()

    def start() -> None:
        cuda.code = 1

    with pytest.raises(LaunchError, match=r"_kernel.*invalid argument") as raised:
        cuda.door().launch(_kernel, "cuda", ORDINARY, start, ())
    assert not isinstance(raised.value, LatchedError)
    assert cuda.peek() == 0


@pytest.mark.parametrize(("synchronise", "blamed"), [(False, False), (True, True)])
def test_a_fault_that_only_running_work_can_have_is_earlier_work_unless_it_was_waited_for(
    synchronise: bool, blamed: bool
) -> None:
    def start() -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(LaunchError) as raised:
        _Cuda().door(synchronise=synchronise).launch(_kernel, "triton", ORDINARY, start, ())
    assert isinstance(raised.value, LatchedError) is not blamed
    assert "illegal memory access" in raised.value.cause


def test_what_triton_raises_carries_the_kernel_and_the_shapes() -> None:
    def start(x: torch.Tensor) -> None:
        raise RuntimeError("out of resource: shared memory")

    x = torch.zeros(2, dtype=torch.bfloat16)
    message = r"_kernel \(triton; grid .*bfloat16\[2\].*out of resource"
    with pytest.raises(LaunchError, match=message) as raised:
        _Cuda().door().launch(_kernel, "triton", ORDINARY, start, (x,))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_kernels_are_waited_for_only_when_asked() -> None:
    cuda = _Cuda()
    cuda.door().launch(_kernel, "cuda", ORDINARY, lambda: None, ())
    assert cuda.waits == 0
    cuda.door(synchronise=True).launch(_kernel, "cuda", ORDINARY, lambda: None, ())
    assert cuda.waits == 1


class _Triton:
    """Stands for a jitted function: remembers how it was launched."""

    __name__ = "scale"

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((grid, args, options))

    def warmup(self, *args, grid, **options):
        self.compiled = (grid, args, options)


def test_a_triton_kernel_gets_its_grid_arguments_and_options() -> None:
    kernel = _Triton()
    launch(kernel, (70_000,), 1, 2, BLOCK=64, num_warps=8)
    launch(kernel, (3, 0), 1, 2, BLOCK=64)
    assert kernel.launches == [((70_000,), (1, 2), {"BLOCK": 64, "num_warps": 8})]
    with pytest.raises(LaunchError, match=r"scale.*grid.y is 70000"):
        launch(kernel, (1, 70_000), 1, 2, BLOCK=64)
    with pytest.raises(LaunchError, match="2048"):
        launch(kernel, (1,), 1, num_warps=64)


def test_without_numbers_a_kernel_is_compiled_and_not_launched() -> None:
    kernel, sizes = _Triton(), torch.empty(4, device="meta")
    launch(kernel, (1, 70_000), sizes, 2, BLOCK=64)
    assert kernel.compiled == ((1, 70_000), (sizes, 2), {"BLOCK": 64})
    assert kernel.launches == []
