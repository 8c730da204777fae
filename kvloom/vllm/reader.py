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
_WAVES_AHEAD = 2


@dataclass(frozen=True, slots=True)
class _Wave:
    pieces: list[Piece]
    buffers: list[Buffer]
    task: Task


class PieceReader:
    """Reads the pieces of one plan at a time, in buffers of its own.

    A store that hangs is waited for ``load_timeout_s`` by all plans together that were there
    meanwhile, not by one after the other.
    """

    def __init__(self, store: Store, form: StoredForm, config: KvloomConfig) -> None:
        self._store = store
        self._config = config
        self._buffers = form.buffers(_WAVE * _WAVES_AHEAD)
        self._gave_up = -math.inf

    def read(
        self, pieces: list[Piece], budget: Budget
    ) -> Iterator[tuple[Piece, Buffer | None] | None]:
        """Pieces with their chunks' payloads (None: failed), each valid until the next.

        With a limited budget None comes wherever the next wave is not there yet; else it is waited
        for.
        """
        waited_already = budget.asked < self._gave_up
        begins = budget.asked if waited_already else time.monotonic()
        ends = begins + self._config.load_timeout_s
        waiting = deque(_batches(pieces, _WAVE))
        flying: deque[_Wave] = deque()
        try:
            while waiting or flying:
                while waiting and len(flying) < _WAVES_AHEAD:
                    flying.append(self._submit(waiting.popleft()))
                wave = flying[0]
                seen_late: float | None = None
                while budget.limited and not wave.task.check() and (now := time.monotonic()) < ends:
                    budget.waited_s += now - (seen_late or now)
                    seen_late = now
                    yield None
                for entry, done in wave.task.as_completed(max(ends - time.monotonic(), 0.0)):
                    yield wave.pieces[entry], wave.buffers[entry] if done else None
                if time.monotonic() >= ends:
                    self._gave_up = time.monotonic()
                self._land(flying.popleft())
        finally:
            for wave in flying:
                self._land(wave)

    def _submit(self, pieces: list[Piece]) -> _Wave:
        buffers = [buffer for _ in pieces if (buffer := self._buffers.acquire()) is not None]
        keys = [piece.key for piece in pieces]
        task = self._store.load(keys, [None] * len(keys), [buffer.memory for buffer in buffers])
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
