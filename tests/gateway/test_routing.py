"""Which worker gets a request, and what is remembered to decide it."""

from moebius_gateway.workers.health import FIRST_EJECTION, LONGEST_EJECTION, Health
from moebius_gateway.workers.routing import AFFINITY_BLOCKS, BLOCK, MAX_BLOCKS, pick, prefix_blocks
from moebius_gateway.workers.view import Standing, WorkerState, WorkerView


def worker(address: str, load: int = 0, in_flight: int = 0, max_running: int = 8) -> Standing:
    return Standing(address, load, in_flight, max_running)


def test_blocks_are_whole_and_depend_on_all_before() -> None:
    tokens = tuple(range(3 * BLOCK))
    blocks = prefix_blocks(tokens)
    assert len(blocks) == 3
    assert prefix_blocks(tokens[:-1]) == blocks[:2]
    assert prefix_blocks((*tokens, 7)) == blocks
    # Another first token changes every block, another last one only the last.
    assert not set(prefix_blocks((99, *tokens[1:]))) & set(blocks)
    assert prefix_blocks((*tokens[:-1], 99))[:2] == blocks[:2]
    assert prefix_blocks((*tokens[:-1], 99))[2] != blocks[2]


def test_a_prompt_without_a_whole_block_has_none_and_a_huge_one_few() -> None:
    assert prefix_blocks((1, 2, 3)) == ()
    assert len(prefix_blocks(range(BLOCK * (MAX_BLOCKS + 5)))) == MAX_BLOCKS


def test_the_least_loaded_is_picked_by_share_of_what_it_can_run() -> None:
    assert pick([worker("a", load=3), worker("b", load=2)], {}) == "b"
    assert pick([worker("a", load=3, max_running=64), worker("b", load=2)], {}) == "a"


def test_a_cached_prefix_outweighs_some_load_but_not_any() -> None:
    warm = {"a": AFFINITY_BLOCKS}
    assert pick([worker("a", load=3), worker("b")], warm) == "a"
    assert pick([worker("a", load=5), worker("b")], warm) == "b"
    assert pick([worker("a", load=3), worker("b")], {"a": MAX_BLOCKS}) == "a"
    assert pick([worker("a", load=5), worker("b")], {"a": MAX_BLOCKS}) == "b"


def test_a_short_prefix_is_worth_little() -> None:
    short = {"a": 2}
    assert pick([worker("a"), worker("b")], short) == "a"
    assert pick([worker("a", load=1), worker("b")], short) == "b"
    assert pick([worker("a", load=3), worker("b")], {"a": AFFINITY_BLOCKS // 4}) == "b"


def test_ties_go_to_the_one_with_fewer_of_ours() -> None:
    assert pick([worker("a", load=2, in_flight=2), worker("b", load=2, in_flight=1)], {}) == "b"


def test_one_death_changes_nothing_repeated_ones_bring_a_trial() -> None:
    once = Health().lost(100.0)
    assert not once.on_trial
    assert once.ejected_until == 0
    twice = once.lost(100.0)
    assert twice.on_trial
    assert twice.ejected_until == 100.0 + FIRST_EJECTION
    assert twice.lost(100.0).ejected_until == 100.0 + 2 * FIRST_EJECTION
    many = twice
    # As many as a worker can die of in a week: no number overflows.
    for _ in range(2000):
        many = many.lost(100.0)
    assert many.ejected_until == 100.0 + LONGEST_EJECTION


def test_a_new_incarnation_may_be_tried_at_once() -> None:
    again = Health().lost(100.0).lost(100.0).restarted()
    assert again.on_trial
    assert again.ejected_until == 0


def test_a_trial_admits_one_request_at_a_time_after_the_ejection() -> None:
    ejected = WorkerView("a", WorkerState.READY, on_trial=True, ejected_until=50.0)
    assert not ejected.admits(49.0)
    assert ejected.admits(50.0)
    trying = WorkerView("a", WorkerState.READY, on_trial=True, in_flight=1)
    assert not trying.admits(50.0)
    assert WorkerView("a", WorkerState.READY, in_flight=9).admits(0.0)
