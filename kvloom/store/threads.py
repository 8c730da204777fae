"""Daemon threads that work off a queue, and calls that must not hang their caller.

Not ``concurrent.futures``: its threads are joined when the interpreter ends, so one read that hangs
in a dead network file system would keep the engine's process from ever ending.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TypeVar

logger = logging.getLogger(__name__)

Job = Callable[[], None]
T = TypeVar("T")

_MOST_WAITING = 65_536  # jobs; more come only where the threads hang, and a queue must not grow


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

    def submit(self, job: Job) -> bool:
        """Whether the job was taken: not if too many wait already."""
        if self._jobs.qsize() >= _MOST_WAITING:
            return False
        self._jobs.put(job)
        return True

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


class BoundedCalls:
    """Calls that may hang, made one after another by a thread of their own.

    A caller waits ``timeout_s`` seconds at most, and not at all while an earlier call hangs; when
    that one ends, whatever it says, calls are made again.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._thread = WorkerThreads(name, 1)
        self._timeout_s = timeout_s
        self._hanging: Future[object] | None = None

    def call(self, work: Callable[[], T]) -> T | None:
        """What ``work`` returns or raises; None if that takes too long."""
        if self._hanging is not None and not self._hanging.done():
            return None
        answer: Future[T] = Future()
        if not self._thread.submit(partial(_answer, answer, work)):
            return None
        try:
            return answer.result(self._timeout_s)
        except FutureTimeoutError:
            if not answer.cancel():  # it was begun
                self._hanging = answer  # type: ignore[assignment]
            return None

    def close(self, deadline_s: float) -> None:
        self._thread.close(deadline_s)


def _answer(answer: Future[T], work: Callable[[], T]) -> None:
    if not answer.set_running_or_notify_cancel():
        return  # its caller has gone
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001  (raised to the caller)
        answer.set_exception(error)
