"""Batches under way: threads settle entries, a caller collects them within a deadline.

What keeps a caller's buffers safe: a thread that is about to write into one holds the entry's turn
(``writing``), and an entry that the caller gave up on is never given a turn again.
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
        self._changed = threading.Condition()

    def settle(self, entry: int, outcome: bool) -> None:
        """Give an entry its outcome; the first one counts."""
        with self._changed:
            if self._outcomes[entry] is None:
                self._outcomes[entry] = outcome
                self._settled.append(entry)
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
                self._changed.notify_all()

    def wants(self, entry: int) -> bool:
        """Whether the caller still waits for the entry: work for the others can be spared."""
        with self._changed:
            return self._outcomes[entry] is None

    def check(self) -> bool:
        with self._changed:
            return len(self._settled) == len(self._outcomes)

    def wait(self, deadline_s: float) -> list[bool]:
        for _ in self.as_completed(deadline_s):
            pass
        return [bool(outcome) for outcome in self._outcomes]

    def as_completed(self, deadline_s: float) -> Iterator[tuple[int, bool]]:
        ends = time.monotonic() + deadline_s
        seen = 0
        while seen < len(self._outcomes):
            with self._changed:
                while len(self._settled) == seen and time.monotonic() < ends:
                    self._changed.wait(max(ends - time.monotonic(), 0.0))
                if len(self._settled) == seen:
                    self._give_up()
                entry = self._settled[seen]
            seen += 1
            yield entry, bool(self._outcomes[entry])

    def _give_up(self) -> None:
        """Settle what is late as failed, once no thread is writing any more.

        Copies from memory into the caller's buffer are short; reads that may hang go into buffers
        of the stage's own, so this wait is.
        """
        for entry, outcome in enumerate(self._outcomes):
            if outcome is None:
                while self._writing[entry]:
                    self._changed.wait()
                if self._outcomes[entry] is None:
                    self._outcomes[entry] = False
                    self._settled.append(entry)
