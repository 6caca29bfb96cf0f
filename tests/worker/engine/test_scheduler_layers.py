"""Models with layers that look back a window, or carry a state along: what is kept of a text, and reused."""

import pytest

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.limits import SchedulerConfig
from tests.worker.engine.scheduler_world import World, config, request


def windowed(**changes):
    sizes = {"window": 10, "num_window_pages": 100, "num_pages": 200, "max_step_tokens": 100}
    return World(config(**(sizes | changes)))


def stateful(**changes):
    sizes = {"state_slots": 40, "num_pages": 200, "max_step_tokens": 100, "snapshot_interval": 32}
    return World(config(**(sizes | changes)))


def run(world, *asked):
    for one in asked:
        world.add(one)
    world.drain()
    world.check_outputs()


def chunks(world):
    """Ends of the slices of the one request that is there, to its first token."""
    ends = []
    while True:
        (piece,) = world.step().slices
        ends.append(piece.end)
        if piece.sample:
            return ends


# ---- windows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 50])
def test_a_long_text_needs_the_pages_of_its_window_alone(page_size, window):
    least = CacheLayout(page_size, 600, window, 10**6).window_reach
    world = windowed(page_size=page_size, num_pages=600, window=window, num_window_pages=least, max_running=1)
    world.add(request(1, 20, max_tokens=200))
    most = 0
    while world.has_work():
        (piece,) = world.step().slices
        most = max(most, sum(page >= 0 for page in piece.window_pages))
    # So many positions, which begin anywhere in a page.
    assert most == -(-(window + page_size - 1) // page_size)
    world.check_outputs()


def test_too_few_window_pages_for_one_request_are_refused():
    layout = {"page_size": 4, "num_pages": 100, "window": 10}
    with pytest.raises(ValueError, match=r"num_window_pages is 4, but one request .* needs 5"):
        CacheLayout(**layout, num_window_pages=4)
    CacheLayout(**layout, num_window_pages=5)


@pytest.mark.parametrize(
    "sizes", [{"window": 0, "num_window_pages": 9}, {"num_window_pages": 1}, {"state_slots": -1}]
)
def test_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match=r"window must be|without a window|state_slots must not"):
        CacheLayout(page_size=4, num_pages=100, **sizes)


def test_siblings_share_a_prefix_whose_window_has_been_left():
    """A long common prefix and many different ends: each finds it, though the first has moved on."""
    world = windowed()
    prefix = list(range(60))
    run(world, request(1, [*prefix, *range(100, 160)], max_tokens=20))
    for handle in range(2, 12):
        run(world, request(handle, [*prefix, *range(handle * 1000, handle * 1000 + 60)], max_tokens=20))
    assert [world.cached[handle] for handle in range(2, 12)] == [60] * 10


def test_a_stream_does_not_push_out_the_windows_of_prompts():
    """The pages that a long output leaves behind are the first to go: nobody goes on in the middle of it."""
    world = windowed(num_window_pages=26, max_running=1)
    text = list(range(60))
    run(world, request(1, text, max_tokens=3))
    run(world, request(2, 8, max_tokens=400))
    run(world, request(3, [*text, *range(100, 110)], max_tokens=1))
    assert world.cached[3] == 60


def test_where_windows_are_left_a_branch_is_kept_for_the_third():
    """A long prompt's window pages, which serve no stop, are needed again; those at a branch are not."""
    world = windowed(num_window_pages=26, max_running=1, max_step_tokens=16)
    prefix = list(range(60))
    for handle in range(4):
        run(world, request(handle, [*prefix, *range(1000 * handle + 100, 1000 * handle + 250)], max_tokens=1))
        run(world, request(100 + handle, 8, max_tokens=150))
    assert [world.cached[handle] for handle in range(4)] == [0, 0, 60, 60]


def test_where_the_window_is_gone_a_prefix_is_not_gone_on_from():
    """Full pages are left, window pages are not: it begins at the deepest place where both are."""
    world = windowed(num_window_pages=26, max_running=1, max_step_tokens=40)
    text = list(range(200))
    run(world, request(1, text, max_tokens=1))
    # The newest 26 window pages, 104 tokens, are still there.
    world.add(request(2, [*text[:150], 7, 7], max_tokens=1))
    (piece,) = world.step().slices
    assert piece.start == 148
    world.drain()
    world.add(request(3, [*text[:40], 7, 7], max_tokens=1))
    (piece,) = world.step().slices
    assert piece.start == 0
    world.drain()
    # What was computed again is there again, on the pages that the tree has.
    assert world.scheduler.stats().cache.pages_cached == 51
    world.add(request(4, [*text[:40], 8, 8], max_tokens=1))
    (piece,) = world.step().slices
    assert piece.start == 40
    world.drain()
    world.check_outputs()


