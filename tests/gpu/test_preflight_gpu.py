"""Preflight, launches and the CUDA compiler on a real GPU."""

import ctypes
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch

from moebius_kernels.plan import Plan, rows_of, token_ranges
from moebius_worker.preflight.probe import Patience
from moebius_worker.preflight.run import Examination, preflight
from moebius_worker.preflight.subject import steps_for

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
    pytest.mark.timeout(500),
]

RANGES = token_ranges(4)
BAD = "tests.gpu.bad_on_gpu"


def _print_plan(plan: Plan) -> None:
    for row in rows_of(plan):
        print(" | ".join(row))


@pytest.fixture(scope="module")
def plan() -> Plan:
    started = time.monotonic()
    made = preflight(
        Examination(
            subject=f"{BAD}:Tiny",
            options={},
            registry=f"{BAD}:everything",
            ranges=RANGES,
            steps=steps_for(RANGES, max_running=4, max_step_tokens=4),
            capture_tokens=4,
            patience=Patience(compile=8.0, run=8.0),
        ),
        {},
    )
    print(f"preflight with five deaths: {time.monotonic() - started:.1f} s")
    _print_plan(made)
    return made


@pytest.mark.parametrize(
    ("name", "gate", "reason"),
    [
        ("elsewhere", "admission", "is not among those it is made for (7.9)"),
        ("leaves_an_error", "latched", "invalid"),
        ("waits_for_the_device", "capture", "captur"),
        ("forks_and_does_not_join", "capture", "unjoined"),
        ("forgets_a_row", "numbers", "NaN"),
        ("hangs", "crash", "took more than 8 s"),
        ("compiles_for_ever", "crash", "took more than 8 s"),
    ],
)
def test_a_bad_backend_is_rejected_everywhere(plan: Plan, name: str, gate: str, reason: str) -> None:
    verdicts = [one for choice in plan.choices for one in choice.verdicts if one.backend == name]
    assert len(verdicts) == len(RANGES)
    for verdict in verdicts:
        assert verdict.rejected == gate, verdict
        assert reason in (verdict.reason or "").lower() or reason in (verdict.reason or ""), verdict


def test_an_illegal_access_costs_the_counts_at_which_it_happens(plan: Plan) -> None:
    outcome = {
        str(choice.tokens): verdict.rejected
        for choice in plan.choices
        for verdict in choice.verdicts
        if verdict.backend == "illegal_access"
    }
    assert outcome["1"] is outcome["2"] is None
    assert outcome["3-4"] == "crash"


def test_what_is_right_is_chosen_captured_and_timed(plan: Plan) -> None:
    for choice in plan.choices:
        if choice.operation == "gated":
            [fast] = [one for one in choice.verdicts if one.backend == "fast"]
            assert fast.rejected is None, fast
            assert fast.captured
            assert fast.microseconds is not None
            assert 0.5 < fast.microseconds < 1000
    assert plan.capturable(4)


