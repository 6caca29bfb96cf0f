"""Two results side by side."""

import pytest
from rich.console import Console

from moebius_cli.bench.compare import MEASURES, compare, table, unlike
from moebius_cli.bench.result import Settings, Spread
from tests.cli.bench.results import FAILED, level, result


def test_differences_are_relative_to_the_first() -> None:
    a = result(level(8, output_rate=200.0))
    b = result(level(8, output_rate=250.0, ttft=Spread(0.1, 0.09, 0.2, 0.6), errors=FAILED))
    rows = {str(row.measure): row for row in compare(a, b)}
    assert len(rows) == len(MEASURES) == 11
    assert rows["tokens/s"].difference == pytest.approx(0.25)
    assert (rows["TTFT ms p50"].a, rows["TTFT ms p50"].b) == (pytest.approx(100), pytest.approx(90))
    assert rows["TTFT ms p50"].difference == pytest.approx(-0.1)
    assert rows["TTFT ms p99"].difference == pytest.approx(1.0)
    assert rows["ITL ms p95"].difference == 0
    # From nothing there is no proportion.
    assert (rows["failed"].a, rows["failed"].b, rows["failed"].difference) == (0, 3, None)


def test_what_is_not_there_has_no_difference() -> None:
    rows = {str(row.measure): row for row in compare(result(level(8, itl=None)), result(level(8)))}
    assert (rows["ITL ms p50"].a, rows["ITL ms p50"].difference) == (None, None)


def test_levels_that_only_one_has_are_said_and_left_out() -> None:
    a, b = result(level(1), level(8), level(2, "rate")), result(level(8), level(2), level(16))
    assert {row.load.value for row in compare(a, b)} == {8}
    assert [*unlike(a, b)] == ["only A has the levels 1, 2/s", "only B has the levels 2, 16"]


def test_what_makes_results_unlike_is_said() -> None:
    a = result(level(8))
    b = result(level(8), model="other", settings=Settings(1024, 256, 0, None, 30.0), length_control="none")
    assert [*unlike(a, a)] == []
    assert [*unlike(a, b)] == [
        "model: clerk in A, other in B",
        "length control: ignore_eos in A, none in B",
        "input tokens: 128 in A, 1024 in B",
    ]


def test_better_is_green_and_worse_is_red() -> None:
    a = result(level(8, output_rate=100.0, ttft=Spread(1, 1, 1, 1), itl=Spread(1, 1, 1, 1)))
    b = result(level(8, output_rate=90.0, ttft=Spread(1, 0.5, 2, 1.01), itl=Spread(1, 1, 1, 1)))
    console = Console(width=80, force_terminal=True, color_system="standard", no_color=False)
    with console.capture() as capture:
        console.print(table(compare(a, b)))
    text = capture.get()
    red, green = "\x1b[31m", "\x1b[32m"
    assert f"{red}-10.0%" in text
    assert f"{green}-50.0%" in text
    assert f"{red}+100.0%" in text
    assert f"{red}+1.0%" not in text
    assert "+1.0%" in text
