"""Exact chunks on their way out: slots -> buffer within the step, buffer -> store behind it.

A block may be freed as soon as the step is over.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from vllm.logger import init_logger

from kvloom.config import KvloomConfig
from kvloom.store.base import BlockHeader, Store, Task
from kvloom.vllm.buffers import Buffer
from kvloom.vllm.grouped_cache import GroupedCache
from kvloom.vllm.metadata import SaveChunk, SavePlan
from kvloom.vllm.metrics import Metrics
from kvloom.vllm.stored_form import StoredForm

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Dump:
    keys: list[bytes]
    buffers: list[Buffer]
    task: Task


class Saver:
    """Executes save plans; what does not fit ``save_queue_bytes`` is dropped, never waited for."""

    def __init__(
        self,
        config: KvloomConfig,
        store: Store,
        cache: GroupedCache,
        form: StoredForm,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._store = store
        self._cache = cache
        self._form = form
        self._metrics = metrics
        payload_bytes = form.part_size * len(cache.layers)
        self._buffers = form.buffers(max(config.save_queue_bytes // payload_bytes, 1))
        self._dumps: deque[_Dump] = deque()
        self._dropped = 0
        self._lost: list[bytes] = []

    def save(self, plan: SavePlan) -> None:
        """Copy a plan's chunks out and hand them to the store."""
        self.reap()
        headers: list[BlockHeader] = []
        buffers: list[Buffer] = []
        for number, chunk in enumerate(plan.chunks):
            buffer = self._buffers.acquire()
            if buffer is None:
                self._drop(plan.chunks[number:])
                break
            try:
                gathered = self._form.gather(plan.tables, chunk.position, buffer)
            except Exception:
                for taken in [*buffers, buffer]:
                    self._buffers.release(taken)
                raise
            if not gathered:
                self._buffers.release(buffer)
                self._lost.append(chunk.key)
                continue
            buffers.append(buffer)
            headers.append(
                BlockHeader(
                    namespace=self._store.namespace,
                    key=chunk.key,
                    parent=chunk.parent,
                    scope=plan.scope,
                    position=chunk.position,
                    generation=plan.generation,
                    token_ids=chunk.token_ids,
                    part_sizes=(self._form.part_size,) * len(self._cache.layers),
                    created_ns=time.time_ns(),
                )
            )
        if headers:
            task = self._store.dump(headers, [buffer.memory for buffer in buffers])
            self._dumps.append(_Dump([header.key for header in headers], buffers, task))

    def take_lost(self) -> list[bytes]:
        """Keys that were not stored after all, since the last time."""
        lost, self._lost = self._lost, []
        return lost

    def drain(self, deadline_s: float) -> None:
        """Wait until what was handed to the store is stored, at most ``deadline_s`` seconds."""
        ends = time.monotonic() + deadline_s
        while self._dumps:
            self._end(self._dumps.popleft(), max(ends - time.monotonic(), 0.0))

    def reap(self) -> None:
        """Count what has ended and free its buffers; every step, or the last save's loss and its
        figures would show with the next save only."""
        while self._dumps and self._dumps[0].task.check():
            self._end(self._dumps.popleft(), 0.0)

    def _end(self, dump: _Dump, deadline_s: float) -> None:
        outcomes = dump.task.wait(deadline_s)
        self._lost += [key for key, done in zip(dump.keys, outcomes, strict=True) if not done]
        size, lost = len(dump.buffers[0].memory), outcomes.count(False)
        self._metrics.moved(
            "save", (len(outcomes) - lost) * size, lost * self._config.blend_chunk_size
        )
        for buffer in dump.buffers:
            self._buffers.release(buffer)

    def _drop(self, chunks: list[SaveChunk]) -> None:
        self._lost += [chunk.key for chunk in chunks]
        self._metrics.failed("save", len(chunks) * self._config.blend_chunk_size)
        if not self._dropped:
            logger.warning(
                "kvloom: the store is slower than the engine: saves beyond save_queue_bytes = %d "
                "are dropped (raise it, or use a faster store)",
                self._config.save_queue_bytes,
            )
        self._dropped += len(chunks)
