"""What a person is shown of a result."""

import pytest
from rich.console import Console

from moebius_cli.bench.progress import progress
from moebius_cli.bench.report import notes, number, table
from moebius_cli.bench.result import Load, Result, Settings, Spread
from moebius_cli.bench.stream import Tally
from tests.cli.bench.results import FAILED, level, result


def shown(of: Result) -> list[list[str]]:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(of))
    return [line.split() for line in capture.get().splitlines()]


def test_the_table() -> None:
    slow = Spread(9.9, 1.2345, 8.7654, 12.3456)
    lines = shown(result(level(8), level(1000, output_rate=12345.6, ttft=slow, errors=FAILED)))
    assert lines[2] == ["8", "700", "95.0/90.0/80.0", "100/200/300", "10.0/20.0/30.0", "40", "0"]
    # The widest that it may come to fits into 80 columns.
    assert lines[3][:2] == ["1000", "12346"]
    assert lines[3][3] == "1234/8765/12346"
    assert lines[3][-1] == "3"


def test_a_level_in_which_all_failed() -> None:
    dead = level(8, completed=0, errors=FAILED, ttft=None, itl=None, stream_rate=None, output_rate=0.0)
    assert shown(result(dead))[2] == ["8", "0.00", "-", "-", "-", "0", "3"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (9.994, "9.99"), (9.996, "10.0"), (99.94, "99.9"), (99.96, "100"), (123456.7, "123457")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_what_the_figures_rest_on() -> None:
    assert [*notes(result(level(8)))] == [
        "Input tokens 128, output tokens 256 (ignore_eos).",
        "Tokens are counted by the endpoint (usage).",
    ]


def test_what_is_wrong_with_the_figures() -> None:
    bad = level(
        4,
        "rate",
        errors=FAILED,
        short_outputs=5,
        token_source="chunks",
        client_cpu=0.71,
        input_tokens=None,
        peak_in_flight=77,
    )
    said = "\n".join(notes(result(bad, length_control="none", input_fitted=False)))
    assert "about 128 (the endpoint does not tell)" in said
    assert "neither ignore_eos nor min_tokens" in said
    assert "pieces with text are counted" in said
    assert "At 4/s, at most 77 requests were open" in said
    assert "At 4/s, 5 of 40 answers ended before 256 tokens" in said
    assert "At 4/s, 3 failed: HTTP 429 (overloaded): the request would wait too long" in said
    assert "took 71% of a core" in said


def test_an_idle_load_generator_is_not_warned_of() -> None:
    assert "of a core" not in "\n".join(notes(result(level(8, client_cpu=0.7))))


@pytest.mark.parametrize(
    ("settings", "seconds", "tally", "expected"),
    [
        (Settings(1, 1, 0, None, 10.0), None, Tally(8), (0.0, "warming")),
        (Settings(1, 1, 0, None, 10.0), 4.0, Tally(8, 3, 0, 200), (0.4, "50 tokens/s, 3 done")),
        (Settings(1, 1, 0, None, 10.0), 11.0, Tally(8, 3, 1, 9), (1.0, "waiting for the last 8, 1 failed")),
        (Settings(1, 1, 0, 40, None), 4.0, Tally(8, 8, 2, 200), (0.25, "50 tokens/s, 10 done, 2 failed")),
        # Fewer requests than streams: each has one.
        (Settings(1, 1, 0, 2, None), 1.0, Tally(4, 4, 0, 8), (0.5, "8 tokens/s, 4 done")),
    ],
)
def test_progress(
    settings: Settings, seconds: float | None, tally: Tally, expected: tuple[float, str]
) -> None:
    assert progress(settings, Load("concurrency", 8), seconds, tally) == expected
