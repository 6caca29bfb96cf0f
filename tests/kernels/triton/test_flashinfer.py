"""FlashInfer's backends: what is handed to the package, and what they say they cannot do.

The package itself is stood for. `test_the_calls_are_those_of_the_package` holds the calls against it where it
is installed; on a GPU the preflight holds its numbers against the references.
"""

import importlib
import importlib.metadata
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from moebius_kernels.activations import GELU_TANH
from moebius_kernels.attention_plan import Span
from moebius_kernels.calls import named_arguments, shapes_of
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.flashinfer.admission import attention_refusal, draw_refusal, experts_refusal
from moebius_kernels.flashinfer.prompts import prompt_batch
from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.registry import Device, Query, TokenRange, gather, refusal
from moebius_kernels.router import topk_softmax
from moebius_kernels.triton.paged_attention import paged_attention as triton_attention
from moebius_kernels.triton.sampling import draw_tokens as triton_draw
from moebius_worker.engine.drawing import draws_of
from tests.kernels import fake_flashinfer
from tests.kernels.paged_world import DEVICE
from tests.kernels.triton.device_world import DeviceWorld
from tests.kernels.triton.test_attention import few_programs  # noqa: F401
from tests.kernels.triton.test_experts import check, draw, make
from tests.kernels.triton.test_sampling import KINDS, draws_on_device, logits_of, rows_of

PROVIDER = "moebius_kernels.flashinfer"
OPERATIONS = {"attention": "paged_attention", "experts": "routed_experts", "sampling": "draw_tokens"}
HOPPER = Device("cuda", "", (9, 0))
MANY = TokenRange(513, 1024)


def forget():
    for module in OPERATIONS:
        sys.modules.pop(f"{PROVIDER}.{module}", None)


def pretend(monkeypatch, version):
    """As if this version were installed; None: none."""
    forget()

    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    for name, module in fake_flashinfer.MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def backends(monkeypatch):
    pretend(monkeypatch, "0.7.2.post1")
    fake_flashinfer.CALLS.clear()
    yield SimpleNamespace(**{name: importlib.import_module(f"{PROVIDER}.{name}") for name in OPERATIONS})
    forget()


@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "flashinfer-python is not installed"), ("0.6.13", "0.6.13 is older than 0.7")],
)
def test_where_the_package_is_not_here_the_registry_says_so(monkeypatch, version, reason):
    pretend(monkeypatch, version)
    registry = gather([PROVIDER])
    assert set(registry.missing) == {f"{PROVIDER}.{name}" for name in OPERATIONS}
    assert all(reason in why for why in registry.missing.values())
    assert all(backend.is_reference for backend in registry.backends)


def test_where_it_is_here_each_operation_has_a_backend_of_it(backends):
    registry = gather([PROVIDER])
    assert not registry.missing
    found = [backend for backend in registry.backends if not backend.is_reference]
    assert {(one.operation, one.name) for one in found} == {
        (one, "flashinfer") for one in OPERATIONS.values()
    }


MIXED = [(20, 1), (31, 9), (3, 1), (0, 5), (16, 6), (9, 1)]


def test_a_batch_reaches_from_the_first_prompt_to_the_last():
    spans = [
        Span(5, 1, (1, 2)),
        Span(0, 3, (3,)),
        Span(9, 1, (4, 5, 6)),
        Span(2, 4, (7, 8)),
        Span(1, 1, (9,)),
    ]
    batch = prompt_batch(spans, 4, None)
    assert (batch.first_row, batch.last_row) == (1, 9)
    assert batch.row_starts == (0, 3, 4, 8)
    assert batch.page_starts == (0, 1, 4, 6)
    assert batch.pages == (3, 4, 5, 6, 7, 8)
    assert batch.last_page_lens == (3, 2, 2)
    assert prompt_batch([spans[0], spans[2]], 4, None) is None


def test_pages_before_the_window_are_left_out():
    # Its first row, at 10, sees 8, 9 and 10.
    batch = prompt_batch([Span(10, 4, (-1, -1, 5, 6))], 4, 3)
    assert batch.pages == (5, 6)
    assert batch.last_page_lens == (2,)


