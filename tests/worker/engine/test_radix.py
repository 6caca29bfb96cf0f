"""The prefix tree by itself."""

import random

import pytest

from moebius_worker.engine.cache.radix import PrefixTree, path


def test_readers_are_counted_along_the_path():
    tree = PrefixTree()
    first = tree.insert(tree.root, (1,), 10)
    second = tree.insert(first, (2,), 11)
    fork = tree.insert(first, (3,), 12)
    tree.acquire(first)
    assert [node.page for node in path(fork)] == [12, 10]
    assert first.readers == 2
    tree.release_path(fork)
    assert (first.readers, second.readers, fork.readers) == (1, 1, 0)
    assert tree.idle == 1
    assert tree.evict().page == 12
    tree.release_path(second)
    assert [tree.evict().page, tree.evict().page] == [11, 10]
    with pytest.raises(KeyError):
        tree.evict()
    assert not tree.root.children


def test_a_node_is_not_evicted_before_its_children():
    """Random readers of random paths: every eviction takes a leaf, and all idle pages can be evicted."""
    draw = random.Random(7)
    for _ in range(50):
        tree = PrefixTree()
        held = []
        page = 0
        for _ in range(60):
            if held and draw.random() < 0.4:
                tree.release_path(held.pop(draw.randrange(len(held))))
            elif tree.idle and draw.random() < 0.2:
                # `evict` asserts that it takes a leaf.
                tree.evict()
            else:
                node = tree.root
                for _ in range(draw.randint(1, 5)):
                    key = (draw.randrange(3),)
                    child = node.children.get(key)
                    if child is None:
                        child = tree.insert(node, key, page)
                        page += 1
                    else:
                        tree.acquire(child)
                    node = child
                held.append(node)
        for node in held:
            tree.release_path(node)
        evicted = [tree.evict().page for _ in range(tree.idle)]
        assert len(set(evicted)) == len(evicted)
        assert not tree.root.children
