"""How a step's tokens are divided."""

from hypothesis import given
from hypothesis import strategies as st

from moebius_worker.engine.step_budget import share_budget


def test_decodes_come_first():
    assert share_budget(4, [100, 1, 1, 1]) == [1, 1, 1, 1]
    assert share_budget(10, [100, 1, 1, 1]) == [7, 1, 1, 1]
    assert share_budget(2, [1, 1, 1]) == [1, 1, 0]


def test_several_prefills_share_a_step():
    assert share_budget(100, [10, 20, 30]) == [10, 20, 30]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    assert share_budget(64, [100_000, 20]) == [44, 20]
    assert share_budget(64, [100_000, 20, 500]) == [32, 20, 12]


def test_the_oldest_prefill_is_not_starved_by_short_ones():
    assert share_budget(64, [100_000, 60, 60]) == [32, 32, 0]


def test_equal_prompts_are_served_in_order():
    assert share_budget(64, [100, 100, 100]) == [64, 0, 0]
    assert share_budget(64, [36, 100, 100]) == [36, 28, 0]


@given(st.integers(1, 500), st.lists(st.one_of(st.just(1), st.integers(1, 300)), max_size=20))
def test_rules(budget, pending):
    grants = share_budget(budget, pending)
    assert len(grants) == len(pending)
    assert all(0 <= grant <= wanted for grant, wanted in zip(grants, pending, strict=True))
    # Nothing is wasted, nothing is spent twice.
    assert sum(grants) == min(budget, sum(pending))
    decodes = [grant for grant, wanted in zip(grants, pending, strict=True) if wanted == 1]
    assert sum(decodes) == min(budget, len(decodes))
    prefills = [(grant, wanted) for grant, wanted in zip(grants, pending, strict=True) if wanted > 1]
    if prefills:
        grant, wanted = prefills[0]
        assert grant >= min(wanted, (budget - sum(decodes) + 1) // 2)
