"""``kvloom bench eviction``: hit rates of the eviction policies on one trace (spec row S7)."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvloom.bench.report import Report
from kvloom.store.eviction import POLICIES, EvictionPolicy

_ALPHA = 0.9
_SEED = 1
Trace = npt.NDArray[np.int64]


def run(
    requests: int,
    blocks: int,
    once: float,
    progress: Callable[[str], None] = lambda phase: None,
) -> Report:
    """Replays requests for blocks of equal size; what is missed is stored, as an engine does.

    Args:
        requests: length of the trace.
        blocks: blocks that are asked for again and again, by a Zipf law of exponent 0.9.
        once: part of the requests that ask for a block that nobody asks for again.
    """
    report = Report(
        f"Hit rates, {requests:,} requests, {100 * once:.0f} % of them for blocks used once"
    )
    trace = make_trace(requests, blocks, once)
    for percent in (1, 5, 10, 25):
        room = max(blocks * percent // 100, 1)
        best = best_possible(trace, room)
        report.add(f"eviction.{percent}.best", 100 * best / requests, "%")
        for name, make in POLICIES.items():
            progress(f"{name}, room for {room:,} blocks")
            hits = replay(make(), trace, room)
            report.add(f"eviction.{percent}.{name}", 100 * hits / requests, "%")
            report.add(f"eviction.{percent}.{name}_of_best", hits / best, "x")
    return report


def make_trace(requests: int, blocks: int, once: float) -> Trace:
    """Numbers of blocks; those used once are above all others."""
    random = np.random.default_rng(_SEED)
    weights = 1.0 / np.arange(1, blocks + 1) ** _ALPHA
    trace = random.choice(blocks, size=requests, p=weights / weights.sum())
    single = np.flatnonzero(random.random(requests) < once)
    trace[single] = blocks + np.arange(len(single))
    return trace.astype(np.int64)


def replay(policy: EvictionPolicy, trace: Trace, room: int) -> int:
    """Hits of a policy with room for so many blocks."""
    held: set[bytes] = set()
    hits = 0
    for number in trace.tolist():
        key = b"%d" % number
        if key in held:
            hits += 1
            policy.touch(key)
            continue
        if len(held) >= room:
            victim = policy.evict()
            assert victim is not None
            held.discard(victim)
        policy.add(key, 1)
        held.add(key)
    return hits


def best_possible(trace: Trace, room: int) -> int:
    """Hits of who knows the future: keep what comes back soonest, store nothing that comes later
    than all that is kept (Belady)."""
    coming = np.full(len(trace), len(trace), dtype=np.int64)
    last: dict[int, int] = {}
    numbers = trace.tolist()
    for at in range(len(numbers) - 1, -1, -1):
        coming[at] = last.get(numbers[at], len(numbers))
        last[numbers[at]] = at
    held: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for number, again in zip(numbers, coming.tolist(), strict=True):
        hits += number in held
        held[number] = again
        heapq.heappush(latest, (-again, number))
        while len(held) > room:
            when, victim = heapq.heappop(latest)
            if held.get(victim) == -when:
                del held[victim]
    return hits
