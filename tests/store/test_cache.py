"""Spec rows S1, S2: the memory stage is bounded, forgets the least used, never what is read."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.store.base import Store
from kvloom.store.cache import Cache
from kvloom.store.contract import NAMESPACE, PART, PARTS, dump, load, make_block
from kvloom.store.eviction import POLICIES
from kvloom.store.memory import HostMemory

SIZE = PART * PARTS
ROOM = 4


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["dump", "load", "delete"]), st.integers(0, 7))))
def test_it_is_a_least_recently_used_cache_of_its_size(steps: list[tuple[str, int]]) -> None:
    cache = Cache(NAMESPACE, limit_bytes=ROOM * SIZE, threads=1, eviction="lru")
    model: OrderedDict[int, bytes] = OrderedDict()
    for step, number in steps:
        header, payload = make_block(number)
        if step == "dump":
            assert dump(cache, [(header, payload)]) == [True]
            if number not in model:
                if len(model) == ROOM:
                    model.popitem(last=False)
                model[number] = bytes(payload)
        elif step == "load":
            done, loaded = load(cache, [header.key], [SIZE], [None])
            assert done == [number in model]
            if number in model:
                model.move_to_end(number)
                assert loaded == [model[number]]
        else:
            assert cache.delete([header.key]) == (model.pop(number, None) is not None)
        assert cache.stats()["cache.bytes"] <= ROOM * SIZE
    keys = [make_block(i)[0].key for i in range(8)]
    assert cache.lookup(keys) == [i in model for i in range(8)]
    cache.close()


@pytest.mark.parametrize("eviction", POLICIES)
def test_what_is_being_read_is_not_evicted(eviction: str) -> None:
    cache = Cache(NAMESPACE, limit_bytes=2 * SIZE, threads=1, eviction=eviction)
    read, other = make_block(1), make_block(2)
    dump(cache, [read, other])
    cache._entries[read[0].key].readers += 1  # as in the middle of a copy
    dump(cache, [make_block(3), make_block(4)])
    assert cache.lookup([read[0].key, other[0].key]) == [True, False]
    cache._entries[read[0].key].readers += 1
    cache._entries[make_block(4)[0].key].readers += 1
    assert dump(cache, [make_block(5)]) == [False], "full of what is read: dropped, not waited"
    cache.close()


def test_a_block_larger_than_the_cache_is_dropped() -> None:
    cache: Store = Cache(NAMESPACE, limit_bytes=SIZE - 1, threads=1)
    assert dump(cache, [make_block(1)]) == [False]
    assert list(cache.headers()) == []
    cache.close()


@given(st.lists(st.sampled_from([100, 1000, 7000]), max_size=60), st.integers(0, 30_000))
def test_host_memory_never_exceeds_its_limit_and_reuses(sizes: list[int], limit: int) -> None:
    memory = HostMemory(limit)
    taken = [piece for size in sizes if (piece := memory.take(size)) is not None]
    assert sum(len(piece) for piece in taken) <= limit
    for piece in taken:
        memory.give(piece)
    again = [memory.take(len(piece)) for piece in taken]
    assert all(piece is not None for piece in again)