@pytest.mark.parametrize(
    ("window", "scores"), [(None, {}), (1, {}), (7, {"scale": 0.5, "softcap": 2.0}), (1000, {"softcap": 2.0})]
)
def test_attention_of_prompts_among_decodes(backends, window, scores):
    world = DeviceWorld(6, 2, 8, key_dim=64, value_dim=64)
    world.paged_attention = backends.attention.PagedAttention("fa3")
    world.check(MIXED, window=window, **scores)


def test_steps_of_decodes_ask_nothing_of_it(backends):
    world = DeviceWorld(6, 2, 8, key_dim=64, value_dim=64)
    world.paged_attention = backends.attention.PagedAttention("fa3")
    world.check([(40, 1), (3, 1)])
    assert not fake_flashinfer.CALLS


def test_work_is_divided_once_a_step_and_anew_for_the_next(backends):
    attention = backends.attention.PagedAttention("fa3")
    world = DeviceWorld(6, 2, 8, key_dim=64, value_dim=64)
    planner = world.planner()
    q = world.random(9, 6, 64)

    def layers(plan):
        for _ in range(3):
            found = attention(q[: plan.slots.shape[0]], world.pages, plan)
            expected = triton_attention(q[: plan.slots.shape[0]], world.pages, plan)
            torch.testing.assert_close(found, expected)

    layers(planner.plan([Span(0, 9, (4, 7))]))
    layers(planner.plan([Span(9, 1, (4, 7))]))
    layers(planner.plan([Span(8, 5, (9, 3)), Span(2, 2, (1,))]))
    names = [name.rpartition(".")[2] for name, *_ in fake_flashinfer.CALLS]
    assert names == ["BatchPrefillWithPagedKVCacheWrapper"] + 2 * ["plan", "run", "run", "run"]


def test_draws_are_those_of_ours(backends):
    logits = logits_of(len(KINDS), 1500).to(DEVICE)
    draws = draws_on_device(draws_of(rows_of(KINDS), torch.device("cpu")))
    mine, ours = backends.sampling.draw_tokens(logits, draws), triton_draw(logits, draws)
    assert torch.equal(mine.token_ids, ours.token_ids)
    assert torch.equal(mine.best, ours.best)
    assert [name for name, *_ in fake_flashinfer.CALLS] == ["top_k"]


@pytest.mark.parametrize("offloaded", [False, True])
def test_experts(backends, offloaded):
    weights = make(Dense(torch.bfloat16), 5, 64, 48, down_bias=draw(5, 64, seed=5).bfloat16())
    if offloaded:
        weights = ExpertWeights(
            weights.gate_up,
            weights.down,
            None,
            weights.down_bias,
            torch.tensor([4, 2, 0, 1, 3], device=DEVICE),
        )
    x = draw(19, 64, seed=3).bfloat16()
    # Expert 2 gets nobody.
    scores = draw(19, 5, seed=4)
    scores[:, 2] = -100.0
    route = topk_softmax(scores, 2)
    check(backends.experts.routed_experts(x, route, weights, GELU_TANH), x, route, weights, GELU_TANH)


def test_the_calls_are_those_of_the_package(backends, monkeypatch):
    """Each call that is made binds to the signature of what it calls."""
    world = DeviceWorld(6, 2, 8, key_dim=64, value_dim=64)
    world.paged_attention = backends.attention.PagedAttention("fa3")
    world.check(MIXED, window=9, softcap=2.0)
    logits = logits_of(len(KINDS), 1500).to(DEVICE)
    backends.sampling.draw_tokens(logits, draws_on_device(draws_of(rows_of(KINDS), torch.device("cpu"))))
    weights = make(Dense(torch.bfloat16), 5, 64, 48)
    backends.experts.routed_experts(draw(3, 64).bfloat16(), topk_softmax(draw(3, 5), 2), weights)
    monkeypatch.undo()
    package = pytest.importorskip("flashinfer")
    for name, args, kwargs in fake_flashinfer.CALLS:
        called = package
        for part in name.split("."):
            called = getattr(called, part)
        inspect.signature(called).bind(*args, **kwargs)
    for name in ("jit.topk.gen_topk_module", "jit.gemm.core.gen_gemm_sm90_module"):
        module, _, generate = name.rpartition(".")
        spec = getattr(importlib.import_module(f"flashinfer.{module}"), generate)()
        assert isinstance(spec.is_compiled, bool)
        assert isinstance(spec.name, str)


