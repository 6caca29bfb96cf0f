"""Choosing, printing and keeping a plan; operations that follow it."""

import time
from collections.abc import Callable

import pytest
import torch

from moebius_kernels.activations import SILU
from moebius_kernels.calls import key_of, named_arguments, shapes_of
from moebius_kernels.dispatch import bind
from moebius_kernels.formats.dense import dense
from moebius_kernels.operations import OPERATION_NAMES, REFERENCE
from moebius_kernels.plan import Choice, Plan, Verdict, choose, rows_of, token_ranges
from moebius_kernels.registry import Backend, Registry, TokenRange, references

REFERENCE_VERDICT = Verdict("reference", error=0.0, microseconds=50.0)
FAST = Verdict("fast", error=1e-3, microseconds=10.0, captured=True)
FASTER = Verdict("faster", error=1e-3, microseconds=5.0)
BROKEN = Verdict("broken", "numbers", "relative error 0.5, allowed 0.01")


@pytest.mark.parametrize(
    ("verdicts", "capture", "backend", "captured"),
    [
        ([REFERENCE_VERDICT, FAST, FASTER, BROKEN], False, "faster", False),
        # What cannot be part of the graph comes after what can, however fast it is.
        ([REFERENCE_VERDICT, FAST, FASTER], True, "fast", True),
        ([REFERENCE_VERDICT, FASTER], True, "faster", False),
        ([BROKEN], True, "reference", False),
        ([], True, "reference", False),
    ],
)
def test_the_fastest_that_passed_is_chosen(verdicts, capture: bool, backend: str, captured: bool) -> None:
    choice = choose("linear", "key", TokenRange(1, 1), verdicts, capture=capture)
    assert (choice.backend, choice.captured) == (backend, captured)
    assert choice.verdicts == tuple(verdicts)


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 100, 8192])
def test_ranges_cover_every_count_once(largest: int) -> None:
    ranges = token_ranges(largest)
    assert [count for one in ranges for count in range(one.first, one.last + 1)] == [*range(1, largest + 1)]


@pytest.mark.parametrize(
    ("running", "lasts"), [(4, (1, 2, 4, 8, 9)), (6, (1, 2, 4, 6, 8, 9)), (20, (1, 2, 4, 8, 9))]
)
def test_a_range_ends_at_the_most_decodes_that_a_step_has(running: int, lasts: tuple[int, ...]) -> None:
    assert tuple(one.last for one in token_ranges(9, running)) == lasts


def _choice(tokens: TokenRange, backend: str = "fast", captured: bool = True, key: str = "a key") -> Choice:
    return Choice("linear", key, tokens, backend, captured, (REFERENCE_VERDICT, FAST, BROKEN))


def test_a_plan_survives_being_written() -> None:
    plan = Plan((_choice(TokenRange(1, 8)), _choice(TokenRange(9, 16), "reference")), {"gpu": "H200"})
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"choices": [{}], "identity": {}}', '{"choices": 3}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Plan.from_json(text)


def test_a_plan_counts_what_it_chose_and_what_it_rejected() -> None:
    plan = Plan((_choice(TokenRange(1, 8)), _choice(TokenRange(9, 16), "reference", captured=False)))
    assert plan.backends == {"linear:fast": 1, "linear:reference": 1}
    assert plan.rejections == {("linear:broken", "numbers"): 2}
    assert plan.capturable(8)
    assert not plan.capturable(9)


def test_without_a_backend_the_next_best_is_chosen() -> None:
    slower = Verdict("slower", microseconds=20.0, captured=True)
    verdicts = (REFERENCE_VERDICT, FAST, slower, BROKEN)
    plan = Plan((Choice("linear", "a key", TokenRange(1, 8), "fast", True, verdicts),), {"gpu": "H200"})
    assert plan.without(()) == plan
    assert plan.without(("gated:fast", "linear:broken")).backends == {"linear:fast": 1}
    [choice] = plan.without(("linear:fast",)).choices
    assert (choice.backend, choice.captured) == ("slower", True)
    # A graph comes first, but something has to compute.
    [choice] = plan.without(("linear:fast", "linear:slower", "linear:reference")).choices
    assert (choice.backend, choice.captured) == ("reference", False)


def test_neighbouring_ranges_with_one_outcome_are_one_row() -> None:
    ranges = token_ranges(16)
    plan = Plan(tuple(_choice(one, "fast" if one.last < 8 else "reference") for one in ranges))
    rows = rows_of(plan)
    assert [(row[2], row[3]) for row in rows] == [("1-4", "fast"), ("5-16", "reference")]
    assert all("broken: relative error 0.5" in row[-1] for row in rows)


def _gated_key(x: torch.Tensor) -> str:
    return key_of(shapes_of("gated", named_arguments("gated", (x, SILU), {})))


