"""What is admitted, and why not; what a call's key is made of."""

import inspect
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from moebius_kernels.activations import SILU
from moebius_kernels.attention_plan import Span, plan_attention
from moebius_kernels.calls import CALLS, key_of, named_arguments, shapes_of
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.dense import dense
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.operations import OPERATION_NAMES, REFERENCE
from moebius_kernels.registry import Backend, Device, Query, TokenRange, gather, references, refusal
from moebius_kernels.router import Route
from moebius_kernels.state_plan import StatePlan
from moebius_kernels.tensor_tree import copy_tensors

CPU = torch.device("cpu")
H200 = Device("cuda", "NVIDIA H200", (9, 0))
HOST = Device("cpu", "a CPU")


def _experts_call(tokens: int) -> tuple:
    route = Route(torch.ones(tokens, 2), torch.zeros(tokens, 2, dtype=torch.int64))
    matrix = StoredMatrix.empty(Nvfp4(), (4, 32, 64), CPU)
    down = dense(torch.zeros(4, 64, 16, dtype=torch.bfloat16))
    return torch.zeros(tokens, 64), route, ExpertWeights([matrix], down), SILU


def _query(largest: int = 8, device: Device = H200) -> Query:
    arguments = named_arguments("routed_experts", _experts_call(3), {})
    return Query("routed_experts", shapes_of("routed_experts", arguments), TokenRange(1, largest), device)


def _backend(**changes) -> Backend:
    return Backend("routed_experts", "mine", print, **{"architectures": frozenset({(9, 0)}), **changes})


def test_every_operation_says_what_its_calls_consist_of() -> None:
    assert tuple(CALLS) == OPERATION_NAMES
    for name, call in CALLS.items():
        parameters = inspect.signature(getattr(REFERENCE, name)).parameters
        assert {*call.rows, *call.pools, *call.step, *call.written} <= set(parameters), name
        assert next(iter(parameters)) in call.rows, "the first argument counts the tokens"


def test_references_that_write_where_a_row_says_are_in_no_graph() -> None:
    """There rows that do not exist say -1, which a GPU's copy by index takes for a fault of the program."""
    x, states = torch.ones(1, 4), torch.zeros(2, 4, 3)
    padded = StatePlan(torch.tensor([0]), torch.tensor([-1]), ())
    with pytest.raises(IndexError):
        REFERENCE.causal_conv1d(x, torch.ones(4, 4), None, states, padded, None)
    in_graphs = {one.operation for one in references() if one.capturable}
    assert in_graphs.isdisjoint({"write_kv", "rotate_and_write_kv", "causal_conv1d", "gated_delta_rule"})
    assert {"linear", "rms_norm", "topk_softmax"} <= in_graphs


def test_every_backend_that_is_installed_has_the_signature_of_its_reference() -> None:
    for backend in gather().backends:
        mine, own, its = (
            [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]
            for function in (backend.function, backend.bind(), getattr(REFERENCE, backend.operation))
        )
        assert mine == own == its, str(backend)


def test_whoever_binds_a_backend_that_keeps_something_has_one_of_its_own() -> None:
    shared = Backend("linear", "plain", REFERENCE.linear)
    assert shared.bind() is shared.bind() is REFERENCE.linear
    own = replace(shared, own=lambda: partial(REFERENCE.linear))
    assert own.bind() is not own.bind()


def test_a_key_is_the_same_for_all_token_counts_and_names_the_forms() -> None:
    keys = {
        key_of(shapes_of("routed_experts", named_arguments("routed_experts", _experts_call(tokens), {})))
        for tokens in (1, 2, 64)
    }
    assert len(keys) == 1
    assert "Nvfp4" in keys.pop()
    sites = {CALLS["routed_experts"].site(*_experts_call(tokens)) for tokens in (1, 2, 64)}
    assert len(sites) == 1


def test_the_key_of_an_attention_knows_the_window_and_not_the_pages() -> None:
    def key(pages: int, window: int | None, length: int) -> tuple:
        kv = KvPages.allocate(KvFormat.MODEL, pages, 16, 2, 8, 8, torch.float32, CPU)
        plan = plan_attention(
            [Span(0, length, (1,))], page_size=16, window=window, dtype=torch.float32, device=CPU
        )
        q = torch.zeros(length, 4, 8)
        arguments = named_arguments("paged_attention", (q, kv, plan), {"scale": 0.5})
        text = key_of(shapes_of("paged_attention", arguments))
        return text, CALLS["paged_attention"].site(q, kv, plan, scale=0.5)

    assert key(4, None, 3) == key(9, None, 1)
    assert key(4, None, 3)[0] != key(4, 8, 3)[0]
    assert key(4, None, 3)[1] != key(4, 8, 3)[1]


def test_copies_do_not_share_memory_with_what_they_were_made_from() -> None:
    kv = KvPages.allocate(KvFormat.INT8, 2, 16, 1, 32, 32, torch.float32, CPU)
    copy = copy_tensors(kv)
    copy.keys.numbers.fill_(1)
    copy.keys.scales.fill_(1)
    assert not kv.keys.numbers.any()
    assert not kv.keys.scales.any()
    assert (copy.keys.format, copy.value_dim) == (kv.keys.format, kv.value_dim)