def query(operation, args, tokens=MANY, device=HOPPER, **kwargs):
    arguments = shapes_of(operation, named_arguments(operation, args, kwargs))
    return Query(operation, arguments, tokens, device)


def attention_call(dim=128, value_dim=128, kv=1, dtype=torch.bfloat16, format=KvFormat.MODEL, in_keys=False):
    pages = KvPages.allocate(format, 1, 16, kv, dim, value_dim, dtype, DEVICE, values_in_keys=in_keys)
    plan = DeviceWorld(1, 1, 16, num_pages=1).planner().plan([])
    return torch.zeros(0, 4, dim, device=DEVICE, dtype=dtype), pages, plan


def test_what_attention_admits():
    def reason(call, **options):
        return attention_refusal(query("paged_attention", call, **options))

    assert reason(attention_call()) is None
    assert reason(attention_call(), softcap=50.0) is None
    assert "on the host" in reason(attention_call(), tokens=TokenRange(257, 512))
    assert "float32" in reason(attention_call(dtype=torch.float32))
    assert "fp8" in reason(attention_call(format=KvFormat.FP8))
    assert "in the keys" in reason(attention_call(576, 512, in_keys=True))
    assert "512" in reason(attention_call(512, 512))
    assert "keys of 128 and values of 64" in reason(attention_call(128, 64))
    assert "no multiple" in reason(attention_call(kv=3))
    assert "sinks" in reason(attention_call(), sinks=torch.zeros(4, device=DEVICE))


def test_what_experts_admit():
    def reason(weights, dtype=torch.bfloat16, **options):
        call = torch.zeros(3, 64, device=DEVICE, dtype=dtype), topk_softmax(draw(3, 5), 2), weights
        return experts_refusal(query("routed_experts", call, **options))

    weights = make(Dense(torch.bfloat16), 5, 64, 48)
    assert reason(weights) is None
    assert "513" in reason(weights, tokens=TokenRange(1, 1))
    assert "float16" in reason(weights, torch.float16)
    biased = ExpertWeights(weights.gate_up, weights.down, torch.zeros(5, 96, device=DEVICE))
    assert "biases" in reason(biased)
    assert "two" in reason(ExpertWeights([weights.gate_up[0]] * 2, weights.down))
    assert "44" in reason(make(Dense(torch.bfloat16), 5, 64, 44))


def test_forms_and_devices_are_the_registrys_business(backends):
    [experts] = backends.experts.BACKENDS
    call = draw(3, 64).bfloat16(), topk_softmax(draw(3, 5), 2)
    dense_query = query("routed_experts", (*call, make(Dense(torch.bfloat16), 5, 64, 48)))
    assert refusal(experts, dense_query) is None
    assert "nvfp4" in refusal(experts, query("routed_experts", (*call, make(Nvfp4(), 5, 64, 64))))
    blackwell = query(
        "routed_experts", (*call, make(Dense(torch.bfloat16), 5, 64, 48)), device=Device("cuda", "", (10, 0))
    )
    assert "10.0" in refusal(experts, blackwell)


def test_what_takes_minutes_to_compile_is_admitted_if_that_was_done(backends, monkeypatch):
    call = draw(3, 64).bfloat16(), topk_softmax(draw(3, 5), 2), make(Dense(torch.bfloat16), 5, 64, 48)
    draws = draws_of(rows_of([{"temperature": 1.0, "top_k": 5}]), torch.device("cpu"))
    for module, compiled, asked in (
        (backends.experts, fake_flashinfer.GEMM, query("routed_experts", call)),
        (backends.sampling, fake_flashinfer.TOPK, query("draw_tokens", (logits_of(1, 100), draws))),
    ):
        [backend] = module.BACKENDS
        assert refusal(backend, asked) is None
        monkeypatch.setattr(compiled, "is_compiled", False)
        assert "flashinfer-jit-cache" in refusal(backend, asked)


def test_what_draws_admit():
    def reason(kinds):
        draws = draws_of(rows_of(kinds), torch.device("cpu"))
        return draw_refusal(query("draw_tokens", (logits_of(len(kinds), 100), draws)))

    assert reason([{"temperature": 1.0, "top_k": 5}]) is None
    assert "nothing is selected" in reason([{"temperature": 1.0}])
