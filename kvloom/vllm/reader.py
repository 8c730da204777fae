"""Stored chunks on their way in: read wave by wave, so that one wave is read while the one before
is written to the cache."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvloom.config import KvloomConfig
from kvloom.store.base import Store, Task
from kvloom.vllm.budget import Budget
from kvloom.vllm.buffers import Buffer
from kvloom.vllm.metadata import Piece
from kvloom.vllm.stored_form import StoredForm

_WAVE = 4
_A_MOMENT = 0.05  # of the time that is left after a wait in vain


@dataclass(frozen=True, slots=True)
class _Wave:
    pieces: list[Piece]
    buffers: list[Buffer]
    task: Task


class PieceReader:
    """Reads the pieces of one plan at a time, in buffers of its own.

    A plan waits ``load_timeout_s`` for the store, counting only time in which the store was seen to
    be late: other plans, and the steps in between, are no fault of the store. Where a plan has
    waited in vain, those that were there meanwhile give it a moment only: their waits must not add
    up.
    """

    def __init__(self, store: Store, form: StoredForm, config: KvloomConfig, waves: int) -> None:
        self._store = store
        self._config = config
        self._waves = waves
        self._buffers = form.buffers(_WAVE * waves)
        self._gave_up = -math.inf

    def read(
        self, pieces: list[Piece], budget: Budget
    ) -> Iterator[tuple[Piece, Buffer | None] | None]:
        """Pieces with their chunks' payloads (None: failed), each valid until the next.

        With a limited budget None comes where the next wave is not there yet; else it is waited
        for.
        """
        left = self._config.load_timeout_s
        if budget.asked < self._gave_up:
            left *= _A_MOMENT
        waiting = deque(_batches(pieces, _WAVE))
        flying: deque[_Wave] = deque()
        try:
            while waiting or flying:
                while waiting and len(flying) < self._waves:
                    flying.append(self._submit(waiting.popleft()))
                wave = flying[0]
                seen_late = time.monotonic()
                while budget.limited and left > 0 and not wave.task.check():
                    now = time.monotonic()
                    left -= now - seen_late
                    budget.waited_s += now - seen_late
                    seen_late = now
                    if not budget.nap():
                        yield None
                asked = time.monotonic()
                for entry, done in wave.task.as_completed(max(left, 0.0)):
                    left -= time.monotonic() - asked
                    if not done and left <= 0:
                        self._gave_up = time.monotonic()
                    yield wave.pieces[entry], wave.buffers[entry] if done else None
                    asked = time.monotonic()
                self._land(flying.popleft())
        finally:
            for wave in flying:
                self._land(wave)

    def _submit(self, pieces: list[Piece]) -> _Wave:
        buffers = [buffer for _ in pieces if (buffer := self._buffers.acquire()) is not None]
        keys = [piece.key for piece in pieces]
        try:
            task = self._store.load(keys, [None] * len(keys), [buffer.memory for buffer in buffers])
        except BaseException:
            for buffer in buffers:
                self._buffers.release(buffer)
            raise
        return _Wave(pieces, buffers, task)

    def _land(self, wave: _Wave) -> None:
        wave.task.wait(0.0)  # from here on no thread of the store writes into the buffers
        for buffer in wave.buffers:
            self._buffers.release(buffer)


def _batches(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