def test_window_pages_never_run_out():
    """Streams have a token in every step while a long prompt is computed, with hardly any window pages."""
    world = windowed(num_window_pages=40, max_running=32, num_pages=500, max_step_tokens=64)
    places = world.config.places
    assert 3 < places < 8
    for handle in range(places - 1):
        world.add(request(handle, 8, max_tokens=200))
    for _ in range(4):
        world.step()
    world.add(request(50, 800, max_tokens=3))
    while 50 not in world.finished:
        plan = world.step()
        assert set(plan.handles) == {*range(places - 1), 50} or 50 in world.finished
    assert world.scheduler.stats().preemptions == 0
    # More requests than there are window pages for wait, and are served.
    for handle in range(100, 130):
        world.add(request(handle, 30, max_tokens=10))
    world.drain()
    world.check_outputs()


def test_half_of_the_window_pages_at_most_are_kept_for_chunks():
    def settings(num_window_pages, max_step_tokens):
        layout = CacheLayout(page_size=16, num_pages=10_000, window=128, num_window_pages=num_window_pages)
        return SchedulerConfig(layout, 64, max_step_tokens, 100_000, 0)

    assert settings(1000, 4096).layout.window_reach == 10
    assert (settings(1000, 4096).places, settings(1000, 4096).step_tokens) == (64, 4096)
    assert (settings(300, 4096).places, settings(300, 4096).step_tokens) == (15, 150 * 16)
    assert (settings(10, 4096).places, settings(10, 4096).step_tokens) == (1, 1)


# ---- states -----------------------------------------------------------------------------------------


def test_snapshots_are_taken_at_the_interval_and_at_the_prompts_last_full_page():
    world = stateful(max_step_tokens=50)
    world.add(request(1, 111, max_tokens=2))
    assert chunks(world) == [32, 64, 96, 108, 111]
    assert world.scheduler.stats().cache.state_slots.cached == 4
    world.drain()


def test_a_chunk_cut_short_leaves_its_tokens_to_others():
    world = stateful(max_step_tokens=100)
    world.add(request(1, 250, max_tokens=1))
    world.add(request(2, 250, max_tokens=1))
    ends = [[piece.end for piece in world.step().slices] for _ in range(3)]
    assert ends == [[32, 32], [64, 64], [96, 96]]
    world.drain()


def test_a_long_text_does_not_fill_all_slots_with_its_snapshots():
    world = stateful(state_slots=8 + 16, max_running=8, num_pages=1000, snapshot_interval=4)
    run(world, request(1, 2001, max_tokens=1))
    # A quarter of the 16 that are not for running ones, and the one at its end.
    assert world.scheduler.stats().cache.state_slots.cached <= 16 / 4 + 1


@pytest.mark.parametrize("answer", [1, 5, 30])
def test_the_next_turn_goes_on_from_the_end_of_the_prompt(answer):
    world = stateful()
    text = list(range(90))
    run(world, request(1, text, max_tokens=answer))
    turn = [*text, *world.outputs(1), *range(500, 520)]
    run(world, request(2, turn, max_tokens=1))
    assert world.cached[2] >= 88
    # The same prompt again.
    run(world, request(3, text, max_tokens=1))
    assert world.cached[3] == 88


def test_a_diverging_prompt_is_computed_from_the_last_snapshot():
    world = stateful()
    text = list(range(200))
    run(world, request(1, text, max_tokens=1))
    run(world, request(2, [*text[:150], *range(900, 950)], max_tokens=1))
    assert world.cached[2] == 128


def test_where_prompts_diverge_a_snapshot_is_made_for_the_third():
    world = stateful(snapshot_interval=1000)
    prefix = list(range(77))
    prompts = [[*prefix, *range(start, start + 40)] for start in (100, 200, 300, 400)]
    for handle, prompt in enumerate(prompts):
        run(world, request(handle, prompt, max_tokens=1))
    # The first cannot know; the second sees it; the others find it, at the last page that all share.
    assert [world.cached[handle] for handle in range(4)] == [0, 0, 76, 76]


def test_a_text_that_merely_goes_on_is_not_a_divergence():
    world = stateful(snapshot_interval=1000)
    text = list(range(80))
    run(world, request(1, text, max_tokens=22))
    turn = [*text, *world.outputs(1), *range(500, 560)]
    world.add(request(2, turn, max_tokens=1))
    # From the first prompt's last page to its own, without a stop at the end of the first one's answer.
    assert chunks(world) == [160, 162]


