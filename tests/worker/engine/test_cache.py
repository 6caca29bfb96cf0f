"""Page pool and KV cache: allocation, sharing, eviction."""

import gc
import tracemalloc

import pytest

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.cache.manager import KVCache
from moebius_worker.engine.cache.pages import PagePool
from tests.worker.engine.scheduler_world import audit_cache, nodes


def filled(cache, tokens):
    """A table that holds `tokens`, all of them computed."""
    table = cache.new_table()
    cache.reuse(table, tokens)
    cache.grow(table, len(tokens))
    cache.commit(table, tokens, len(tokens))
    return table


def test_pool_gives_each_page_once_and_takes_it_back_once():
    pool = PagePool(3)
    pages = [pool.take() for _ in range(3)]
    assert sorted(pages) == [0, 1, 2]
    with pytest.raises(IndexError):
        pool.take()
    pool.give_back(1)
    with pytest.raises(ValueError, match="page 1 is freed twice"):
        pool.give_back(1)
    assert pool.free == 1
    assert pool.take() == 1


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_are_taken_whole_and_as_needed(page_size):
    cache = KVCache(CacheLayout(page_size=page_size, num_pages=8))
    table = cache.new_table()
    cache.grow(table, 1)
    assert len(table.pages) == 1
    cache.grow(table, page_size)
    assert len(table.pages) == 1
    cache.grow(table, page_size + 1)
    assert len(table.pages) == 2
    assert cache.room(table) == 8 * page_size
    cache.release(table)
    audit_cache(cache, [table])
    assert cache.available == 8


def test_full_pages_are_found_again_and_the_last_token_never_is():
    cache = KVCache(CacheLayout(page_size=4, num_pages=8))
    cache.release(filled(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert cache.stats().pages_cached == 2

    for text, reused in [
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8, 0], 8),
        ([1, 2, 3, 4, 5, 6, 0, 0, 0], 4),
        ([0, 2, 3, 4, 5, 6, 7, 8, 9], 0),
        # The same block in another place is another page: its keys depend on the text before it.
        ([5, 6, 7, 8, 9], 0),
        ([1, 2, 3, 4], 0),
        ([1], 0),
    ]:
        table = cache.new_table()
        assert cache.reuse(table, text) == reused
        assert len(table.pages) == reused // 4
        audit_cache(cache, [table])
        cache.release(table)


def test_a_partial_page_is_never_shared():
    cache = KVCache(CacheLayout(page_size=4, num_pages=8))
    first = filled(cache, [1, 2, 3, 4, 5, 6])
    second = filled(cache, [1, 2, 3, 4, 5, 6])
    assert first.pages[0] == second.pages[0]
    assert first.pages[1] != second.pages[1]
    audit_cache(cache, [first, second])


def test_twins_end_up_on_the_same_pages():
    """Two requests that compute the same text at the same time: who is second gives up its page."""
    cache = KVCache(CacheLayout(page_size=4, num_pages=8))
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    twins = [cache.new_table(), cache.new_table()]
    for table in twins:
        cache.grow(table, 8)
    assert cache.available == 4
    for table in twins:
        cache.commit(table, text, 8)
    audit_cache(cache, twins)
    assert twins[0].pages == twins[1].pages
    assert cache.available == 6
    cache.release(twins[0])
    assert cache.stats().pages_used == 2
    cache.release(twins[1])
    assert cache.stats().pages_used == 0


def test_a_prefill_goes_on_with_what_another_has_computed():
    cache = KVCache(CacheLayout(page_size=4, num_pages=8))
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    slow = cache.new_table()
    cache.grow(slow, 2)
    fast = filled(cache, text)
    assert cache.reuse(slow, text) == 8
    assert slow.pages == fast.pages[:2]
    audit_cache(cache, [slow, fast])


def test_need_counts_what_cannot_be_shared():
    cache = KVCache(CacheLayout(page_size=4, num_pages=8))
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert cache.need(text) == 3
    table = filled(cache, text)
    assert cache.need(text) == 1
    assert cache.need(text[:8]) == 1
    assert cache.need([*text[:4], 0, 0, 0, 0, 0]) == 2
    cache.release(table)
    # Idle pages are reused too, but they are taken out of what is available.
    assert cache.need(text) == 3
    before = cache.available
    reader = cache.new_table()
    cache.reuse(reader, text)
    cache.grow(reader, len(text))
    assert before - cache.available == 3


def test_what_was_idle_for_longest_is_evicted_leaf_first():
    cache = KVCache(CacheLayout(page_size=2, num_pages=6))
    old = [1, 1, 2, 2, 3, 3]
    new = [4, 4, 5, 5, 6, 6]
    cache.release(filled(cache, old))
    cache.release(filled(cache, new))
    assert cache.stats().pages_cached == 6
    # Reading renews a part of the old text.
    table = cache.new_table()
    assert cache.reuse(table, [*old[:4], 0]) == 4
    cache.release(table)

    writer = cache.new_table()
    held = []
    for length in range(2, 14, 2):
        cache.grow(writer, length)
        audit_cache(cache, [writer])
        held.append(sorted(node.key[0] for node in nodes(cache)))
    assert held == [[1, 2, 4, 5, 6], [1, 2, 4, 5], [1, 2, 4], [1, 2], [1], []]


def test_pages_in_use_are_never_evicted():
    cache = KVCache(CacheLayout(page_size=2, num_pages=4))
    reader = filled(cache, [1, 1, 2, 2])
    other = cache.new_table()
    assert cache.room(other) == 4
    cache.grow(other, 4)
    with pytest.raises(KeyError):
        cache.grow(other, 5)
    assert reader.shared == 2


def test_a_cached_page_pins_its_own_tokens_only():
    """Many short prefixes of long prompts: what the tree keeps does not grow with the prompts."""
    cache = KVCache(CacheLayout(page_size=16, num_pages=200))
    gc.collect()
    tracemalloc.start()
    try:
        for index in range(200):
            text = list(range(index * 100_000, index * 100_000 + 5_000))
            table = cache.new_table()
            cache.grow(table, 16)
            cache.commit(table, text, 16)
            cache.release(table)
            del text, table
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.stats().pages_cached == 200
    # 16 integers, their tuple, and the node: about a kilobyte. A pinned prompt would be 150.
    assert kept / 200 < 2_000


def test_memory_is_bounded_by_the_pages_whatever_passes_through():
    cache = KVCache(CacheLayout(page_size=4, num_pages=50))
    for index in range(500):
        cache.release(filled(cache, [index] * 40))
        assert len(nodes(cache)) <= 50
    audit_cache(cache, [])
