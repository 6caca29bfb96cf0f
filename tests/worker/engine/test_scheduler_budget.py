"""How a step's tokens are divided."""

from hypothesis import given, settings
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


def test_the_keys_that_a_prefill_attends_to_cost_too():
    # A token costs 1 + (3000 + 50) / 1000.
    assert share_budget(101, [1, 500], [7, 3000], 1000) == [1, 24]
    assert share_budget(101, [1, 500, 500], [7, 3000, 0], 1000) == [1, 24, 2]
    assert share_budget(101, [1, 500, 40], [7, 3000, 0], 1000) == [1, 14, 40]


def test_the_first_prefill_gets_a_token_whatever_it_costs():
    assert share_budget(4, [1, 1, 1, 100, 100], [0, 0, 0, 50_000, 50_000], 1000) == [1, 1, 1, 1, 0]


@settings(deadline=None)
@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.one_of(st.just(1), st.integers(1, 300)), st.integers(0, 9000)), max_size=20),
    st.integers(1, 9000),
)
def test_rules_with_attention(budget, requests, keys_per_token):
    pending, starts = [count for count, _ in requests], [start for _, start in requests]
    grants = share_budget(budget, pending, starts, keys_per_token)
    assert all(0 <= grant <= wanted for grant, wanted in zip(grants, pending, strict=True))
    assert sum(grants) <= budget
    decodes = pending.count(1)
    assert sum(grant for grant, wanted in zip(grants, pending, strict=True) if wanted == 1) == min(
        budget, decodes
    )
    first, *others = [index for index, wanted in enumerate(pending) if wanted > 1] or [None]
    if first is None or budget <= decodes:
        return
    assert grants[first] >= 1
    costs = {
        index: grants[index] * (1 + (starts[index] + grants[index] / 2) / keys_per_token)
        for index in (first, *others)
    }
    # All of them together cost what the decodes leave, at most, or it is one token alone.
    assert sum(costs.values()) <= budget - decodes or (grants[first] == 1 and not any(map(costs.get, others)))


@settings(deadline=None)
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
