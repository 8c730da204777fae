"""The worker side: KV in place before the forward, exact chunks out after it (DESIGN.md).

Loads: store -> buffer -> keys rotated -> slots, wave by wave so that one wave is read while the one
before is written to the cache; then RecomputeEngine fills the rest. A piece that fails to load is
computed like any new token, so the answer is the same and only later. Saves: slots -> buffer within
the step, buffer -> store in the background; a block may be freed as soon as the step is over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.logger import init_logger

from kvloom.blend.correction import samples_and_rest
from kvloom.blend.rope import PositionCorrector
from kvloom.blend.selection import LookingPolicy, SelectionPolicy
from kvloom.config import KvloomConfig
from kvloom.store.base import BlockHeader, Store, Task
from kvloom.vllm.buffers import Buffer, BufferPool
from kvloom.vllm.correction import Correction
from kvloom.vllm.metadata import LoadPlan, LoadReport, Piece, SaveChunk, SavePlan, WorkerReport
from kvloom.vllm.metrics import Metrics
from kvloom.vllm.paged_cache import PagedCache
from kvloom.vllm.recompute import RecomputeEngine

logger = init_logger(__name__)

_WAVE = 4
_WAVES_AHEAD = 2
_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Wave:
    pieces: list[Piece]
    buffers: list[Buffer]
    task: Task


@dataclass(frozen=True, slots=True)
class _Dump:
    keys: list[bytes]
    buffers: list[Buffer]
    task: Task


class BlendWorker:
    """Executes load and save plans in the engine's worker thread.

    Args:
        corrector: None where keys are not rotated; then no plan asks for it.
        engine: None where the model's forward can't be called; pieces that fail to load are then
            reported to vLLM, which computes those blocks itself.
    """

    def __init__(
        self,
        config: KvloomConfig,
        policy: SelectionPolicy,
        store: Store,
        cache: PagedCache,
        metrics: Metrics,
        *,
        corrector: PositionCorrector | None,
        engine: RecomputeEngine | None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._store = store
        self._cache = cache
        self._metrics = metrics
        self._corrector = corrector
        self._engine = engine
        shape = cache.payload_shape(config.blend_chunk_size)
        self._load_buffers = BufferPool(shape, cache.dtype, count=_WAVE * _WAVES_AHEAD)
        payload_bytes = cache.part_size(config.blend_chunk_size) * len(cache.layers)
        self._save_buffers = BufferPool(
            shape, cache.dtype, count=max(config.save_queue_bytes // payload_bytes, 1)
        )
        self._dumps: deque[_Dump] = deque()
        self._dropped_saves = 0
        self._failed_blocks: set[int] = set()
        self._finished_saves: set[str] = set()
        self._report = WorkerReport()
        self._loaded_keys: list[bytes] = []

    def load(self, plan: LoadPlan) -> None:
        """Put a plan's KV in place, or report its blocks as failed; never raises."""
        try:
            self._report.loads[plan.request_id] = self._fill(plan)
        except Exception:
            logger.exception(
                "kvloom: filling the cache of request %s failed; vLLM computes it instead",
                plan.request_id,
            )
            self._fail_from(plan, plan.start)

    def save(self, plan: SavePlan) -> None:
        """Copy a plan's chunks out and hand them to the store; never raises."""
        keys = [chunk.key for chunk in plan.chunks]
        try:
            if self._failed_blocks.intersection(plan.block_ids):
                self._report.lost += keys  # vLLM computes these blocks again, in a later step
            else:
                self._dump(plan)
        except Exception:
            logger.exception("kvloom: saving chunks of request %s failed", plan.request_id)
            self._report.lost += keys
        if plan.last:
            self._finished_saves.add(plan.request_id)

    def end_step(self) -> None:
        """After the forward: what was loaded moves up in the store, for it may be asked for again.

        Not earlier, so that it takes nothing from the time to the first token.
        """
        keys, self._loaded_keys = self._loaded_keys, []
        if keys:
            self._store.prefetch(keys)

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_finished_saves(self) -> set[str]:
        finished, self._finished_saves = self._finished_saves, set()
        return finished

    def take_report(self) -> WorkerReport:
        report, self._report = self._report, WorkerReport()
        return report

    def drain(self, deadline_s: float) -> None:
        """Wait until what was handed to the store is stored, at most ``deadline_s`` seconds."""
        ends = time.monotonic() + deadline_s
        while self._dumps:
            self._end(self._dumps.popleft(), max(ends - time.monotonic(), 0.0))

    def _fill(self, plan: LoadPlan) -> LoadReport:
        began = time.perf_counter()
        rotate_s = 0.0
        failed: list[Piece] = []
        bytes_read = 0
        for piece, buffer in self._loaded(plan.pieces):
            if buffer is None:
                failed.append(piece)
                self._report.lost.append(piece.key)
                continue
            self._loaded_keys.append(piece.key)
            payload = buffer.tensor[:, :, piece.offset : piece.offset + piece.length]
            bytes_read += len(buffer.memory)
            if piece.delta:
                rotating = time.perf_counter()
                self._rotate(payload, piece.delta)
                rotate_s += time.perf_counter() - rotating
            slots = self._slots(plan.block_ids, piece.start, piece.length)
            self._cache.scatter(payload.to(self._cache.device), slots)
        loaded_s = time.perf_counter() - began - rotate_s
        chosen = self._compute(plan, failed)
        total_s = time.perf_counter() - began
        return LoadReport(
            failed_tokens=sum(piece.length for piece in failed),
            chosen=chosen,
            bytes_read=bytes_read,
            load_ms=loaded_s * 1e3,
            rotate_ms=rotate_s * 1e3,
            compute_ms=(total_s - loaded_s - rotate_s) * 1e3,
        )

    def _compute(self, plan: LoadPlan, failed: list[Piece]) -> int:
        """Compute what must be, and what the policy chooses; answers how many it chose."""
        lost = [np.arange(piece.start, piece.start + piece.length) for piece in failed]
        positions = np.unique(np.concatenate([plan.compute, *lost]))
        chosen = self._choose(plan, positions)
        positions = np.union1d(positions, chosen)
        if not positions.size:
            return 0
        if self._engine is None:
            self._fail_from(plan, int(positions[0]))
            return 0
        loaded = [
            np.arange(piece.start, piece.start + piece.length)
            for piece in plan.pieces
            if piece.start >= plan.exact and piece not in failed
        ]
        correction = Correction(
            self._cache,
            plan.block_ids,
            list(samples_and_rest(plan.runs, np.concatenate([*loaded, _NOTHING]), positions)),
            part=self._policy.correction,
        )
        # New tokens behind the last run see the corrected KV; those before its end can't.
        before, behind = np.split(positions, [np.searchsorted(positions, correction.end)])
        self._run_model(plan, before)
        correction.apply()
        self._run_model(plan, behind)
        return len(chosen)

    def _run_model(self, plan: LoadPlan, positions: npt.NDArray[np.int64]) -> None:
        if self._engine is not None and positions.size:
            tokens = plan.token_ids[positions - plan.start]
            self._engine.compute(plan.block_ids, tokens, positions)

    def _choose(self, plan: LoadPlan, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        end = plan.start + len(plan.token_ids)
        candidates = np.setdiff1d(np.arange(plan.exact, end), positions)
        if self._engine is None or not isinstance(self._policy, LookingPolicy):
            return _NOTHING
        if not plan.choose or not candidates.size:
            return _NOTHING
        return self._engine.choose(
            self._policy,
            plan.block_ids,
            plan.token_ids,
            count=plan.choose,
            start=plan.start,
            candidates=candidates,
            positions=positions,
        )

    def _loaded(self, pieces: list[Piece]) -> Iterator[tuple[Piece, Buffer | None]]:
        """Pieces with their chunks' payloads (None: failed), each valid until the next."""
        ends = time.monotonic() + self._config.load_timeout_s
        waiting = deque(_batches(pieces, _WAVE))
        flying: deque[_Wave] = deque()
        try:
            while waiting or flying:
                while waiting and len(flying) < _WAVES_AHEAD:
                    flying.append(self._submit(waiting.popleft()))
                wave = flying[0]
                for entry, done in wave.task.as_completed(max(ends - time.monotonic(), 0.0)):
                    yield wave.pieces[entry], wave.buffers[entry] if done else None
                self._land(flying.popleft())
        finally:
            for wave in flying:
                self._land(wave)

    def _land(self, wave: _Wave) -> None:
        wave.task.wait(0.0)  # from here on no thread of the store writes into the buffers
        for buffer in wave.buffers:
            self._load_buffers.release(buffer)

    def _submit(self, pieces: list[Piece]) -> _Wave:
        buffers = [buffer for _ in pieces if (buffer := self._load_buffers.acquire()) is not None]
        keys = [piece.key for piece in pieces]
        task = self._store.load(keys, [None] * len(keys), [buffer.memory for buffer in buffers])
        return _Wave(pieces, buffers, task)

    def _rotate(self, payload: Tensor, delta: int) -> None:
        if self._corrector is None:
            raise RuntimeError(f"a plan moves keys by {delta}, but this model's are not rotated")
        self._corrector.rotate_(payload[:, 0], delta)

    def _slots(self, block_ids: list[int], start: int, length: int) -> Tensor:
        slots = self._cache.slots(block_ids, torch.arange(start, start + length))
        return slots.to(self._cache.device)

    def _fail_from(self, plan: LoadPlan, position: int) -> None:
        end = plan.start + len(plan.token_ids)
        first = position // self._cache.block_size
        self._failed_blocks.update(plan.block_ids[first : -(-end // self._cache.block_size)])

    def _dump(self, plan: SavePlan) -> None:
        self._reap()
        headers: list[BlockHeader] = []
        buffers: list[Buffer] = []
        for chunk in plan.chunks:
            buffer = self._save_buffers.acquire()
            if buffer is None:
                self._drop(plan.chunks[len(headers) :])
                break
            slots = self._slots(plan.block_ids, chunk.position, len(chunk.token_ids))
            self._cache.gather(slots, buffer.tensor)
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
                    part_sizes=(self._cache.part_size(len(chunk.token_ids)),)
                    * len(self._cache.layers),
                    created_ns=time.time_ns(),
                )
            )
        if headers:
            task = self._store.dump(headers, [buffer.memory for buffer in buffers])
            self._dumps.append(_Dump([header.key for header in headers], buffers, task))

    def _reap(self) -> None:
        while self._dumps and self._dumps[0].task.check():
            self._end(self._dumps.popleft(), 0.0)

    def _end(self, dump: _Dump, deadline_s: float) -> None:
        outcomes = dump.task.wait(deadline_s)
        self._report.lost += [k for k, done in zip(dump.keys, outcomes, strict=True) if not done]
        size, lost = len(dump.buffers[0].memory), outcomes.count(False)
        self._metrics.moved(
            "save", (len(outcomes) - lost) * size, lost * self._config.blend_chunk_size
        )
        for buffer in dump.buffers:
            self._save_buffers.release(buffer)

    def _drop(self, chunks: list[SaveChunk]) -> None:
        self._report.lost += [chunk.key for chunk in chunks]
        self._metrics.failed("save", len(chunks) * self._config.blend_chunk_size)
        if not self._dropped_saves:
            logger.warning(
                "kvloom: the store is slower than the engine: saves beyond save_queue_bytes = %d "
                "are dropped (raise it, or use a faster store)",
                self._config.save_queue_bytes,
            )
        self._dropped_saves += len(chunks)


def _batches(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
