"""The embedded backend: everything in memory, every change in a journal before its answer.

The path of a change: ``Namespace`` decides and applies it, its operations join the group that
waits, the group is written, and its requests are answered. Where writing means waiting for a disk,
a thread does it, and what comes meanwhile is the next group.
Lookups read memory and wait for nobody. The journal is kept short by writing the state anew, a few
pages with every group (``_renew``): no pause, however large the state is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from kvloom.hf3fs.metadata.base import (
    Allocation,
    AuditReport,
    ConflictError,
    Limits,
    Location,
    MetadataError,
    MetadataStore,
    NamespaceStats,
    StorageError,
    UnknownNamespaceError,
    Written,
    check_geometry,
    check_namespace,
)
from kvloom.hf3fs.metadata.journal import Durability, Journal
from kvloom.hf3fs.metadata.state import Namespace, Operation

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[str, list[object]]]).decode

_CHUNK_PAGES = 512  # of the state that is written anew at a time
_SLACK_PAGES = 20_000  # the journal may always have these beyond twice the pages in use
_RETRY_S = 0.5
_SAVE_USE_S = 10.0
_CHECKPOINT_BYTES = 4 * 1024 * 1024

_Entry = tuple[int, int, int, bytes, int]  # the arguments of ``Journal.append``


class _Generations:
    """Numbers that never come twice, not even after the state was lost: they begin at the time."""

    def __init__(self) -> None:
        self.next = time.time_ns() // 1000

    def __call__(self, count: int) -> list[int]:
        first, self.next = self.next, self.next + count
        return list(range(first, self.next))


class Embedded(MetadataStore):
    """A backend in one process, its state in the file ``path``.

    Args:
        monotonic, wall: the clocks, for tests.

    Raises:
        StorageError: the file can't be opened or is in use.
    """

    lookups_at_once = True

    def __init__(
        self,
        path: Path,
        limits: Limits,
        durability: Durability = "process",
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        self._monotonic, self._wall = monotonic, wall
        self._generations = _Generations()
        self._namespaces: dict[str, Namespace] = {}
        self._closed_until: dict[str, float] = {}  # of cleared namespaces
        self._journal = Journal(path, durability)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvloom-journal")
        self._queue: list[tuple[str, Operation]] = []
        self._written: asyncio.Future[None] | None = None  # of the group that waits
        self._writing: asyncio.Task[None] | None = None
        self._checkpoint: Future[None] | None = None
        self._at_once = durability == "process"
        self._failure: str | None = None
        self._number = 0
        self._journal_pages = 0
        self._entries: dict[int, int] = {}  # pages of each entry
        self._renewal: Iterator[tuple[str, Operation]] | None = None
        self._renewal_start = 0
        self._use_saved = monotonic()
        self._closed = False
        self._replay(self._monotonic() + limits.read_lease_s)
        self._heed_power_cut(durability)

    def _replay(self, grace_until: float) -> None:
        for number, pages, generation, blob in self._journal.read():
            for name, operation in _decode(blob):
                self._apply(name, tuple(operation), grace_until)
            self._number = number
            self._entries[number] = pages
            self._journal_pages += pages
            self._generations.next = max(self._generations.next, generation)
        for namespace in self._namespaces.values():
            namespace.replayed()

    def _heed_power_cut(self, durability: Durability) -> None:
        """After one the last allocations may be forgotten, while their writers still write."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot = ""
        if self._journal.fact("boot", boot) != boot:
            self._journal.set_fact("boot", boot)
            if durability == "process":
                for namespace in self._namespaces.values():
                    namespace.closed_until = self._monotonic() + self._limits.write_lease_s

    def _apply(self, name: str, operation: Operation, grace_until: float = 0.0) -> None:
        match operation:
            case ("create", world_size):
                if name not in self._namespaces:
                    self._namespaces[name] = Namespace(
                        world_size,
                        self._limits,
                        self._generations,
                        monotonic=self._monotonic,
                        wall=self._wall,
                        grace_until=grace_until,
                    )
                    self._namespaces[name].closed_until = self._closed_until.pop(name, 0.0)
            case ("clear",):
                namespace = self._namespaces.pop(name, None)
                if namespace is not None:
                    self._closed_until[name] = namespace.last_lease()
            case _:
                # Where the state was written anew, operations from before that may come first, and
                # a "file" comes again.
                known = self._namespaces.get(name)
                again = known and operation[0] == "file" and known.files[operation[1]]
                if known is not None and not again:
                    known.apply(operation)

    def _namespace(self, name: str) -> Namespace:
        namespace = self._namespaces.get(name)
        if namespace is None:
            check_namespace(name)
            raise UnknownNamespaceError(f"namespace {name!r} is not known: initialize a rank first")
        return namespace

    # Lookups

    async def exists(self, namespace: str, keys: Sequence[str], lease: bool = False) -> list[bool]:
        return self._namespace(namespace).exists(keys, lease)

    async def locations(
        self, namespace: str, rank: int, keys: Sequence[str]
    ) -> list[Location | None]:
        return self._namespace(namespace).locations(rank, keys)

    async def pages(self, namespace: str, rank: int, keys: Sequence[str]) -> list[int | None]:
        return self._namespace(namespace).pages(rank, keys)

    async def touch(self, namespace: str, keys: Sequence[str]) -> int:
        return self._namespace(namespace).touch(keys)

    async def namespaces(self) -> list[str]:
        return sorted(self._namespaces)

    async def stats(self, namespace: str) -> NamespaceStats:
        return self._namespace(namespace).stats()

    async def audit(self, namespace: str) -> AuditReport:
        return self._namespace(namespace).audit()

    # Changes

    async def initialize(self, namespace: str, rank: int, num_pages: int, world_size: int) -> None:
        check_namespace(namespace)
        check_geometry(rank, num_pages, world_size)
        self._check_writable()
        known = self._namespaces.get(namespace)
        if known is None:
            if len(self._namespaces) >= self._limits.max_namespaces:
                raise MetadataError(
                    f"{self._limits.max_namespaces} namespaces are the limit: clear one first"
                )
        elif known.world_size != world_size:
            raise ConflictError(
                f"namespace {namespace!r} has world size {known.world_size}, not {world_size}: use "
                f"another namespace, or clear this one first"
            )
        if known is None or known.files[rank] is None:
            self._check_pages(num_pages)
        if known is None:
            create = ("create", world_size)
            self._apply(namespace, create)
            self._record(namespace, [create])
        self._record(namespace, self._namespaces[namespace].initialize(rank, num_pages))
        await self._durable()

    def _check_pages(self, num_pages: int) -> None:
        files = [file for each in self._namespaces.values() for file in each.files]
        total = sum(file.num_pages for file in files if file is not None)
        if total + num_pages > self._limits.max_pages:
            raise MetadataError(
                f"{num_pages} pages on top of {total} go beyond the limit of "
                f"{self._limits.max_pages}: raise --max-pages"
            )

    async def allocate(
        self,
        namespace: str,
        rank: int,
        writer: str,
        keys: Sequence[str],
        lease_existing: bool = False,
    ) -> list[Allocation]:
        self._check_writable()
        known = self._namespace(namespace)
        answers, operations = known.allocate(rank, writer, keys, lease_existing)
        self._record(namespace, operations)
        await self._durable()
        return answers

    async def confirm(
        self, namespace: str, rank: int, writer: str, written: Sequence[Written]
    ) -> list[bool]:
        self._check_writable()
        answers, operations = self._namespace(namespace).confirm(rank, writer, written)
        self._record(namespace, operations)
        await self._durable()
        return answers

    async def release(
        self, namespace: str, rank: int, writer: str, written: Sequence[Written]
    ) -> int:
        self._check_writable()
        count, operations = self._namespace(namespace).release(rank, writer, written)
        self._record(namespace, operations)
        await self._durable()
        return count

    async def delete(self, namespace: str, keys: Sequence[str]) -> int:
        self._check_writable()
        count, operations = self._namespace(namespace).delete(keys)
        self._record(namespace, operations)
        await self._durable()
        return count

    async def clear(self, namespace: str) -> None:
        self._check_writable()
        self._namespace(namespace)
        self._apply(namespace, ("clear",))
        self._record(namespace, [("clear",)])
        await self._durable()

    async def check(self) -> None:
        self._check_writable()

    async def sweep(self) -> None:
        save_use = self._monotonic() - self._use_saved >= _SAVE_USE_S
        for name, namespace in self._namespaces.items():
            self._record(name, namespace.expire())
            if save_use:
                self._record(name, namespace.save_use())
        if save_use:
            self._use_saved = self._monotonic()
        await self._durable()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for name, namespace in self._namespaces.items():
            self._record(name, namespace.save_use())
        try:
            await self._durable()
        except StorageError as error:
            logger.warning("kvloom: the last use of keys is not saved: %s", error)
        if self._writing is not None:
            self._writing.cancel()
        if self._checkpoint is not None:
            with contextlib.suppress(sqlite3.Error):
                await asyncio.wrap_future(self._checkpoint)
        self._thread.shutdown(wait=True)
        self._journal.close()

    # The journal

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise StorageError(f"changes can't be stored now: {self._failure}")

    def _record(self, name: str, operations: Sequence[Operation]) -> None:
        self._queue += [(name, operation) for operation in operations]

    @property
    def changes_at_once(self) -> bool:
        # Handing a group to the thread and back costs more than writing it, unless to wait for a
        # disk. While the thread is at work, groups queue behind it.
        return self._at_once and self._writing is None and self._checkpoint is None

    async def _durable(self) -> None:
        """Wait until everything recorded is in the journal.

        Not only what this request recorded: an answer may rest on what another one decided and
        that is not written yet.
        """
        if self.changes_at_once:
            self._write_now()
            return
        loop = asyncio.get_running_loop()
        if self._writing is None:
            if not self._queue:
                return
            self._writing = loop.create_task(self._write())
        if self._written is None:
            self._written = loop.create_future()
        await asyncio.shield(self._written)

    def _write_now(self) -> None:
        if not self._queue:
            return
        group, self._queue = self._queue, []
        entry = self._entry(group)
        try:
            self._journal.append(*entry)
        except sqlite3.Error as error:
            self._failed(error)
            self._queue = group + self._queue
            self._writing = asyncio.get_running_loop().create_task(self._write())
            raise StorageError(f"changes can't be stored now: {error}") from None
        self._stored(entry)
        if self._journal.log_bytes > _CHECKPOINT_BYTES:
            self._checkpoint = self._thread.submit(self._journal.checkpoint)
            loop = asyncio.get_running_loop()
            self._checkpoint.add_done_callback(
                lambda done: loop.call_soon_threadsafe(self._checkpointed, done)
            )

    def _checkpointed(self, done: Future[None]) -> None:
        self._checkpoint = None
        if (error := done.exception()) is not None:
            logger.warning("kvloom: the journal's log was not folded in: %s", error)
        if self._queue and self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queue or self._written is not None:
                group, written = self._queue, self._written
                self._queue, self._written = [], None
                entry = self._entry(group)
                while group:
                    try:
                        await loop.run_in_executor(self._thread, self._journal.append, *entry)
                        break
                    except sqlite3.Error as error:
                        self._failed(error)
                    for waiting in (written, self._written):
                        if waiting is not None and not waiting.done():
                            waiting.set_exception(StorageError(f"not stored: {self._failure}"))
                    self._written = None
                    await asyncio.sleep(_RETRY_S)
                if group:
                    self._stored(entry)
                if written is not None and not written.done():
                    written.set_result(None)
        finally:
            self._writing = None

    def _entry(self, group: list[tuple[str, Operation]]) -> _Entry:
        drop_before = self._renew(group)
        pages = sum(_pages_of(operation) for _, operation in group)
        return self._number + 1, pages, self._generations.next, _encode(group), drop_before

    def _stored(self, entry: _Entry) -> None:
        if self._failure is not None:
            logger.warning("kvloom: changes are stored again")
            self._failure = None
        self._number, pages, _, _, drop_before = entry
        self._entries[self._number] = pages
        self._journal_pages += pages
        for old in list(itertools.takewhile(lambda each: each < drop_before, self._entries)):
            self._journal_pages -= self._entries.pop(old)

    def _failed(self, error: sqlite3.Error) -> None:
        if self._failure is None:
            logger.error("kvloom: changes can't be stored, trying again: %s", error)
        self._failure = str(error)

    def _renew(self, group: list[tuple[str, Operation]]) -> int:
        """Add a part of the whole state to the group; the number below which entries can go then.

        When every page has been written anew since entry n, all that older ones say is outdated.
        """
        in_use = sum(namespace.pages_in_use for namespace in self._namespaces.values())
        if self._renewal is None:
            if self._journal_pages <= 2 * in_use + _SLACK_PAGES:
                return 0
            self._renewal = self._describe()
            self._renewal_start = self._number + 1
            # First, as the operations of the next groups need them.
            for name, namespace in self._namespaces.items():
                group.append((name, ("create", namespace.world_size)))
                for rank, file in enumerate(namespace.files):
                    if file is not None:
                        group.append((name, ("file", rank, file.num_pages)))
        # Faster than the journal grows, else it would never end.
        goal = 2 * sum(_pages_of(operation) for _, operation in group)
        for name, operation in self._renewal:
            group.append((name, operation))
            goal -= _pages_of(operation)
            if goal <= 0:
                return 0
        self._renewal = None
        return self._renewal_start

    def _describe(self) -> Iterator[tuple[str, Operation]]:
        for name, namespace in list(self._namespaces.items()):
            for rank, file in enumerate(namespace.files):
                pages = 0 if file is None else file.num_pages
                for first in range(0, pages, _CHUNK_PAGES):
                    if self._namespaces.get(name) is not namespace:
                        break
                    operation = namespace.describe(rank, first, _CHUNK_PAGES)
                    if operation[-1]:
                        yield name, operation


def _pages_of(operation: Operation) -> int:
    """How many pages or keys an operation lists, at least 1."""
    match operation:
        case ("allocate" | "confirm" | "free" | "drop" | "cool" | "used" | "restore", *fields):
            return max(1, *(len(field) for field in fields if isinstance(field, list)))
    return 1