def test_copies_have_the_strides_and_the_alignment_of_the_original() -> None:
    qkv = torch.randn(5, 24).bfloat16()
    q, k, v = qkv.split([12, 8, 4], dim=-1)
    for original in (
        q.unflatten(-1, (3, 4)),
        k,
        v,
        qkv[::2],
        qkv.T,
        qkv[1:2],
        qkv[:0],
        qkv[:1].expand(3, -1),
    ):
        copy = copy_tensors({"x": original})["x"]
        assert torch.equal(copy, original)
        if original.numel() and 0 not in original.stride():
            assert copy.stride() == original.stride()
            assert (copy.storage_offset() - original.storage_offset()) % 64 == 0
        assert copy.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()
    # Who reads beside the rows finds nothing of use.
    assert copy_tensors(k).as_strided((4, 16), (24, 1), 12 + 8).isnan().all()


@pytest.mark.parametrize(
    ("backend", "device", "because"),
    [
        (_backend(), H200, None),
        (_backend(), HOST, "runs on cuda, not on cpu"),
        (_backend(), Device("cuda", "a B200", (10, 0)), "architecture 10.0 is not among"),
        # A neighbour in the family is another architecture.
        (_backend(architectures=frozenset({(12, 0)})), Device("cuda", "GB10", (12, 1)), "architecture 12.1"),
        (_backend(architectures=frozenset()), H200, "made for (none)"),
        (_backend(formats=frozenset({"nvfp4", "bf16"})), H200, None),
        (_backend(formats=frozenset({"bf16"})), H200, "does not read nvfp4"),
        (_backend(admits=lambda query: "no tile for it"), H200, "no tile for it"),
        (_backend(admits=lambda query: query.arguments["nothing"]), H200, "its admission raised KeyError"),
    ],
)
def test_admission_says_why_not(backend: Backend, device: Device, because: str | None) -> None:
    reason = refusal(backend, _query(device=device))
    assert (reason is None) if because is None else (reason is not None and because in reason)


def test_admission_sees_shapes_forms_and_the_largest_count() -> None:
    def admits(query: Query) -> str | None:
        weights = query.arguments["weights"]
        [gate_up] = weights["gate_up"]
        assert gate_up.format == Nvfp4()
        assert (gate_up.shape, weights["down"].shape) == ((4, 32, 64), (4, 64, 16))
        assert query.arguments["x"].shape == (64,)
        assert query.arguments["route"]["experts"].shape == (2,)
        assert query.arguments["activation"] == {"kind": "Silu"}
        return "too many" if query.tokens.last > 8 else None

    assert refusal(_backend(admits=admits), _query()) is None
    assert refusal(_backend(admits=admits), _query(9)) == "too many"


def test_the_reference_is_admitted_everywhere() -> None:
    for device in (HOST, H200, Device("cuda", "of tomorrow", (15, 7))):
        [reference] = [one for one in gather(()).of("routed_experts") if one.is_reference]
        assert refusal(reference, _query(device=device)) is None


@pytest.fixture
def provider(tmp_path, monkeypatch):
    """Writes a package of modules and returns its name."""

    def write(**modules: str) -> str:
        package = tmp_path / "provided"
        package.mkdir()
        (package / "__init__.py").write_text("")
        for name, text in modules.items():
            (package / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return "provided"

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "provided"]:
        del sys.modules[name]


TABLE = """
from moebius_kernels.registry import Backend
BACKENDS = (Backend("{operation}", "{name}", print),)
"""


def test_backends_come_from_the_tables_of_modules_and_what_is_broken_is_reported(provider) -> None:
    name = provider(
        good=TABLE.format(operation="linear", name="fast"),
        helper="",
        missing="import a_library_that_nobody_has",
        worse="raise OSError('libcuda.so.1: cannot open shared object file')",
    )
    registry = gather((name, "a_package_that_nobody_has"))
    assert [one.name for one in registry.of("linear")] == ["reference", "fast"]
    assert set(registry.missing) == {f"{name}.missing", f"{name}.worse"}
    assert "libcuda" in registry.missing[f"{name}.worse"]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"one": TABLE.format(operation="lineal", name="fast")}, "implements no operation"),
        ({one: TABLE.format(operation="linear", name="fast") for one in ("one", "two")}, "two backends"),
        ({"one": TABLE.format(operation="linear", name="reference")}, "two backends"),
    ],
)
def test_tables_that_contradict_themselves_are_refused(provider, modules, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather((provider(**modules),))


def test_what_is_excluded_is_gone_but_a_reference_stays(provider) -> None:
    name = provider(good=TABLE.format(operation="linear", name="fast"))
    registry = gather((name,)).without(["linear:fast", "linear:reference", "embedding:fast"])
    assert [str(one) for one in registry.of("linear")] == ["linear:reference"]


def test_names_that_exclude_nothing_are_told_with_those_that_would(provider) -> None:
    tables = {one: TABLE.format(operation="linear", name=one) for one in ("fast", "faster")}
    names = ["linear:fast", "linear:fats", "linear:reference", "embedding:fast", "lineal:fast"]
    assert gather((provider(**tables),)).mistaken(names) == {
        "linear:fats": "of linear there are here: fast, faster",
        "linear:reference": "the reference stays: something has to compute",
        "embedding:fast": "of embedding there are here: none",
        "lineal:fast": "there is no such operation",
    }
