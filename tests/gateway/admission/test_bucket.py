"""Rates: what may be taken when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_gateway.admission.bucket import Bucket


def test_a_minute_s_worth_at_once_then_as_it_fills() -> None:
    bucket = Bucket.per_minute(60, now=100.0)
    for _ in range(60):
        assert bucket.delay(1, 100.0) == 0
        bucket = bucket.taken(1, 100.0)
    assert bucket.delay(1, 100.0) == pytest.approx(1.0)
    assert bucket.delay(1, 100.4) == pytest.approx(0.6)
    assert bucket.delay(1, 101.0) == pytest.approx(0.0)
    assert bucket.delay(5, 101.0) == pytest.approx(4.0)


def test_it_never_holds_more_than_its_capacity() -> None:
    assert Bucket.per_minute(60, 0.0).filled(1e9).level == 60
    assert Bucket.per_minute(60, 0.0).taken(-10, 0.0).level == 60


def test_more_than_it_holds_needs_a_full_one_and_leaves_a_debt() -> None:
    bucket = Bucket.per_minute(60, 0.0)
    assert bucket.delay(600, 0.0) == 0
    bucket = bucket.taken(600, 0.0)
    assert bucket.delay(1, 0.0) == pytest.approx(541)
    assert bucket.taken(1, 0.0).delay(600, 0.0) == pytest.approx(601)


def test_another_limit_forgives_nothing() -> None:
    bucket = Bucket.per_minute(60, 0.0).taken(50, 0.0).resized(120, 0.0)
    assert bucket.level == 70
    assert bucket.rate == 2


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 30)), min_size=1, max_size=50))
def test_over_any_time_no_more_is_taken_than_capacity_and_rate_allow(
    steps: list[tuple[float, float]],
) -> None:
    bucket, now, taken = Bucket.per_minute(60, 0.0), 0.0, 0.0
    for pause, amount in steps:
        now += pause
        if bucket.delay(amount, now) == 0:
            bucket, taken = bucket.taken(amount, now), taken + amount
        assert taken <= 60 + now + 1e-6
