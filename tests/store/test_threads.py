"""Calls that may hang do not hang their callers (spec row S8)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.store import threads
from kvloom.store.threads import BoundedCalls, WorkerThreads


@pytest.fixture
def calls() -> Iterator[BoundedCalls]:
    calls = BoundedCalls("test", timeout_s=0.1)
    yield calls
    calls.close(1.0)


def test_what_a_call_returns_or_raises_is_its_callers() -> None:
    calls = BoundedCalls("test", timeout_s=30.0)
    assert calls.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0)
    assert calls.call(lambda: 4) == 4
    calls.close(1.0)


def test_a_call_that_hangs_costs_one_deadline_and_is_recovered_from(
    calls: BoundedCalls, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    begun = threading.Event()

    def hang() -> int:
        begun.set()
        return os.open(fifo, os.O_RDONLY)

    began = time.monotonic()
    assert calls.call(hang) is None
    assert all(calls.call(lambda: 3) is None for _ in range(100))
    assert 0.1 <= time.monotonic() - began < 5.0, "a hundred would be ten seconds"
    assert begun.wait(10)
    os.close(os.open(fifo, os.O_WRONLY))
    ends = time.monotonic() + 10
    while calls.call(lambda: 3) is None and time.monotonic() < ends:
        time.sleep(0.01)
    assert calls.call(lambda: 4) == 4


def test_who_waited_behind_a_hanging_call_is_freed_too_and_nothing_is_done_late(
    calls: BoundedCalls,
) -> None:
    go_on = threading.Event()
    done: list[int] = []
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait()

    hanging = threading.Thread(target=calls.call, args=[hang])
    hanging.start()
    assert begun.wait(10)
    assert calls.call(lambda: done.append(1)) is None
    hanging.join(5)
    assert not hanging.is_alive()
    go_on.set()
    calls.close(5)
    assert not done


def test_a_queue_that_nobody_works_off_stops_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_MOST_WAITING", 10)
    go_on = threading.Event()
    workers = WorkerThreads("test", 1)
    taken = [workers.submit(go_on.wait) for _ in range(100)]  # type: ignore[arg-type]
    assert taken[:10] == [True] * 10
    assert not any(taken[11:])
    go_on.set()
    workers.close(5)
