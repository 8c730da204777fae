"""Stages from fast to slow as one store (spec row S1).

Loads come from the fastest stage that has a block and fall through to the next where that fails;
dumps go to all; ``prefetch`` copies blocks up, in the background and never on the way of a load.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

from kvloom.store.base import BlockHeader, Changes, PayloadSlice, Store, Task, Watcher
from kvloom.store.threads import WorkerThreads

_PREFETCH_S = 30.0
_PREFETCH_BLOCKS = 4
_PREFETCH_BATCHES = 32
_CLOSE_S = 5.0


class Pipeline(Store):
    """At least two stages, the fastest first; a dump is done when the last one says so."""

    def __init__(self, stages: Sequence[Store]) -> None:
        self.namespace = stages[0].namespace
        self._stages = tuple(stages)
        self._promotions = WorkerThreads("kvloom-prefetch", 1)
        self._room = threading.Semaphore(_PREFETCH_BATCHES)
        self._payload = memoryview(bytearray())  # of the promotions' thread, grown as needed

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)
        for stage in self._stages:
            left = [i for i, done in enumerate(found) if not done]
            for i, there in zip(left, stage.lookup([keys[i] for i in left]), strict=True):
                found[i] = there
        return found

    def load(
        self,
        keys: Sequence[bytes],
        slices: Sequence[PayloadSlice | None],
        buffers: Sequence[memoryview],
    ) -> Task:
        return _Load(self._stages, keys, slices, buffers)

    def dump(self, headers: Sequence[BlockHeader], buffers: Sequence[memoryview]) -> Task:
        return _Dump([stage.dump(headers, buffers) for stage in self._stages], len(headers))

    def prefetch(self, keys: Sequence[bytes]) -> None:
        wanted = list(keys)
        for first in range(0, len(wanted), _PREFETCH_BLOCKS):
            if not self._room.acquire(blocking=False):
                return  # a hint may be dropped, a queue must not grow
            self._promotions.submit(
                partial(self._promote, wanted[first : first + _PREFETCH_BLOCKS])
            )

    def touch(self, keys: Sequence[bytes]) -> None:
        for stage in self._stages:
            stage.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        there = sum(self.lookup(keys))
        for stage in reversed(self._stages):  # a promotion looks below itself when it is done
            stage.delete(keys)
        return there

    def headers(self) -> Iterator[BlockHeader]:
        seen: set[bytes] = set()
        for stage in reversed(self._stages):
            for header in stage.headers():
                if header.key not in seen:
                    seen.add(header.key)
                    yield header

    def watch(self) -> Watcher:
        return _PipelineWatcher(self, [stage.watch() for stage in self._stages])

    def stats(self) -> dict[str, int]:
        return {name: value for stage in self._stages for name, value in stage.stats().items()}

    def close(self) -> None:
        self._promotions.close(_CLOSE_S)
        for stage in self._stages:
            stage.close()

    def header(self, key: bytes) -> BlockHeader | None:
        return next((h for stage in self._stages if (h := stage.header(key)) is not None), None)

    def _promote(self, keys: list[bytes]) -> None:
        try:
            self._copy_up(keys)
        finally:
            self._room.release()

    def _copy_up(self, keys: list[bytes]) -> None:
        fast, slow = self._stages[0], self._stages[1:]
        missing = [key for key, there in zip(keys, fast.lookup(keys), strict=True) if not there]
        for key in missing:
            for stage in slow:
                header = stage.header(key)
                if header is None:
                    continue
                if len(self._payload) < header.payload_size:
                    self._payload = memoryview(bytearray(header.payload_size))
                payload = self._payload[: header.payload_size]
                if all(stage.load([key], [None], [payload]).wait(_PREFETCH_S)):
                    task = fast.dump([header], [payload])
                    task.wait(_PREFETCH_S)
                    if not task.check():  # late, and still reading it: it is not ours any more
                        self._payload = memoryview(bytearray())
                    if not any(stage.lookup([key])):
                        fast.delete([key])  # it was deleted meanwhile
                    break


class _Load(Task):
    """Entries asked of the first stage that has them, and of the next ones where that fails."""

    def __init__(
        self,
        stages: Sequence[Store],
        keys: Sequence[bytes],
        slices: Sequence[PayloadSlice | None],
        buffers: Sequence[memoryview],
    ) -> None:
        self._stages = stages
        self._keys, self._slices, self._buffers = keys, slices, buffers
        self._outcomes: list[bool | None] = [None] * len(keys)
        self._settled: list[int] = []
        self._flying: list[tuple[int, list[int], Task]] = []
        self._submit(0, list(range(len(keys))))

    def check(self) -> bool:
        while self._flying and self._flying[0][2].check():
            for _ in self._land(math.inf):
                pass
        return not self._flying

    def wait(self, deadline_s: float) -> list[bool]:
        for _ in self.as_completed(deadline_s):
            pass
        return [bool(outcome) for outcome in self._outcomes]

    def as_completed(self, deadline_s: float) -> Iterator[tuple[int, bool]]:
        ends = time.monotonic() + deadline_s
        reported = 0
        while True:
            landing = self._land(ends)
            more = True
            while more:
                new = self._settled[reported:]  # here, or by a check() in between
                reported += len(new)
                for entry in new:
                    yield entry, bool(self._outcomes[entry])
                more = next(landing, False)
            if not self._flying and reported == len(self._settled):
                return

    def _land(self, ends: float) -> Iterator[bool]:
        """Collect the first batch under way; yields True as its entries are settled."""
        if not self._flying:
            return
        stage, entries, task = self._flying[0]
        failed: list[int] = []
        for position, done in task.as_completed(max(ends - time.monotonic(), 0.0)):
            if not done:
                failed.append(entries[position])
            elif self._outcomes[entries[position]] is None:
                self._settle(entries[position], True)
                yield True
        self._flying.pop(0)
        if failed and stage + 1 < len(self._stages) and time.monotonic() < ends:
            self._submit(stage + 1, failed)
            return
        for entry in failed:
            self._settle(entry, False)
            yield True

    def _settle(self, entry: int, outcome: bool) -> None:
        self._outcomes[entry] = outcome
        self._settled.append(entry)

    def _submit(self, first: int, entries: list[int]) -> None:
        """Ask the first stage, from ``first`` on, that has an entry; the last one in any case."""
        left = entries
        for number in range(first, len(self._stages)):
            stage = self._stages[number]
            if number + 1 < len(self._stages):
                there = stage.lookup([self._keys[entry] for entry in left])
                mine = [entry for entry, found in zip(left, there, strict=True) if found]
                left = [entry for entry, found in zip(left, there, strict=True) if not found]
            else:
                mine, left = left, []
            if mine:
                keys = [self._keys[entry] for entry in mine]
                for slower in self._stages[number + 1 :]:
                    slower.touch(keys)
                task = stage.load(
                    keys,
                    [self._slices[entry] for entry in mine],
                    [self._buffers[entry] for entry in mine],
                )
                self._flying.append((number, mine, task))


class _Dump(Task):
    """Done when every stage is, for the caller's buffers are read until then."""

    def __init__(self, tasks: Sequence[Task], size: int) -> None:
        self._tasks = tasks
        self._size = size

    def check(self) -> bool:
        return all(task.check() for task in self._tasks)

    def wait(self, deadline_s: float) -> list[bool]:
        ends = time.monotonic() + deadline_s
        outcomes = [task.wait(max(ends - time.monotonic(), 0.0)) for task in self._tasks]
        return outcomes[-1]

    def as_completed(self, deadline_s: float) -> Iterator[tuple[int, bool]]:
        yield from enumerate(self.wait(deadline_s))


class _PipelineWatcher(Watcher):
    """A block is gone when no stage has it any more."""

    def __init__(self, pipeline: Pipeline, watchers: Sequence[Watcher]) -> None:
        self._pipeline = pipeline
        self._watchers = watchers

    def poll(self, limit: int = 4096, timeout_s: float = 0.0) -> Changes:
        added: dict[bytes, BlockHeader] = {}
        removed: dict[bytes, None] = {}
        for number, watcher in enumerate(self._watchers):
            last = number + 1 == len(self._watchers)
            changes = watcher.poll(limit, timeout_s if last and not (added or removed) else 0.0)
            added |= {header.key: header for header in changes.added}
            removed |= dict.fromkeys(changes.removed)
        keys = list(removed)
        gone = [
            key for key, there in zip(keys, self._pipeline.lookup(keys), strict=True) if not there
        ]
        for key in gone:
            added.pop(key, None)
        return Changes(tuple(added.values()), tuple(gone))