def test_calls_go_where_the_plan_says_by_site_and_token_count() -> None:
    called: list[str] = []

    def backend(name: str) -> Backend:
        return Backend("gated", name, lambda gate_up, activation: called.append(name))

    others = tuple(one for one in references() if one.operation != "gated")
    registry = Registry((*others, *map(backend, ("reference", "few", "many"))), {})
    wide, narrow = torch.zeros(9, 8), torch.zeros(9, 4)
    choices = [
        Choice("gated", _gated_key(wide), TokenRange(*bounds), name, True, ())
        for bounds, name in (((3, 4), "many"), ((1, 2), "few"), ((5, 8), "many"))
    ]
    unplanned: list[tuple[str, str]] = []
    ops = bind(Plan(tuple(choices)), registry, unplanned=lambda *call: unplanned.append(call))
    for count in (1, 2, 3, 4, 5, 8):
        ops.gated(wide[:count], SILU)
    assert called == ["few", "few", "many", "many", "many", "many"]
    assert not unplanned
    # More tokens than the plan knows, and another site, of which is told once.
    for x in (wide, narrow[:1], narrow[:1]):
        ops.gated(x, SILU)
    assert called[6:] == ["reference"] * 3
    assert unplanned == [("gated", _gated_key(narrow))]


def _registry(*backends: Backend) -> Registry:
    return Registry((*references(), *backends), {})


def test_without_choices_every_operation_is_the_reference() -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing has chosen it")

    ops = bind(Plan(), _registry(*(Backend(name, "fast", never) for name in OPERATION_NAMES)))
    x, weight = torch.randn(3, 8), torch.randn(8)
    calls = {
        "linear": (x, [dense(torch.randn(4, 8))]),
        "gated": (x, SILU),
        "rms_norm": (x, weight, 1e-6),
        "l2_norm": (x,),
    }
    for name, arguments in calls.items():
        assert torch.equal(getattr(ops, name)(*arguments), getattr(REFERENCE, name)(*arguments)), name


class Device:
    """Work fails after it was asked for, and whoever waits next is told."""

    def __init__(self) -> None:
        self.failed = False
        self.noted: list[str] = []

    def prepare(self, operation: str, backend: str, shapes: str) -> Callable[[int], None]:
        return lambda tokens: self.noted.append(f"{operation}:{backend}")

    def wait(self) -> bool:
        if self.failed:
            raise RuntimeError("an illegal memory access was encountered")
        return True


@pytest.mark.parametrize(
    ("guilty", "noted"),
    [
        ("before", "none:reference"),
        ("gated", "gated:fast"),
        ("between", "none:reference"),
        ("l2_norm", "l2_norm:reference"),
    ],
)
def test_whose_work_failed_is_noted_last_while_somebody_watches(guilty: str, noted: str) -> None:
    """Between operations something of PyTorch's is computed."""
    device, x = Device(), torch.zeros(2, 8)

    def at(place: str) -> None:
        device.failed |= place == guilty

    fast = Backend("gated", "fast", lambda gate_up, activation: at("gated"))
    l2_norm = Backend("l2_norm", "reference", lambda x: at("l2_norm"))
    others = tuple(one for one in references() if one.operation != "l2_norm")
    plan = Plan((Choice("gated", _gated_key(x), TokenRange(1, 8), "fast", True, ()),))
    ops = bind(plan, Registry((*others, l2_norm, fast), {}), device, watch=device)

    def act() -> None:
        ops.rms_norm(x, x[0], 1e-6)
        at("before")
        ops.gated(x, SILU)
        at("between")
        ops.l2_norm(x)
        ops.gated(x, SILU)

    with pytest.raises(RuntimeError, match="illegal"):
        act()
    assert device.noted[-1] == noted


def test_a_plan_for_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="linear:fast"):
        bind(Plan((_choice(TokenRange(1, 8)),)), _registry())


@pytest.mark.timed
def test_finding_the_backend_takes_microseconds() -> None:
    noted: list[int] = []
    x, blocks = torch.zeros(4, 8), (dense(torch.zeros(6, 8)),)
    arguments = named_arguments("linear", (x, blocks), {})
    key = key_of(shapes_of("linear", arguments))
    nothing = Backend("linear", "nothing", lambda x, blocks, bias=None: noted.append(1))
    plan = Plan((Choice("linear", key, TokenRange(1, 8), "nothing", True, ()),))
    ops = bind(plan, _registry(nothing))

    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(2000):
            ops.linear(x, blocks)
        return (time.perf_counter() - started) / 2000

    # Generous: the machine of the tests is shared.
    assert min(seconds() for _ in range(5)) < 20e-6
    assert len(noted) == 10_000