def test_the_state_at_a_pages_end_is_kept_without_a_copy():
    world = stateful(snapshot_interval=1000)
    world.add(request(1, 10, max_tokens=7))
    saves = 0
    while world.has_work():
        (piece,) = world.step().slices
        saves += piece.state.save is not None
        slot = piece.state.slot
    assert saves == 1
    cache = world.scheduler._cache
    # 10 + 7 tokens, of which 16 were computed.
    assert slot in {item.number for item in cache._states._items.values()}
    turn = [*world.conversations[1], 5, 5]
    run(world, request(2, turn, max_tokens=1))
    assert world.work[2] == len(turn) - 16


def test_decoding_is_not_cut_at_pages():
    world = World(config(state_slots=20, snapshot_interval=4), speculated=3)
    world.add(request(1, 9, max_tokens=50))
    chunks(world)
    while world.has_work():
        (piece,) = world.step().slices
        assert len(piece.token_ids) == 3
        assert piece.state.save is None
    world.check_outputs()


def test_no_more_run_than_there_are_slots():
    world = stateful(state_slots=3)
    for handle in range(10):
        world.add(request(handle, 30, max_tokens=10))
    while world.has_work():
        world.step()
        assert world.scheduler.stats().running <= 3
    world.check_outputs()
    assert len(world.finished) == 10


def test_places_are_for_those_that_can_have_a_slot():
    assert SchedulerConfig(CacheLayout(16, 10, state_slots=3), 64, 128, 1000, 0).places == 3


def test_one_slot_is_enough():
    world = stateful(state_slots=1)
    text = list(range(100))
    run(world, *(request(handle, text, max_tokens=3) for handle in range(4)))


def test_the_snapshot_that_was_idle_for_longest_goes_first():
    world = stateful(state_slots=4, max_running=1, snapshot_interval=1000)
    texts = [[*range(start, start + 41)] for start in (0, 100, 200, 300, 400)]
    for handle, text in enumerate(texts[:3]):
        run(world, request(handle, text, max_tokens=1))
    assert world.scheduler.stats().cache.state_slots.cached == 3
    # Using the first one renews it.
    run(world, request(10, texts[0], max_tokens=1))
    run(world, request(11, texts[3], max_tokens=1), request(12, texts[4], max_tokens=1))
    run(world, request(13, texts[0], max_tokens=1))
    run(world, request(14, texts[1], max_tokens=1))
    assert (world.cached[10], world.cached[13], world.cached[14]) == (40, 40, 0)


def test_a_preempted_request_goes_on_from_its_last_snapshot():
    world = stateful(num_pages=40, max_running=4, state_slots=12)
    world.add(request(1, 60, max_tokens=60))
    world.add(request(2, 60, max_tokens=60))
    world.drain()
    assert world.scheduler.stats().preemptions
    assert world.restarts
    # Not all of what was preempted was computed again.
    assert world.work[2] < 2 * 119
    world.check_outputs()


def test_a_failed_step_leaves_no_snapshot():
    world = stateful()
    text = list(range(90))
    world.add(request(1, text, max_tokens=5))
    world.fail(world.begin())
    assert world.scheduler.stats().cache.state_slots == (40, 0, 0)
    run(world, request(2, text, max_tokens=5))


def test_a_cancelled_step_leaves_a_sound_snapshot():
    world = stateful()
    text = list(range(90))
    world.add(request(1, text, max_tokens=5))
    world.step(during=lambda _: world.cancel(1))
    run(world, request(2, text, max_tokens=5))
    assert world.cached[2] == 32


def test_twins_share_snapshots_while_they_run():
    world = stateful(max_running=4, max_step_tokens=50, num_pages=400)
    text = list(range(400))
    run(world, *(request(handle, text, max_tokens=3) for handle in (1, 2, 3)))
    assert sum(world.work.values()) < 700


def test_a_model_without_such_layers_is_not_slowed_by_them():
    """No chunk is cut short, and a slice says nothing of windows and states."""
    world = World(config(max_step_tokens=50, num_pages=200))
    world.add(request(1, 111, max_tokens=1))
    assert chunks(world) == [50, 100, 111]
    assert world.scheduler.stats().cache.window_pages == (0, 0, 0)


def test_both_kinds_at_once_need_both():
    """A request goes on only where the window's pages and a snapshot are."""
    world = World(
        config(
            window=10,
            num_window_pages=40,
            state_slots=40,
            num_pages=400,
            max_step_tokens=64,
            max_running=2,
            snapshot_interval=16,
        )
    )
    text = list(range(400))
    run(world, request(1, text, max_tokens=1))
    for cut in (100, 200, 300, 390):
        run(world, request(1000 + cut, [*text[:cut], 5, 5], max_tokens=1))
    cached = [world.cached[1000 + cut] for cut in (100, 200, 300, 390)]
    # The first finds snapshots without window pages; each leaves both where it diverges, for the next one.
    assert cached[0] == 0

    assert cached == [0, 100, 200, 300]
