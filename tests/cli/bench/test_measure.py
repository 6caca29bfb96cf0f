"""The statistics, with numbers that can be reckoned by hand, and against numpy."""

import random

import numpy as np
import pytest

from moebius_cli.bench.measure import measure, peak_in_flight, quantile, spread
from moebius_cli.bench.result import ErrorCount, Load, Spread
from moebius_cli.bench.stream import RequestError, Stream

LOAD = Load("concurrency", 2)


def stream(
    begun: float, *arrivals: float, tokens: int | None = None, error: RequestError | None = None
) -> Stream:
    ended = arrivals[-1] if arrivals else begun
    return Stream(begun, list(arrivals), ended, 100 if tokens is not None else None, tokens, error)


@pytest.mark.parametrize("count", [1, 2, 3, 100, 101])
def test_quantiles_are_numpys(count: int) -> None:
    values = sorted(random.Random(count).random() for _ in range(count))
    for share in (0.0, 0.5, 0.95, 0.99, 1.0):
        assert quantile(values, share) == pytest.approx(np.quantile(values, share))


def test_a_percentile_is_what_so_many_reach() -> None:
    values = list(range(101))
    assert spread(values) == Spread(50, 50, 95, 99)
    assert spread(values, higher_is_better=True) == Spread(50, 50, pytest.approx(5), pytest.approx(1))
    assert spread([]) is None


def test_figures_of_two_streams() -> None:
    streams = [
        stream(10.0, 10.5, 10.6, 10.8, tokens=3),
        # Pieces of two tokens each.
        stream(11.0, 11.2, 11.6, 12.0, tokens=6),
    ]
    level = measure(LOAD, streams, 6, (10.0, 12.0), client_cpu=0.5)
    assert level.seconds == 2.0
    assert (level.completed, level.errors, level.failed) == (2, (), 0)
    assert level.ttft == Spread(*map(pytest.approx, (0.35, 0.35, 0.485, 0.497)))
    assert level.itl is not None
    assert level.itl.mean == pytest.approx((0.1 + 0.2 + 0.4 + 0.4) / 4)
    assert level.itl.p50 == pytest.approx(0.3)
    assert level.e2e is not None
    assert level.e2e.mean == pytest.approx((0.8 + 1.0) / 2)
    assert level.stream_rate is not None
    assert level.stream_rate.mean == pytest.approx((2 / 0.3 + 5 / 0.8) / 2)
    assert level.output_rate == pytest.approx(9 / 2)
    assert level.request_rate == pytest.approx(1.0)
    assert (level.input_tokens, level.output_tokens, level.short_outputs) == (100, 4.5, 1)
    assert level.token_source == "usage"


def test_after_the_window_nothing_adds_to_rates_and_gaps() -> None:
    """A stream of 20 tokens in 4 pieces, half of which came in time; its latencies count whole."""
    level = measure(LOAD, [stream(0.0, 1.0, 1.5, 9.0, 9.1, tokens=20)], 20, (0.0, 2.0), 0)
    assert level.output_rate == pytest.approx(10 / 2)
    assert level.request_rate == 0
    assert level.itl == Spread(*[pytest.approx(0.5)] * 4)
    assert level.completed == 1
    assert level.e2e is not None
    assert level.e2e.mean == pytest.approx(9.1)


def test_without_usage_pieces_are_counted() -> None:
    level = measure(LOAD, [stream(0.0, 1.0, 2.0)], 2, (0.0, 2.0), 0)
    assert (level.token_source, level.output_tokens, level.input_tokens) == ("chunks", 2, None)
    mixed = measure(LOAD, [stream(0.0, 1.0), stream(0.0, 1.0, tokens=7)], 2, (0.0, 1.0), 0)
    assert (mixed.token_source, mixed.output_tokens, mixed.short_outputs) == ("mixed", 4, 1)


def test_failed_streams_are_counted_by_kind_and_nothing_else() -> None:
    def error(kind: str, message: str) -> RequestError:
        return RequestError(kind, message)

    streams = [
        stream(0.0, error=error("HTTP 500", "first")),
        stream(0.0, 0.1, 0.2, tokens=50, error=error("timeout", "late")),
        stream(0.0, error=error("timeout", "later")),
        stream(0.0, 1.0, 3.0, tokens=2),
    ]
    level = measure(LOAD, streams, 2, (0.0, 4.0), 0)
    assert level.errors == (ErrorCount("timeout", 2, "late"), ErrorCount("HTTP 500", 1, "first"))
    assert (level.failed, level.completed) == (3, 1)
    assert level.ttft == Spread(1.0, 1.0, 1.0, 1.0)
    assert level.output_rate == pytest.approx(0.5)


def test_a_level_in_which_all_fail() -> None:
    level = measure(LOAD, [stream(0.0, error=RequestError("connect", "refused"))], 2, (0.0, 1.0), 0)
    assert (level.ttft, level.itl, level.e2e, level.stream_rate) == (None, None, None, None)
    assert (level.input_tokens, level.output_tokens, level.token_source) == (None, None, None)
    assert (level.output_rate, level.completed, level.failed) == (0, 0, 1)


def test_answers_of_one_piece_have_no_gap_and_no_rate() -> None:
    level = measure(LOAD, [stream(0.0, 1.0, tokens=4)], 4, (0.0, 2.0), 0)
    assert (level.itl, level.stream_rate) == (None, None)
    assert level.output_rate == pytest.approx(2.0)


def test_the_peak_of_open_requests() -> None:
    assert peak_in_flight([stream(0, 2), stream(2, 4), stream(4, 5)]) == 1
    assert peak_in_flight([stream(0, 9), stream(1, 3), stream(2, 4), stream(5, 6)]) == 3
