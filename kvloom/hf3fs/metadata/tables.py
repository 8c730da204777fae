"""The keys and pages of a namespace as columns: one array a property, one entry a key or page.

Requests come in batches, and a batch is one step of each array. As objects, millions of keys would
be followed one by one through memory, and that is what a request would wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.signedinteger[Any]]
Seconds = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Objects = npt.NDArray[np.object_]

NO_ROW = 0  # of a key that is not there: never complete, has no page
NO_PAGE = -1
FREE, COOLING = 0, -1  # instead of the row of a page's key
NEVER = np.iinfo(np.int64).max
_FIRST_ROWS = 1024


class FreeNumbers:
    """Numbers to take and to give back; what was given back last is taken last."""

    def __init__(self, numbers: Numbers, room: int) -> None:
        self._ring = np.resize(numbers, room) if len(numbers) else np.zeros(room, np.int64)
        self._first, self._count = 0, len(numbers)

    def __len__(self) -> int:
        return self._count

    def numbers(self) -> Numbers:
        return self._ring.take(self._places(0, self._count), mode="wrap")

    def take(self, count: int) -> Numbers:
        taken = self._ring.take(self._places(0, count), mode="wrap")
        self._first = (self._first + count) % len(self._ring)
        self._count -= count
        return taken

    def put(self, numbers: Numbers) -> None:
        self._ring.put(self._places(self._count, len(numbers)), numbers, mode="wrap")
        self._count += len(numbers)

    def _places(self, skip: int, count: int) -> Numbers:
        return np.arange(self._first + skip, self._first + skip + count)


class KeyTable:
    """Keys by name. A key has a row; ``missing`` ranks have not confirmed it, 0: it is complete.

    Attributes:
        names: None where a row is not used.
        pages: of each rank; ``NO_PAGE`` where it has none.
        used: wall clock, seconds. lease: monotonic, seconds; until then it is being read.
        order: a larger number was used later; ``NEVER`` unless complete.
        read: somebody asked for its location.
    """

    def __init__(self, world_size: int) -> None:
        self._rows: dict[str, int] = {}
        self._spare = FreeNumbers(np.arange(0), 1)
        self.world_size = world_size
        self.complete = 0
        self.names: Objects = np.empty(0, object)
        self.pages: list[Numbers] = [np.empty(0, np.int32) for _ in range(world_size)]
        self.missing: Numbers = np.empty(0, np.int32)
        self.used: Seconds = np.empty(0)
        self.lease: Seconds = np.empty(0)
        self.order: Numbers = np.empty(0, np.int64)
        self.read: Flags = np.empty(0, np.bool_)
        self._last_order = 0
        self._grow(0)
        self._spare.take(1)  # NO_ROW

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, names: Sequence[str]) -> Numbers:
        """The row of each, or ``NO_ROW``."""
        return np.fromiter(map(self._rows.get, names, repeat(NO_ROW)), np.intp, len(names))

    def find_or_add(self, names: Sequence[str]) -> Numbers:
        """The row of each; the names are distinct."""
        rows = self.find(names)
        new = rows == NO_ROW
        if new.all():
            return self._add(names)
        if new.any():
            rows[new] = self._add([name for name, add in zip(names, new, strict=True) if add])
        return rows

    def _add(self, names: Sequence[str]) -> Numbers:
        if len(self._spare) < len(names):
            self._grow(len(names))
        rows = self._spare.take(len(names))
        self._rows.update(zip(names, rows.tolist(), strict=True))
        self.names[rows] = names
        self.missing[rows] = self.world_size
        self.used[rows] = self.lease[rows] = 0.0
        self.read[rows] = False
        return rows

    def remove(self, rows: Numbers) -> None:
        """Forget keys whose pages were dealt with."""
        for name in self.names[rows].tolist():
            del self._rows[name]
        self.complete -= int((self.missing[rows] == 0).sum())
        self._clear(rows)
        self._spare.put(rows)

    def use(self, rows: Numbers, now: float) -> None:
        """Complete keys are used, the first one last: a prompt's start outlives what needs it."""
        self.used[rows] = now
        self._last_order += len(rows)
        self.order[rows] = np.arange(self._last_order, self._last_order - len(rows), -1)

    def confirm(self, rows: Numbers, used: float) -> Numbers:
        """One rank more has confirmed these; the rows that are complete now."""
        self.used[rows] = np.maximum(self.used[rows], used)
        self.missing[rows] -= 1
        done: Numbers = rows[self.missing[rows] == 0]
        self.complete += len(done)
        self._last_order += len(done)
        self.order[done] = np.arange(self._last_order - len(done), self._last_order) + 1
        return done

    def lose(self, rank: int, rows: Numbers, confirmed: Flags) -> Numbers:
        """A rank has no pages of these any more; the rows that no rank has a page of."""
        self.pages[rank][rows] = NO_PAGE
        self.missing[rows] += confirmed
        lost = np.ones(len(rows), np.bool_)
        for pages in self.pages:
            lost &= pages[rows] == NO_PAGE
        return rows[lost]

    def is_complete(self, rows: Numbers) -> Flags:
        answer: Flags = self.missing[rows] == 0
        return answer

    def all_complete(self) -> Numbers:
        return np.flatnonzero(self.missing == 0)

    def sort_by_use(self) -> None:
        """Make ``order`` that of ``used``."""
        rows = self.all_complete()
        rows = rows[np.lexsort((self.order[rows], self.used[rows]))]
        self.order[rows] = np.arange(1, len(rows) + 1)
        self._last_order = len(rows)

    def oldest(self, count: int, now: float) -> Numbers:
        """At most so many complete keys without a lease, least recently used first."""
        rows = np.flatnonzero((self.missing == 0) & (self.lease <= now))
        order = self.order[rows]
        if count < len(rows):
            first = np.argpartition(order, count)[:count]
            rows, order = rows[first], order[first]
        return rows[np.argsort(order)]

    def _clear(self, rows: Numbers) -> None:
        self.names[rows] = None
        self.missing[rows] = 1
        self.order[rows] = NEVER
        for pages in self.pages:
            pages[rows] = NO_PAGE

    def _grow(self, least: int) -> None:
        old = len(self.names)
        size = max(_FIRST_ROWS, 2 * old, old + least)
        self.names = _grown(self.names, size)
        self.pages = [_grown(pages, size) for pages in self.pages]
        self.missing = _grown(self.missing, size)
        self.used, self.lease = _grown(self.used, size), _grown(self.lease, size)
        self.order, self.read = _grown(self.order, size), _grown(self.read, size)
        rows = np.arange(old, size)
        self._clear(rows)
        self._spare = FreeNumbers(np.concatenate((self._spare.numbers(), rows)), size)


