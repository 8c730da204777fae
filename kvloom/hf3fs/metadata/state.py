"""The state machine of one namespace, in memory and without I/O.

The path of a change: a method *decides* (which page, which keys to evict), makes operations of the
decision, applies them and returns them; whoever calls writes them to a journal before answering.
Replaying a journal applies the same operations in the same order, so a restart rebuilds the same
state. An operation is a plain tuple of numbers, texts and lists, ``(kind, ...)``. It changes pages
and keys alone: leases, free lists and counters follow from those and from the clock.

Every page in use has one ``Slot``. A crash between any two operations leaves either:

- allocated, not confirmed: the slot is there, gets a new lease, and is freed when that ends;
- confirmed by some ranks only: the same;
- dropped, not yet given again: the page is free;
- dropped while somebody may read it (*cooling*): the page is freed a read lease after the restart.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import msgspec

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

Operation = tuple[Any, ...]

# One evicts a little more than is needed, so that the next batch need not evict again.
_EVICT_EXTRA = 1 / 256
_SEARCH_AGAIN_S = 0.1
_FULL = Allocation(Status.FULL)


# Millions of these live for long, and whoever drops one breaks its cycle (``slot.key = None``): the
# garbage collector need not look at them.
class Key(msgspec.Struct, gc=False, eq=False):
    """A key and its slot of each rank. ``used`` is wall clock, ``lease`` monotonic, in seconds."""

    name: str
    slots: list[Slot | None]
    unconfirmed: int  # ranks
    used: float = 0.0
    hits: int = 0
    lease: float = 0.0


class Slot(msgspec.Struct, gc=False, eq=False):
    """A page in use. ``deadline`` (monotonic) counts until its key is complete."""

    key: Key | None  # None: cooling, of no key any more
    rank: int
    page: int
    generation: int
    writer: str
    deadline: float = 0.0
    confirmed: bool = False
    location: Location | None = None  # when confirmed


class PageFile:
    """The pages of one rank: a slot for each page in use, the others are free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.slots: list[Slot | None] = [None] * num_pages
        self.confirmed = self.cooling = 0
        self.find_free()

    def find_free(self) -> None:
        self.free = deque(page for page, slot in enumerate(self.slots) if slot is None)

    def stats(self) -> RankStats:
        allocated = self.num_pages - len(self.free) - self.confirmed - self.cooling
        return RankStats(self.num_pages, len(self.free), allocated, self.confirmed, self.cooling)


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
        self._limits = limits
        self._generations = generations
        self._monotonic = monotonic
        self._wall = wall
        self._grace_until = grace_until
        self._complete: OrderedDict[str, Key] = OrderedDict()  # least recently used first
        self._incomplete: dict[str, Key] = {}
        # A heap: deadline, rank, pages, their generations. One entry for a whole allocation.
        self._expiry: list[tuple[float, int, Sequence[int], Sequence[int]]] = []
        self._no_victim_until = 0.0
        self._last_lease = 0.0
        self._saved_use = wall()
        self._hits = self._misses = 0
        self._evicted = self._evicted_unread = self._expired = self._refused = 0
        self._evicted_idle_s = 0.0

    # What readers ask

    # All go backwards, so that a prompt's first block outlives the blocks that need it. In these
    # loops the service spends its time: a key is looked up once, and nothing is called twice.

    def exists(self, keys: Sequence[str], lease: bool) -> list[bool]:
        if lease:
            self.touch(keys)
        get, move, now = self._complete.get, self._complete.move_to_end, self._wall()
        answer = []
        for name in reversed(keys):
            key = get(name)
            if key is None:
                answer.append(False)
            else:
                key.used = now
                move(name)
                answer.append(True)
        answer.reverse()
        return answer

    def locations(self, rank: int, keys: Sequence[str]) -> list[Location | None]:
        self.file(rank)
        get, move, now = self._complete.get, self._complete.move_to_end, self._wall()
        until = self._read_lease()
        answer: list[Location | None] = []
        for name in reversed(keys):
            key = get(name)
            if key is None:
                answer.append(None)
            else:
                key.hits += 1
                key.used = now
                key.lease = until
                move(name)
                slot = key.slots[rank]
                answer.append(None if slot is None else slot.location)
        answer.reverse()
        misses = answer.count(None)
        self._misses += misses
        self._hits += len(keys) - misses
        return answer

    def touch(self, keys: Sequence[str]) -> int:
        now, until, count = self._wall(), self._read_lease(), 0
        for name in reversed(keys):
            key = self._complete.get(name)
            if key is not None:
                key.used, key.lease = now, until
                self._complete.move_to_end(name)
                count += 1
        return count

    def _read_lease(self) -> float:
        """The end of a read lease that begins now; no earlier one ends later."""
        until = self._monotonic() + self._limits.read_lease_s
        self._last_lease = max(self._last_lease, until)
        return until

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
        deadline = now + self._limits.write_lease_s
        self.exists(names, lease_existing)
        answers: dict[str, Allocation | None] = {}
        for name in names:
            key = self._complete.get(name) or self._incomplete.get(name)
            slot = None if key is None else key.slots[rank]
            answers[name] = None if slot is None else _answer_of(slot, writer, deadline)
        wanted = [name for name, answer in answers.items() if answer is None]
        open_ = now >= self.closed_until
        if len(wanted) > len(file.free) and open_:
            operations += self._evict(rank, len(wanted) - len(file.free))
        count = min(len(wanted), len(file.free)) if open_ else 0
        if count:
            pages = [file.free.popleft() for _ in range(count)]
            given = self._generations(count)
            operation = ("allocate", rank, writer, wanted[:count], pages, given)
            self.apply(operation)
            operations.append(operation)
            for name, page, generation in zip(wanted, pages, given, strict=False):
                answers[name] = Allocation(Status.WRITE, page, generation)
        return [answers[name] or _FULL for name in names], operations

    def _evict(self, rank: int, count: int) -> list[Operation]:
        """Drop least recently used keys without a read lease, to free ``count`` pages and some."""
        now = self._monotonic()
        if now < max(self._grace_until, self._no_victim_until):
            return []
        file = self.file(rank)
        goal = count + int(file.num_pages * _EVICT_EXTRA)
        victims: list[Key] = []
        earliest = math.inf
        for key in self._complete.values():
            if len(victims) == goal:
                break
            if key.lease <= now:
                victims.append(key)
            else:
                earliest = min(earliest, key.lease)
        if len(victims) < count:
            # Else a store full of leased keys would be searched through by every allocation.
            self._no_victim_until = min(earliest, now + _SEARCH_AGAIN_S)
        if not victims:
            return []
        self._evicted += len(victims)
        self._evicted_unread += sum(not key.hits for key in victims)
        self._evicted_idle_s = self._wall() - victims[-1].used
        operation = ("drop", [key.name for key in victims])
        self.apply(operation)
        return [operation]

    def confirm(
        self, rank: int, writer: str, written: Sequence[Written]
    ) -> tuple[list[bool], list[Operation]]:
        file = self.file(rank)
        slots = [_slot_of(file, writer, item, confirmed=True) for item in written]
        fresh = [slot.page for slot in slots if slot is not None and not slot.confirmed]
        self._refused += slots.count(None)
        operations: list[Operation] = []
        if fresh:
            # Backwards, as look-ups go. A page that is listed twice is confirmed once.
            operations.append(("confirm", rank, list(dict.fromkeys(reversed(fresh))), self._wall()))
            self.apply(operations[0])
        return [slot is not None for slot in slots], operations

    def release(
        self, rank: int, writer: str, written: Sequence[Written]
    ) -> tuple[int, list[Operation]]:
        slots = {
            id(slot): slot for item in written if (slot := self._to_release(rank, writer, item))
        }
        # What is not complete nobody reads, and its other ranks' pages may be being written.
        torn = {slot.page: slot.key.name for slot in slots.values() if slot.key}
        torn = {page: name for page, name in torn.items() if name in self._complete}
        pending = [slot.page for slot in slots.values() if slot.page not in torn]
        operations: list[Operation] = [("free", rank, pending)] if pending else []
        operations += [("cool", list(torn.values()))] if torn else []
        for operation in operations:
            self.apply(operation)
        return len(slots), operations

    def _to_release(self, rank: int, writer: str, item: Written) -> Slot | None:
        if item.key:
            return _slot_of(self.file(rank), writer, item, confirmed=False)
        # API v1 names no key, and writes complete keys anew: that failed, so the page is torn.
        file = self.file(rank)
        slot = file.slots[item.page] if 0 <= item.page < file.num_pages else None
        if slot is None or slot.key is None or not (slot.confirmed or slot.writer == writer):
            return None
        return slot

    def delete(self, names: Sequence[str]) -> tuple[int, list[Operation]]:
        keys = [self._complete[name] for name in dict.fromkeys(names) if name in self._complete]
        if not keys:
            return 0, []
        now = self._monotonic()
        read = {key.name for key in keys if max(key.lease, self._grace_until) > now}
        cool = [key.name for key in keys if key.name in read]
        drop = [key.name for key in keys if key.name not in read]
        operations: list[Operation] = [("cool", cool)] if cool else []
        operations += [("drop", drop)] if drop else []
        for operation in operations:
            self.apply(operation)
        return len(keys), operations

    def expire(self) -> list[Operation]:
        """Free what the ended leases held."""
        now = self._monotonic()
        ended: dict[int, list[int]] = {}
        while self._expiry and self._expiry[0][0] <= now:
            _, rank, pages, generations = heapq.heappop(self._expiry)
            for page, generation in zip(pages, generations, strict=True):
                slot = self.file(rank).slots[page]
                if slot is None or slot.generation != generation:
                    continue
                if slot.key is not None and slot.key.name in self._complete:
                    continue
                if slot.deadline > now:
                    self._expire_later(slot)
                    continue
                self._expired += slot.key is not None
                ended.setdefault(rank, []).append(page)
        operations: list[Operation] = [("free", rank, pages) for rank, pages in ended.items()]
        for operation in operations:
            self.apply(operation)
        return operations

    def dissolve(self) -> None:
        """Before it is dropped."""
        for file in self.files:
            for slot in () if file is None else file.slots:
                if slot is not None:
                    slot.key = None

    def last_lease(self) -> float:
        """Monotonic time when the last lease ends that anybody may hold."""
        return max(self._last_lease, self._grace_until)

    # Operations

    def apply(self, operation: Operation) -> None:
        match operation:
            case ("file", rank, num_pages):
                self.files[rank] = PageFile(num_pages)
            case ("allocate", rank, writer, names, pages, generations):
                deadline = self._monotonic() + self._limits.write_lease_s
                self._last_lease = max(self._last_lease, deadline)
                heapq.heappush(self._expiry, (deadline, rank, pages, generations))
                for name, page, generation in zip(names, pages, generations, strict=True):
                    self._put(name, Slot(None, rank, page, generation, writer), deadline)
            case ("confirm", rank, pages, used):
                deadline = self._monotonic() + self._limits.write_lease_s
                for page in pages:
                    self._confirm(rank, page, used, deadline)
            case ("free", rank, pages):
                for page in pages:
                    self._free(rank, page)
            case ("drop", names):
                for key in self._pop(names):
                    for slot in key.slots:
                        if slot is not None:
                            self._release_slot(slot)
            case ("cool", names):
                for key in self._pop(names):
                    deadline = max(key.lease, self._grace_until, self._monotonic())
                    for slot in key.slots:
                        if slot is not None:
                            self._cool(slot, deadline)
            case ("used", names, times):
                for name, used in zip(names, times, strict=True):
                    if (found := self._complete.get(name)) is not None:
                        found.used = used
            case ("restore", rank, rows):
                self._restore(rank, rows)

    def _put(self, name: str, slot: Slot, deadline: float) -> None:
        key = self._complete.get(name) or self._incomplete.get(name)
        if key is None:
            key = self._incomplete[name] = Key(name, [None] * self.world_size, self.world_size)
        slot.key, slot.deadline = key, deadline
        key.slots[slot.rank] = slot
        self.file(slot.rank).slots[slot.page] = slot

    def _confirm(self, rank: int, page: int, used: float, deadline: float) -> None:
        file = self.file(rank)
        slot = file.slots[page]
        # None when a journal was shortened: the page's state follows in a "restore" of later.
        if slot is None or slot.key is None or slot.confirmed:
            return
        slot.confirmed, slot.deadline = True, deadline
        slot.location = Location(page, slot.generation)
        file.confirmed += 1
        key = slot.key
        key.used = max(key.used, used)
        key.unconfirmed -= 1
        if not key.unconfirmed:
            self._complete[key.name] = self._incomplete.pop(key.name)

    def _free(self, rank: int, page: int) -> None:
        slot = self.file(rank).slots[page]
        if slot is None:
            return
        key = slot.key
        self._release_slot(slot)
        if key is not None:
            key.slots[rank] = None
            key.unconfirmed += slot.confirmed
            if not any(key.slots):
                self._incomplete.pop(key.name, None)

    def _release_slot(self, slot: Slot) -> None:
        file = self.file(slot.rank)
        file.cooling -= slot.key is None
        file.confirmed -= slot.key is not None and slot.confirmed
        file.slots[slot.page] = slot.key = None
        file.free.append(slot.page)

    def _cool(self, slot: Slot, deadline: float) -> None:
        file = self.file(slot.rank)
        file.confirmed -= slot.confirmed
        file.cooling += 1
        slot.key, slot.deadline = None, deadline
        self._expire_later(slot)

    def _pop(self, names: Iterable[str]) -> Iterator[Key]:
        for name in names:
            key = self._complete.pop(name, None)
            if key is None:
                key = self._incomplete.pop(name, None)
            if key is not None:
                yield key

    def _expire_later(self, slot: Slot) -> None:
        heapq.heappush(self._expiry, (slot.deadline, slot.rank, [slot.page], [slot.generation]))

    # A journal of its own state, to replace an old one

    def describe(self, rank: int, first: int, count: int) -> Operation:
        """The pages ``[first, first + count)`` that are in use, as one operation."""
        rows = []
        for slot in self.file(rank).slots[first : first + count]:
            if slot is not None:
                key = slot.key
                named = (key.name, key.used, key.hits) if key is not None else ("", 0.0, 0)
                rows.append((slot.page, slot.generation, slot.writer, slot.confirmed, *named))
        return ("restore", rank, rows)

    def _restore(
        self, rank: int, rows: Iterable[tuple[int, int, str, bool, str, float, int]]
    ) -> None:
        deadline = self._monotonic() + self._limits.write_lease_s
        file = self.file(rank)
        for page, generation, writer, confirmed, name, used, hits in rows:
            there = file.slots[page]
            if there is not None and there.generation == generation:
                if there.key is not None:
                    there.key.used, there.key.hits = used, hits
                continue
            slot = Slot(None, rank, page, generation, writer)
            if not name:
                file.slots[page] = slot
                self._cool(slot, self._grace_until)
                continue
            self._put(name, slot, deadline)
            heapq.heappush(self._expiry, (deadline, rank, [page], [generation]))
            if confirmed:
                self._confirm(rank, page, used, deadline)
            key = self._complete.get(name) or self._incomplete[name]
            key.used, key.hits = used, hits

    def replayed(self) -> None:
        """After the last operation of a journal: what operations leave out is derived."""
        for file in self.files:
            if file is not None:
                file.find_free()
        self._complete = OrderedDict(sorted(self._complete.items(), key=lambda item: item[1].used))
        self._saved_use = self._wall()

    def save_use(self) -> list[Operation]:
        """What was used since the last call, so that a restart evicts in the right order."""
        since, self._saved_use = self._saved_use, self._wall()
        recent = takewhile(lambda key: key.used >= since, reversed(self._complete.values()))
        used = {key.name: key.used for key in recent}
        return [("used", list(used), list(used.values()))] if used else []

    # Figures

    @property
    def pages_in_use(self) -> int:
        return sum(file.num_pages - len(file.free) for file in self.files if file is not None)

    def stats(self) -> NamespaceStats:
        first = next(iter(self._complete.values()), None)
        return NamespaceStats(
            world_size=self.world_size,
            ranks=[None if file is None else file.stats() for file in self.files],
            complete=len(self._complete),
            incomplete=len(self._incomplete),
            hits=self._hits,
            misses=self._misses,
            least_recent_use_s=0.0 if first is None else max(0.0, self._wall() - first.used),
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
        late = self._monotonic()
        for rank, file in enumerate(self.files):
            if file is None:
                continue
            totals["pages"] += file.num_pages
            totals["free"] += len(file.free)
            free = set(file.free)
            totals["twice"] += len(file.free) - len(free)
            for page, slot in enumerate(file.slots):
                totals["leaked"] += slot is None and page not in free
                totals["twice"] += slot is not None and page in free
                if slot is None:
                    continue
                key = slot.key
                totals["cooling"] += key is None
                totals["confirmed"] += key is not None and slot.confirmed
                totals["allocated"] += key is not None and not slot.confirmed
                complete = key is not None and self._complete.get(key.name) is key
                known = complete or key is None or self._incomplete.get(key.name) is key
                claimed = key is None or key.slots[rank] is slot
                held = complete or slot.deadline > late
                totals["leaked"] += not (known and claimed and held)
            for key in (*self._complete.values(), *self._incomplete.values()):
                mine = key.slots[rank]
                totals["twice"] += mine is not None and file.slots[mine.page] is not mine
        return AuditReport(**totals)


def _slot_of(file: PageFile, writer: str, item: Written, confirmed: bool) -> Slot | None:
    """The slot that ``item`` names, if it is the writer's, or if ``confirmed`` any written."""
    slot = file.slots[item.page] if 0 <= item.page < file.num_pages else None
    if slot is None or slot.key is None or slot.key.name != item.key:
        return None
    if item.generation not in (-1, slot.generation):
        return None
    if slot.confirmed:
        return slot if confirmed else None
    return slot if slot.writer == writer else None


def _answer_of(slot: Slot, writer: str, deadline: float) -> Allocation:
    """What a writer is told of a page that is in use; renews the lease."""
    if slot.confirmed:
        slot.deadline = deadline  # the other ranks' pages may be on their way
        return Allocation(Status.EXISTS, slot.page, slot.generation)
    if slot.writer != writer:
        return Allocation(Status.BUSY)
    slot.deadline = deadline
    return Allocation(Status.WRITE, slot.page, slot.generation)
