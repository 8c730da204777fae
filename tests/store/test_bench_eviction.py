"""The replay that policies are judged by: its best possible really is, on traces small enough."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvloom.bench.eviction import best_possible, make_trace, replay
from kvloom.store.eviction import POLICIES


def all_choices(trace: tuple[int, ...], room: int) -> int:
    """Most hits over every way to keep and to let go."""

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(trace):
            return 0
        hit = int(trace[at] in held)
        after = held | {trace[at]}
        choices = [after] if len(after) <= room else [after - {victim} for victim in after]
        return hit + max(best(at + 1, choice) for choice in choices)

    return best(0, frozenset())


@given(st.lists(st.integers(0, 4), max_size=10), st.integers(1, 3))
def test_no_choice_has_more_hits_than_the_best_possible(trace: list[int], room: int) -> None:
    assert best_possible(np.asarray(trace, np.int64), room) == all_choices(tuple(trace), room)


def test_with_many_blocks_used_once_s3fifo_has_more_hits_than_lru() -> None:
    trace = make_trace(20_000, 2_000, 0.3)
    hits = {name: replay(make(), trace, 100) for name, make in POLICIES.items()}
    best = best_possible(trace, 100)
    assert hits["lru"] < hits["s3fifo"] <= best
