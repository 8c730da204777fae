"""AsyncOperationManager: pages between the paged cache and 3FS, off the engine's thread (H13).

    load: locations -> page file -> buffer -> verified -> slots
    save: slots -> buffer, within the step -> pages allocated -> page file -> confirmed

A save's blocks are copied out within the step, so they may be freed and filled anew as soon as it
is over, and no load ever meets a block that a save still reads. Pages move in batches of at most
``IO_ENTRIES`` over the clients; buffers are bounded: a load waits for them in its thread, a save
that finds none is dropped. What a load could not bring by its deadline is reported as failed, and
from then on no thread writes to its blocks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from vllm.logger import init_logger

from kvloom.config import IO_ENTRIES, Hf3fsConfig
from kvloom.hf3fs.client import Hf3fsClient
from kvloom.hf3fs.metadata.base import Allocation, Location, Status, Written
from kvloom.hf3fs.metadata.client import MetadataClient, NoAnswer
from kvloom.hf3fs.page import page_bytes, seal, verify
from kvloom.store.tasks import BatchTask
from kvloom.store.threads import WorkerThreads
from kvloom.vllm.buffers import Buffer, BufferPool
from kvloom.vllm.hf3fs_plans import BlockPlan
from kvloom.vllm.metrics import Metrics
from kvloom.vllm.paged_cache import PagedCache

logger = init_logger(__name__)

_WARN_EVERY_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of the KV.

    Attributes:
        file: number of the page file that its blocks lie in.
        files: how many hold a block's KV together.
        saves: whether this rank writes them; where several hold the same, one does.
    """

    file: int
    files: int
    saves: bool


@dataclass(frozen=True, slots=True)
class _Load:
    plan: BlockPlan
    task: BatchTask
    began: float


