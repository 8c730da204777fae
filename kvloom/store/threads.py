"""A few daemon threads that work off a queue.

Not ``concurrent.futures``: its threads are joined when the interpreter ends, so one read that hangs
in a dead network file system would keep the engine's process from ever ending.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class WorkerThreads:
    """``count`` threads named ``name``; jobs start in the order they were submitted."""

    def __init__(self, name: str, count: int) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, deadline_s: float) -> None:
        """Let the queued jobs end, at most ``deadline_s`` seconds for all; idempotent."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(deadline_s / len(self._threads))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("kvloom: a background job failed")