class PageFile:
    """The pages of one rank.

    Attributes:
        rows: of the keys that have them, ``FREE`` or ``COOLING``: of no key, but still being read.
        deadline: monotonic, seconds; they come back then. Infinite for free and for complete ones.
        num_confirmed, num_cooling: pages of keys that are confirmed, pages that are cooling.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.rows: Numbers = np.full(num_pages, FREE, np.int32)
        self.generations: Numbers = np.zeros(num_pages, np.int64)
        self.deadline: Seconds = np.full(num_pages, np.inf)
        self.confirmed: Flags = np.zeros(num_pages, np.bool_)
        self.writers: Objects = np.full(num_pages, None, object)
        self.recount()

    def recount(self) -> None:
        """Derive the counters and the free list from the columns."""
        self.num_confirmed = int(self.confirmed.sum())
        self.num_cooling = int((self.rows == COOLING).sum())
        self.free = FreeNumbers(np.flatnonzero(self.rows == FREE), self.num_pages)

    def give(
        self,
        pages: Numbers,
        rows: Numbers | int,
        generations: Numbers,
        writers: str | Objects,
        deadline: float,
    ) -> None:
        self.rows[pages] = rows
        self.generations[pages] = generations
        self.deadline[pages] = deadline
        self.confirmed[pages] = False
        self.writers[pages] = writers

    def confirm(self, pages: Numbers, deadline: float) -> None:
        self.confirmed[pages] = True
        self.deadline[pages] = deadline
        self.num_confirmed += len(pages)

    def cool(self, pages: Numbers, deadline: float | Seconds) -> None:
        """Their keys are gone, who reads them is not."""
        self.num_confirmed -= int(self.confirmed[pages].sum())
        self.num_cooling += len(pages)
        self.rows[pages] = COOLING
        self.confirmed[pages] = False
        self.deadline[pages] = deadline

    def release(self, pages: Numbers) -> None:
        self.num_confirmed -= int(self.confirmed[pages].sum())
        self.num_cooling -= int((self.rows[pages] == COOLING).sum())
        self.rows[pages] = FREE
        self.confirmed[pages] = False
        self.deadline[pages] = np.inf
        self.writers[pages] = None
        self.free.put(pages)


def _grown(column: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    grown = np.zeros(size, column.dtype)
    grown[: len(column)] = column
    return grown
