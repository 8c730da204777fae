"""Batches under way: threads settle entries, a caller collects them within a deadline.

What keeps a caller's buffers safe: a thread that is about to write into one holds the entry's turn
(``writing``), and an entry that the caller gave up on is never given a turn again.

A caller that waits is woken only for what it waits for: each time more, it would take the
interpreter's lock from the threads that it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvloom.store.base import Task


class BatchTask(Task):
    """A task of ``size`` entries that other threads settle."""

    def __init__(self, size: int) -> None:
        self._outcomes: list[bool | None] = [None] * size
        self._writing = [False] * size
        self._settled: list[int] = []
        self._wake_at = size  # settled entries; the least that anybody waits for
        self._giving_up = False
        self._changed = threading.Condition()

    def settle(self, entry: int, outcome: bool) -> None:
        """Give an entry its outcome; the first one counts."""
        with self._changed:
            if self._outcomes[entry] is None:
                self._outcomes[entry] = outcome
                self._settled.append(entry)
                if len(self._settled) >= self._wake_at:
                    self._wake_at = len(self._outcomes)
                    self._changed.notify_all()

    @contextmanager
    def writing(self, entry: int) -> Iterator[bool]:
        """The right to write into the entry's buffer; False when the caller has given it up."""
        with self._changed:
            granted = self._outcomes[entry] is None
            self._writing[entry] = granted
        try:
            yield granted
        finally:
            with self._changed:
                self._writing[entry] = False
                if self._giving_up:
                    self._changed.notify_all()

    def wants(self, entry: int) -> bool:
        """Whether the caller still waits for the entry: work for the others can be spared."""
        with self._changed:
            return self._outcomes[entry] is None

    def check(self) -> bool:
        with self._changed:
            return len(self._settled) == len(self._outcomes)

    def wait(self, deadline_s: float) -> list[bool]:
        with self._changed:
            self._settle_by(time.monotonic() + deadline_s, len(self._outcomes))
            return [bool(outcome) for outcome in self._outcomes]

    def as_completed(self, deadline_s: float) -> Iterator[tuple[int, bool]]:
        ends = time.monotonic() + deadline_s
        seen = 0
        while seen < len(self._outcomes):
            with self._changed:
                self._settle_by(ends, seen + 1)
                entry = self._settled[seen]
            seen += 1
            yield entry, bool(self._outcomes[entry])

    def _settle_by(self, ends: float, count: int) -> None:
        """Wait until ``count`` entries are settled; at ``ends``, settle what is late."""
        while len(self._settled) < count and (left := ends - time.monotonic()) > 0:
            self._wake_at = min(self._wake_at, count)
            self._changed.wait(left)
        if len(self._settled) < count:
            self._give_up()

    def _give_up(self) -> None:
        """Settle what is late as failed, once no thread is writing any more.

        Copies from memory into the caller's buffer are short; reads that may hang go into buffers
        of the stage's own, so this wait is.
        """
        self._giving_up = True
        for entry, outcome in enumerate(self._outcomes):
            if outcome is None:
                while self._writing[entry]:
                    self._changed.wait()
                if self._outcomes[entry] is None:
                    self._outcomes[entry] = False
                    self._settled.append(entry)