class AsyncOperationManager:
    """Executes load and save plans of one rank.

    Args:
        clients: of the rank's page file; each is used by one reading and one writing thread.
        metadata: of the connector's namespace.
    """

    def __init__(
        self,
        config: Hf3fsConfig,
        cache: PagedCache,
        clients: Sequence[Hf3fsClient],
        metadata: MetadataClient,
        metrics: Metrics,
        *,
        share: Share,
    ) -> None:
        self._config = config
        self._cache = cache
        self._metadata = metadata
        self._share = share
        self._metrics = metrics
        shape = cache.payload_shape(cache.block_size)
        self._payload_bytes = cache.part_size(cache.block_size) * len(cache.layers)
        self._page_bytes = page_bytes(self._payload_bytes)
        self._load_buffers, self._save_buffers = (
            BufferPool(shape, cache.dtype, config.buffer_count, self._page_bytes) for _ in range(2)
        )
        self._readers: queue.SimpleQueue[Hf3fsClient] = queue.SimpleQueue()
        self._writers: queue.SimpleQueue[Hf3fsClient] = queue.SimpleQueue()
        for client in clients:
            self._readers.put(client)
            self._writers.put(client)
        self._load_threads = WorkerThreads("kvloom-hf3fs-load", len(clients))
        self._save_threads = WorkerThreads("kvloom-hf3fs-save", len(clients))
        self._lookups = WorkerThreads("kvloom-hf3fs-locate", 1)
        self._loads: list[_Load] = []
        self._lock = threading.Lock()
        self._saving: set[str] = set()
        self._no_save_under_way = threading.Condition(self._lock)
        self._dropped: list[str] = []
        self._warned = -_WARN_EVERY_S

    def load(self, plan: BlockPlan) -> None:
        """Begin to put a plan's blocks in place; never blocks."""
        task = BatchTask(len(plan.block_ids))
        self._loads.append(_Load(plan, task, time.monotonic()))
        if plan.keys:
            self._lookups.submit(partial(self._locate, plan, task))
        else:
            self._settle(task, range(len(plan.block_ids)), False)

    def save(self, plan: BlockPlan) -> None:
        """Copy a plan's blocks out and hand them to the threads; never blocks."""
        if not self._share.saves:
            return
        entries: list[tuple[str, int, Buffer]] = []
        for key, block in zip(plan.keys, plan.block_ids, strict=True):
            with self._lock:
                if key in self._saving:
                    continue
            buffer = self._save_buffers.acquire()
            if buffer is None:
                self._drop([key], "all buffers are in use: 3FS is slower than the engine")
                continue
            with self._lock:
                self._saving.add(key)
            entries.append((key, block, buffer))
        for batch in _batches(entries):
            pages = [(key, buffer) for key, _, buffer in batch]
            try:
                self._cache.gather_blocks(
                    [block for _, block, _ in batch], [buffer.tensor for _, buffer in pages]
                )
            except BaseException:
                self._end_saves(pages)
                raise
            self._save_threads.submit(partial(self._write, pages, time.monotonic()))

    def take_finished_loads(self) -> list[tuple[BlockPlan, set[int]]]:
        """Plans that came to an end, each with the ids of its blocks that did not come."""
        finished = []
        for load in list(self._loads):
            waited = time.monotonic() - load.began
            if load.task.check() or waited >= self._config.load_timeout_s:
                self._loads.remove(load)
                outcomes = load.task.wait(0.0)  # from here on no thread writes to its blocks
                blocks = zip(load.plan.block_ids, outcomes, strict=True)
                failed = {block for block, done in blocks if not done}
                finished.append((load.plan, failed))
                good = len(outcomes) - len(failed)
                self._metrics.took("load", waited)
                self._metrics.moved(
                    "load", good * self._payload_bytes, len(failed) * self._cache.block_size
                )
        return finished

    def take_dropped(self) -> list[str]:
        with self._lock:
            dropped, self._dropped = self._dropped, []
        return dropped

    def drain(self, deadline_s: float) -> None:
        """Wait until saves under way are done, at most ``deadline_s`` seconds."""
        with self._no_save_under_way:
            self._no_save_under_way.wait_for(lambda: not self._saving, deadline_s)

    def close(self, deadline_s: float) -> None:
        """Finish saves within a bound; loads under way are given up. Idempotent."""
        ends = time.monotonic() + deadline_s
        self.drain(deadline_s)
        for threads in (self._lookups, self._load_threads, self._save_threads):
            threads.close(max(ends - time.monotonic(), 0.0))

    # Loading, in threads

    def _locate(self, plan: BlockPlan, task: BatchTask) -> None:
        places = self._metadata.locations(self._share.file, plan.keys)
        if isinstance(places, NoAnswer):
            self._settle(task, range(len(plan.keys)), False)
            return
        found: list[tuple[int, Location]] = []
        for entry, place in enumerate(places):
            if place is None:
                task.settle(entry, False)
            else:
                found.append((entry, place))
        for batch in _batches(found):
            self._load_threads.submit(partial(self._read, plan, task, batch))

    def _read(self, plan: BlockPlan, task: BatchTask, batch: list[tuple[int, Location]]) -> None:
        buffers: list[Buffer] = []
        client = self._readers.get()
        try:
            wanted = [(entry, place) for entry, place in batch if task.wants(entry)]
            # There are as many buffers as all clients use at once.
            buffers = [b for _ in wanted if (b := self._load_buffers.acquire()) is not None]
            offsets = [place.page * self._page_bytes for _, place in wanted]
            results = client.batch_read(offsets, [_whole(buffer) for buffer in buffers])
            good: list[tuple[int, Buffer]] = []
            for (entry, place), buffer, result in zip(wanted, buffers, results, strict=True):
                key = plan.keys[entry]
                if result == self._page_bytes and verify(
                    buffer.memory, self._payload_bytes, key, place.generation
                ):
                    good.append((entry, buffer))
                    continue
                why = "its page is another's or damaged" if result >= 0 else f"error {-result}"
                self._warn(f"could not read block {key[:16]}: {why}")
                if result >= 0:
                    self._metadata.delete([key])  # or the next request would fail on it too
                task.settle(entry, False)
            self._fill(plan, task, good)
        finally:
            self._readers.put(client)
            for buffer in buffers:
                self._load_buffers.release(buffer)
            self._settle(task, [entry for entry, _ in batch], False)

    def _fill(self, plan: BlockPlan, task: BatchTask, read: list[tuple[int, Buffer]]) -> None:
        with ExitStack() as turns, torch.inference_mode():
            mine = [item for item in read if turns.enter_context(task.writing(item[0]))]
            if mine:
                self._cache.scatter_blocks(
                    [buffer.tensor for _, buffer in mine],
                    [plan.block_ids[entry] for entry, _ in mine],
                )
            self._settle(task, [entry for entry, _ in mine], True)

    # Saving, in threads

    def _write(self, batch: list[tuple[str, Buffer]], began: float) -> None:
        try:
            written = self._write_batch(batch)
            if written:
                self._metrics.took("save", time.monotonic() - began)
                self._metrics.moved("save", written * self._payload_bytes)
        finally:
            self._end_saves(batch)

    def _end_saves(self, batch: list[tuple[str, Buffer]]) -> None:
        for _, buffer in batch:
            self._save_buffers.release(buffer)
        with self._no_save_under_way:
            self._saving.difference_update(key for key, _ in batch)
            self._no_save_under_way.notify_all()

    def _write_batch(self, batch: list[tuple[str, Buffer]]) -> int:
        """How many blocks were written; those that others have or write are none."""
        keys = [key for key, _ in batch]
        answer = self._metadata.allocate(self._share.file, keys)
        if isinstance(answer, NoAnswer):
            self._drop(keys, answer.reason)
            return 0
        mine: list[tuple[str, Buffer, Allocation]] = []
        for (key, buffer), given in zip(batch, answer, strict=True):
            if given.status is Status.WRITE:
                seal(buffer.memory, self._payload_bytes, key, given.generation)
                mine.append((key, buffer, given))
            elif given.status is Status.FULL:
                self._drop([key], "no page is free")
        if not mine:
            return 0
        client = self._writers.get()
        try:
            results = client.batch_write(
                [given.page * self._page_bytes for _, _, given in mine],
                [_whole(buffer) for _, buffer, _ in mine],
            )
        finally:
            self._writers.put(client)
        written: list[Written] = []
        failed: list[Written] = []
        for (key, _, given), result in zip(mine, results, strict=True):
            page = Written(key, given.page, given.generation)
            (written if result == self._page_bytes else failed).append(page)
        if written:
            confirmed = self._metadata.confirm(self._share.file, written)
            if isinstance(confirmed, NoAnswer):
                self._drop([page.key for page in written], confirmed.reason)
                written = []
            elif not all(confirmed):
                late = [page for page, good in zip(written, confirmed, strict=True) if not good]
                self._drop([page.key for page in late], "their write leases had ended")
                written = [page for page in written if page not in late]
        if failed:
            self._metadata.release(self._share.file, failed)
            self._drop([page.key for page in failed], f"writing failed: {min(results)}")
        return len(written)

    # Common

    def _settle(self, task: BatchTask, entries: Sequence[int], outcome: bool) -> None:
        for entry in entries:
            task.settle(entry, outcome)

    def _drop(self, keys: list[str], why: str) -> None:
        with self._lock:
            self._dropped += keys
        self._metrics.failed("save", len(keys) * self._cache.block_size)
        self._warn(f"{len(keys)} blocks were not saved: {why}")

    def _warn(self, text: str) -> None:
        """Say so at most every half minute: one cause fails every block."""
        now = time.monotonic()
        if now - self._warned >= _WARN_EVERY_S:
            self._warned = now
            logger.warning("kvloom: %s", text)


def _whole(buffer: Buffer) -> torch.Tensor:
    return torch.frombuffer(buffer.memory, dtype=torch.uint8)


def _batches(entries: Sequence[T]) -> Iterator[list[T]]:
    for first in range(0, len(entries), IO_ENTRIES):
        yield list(entries[first : first + IO_ENTRIES])
