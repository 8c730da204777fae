"""The state machine of one namespace, in memory and without I/O.

The path of a change: a method *decides* (which page, which keys to evict), makes operations of the
decision, applies them and returns them; whoever calls writes them to a journal before answering.
Replaying a journal applies the same operations in the same order, so a restart rebuilds the same
state. An operation is a plain tuple of numbers, texts and lists, ``(kind, ...)``. It changes pages
and keys alone: leases, free lists and counters follow from those and from the clock.

A crash between any two operations leaves a page in one of these states:

- allocated, not confirmed: it gets a new lease, and is freed when that ends;
- confirmed by some ranks only: the same;
- dropped, not yet given again: the page is free;
- dropped while somebody may read it (*cooling*): the page is freed a read lease after the restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, TypeVar

import numpy as np

from kvloom.hf3fs.metadata.base import (
    Allocation,
    AuditReport,
    ConflictError,
    Limits,
    Location,
    NamespaceStats,
    RankStats,
    Status,
    UnknownNamespaceError,
    Written,
)
from kvloom.hf3fs.metadata.tables import (
    COOLING,
    FREE,
    NO_PAGE,
    NO_ROW,
    Flags,
    KeyTable,
    Numbers,
    Objects,
    PageFile,
)

Operation = tuple[Any, ...]
T = TypeVar("T")

# One evicts a little more than is needed, so that the next batch need not evict again.
_EVICT_EXTRA = 1 / 256
# Looking for the least recently used keys reads the whole table: for so many at once.
_EVICT_AHEAD = 1 / 16
_SEARCH_AGAIN_S = 0.1
_EXPIRE_AGAIN_S = 0.02
# An audit looks between two sweeps: a page is leaked when they have missed it.
_LATE_S = 5.0


class Namespace:
    """Keys and pages of one namespace.

    Args:
        generations: gives the next so many generation numbers; none comes twice.
        monotonic, wall: the clocks, in seconds.
        grace_until: monotonic; nothing is evicted before, as readers of before a restart may read.
    """

    def __init__(
        self,
        world_size: int,
        limits: Limits,
        generations: Callable[[int], list[int]],
        *,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        grace_until: float = 0.0,
    ) -> None:
        self.world_size = world_size
        self.files: list[PageFile | None] = [None] * world_size
        self.closed_until = 0.0  # monotonic; no page is given before
        self._keys = KeyTable(world_size)
        self._limits = limits
        self._generations = generations
        self._monotonic = monotonic
        self._wall = wall
        self._grace_until = grace_until
        self._oldest: Numbers = np.empty(0, np.intp)  # rows to evict next, and their ``order``
        self._oldest_order: Numbers = np.empty(0, np.int64)
        self._no_victim_until = 0.0
        self._next_deadline = math.inf  # no page's is before
        self._expired_at = -math.inf
        self._last_lease = 0.0
        self._saved_use = wall()
        self._hits = self._misses = 0
        self._evicted = self._evicted_unread = self._expired = self._refused = 0
        self._evicted_idle_s = 0.0

    # What readers ask

    def exists(self, names: Sequence[str], lease: bool) -> list[bool]:
        complete = self._use(names, lease)[1]
        answer: list[bool] = complete.tolist()
        return answer

    def touch(self, names: Sequence[str]) -> int:
        return len(self._use(names, lease=True)[0])

    def locations(self, rank: int, names: Sequence[str]) -> list[Location | None]:
        pages, complete = self._locate(rank, names)
        generations = self.file(rank).generations[pages]
        return _spread(map(Location, pages.tolist(), generations.tolist()), complete)

    def pages(self, rank: int, names: Sequence[str]) -> list[int | None]:
        pages, complete = self._locate(rank, names)
        return _spread(iter(pages.tolist()), complete)

    def _locate(self, rank: int, names: Sequence[str]) -> tuple[Numbers, Flags]:
        """The rank's pages of those that are complete, and which these are."""
        self.file(rank)
        rows, complete = self._use(names, lease=True)
        self._keys.read[rows] = True
        self._hits += len(rows)
        self._misses += len(names) - len(rows)
        return self._keys.pages[rank][rows], complete

    def _use(self, names: Sequence[str], lease: bool) -> tuple[Numbers, Flags]:
        """The rows of those that are complete, and which these are."""
        rows = self._keys.find(names)
        complete = self._keys.is_complete(rows)
        rows = rows[complete]
        self._keys.use(rows, self._wall())
        if lease:
            until = self._monotonic() + self._limits.read_lease_s
            self._last_lease = max(self._last_lease, until)
            self._keys.lease[rows] = until
        return rows, complete

    def file(self, rank: int) -> PageFile:
        """
        Raises:
            UnknownNamespaceError: the rank has not been initialized.
        """
        file = self.files[rank] if 0 <= rank < self.world_size else None
        if file is None:
            raise UnknownNamespaceError(
                f"rank {rank} of {self.world_size} is not initialized: initialize it first"
            )
        return file

    # What writers ask: each decides, applies, and returns operations with the answer

    def initialize(self, rank: int, num_pages: int) -> list[Operation]:
        file = self.files[rank]
        if file is None:
            operation = ("file", rank, num_pages)
            self.apply(operation)
            return [operation]
        if file.num_pages != num_pages:
            raise ConflictError(
                f"rank {rank} has {file.num_pages} pages, not {num_pages}: use the same file size, "
                f"another namespace, or clear this one first"
            )
        return []

    def allocate(
        self, rank: int, writer: str, names: Sequence[str], lease_existing: bool
    ) -> tuple[list[Allocation], list[Operation]]:
        """``lease_existing``: API v1 writes complete keys anew; their pages must stay theirs."""
        file = self.file(rank)
        operations = self.expire()
        now = self._monotonic()
        wanted = list(dict.fromkeys(names))
        answers = self._allocated(rank, file, writer, wanted, lease_existing)
        if answers:
            wanted = [name for name in wanted if name not in answers]
        open_ = now >= self.closed_until
        if len(wanted) > len(file.free) and open_:
            operations += self._evict(rank, len(wanted) - len(file.free))
        count = min(len(wanted), len(file.free)) if open_ else 0
        if count:
            pages: list[int] = file.free.take(count).tolist()
            given = self._generations(count)
            operation = ("allocate", rank, writer, wanted[:count], pages, given)
            self.apply(operation)
            operations.append(operation)
            fresh = map(Allocation, repeat(Status.WRITE), pages, given)
            if count == len(names):
                return list(fresh), operations
            answers.update(zip(wanted, fresh, strict=False))
        full = Allocation(Status.FULL)
        return [answers.get(name, full) for name in names], operations

    def _allocated(
        self, rank: int, file: PageFile, writer: str, names: list[str], lease: bool
    ) -> dict[str, Allocation]:
        """What is answered for keys that have their page; renews the leases of pending ones."""
        if not self._keys.find(names).any():
            return {}
        self._use(names, lease)
        rows = self._keys.find(names)
        pages = self._keys.pages[rank][rows]
        known = pages != NO_PAGE
        deadline = self._monotonic() + self._limits.write_lease_s
        held = pages[known]
        confirmed, mine = file.confirmed[held], file.writers[held] == writer
        # A confirmed page waits for those of the other ranks, which may be on their way.
        renewed = held[(confirmed | mine) & ~self._keys.is_complete(rows[known])]
        file.deadline[renewed] = deadline
        answers: dict[str, Allocation] = {}
        for name, page, written, own, generation in zip(
            (name for name, there in zip(names, known.tolist(), strict=True) if there),
            held.tolist(),
            confirmed.tolist(),
            mine.tolist(),
            file.generations[held].tolist(),
            strict=True,
        ):
            if not written and not own:
                answers[name] = Allocation(Status.BUSY)
            else:
                status = Status.EXISTS if written else Status.WRITE
                answers[name] = Allocation(status, page, generation)
        return answers

    def _evict(self, rank: int, count: int) -> list[Operation]:
        """Drop least recently used keys without a read lease, to free ``count`` pages and some."""
        now = self._monotonic()
        if now < max(self._grace_until, self._no_victim_until):
            return []
        keys = self._keys
        goal = count + int(self.file(rank).num_pages * _EVICT_EXTRA)
        victims = self._victims(goal, now)
        if len(victims) < goal:
            self._oldest = keys.oldest(max(goal, int(keys.complete * _EVICT_AHEAD)), now)
            self._oldest_order = keys.order[self._oldest]
            victims = self._victims(goal, now)
        if len(victims) < count:
            # Else a store full of leased keys would be searched through by every allocation.
            self._no_victim_until = now + _SEARCH_AGAIN_S
        if not len(victims):
            return []
        self._evicted += len(victims)
        self._evicted_unread += len(victims) - int(keys.read[victims].sum())
        self._evicted_idle_s = self._wall() - float(keys.used[victims[-1]])
        operation = ("drop", keys.names[victims].tolist())
        self.apply(operation)
        return [operation]

    def _victims(self, goal: int, now: float) -> Numbers:
        """The next to evict of those that were found the last time and not used since."""
        unused = self._keys.order[self._oldest] == self._oldest_order
        able: Numbers = self._oldest[unused & (self._keys.lease[self._oldest] <= now)]
        return able[:goal]

    def confirm(
        self, rank: int, writer: str, written: Sequence[Written]
    ) -> tuple[list[bool], list[Operation]]:
        file = self.file(rank)
        pages = _numbers([item.page for item in written])
        generations = _numbers([item.generation for item in written])
        names = np.array([item.key for item in written], object)
        inside = (pages >= 0) & (pages < file.num_pages)
        pages[~inside] = 0
        good = inside & self._has(file, pages, names, generations)
        good &= file.confirmed[pages] | (file.writers[pages] == writer)
        self._refused += len(written) - int(good.sum())
        fresh = pages[good & ~file.confirmed[pages]]
        operations: list[Operation] = []
        if len(fresh):
            # Backwards, as look-ups go. A page that is listed twice is confirmed once.
            listed = list(dict.fromkeys(fresh[::-1].tolist()))
            operations.append(("confirm", rank, listed, self._wall()))
            self.apply(operations[0])
        answer: list[bool] = good.tolist()
        return answer, operations

    def _has(self, file: PageFile, pages: Numbers, names: Objects, generations: Numbers) -> Flags:
        """Which pages are of these keys; generation -1 is any."""
        rows = np.maximum(file.rows[pages], NO_ROW)  # whose name is None
        same: Flags = self._keys.names[rows] == names
        same &= (generations == -1) | (generations == file.generations[pages])
        return same

    def release(
        self, rank: int, writer: str, written: Sequence[Written]
    ) -> tuple[int, list[Operation]]:
        file = self.file(rank)
        pending: dict[int, None] = {}
        torn: dict[str, None] = {}
        for item in written:
            name = self._to_release(file, writer, item)
            # What is not complete nobody reads, and its other ranks' pages may be being written.
            if name is not None and self._keys.is_complete(self._keys.find([name])).all():
                torn[name] = None
            elif name is not None:
                pending[item.page] = None
        operations: list[Operation] = [("free", rank, list(pending))] if pending else []
        operations += [("cool", list(torn))] if torn else []
        for operation in operations:
            self.apply(operation)
        return len(pending) + len(torn), operations

    def _to_release(self, file: PageFile, writer: str, item: Written) -> str | None:
        """The key of a page that is the writer's to give back."""
        if not 0 <= item.page < file.num_pages:
            return None
        name: str | None = self._keys.names[max(file.rows[item.page], NO_ROW)]
        if name is None:
            return None
        confirmed, mine = file.confirmed[item.page], file.writers[item.page] == writer
        if not item.key:
            # API v1 names no key, and writes complete keys anew: that failed, the page is torn.
            return name if confirmed or mine else None
        same = item.key == name and item.generation in (-1, file.generations[item.page])
        return name if same and mine and not confirmed else None

    def delete(self, names: Sequence[str]) -> tuple[int, list[Operation]]:
        rows = self._keys.find(list(dict.fromkeys(names)))
        rows = rows[self._keys.is_complete(rows)]
        read = np.maximum(self._keys.lease[rows], self._grace_until) > self._monotonic()
        operations: list[Operation] = []
        for kind, chosen in (("cool", rows[read]), ("drop", rows[~read])):
            if len(chosen):
                operations.append((kind, self._keys.names[chosen].tolist()))
        for operation in operations:
            self.apply(operation)
        return len(rows), operations

    def expire(self) -> list[Operation]:
        """Free what the ended leases held."""
        now = self._monotonic()
        if now < max(self._next_deadline, self._expired_at + _EXPIRE_AGAIN_S):
            return []
        self._expired_at = now
        self._next_deadline = math.inf
        operations: list[Operation] = []
        for rank, file in enumerate(self.files):
            if file is None:
                continue
            ended = np.flatnonzero(file.deadline <= now)
            if len(ended):
                self._expired += int((file.rows[ended] != COOLING).sum())
                operations.append(("free", rank, ended.tolist()))
                self.apply(operations[-1])
            self._next_deadline = min(self._next_deadline, float(file.deadline.min()))
        return operations

    def last_lease(self) -> float:
        """Monotonic time when the last lease ends that anybody may hold."""
        return max(self._last_lease, self._grace_until)

    # Operations

    def apply(self, operation: Operation) -> None:
        match operation:
            case ("file", rank, num_pages):
                self.files[rank] = PageFile(num_pages)
            case ("allocate", rank, writer, names, pages, generations):
                self._put(rank, names, _numbers(pages), _numbers(generations), writer)
            case ("confirm", rank, pages, used):
                self._confirm(rank, _numbers(pages), used)
            case ("free", rank, pages):
                self._free(rank, _numbers(pages))
            case ("drop", names):
                rows = self._known(names)
                for file, _, pages in self._pages_of(rows):
                    file.release(pages)
                self._keys.remove(rows)
            case ("cool", names):
                rows = self._known(names)
                lease = np.maximum(self._keys.lease[rows], self._grace_until)
                deadlines = np.maximum(lease, self._monotonic())
                for file, there, pages in self._pages_of(rows):
                    file.cool(pages, deadlines[there])
                self._keys.remove(rows)
                self._next_deadline = min(
                    self._next_deadline, float(deadlines.min(initial=math.inf))
                )
            case ("used", names, times):
                rows = self._keys.find(names)
                complete = self._keys.is_complete(rows)
                self._keys.used[rows[complete]] = np.array(times)[complete]
            case ("restore", rank, entries) if entries:
                self._restore(rank, entries)

    def _known(self, names: Sequence[str]) -> Numbers:
        rows = self._keys.find(names)
        known: Numbers = rows[rows != NO_ROW]
        return known

    def _pages_of(self, rows: Numbers) -> Iterator[tuple[PageFile, Flags, Numbers]]:
        """Of every rank: which of the keys have a page there, and these pages."""
        for file, pages in zip(self.files, self._keys.pages, strict=True):
            if file is not None:
                there = pages[rows] != NO_PAGE
                yield file, there, pages[rows[there]]

    def _put(
        self,
        rank: int,
        names: Sequence[str],
        pages: Numbers,
        generations: Numbers,
        writers: str | Objects,
    ) -> None:
        rows = self._keys.find_or_add(names)
        deadline = self._monotonic() + self._limits.write_lease_s
        self._last_lease = max(self._last_lease, deadline)
        self._next_deadline = min(self._next_deadline, deadline)
        self._keys.pages[rank][rows] = pages
        self.file(rank).give(pages, rows, generations, writers, deadline)

    def _confirm(self, rank: int, pages: Numbers, used: float) -> None:
        file = self.file(rank)
        # Free when a journal was shortened: the page's state follows in a "restore" of later.
        pages = pages[(file.rows[pages] > NO_ROW) & ~file.confirmed[pages]]
        deadline = self._monotonic() + self._limits.write_lease_s
        self._next_deadline = min(self._next_deadline, deadline)
        file.confirm(pages, deadline)
        done = self._keys.confirm(file.rows[pages], used)
        for each, _, complete in self._pages_of(done):
            each.deadline[complete] = math.inf

    def _free(self, rank: int, pages: Numbers) -> None:
        file = self.file(rank)
        pages = pages[file.rows[pages] != FREE]
        keyed = pages[file.rows[pages] != COOLING]
        rows = file.rows[keyed]
        lost = self._keys.lose(rank, rows, file.confirmed[keyed])
        file.release(pages)
        self._keys.remove(lost)

    # A journal of its own state, to replace an old one

    def describe(self, rank: int, first: int, count: int) -> Operation:
        """The pages ``[first, first + count)`` that are in use, as one operation."""
        file = self.file(rank)
        pages = first + np.flatnonzero(file.rows[first : first + count] != FREE)
        rows = np.maximum(file.rows[pages], NO_ROW)
        columns = (
            pages,
            file.generations[pages],
            file.writers[pages],
            file.confirmed[pages],
            self._keys.names[rows],
            self._keys.used[rows],
            self._keys.read[rows],
        )
        return ("restore", rank, list(zip(*(each.tolist() for each in columns), strict=True)))

    def _restore(self, rank: int, entries: Sequence[Sequence[Any]]) -> None:
        page, generation, writer, confirmed, name, used, read = zip(*entries, strict=True)
        file = self.file(rank)
        pages, generations = _numbers(page), _numbers(generation)
        writers, names = np.array(writer, object), np.array(name, object)
        keyed = names.astype(bool)
        new = (file.rows[pages] == FREE) | (file.generations[pages] != generations)
        fresh = new & keyed
        self._put(rank, names[fresh].tolist(), pages[fresh], generations[fresh], writers[fresh])
        self._confirm(rank, pages[fresh & np.array(confirmed)], 0.0)
        rows = file.rows[pages[keyed]]
        there = rows > NO_ROW
        self._keys.used[rows[there]] = np.array(used)[keyed][there]
        self._keys.read[rows[there]] = np.array(read, bool)[keyed][there]
        left = new & ~keyed
        file.give(pages[left], COOLING, generations[left], writers[left], self._grace_until)
        self._next_deadline = min(self._next_deadline, self._grace_until)

    def replayed(self) -> None:
        """After the last operation of a journal: what operations leave out is derived."""
        for file in self.files:
            if file is not None:
                file.recount()
        self._keys.sort_by_use()
        self._saved_use = self._wall()

    def save_use(self) -> list[Operation]:
        """What was used since the last call, so that a restart evicts in the right order."""
        since, self._saved_use = self._saved_use, self._wall()
        rows = self._keys.all_complete()
        rows = rows[self._keys.used[rows] >= since]
        names, times = self._keys.names[rows].tolist(), self._keys.used[rows].tolist()
        return [("used", names, times)] if names else []

    # Figures

    @property
    def pages_in_use(self) -> int:
        return sum(file.num_pages - len(file.free) for file in self.files if file is not None)

    def stats(self) -> NamespaceStats:
        keys = self._keys
        unused_s = self._wall() - float(keys.used[keys.order.argmin()]) if keys.complete else 0.0
        return NamespaceStats(
            world_size=self.world_size,
            ranks=[None if file is None else _stats_of(file) for file in self.files],
            complete=keys.complete,
            incomplete=len(keys) - keys.complete,
            hits=self._hits,
            misses=self._misses,
            least_recent_use_s=max(0.0, unused_s),
            evicted=self._evicted,
            evicted_idle_s=self._evicted_idle_s,
            evicted_unread=self._evicted_unread,
            expired=self._expired,
            refused=self._refused,
        )

    def audit(self) -> AuditReport:
        totals = dict.fromkeys(
            ("pages", "free", "allocated", "confirmed", "cooling", "leaked", "twice"), 0
        )
        late = self._monotonic() - _LATE_S
        for file, of_key in zip(self.files, self._keys.pages, strict=True):
            if file is None:
                continue
            listed = np.bincount(file.free.numbers(), minlength=file.num_pages)
            used, cooling = file.rows != FREE, file.rows == COOLING
            rows = np.maximum(file.rows, NO_ROW)
            keyed = rows != NO_ROW
            claimed = cooling | (of_key[rows] == np.arange(file.num_pages))
            held = (keyed & self._keys.is_complete(rows)) | (file.deadline > late)
            claims = of_key[of_key != NO_PAGE]
            stolen = file.rows[claims] != np.flatnonzero(of_key != NO_PAGE)
            for name, counted in {
                "free": listed,
                "allocated": keyed & ~file.confirmed,
                "confirmed": keyed & file.confirmed,
                "cooling": cooling,
                "leaked": np.where(used, ~(claimed & held), listed == 0),
                "twice": np.where(used, listed, np.maximum(listed - 1, 0)),
            }.items():
                totals[name] += int(counted.sum())
            totals["pages"] += file.num_pages
            totals["twice"] += int(stolen.sum())
        return AuditReport(**totals)


def _stats_of(file: PageFile) -> RankStats:
    free, confirmed, cooling = len(file.free), file.num_confirmed, file.num_cooling
    allocated = file.num_pages - free - confirmed - cooling
    return RankStats(file.num_pages, free, allocated, confirmed, cooling)


def _numbers(listed: Sequence[int]) -> Numbers:
    # Twice as fast as np.array, which looks for the type first.
    return np.fromiter(listed, np.int64, len(listed))


def _spread(found: Iterator[T], there: Flags) -> list[T | None]:
    """What was found, in the places of those that are there; None in the others."""
    if there.all():
        return list(found)
    return [next(found) if each else None for each in there.tolist()]
