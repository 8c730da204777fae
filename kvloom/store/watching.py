"""Telling watchers what a stage of this process added and removed, at once."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from kvloom.store.base import BlockHeader, Changes, Watcher


class Events:
    """A queue of changes for one watcher."""

    def __init__(self) -> None:
        self._queue: deque[BlockHeader | bytes] = deque()
        self._changed = threading.Condition()

    def put(self, event: BlockHeader | bytes) -> None:
        """A header that was added, or a key that is gone."""
        with self._changed:
            self._queue.append(event)
            self._changed.notify_all()

    def take(self, limit: int, timeout_s: float) -> Changes:
        """What came first, in order; a key is never both added and removed in one answer."""
        added: dict[bytes, BlockHeader] = {}
        removed: dict[bytes, None] = {}
        with self._changed:
            if not self._queue and timeout_s > 0:
                self._changed.wait(timeout_s)
            while self._queue and len(added) + len(removed) < limit:
                event = self._queue.popleft()
                if isinstance(event, BlockHeader):
                    removed.pop(event.key, None)
                    added[event.key] = event
                else:
                    added.pop(event, None)
                    removed[event] = None
        return Changes(tuple(added.values()), tuple(removed))


class Announcer:
    """The watchers of a stage; one that nobody holds any more is forgotten."""

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[Events] = weakref.WeakSet()
        self._lock = threading.Lock()

    def listen(self) -> Events:
        events = Events()
        with self._lock:
            self._listeners.add(events)
        return events

    def announce(self, event: BlockHeader | bytes) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for events in listeners:
            events.put(event)


class EventWatcher(Watcher):
    """A watcher of a stage that only this process changes."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def poll(self, limit: int = 4096, timeout_s: float = 0.0) -> Changes:
        return self._events.take(limit, timeout_s)
