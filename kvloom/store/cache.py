"""``Cache``: blocks in host memory, bounded; which go first is an eviction policy's to say."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvloom.config import KvloomConfig
from kvloom.store.base import BlockHeader, PayloadSlice, Store, Task, Watcher
from kvloom.store.eviction import POLICIES
from kvloom.store.memory import HostMemory
from kvloom.store.tasks import BatchTask
from kvloom.store.threads import WorkerThreads
from kvloom.store.watching import Announcer, EventWatcher

_CLOSE_S = 5.0


@dataclass(slots=True)
class _Entry:
    """``readers`` keeps an entry from eviction while its payload is copied out."""

    header: BlockHeader
    payload: memoryview
    readers: int = 0


class Cache(Store):
    """A stage in this process's memory; nothing of it survives the process.

    Args:
        limit_bytes: payload bytes kept (``cache_bytes``).
        threads: threads that copy payloads.
        eviction: name of the eviction policy.
        ttl_s: seconds after their making when blocks are gone; None: never.
    """

    def __init__(
        self,
        namespace: str,
        limit_bytes: int,
        threads: int,
        eviction: str = "s3fifo",
        ttl_s: float | None = None,
    ) -> None:
        self.namespace = namespace
        self._memory = HostMemory(limit_bytes)
        self._entries: dict[bytes, _Entry] = {}
        self._policy = POLICIES[eviction]()
        self._ttl_ns = None if ttl_s is None else int(ttl_s * 1e9)
        self._lock = threading.Lock()
        self._announcer = Announcer()
        self._threads = WorkerThreads("kvloom-cache", threads)
        self._closed = False
        self._counts = dict.fromkeys(
            ("hits", "misses", "stored", "evicted", "expired", "dropped"), 0
        )

    @classmethod
    def from_config(cls, namespace: str, config: KvloomConfig) -> Cache:
        return cls(namespace, config.cache_bytes, config.threads, config.eviction, config.ttl_s)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [self._find(key) is not None for key in keys]

    def load(
        self,
        keys: Sequence[bytes],
        slices: Sequence[PayloadSlice | None],
        buffers: Sequence[memoryview],
    ) -> Task:
        task = BatchTask(len(keys))
        for entry, (key, part, buffer) in enumerate(zip(keys, slices, buffers, strict=True)):
            self._submit(task, entry, partial(self._read, task, entry, key, part, buffer))
        return task

    def dump(self, headers: Sequence[BlockHeader], buffers: Sequence[memoryview]) -> Task:
        task = BatchTask(len(headers))
        for entry, (header, buffer) in enumerate(zip(headers, buffers, strict=True)):
            self._submit(task, entry, partial(self._write, task, entry, header, buffer))
        return task

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return sum(self._remove(key) for key in keys)

    def header(self, key: bytes) -> BlockHeader | None:
        with self._lock:
            entry = self._find(key)
            return entry.header if entry is not None else None

    def headers(self) -> Iterator[BlockHeader]:
        with self._lock:
            return iter([entry.header for entry in self._entries.values()])

    def watch(self) -> Watcher:
        with self._lock:
            events = self._announcer.listen()
            for entry in self._entries.values():
                events.put(entry.header)
        return EventWatcher(events)

    def stats(self) -> dict[str, int]:
        with self._lock:
            used = sum(len(entry.payload) for entry in self._entries.values())
            return {
                "cache.blocks": len(self._entries),
                "cache.bytes": used,
                **{f"cache.{name}": count for name, count in self._counts.items()},
            }

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._threads.close(_CLOSE_S)
            with self._lock:
                self._entries.clear()

    def _submit(self, task: BatchTask, entry: int, job: partial[None]) -> None:
        if self._closed or not self._threads.submit(job):
            task.settle(entry, False)

    def _read(
        self,
        task: BatchTask,
        number: int,
        key: bytes,
        part: PayloadSlice | None,
        buffer: memoryview,
    ) -> None:
        with self._lock:
            entry = self._find(key)
            if entry is None:
                self._counts["misses"] += 1
            else:
                entry.readers += 1
                self._policy.touch(key)
                self._counts["hits"] += 1
        if entry is None:
            task.settle(number, False)
            return
        done = False
        try:
            wanted = entry.payload
            if part is not None:
                wanted = wanted[part.offset : part.offset + part.length]
            with task.writing(number) as granted:
                if granted and len(wanted) == len(buffer):
                    _copy(wanted, buffer)
                    done = True
        finally:
            with self._lock:
                entry.readers -= 1
                if not entry.readers and self._entries.get(key) is not entry:
                    self._memory.give(entry.payload)  # removed while it was read
            task.settle(number, done)

    def _write(self, task: BatchTask, number: int, header: BlockHeader, buffer: memoryview) -> None:
        if header.namespace != self.namespace or len(buffer) != header.payload_size:
            task.settle(number, False)
            return
        payload = None
        with self._lock:
            known = self._find(header.key) is not None
            if not known:
                payload = self._memory.take(len(buffer)) or self._evict_for(len(buffer))
        if payload is not None:
            _copy(buffer, payload)
            with self._lock:
                if header.key in self._entries:  # another thread was faster
                    self._memory.give(payload)
                else:
                    self._entries[header.key] = _Entry(header, payload)
                    self._policy.add(header.key, len(payload))
                    self._counts["stored"] += 1
                    self._announcer.announce(header)
        elif not known:
            with self._lock:
                self._counts["dropped"] += 1
        task.settle(number, known or payload is not None)

    def _find(self, key: bytes) -> _Entry | None:
        """An entry that has not expired; one that has is removed on the way."""
        entry = self._entries.get(key)
        if entry is None or self._ttl_ns is None:
            return entry
        if time.time_ns() - entry.header.created_ns <= self._ttl_ns:
            return entry
        self._remove(key)
        self._counts["expired"] += 1
        return None

    def _evict_for(self, size: int) -> memoryview | None:
        """Memory for a block, from those that the policy gives up and nobody reads."""
        while (key := self._policy.evict(self._is_read)) is not None:
            self._remove(key)
            self._counts["evicted"] += 1
            payload = self._memory.take(size)
            if payload is not None:
                return payload
        return None

    def _is_read(self, key: bytes) -> bool:
        return self._entries[key].readers > 0

    def _remove(self, key: bytes) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._policy.remove(key)
        if not entry.readers:
            self._memory.give(entry.payload)
        self._announcer.announce(key)
        return True


def _copy(source: memoryview, target: memoryview) -> None:
    # numpy copies without the interpreter's lock; memoryview assignment would hold it.
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