SCALE = """
extern "C" __global__ void scale(float* x, float factor, long long count) {
    extern __shared__ float tile[];
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = i < count ? x[i] : 0.0f;
    __syncthreads();
    if (i < count) x[i] = tile[threadIdx.x] * factor;
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_a_cuda_kernel_is_compiled_loaded_launched_and_captured(tmp_path: Path) -> None:
    from moebius_kernels.jit.cache import ArtefactCache
    from moebius_kernels.jit.cuda import CudaModule
    from moebius_kernels.jit.nvcc import CudaSource, build, find_compiler
    from moebius_kernels.launch import Geometry, LaunchError, launch_cuda

    file = tmp_path / "scale.cu"
    file.write_text(SCALE)
    architecture = torch.cuda.get_device_capability()
    started = time.monotonic()
    source, cache, compiler = CudaSource("scale", file), ArtefactCache(tmp_path / "cache"), find_compiler()
    binary = build(source, architecture, cache, compiler)
    compiled = time.monotonic() - started
    assert build(source, architecture, cache, compiler) == binary
    print(f"nvcc: {compiled:.1f} s, again {time.monotonic() - started - compiled:.3f} s")
    scale = CudaModule(binary).function("scale")
    x = torch.randn(70_001, device="cuda")
    before = x.clone()
    # More than a function may use without being told.
    geometry = Geometry((-(-len(x) // 256), 1, 1), (256, 1, 1), 64 * 1024)

    def run() -> None:
        launch_cuda(scale, geometry, x, ctypes.c_float(2.0), ctypes.c_longlong(len(x)))

    run()
    torch.testing.assert_close(x, before * 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    graph.replay()
    torch.testing.assert_close(x, before * 8)
    with pytest.raises(LaunchError, match=r"grid.z is 65536"):
        launch_cuda(scale, geometry._replace(grid=(1, 1, 65_536)), x)
    with pytest.raises(LaunchError, match="bytes of shared memory"):
        launch_cuda(scale, geometry._replace(shared=1 << 20), x)
    with pytest.raises(LaunchError, match="of no type that a kernel has"):
        launch_cuda(scale, geometry, x, 2.0, len(x))
    with pytest.raises(RuntimeError, match="NOT_FOUND"):
        CudaModule(binary).function("scales")


def test_an_error_from_before_is_reported_as_such_and_forgotten() -> None:
    from moebius_kernels.launch import LatchedError, _runtime, latched_error
    from tests.gpu.bad_on_gpu import fast

    x = torch.randn(4, 128, device="cuda")
    fast(x, None)
    _runtime().cudaMemcpy(ctypes.c_void_p(8), ctypes.c_void_p(16), ctypes.c_size_t(4), 99)
    assert "invalid" in (latched_error() or "")
    with pytest.raises(LatchedError, match=r"_silu_times.*invalid"):
        fast(x, None)
    assert latched_error() is None
    assert fast(x, None).isfinite().all()


@pytest.mark.timed
def test_the_door_costs_next_to_nothing() -> None:
    from moebius_kernels.launch import launch
    from tests.gpu.bad_on_gpu import _silu_times

    x, y = torch.randn(4, 128, device="cuda"), torch.empty(4, 64, device="cuda")

    def seconds(function: Callable[[], None]) -> float:
        started = time.perf_counter()
        for _ in range(200):
            function()
        took = (time.perf_counter() - started) / 200
        torch.cuda.synchronize()
        return took

    def directly() -> None:
        _silu_times[(4,)](x, y, 64, BLOCK=64, num_warps=1)

    def through() -> None:
        launch(_silu_times, (4,), x, y, 64, BLOCK=64, num_warps=1)

    # By turns: the machine is not the same from one moment to the next.
    times = [(seconds(directly), seconds(through)) for _ in range(30)]
    direct, cost = median(one for one, _ in times) * 1e6, median(two - one for one, two in times) * 1e6
    print(f"launch: {direct:.1f} us directly, {cost:.1f} us more through the door")
    # The aim is 2.
    assert cost < 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Qwen3-30B-A3B's true sizes, with three layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.tiny import write_tokenizer

    path = tmp_path_factory.mktemp("qwen3")
    config = Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40_960,
        rope_theta=1e6,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(path)
    write_tokenizer(path)
    del model
    torch.cuda.empty_cache()
    return path


def test_a_model_of_true_size_gets_a_plan_and_finds_it_again(checkpoint: Path, tmp_path: Path) -> None:
    from moebius_kernels.registry import gather
    from moebius_worker.checkpoint.checkpoint import open_checkpoint
    from moebius_worker.engine.runner import RunnerOptions
    from moebius_worker.preflight.examine import Wanted, find_plan

    wanted = Wanted(RunnerOptions(device="cuda", max_running=64, max_step_tokens=4096))
    registry = gather()
    opened = open_checkpoint(str(checkpoint))
    phases: list[tuple[float, str]] = []

    def timed(**more) -> tuple[Plan, float]:
        started = time.monotonic()
        found = find_plan(
            opened,
            wanted,
            registry,
            lambda phase, done, total: phases.append((time.monotonic(), phase)),
            root=tmp_path,
            **more,
        )
        return found, time.monotonic() - started

    plan, cold = timed()
    again, warm = timed(fresh=True)
    found, kept = timed()
    print(f"preflight: {cold:.1f} s cold, {warm:.1f} s with compiled kernels, {kept:.2f} s kept")
    spans = [(later[0] - one[0], one[1]) for one, later in pairwise(phases)]
    for seconds, phase in sorted(spans, reverse=True)[:8]:
        print(f"  {seconds:.1f} s {phase}")
    _print_plan(plan)
    assert found == again
    assert {choice.operation for choice in plan.choices} >= {"linear", "routed_experts", "paged_attention"}
    draws = [choice for choice in plan.choices if choice.operation == "draw_tokens"]
    # With top-k or top-p, and without.
    assert len({choice.key for choice in draws}) == 2
    verdicts = [one for choice in draws for one in choice.verdicts if one.backend == "triton"]
    assert len(verdicts) == len(draws)
    assert {one.rejected for one in verdicts} == {None}
    # To find the best 256 takes either as long: the faster one has it.
    assert all(choice.backend == "triton" for choice in draws if "truncated=False" in choice.key)
    crashed = {gate for _, gate in plan.rejections} & {"crash", "latched"}
    assert not crashed, plan.rejections
    for choice in plan.choices:
        assert any(one.rejected is None for one in choice.verdicts if one.backend == "reference"), choice
