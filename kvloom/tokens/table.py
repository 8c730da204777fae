"""A multimap from 64-bit keys to small integers that is looked up by the ten thousand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_EMPTY = -1
_MULTIPLIER = 0xD6E8FEB86659FD93
_MASK = 2**64 - 1


class MultiMap:
    """Open addressing over numpy arrays; the entries of one key are chained, the newest first.

    Entries are numbers below a capacity that grows with them. A key whose entries are all removed
    keeps its cell until the table is rebuilt. Not thread-safe.
    """

    def __init__(self) -> None:
        self._bits = 10
        self._allocate()
        self._next = np.full(0, _EMPTY, dtype=np.int32)
        self._keys_of = np.empty(0, dtype=np.uint64)

    @property
    def nbytes(self) -> int:
        return self._cells.nbytes + self._heads.nbytes + self._next.nbytes + self._keys_of.nbytes

    def find(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        """The newest entry of each key, -1 where there is none; int32 as long as ``keys``."""
        found = np.full(len(keys), _EMPTY, dtype=np.int32)
        with np.errstate(over="ignore"):
            cells = ((keys * np.uint64(_MULTIPLIER)) >> np.uint64(64 - self._bits)).astype(np.intp)
        left = np.flatnonzero(self._used[cells])
        while left.size:
            at = cells[left]
            equal = self._cells[at] == keys[left]
            found[left[equal]] = self._heads[at[equal]]
            left = left[~equal]
            cells[left] = (cells[left] + 1) & self._wrap
            left = left[self._used[cells[left]]]
        return found

    def next(self, entries: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The entry after each one in its key's chain, -1 at the end and for -1."""
        if not len(self._next):
            return np.full(len(entries), _EMPTY, dtype=np.int32)
        return np.where(entries >= 0, self._next[entries], np.int32(_EMPTY))

    def entries(self, key: int, limit: int) -> list[int]:
        """At most ``limit`` entries of one key, the newest first."""
        found = []
        entry = self._head(key)
        while entry != _EMPTY and len(found) < limit:
            found.append(entry)
            entry = int(self._next[entry])
        return found

    def add(self, key: int, entry: int) -> None:
        """Put an entry, in no chain yet, at the front of its key's chain."""
        if entry >= len(self._next):
            self._grow_entries(entry + 1)
        cell = self._cell(key)
        if not self._used[cell]:
            self._used[cell] = True
            self._cells[cell] = key
            self._filled += 1
        self._next[entry] = self._heads[cell]
        self._heads[cell] = entry
        self._keys_of[entry] = key
        if 2 * self._filled > len(self._cells):
            self._rebuild()

    def remove(self, entry: int) -> None:
        """Take an entry out of its chain."""
        cell = self._cell(int(self._keys_of[entry]))
        before, at = _EMPTY, int(self._heads[cell])
        while at != entry:
            before, at = at, int(self._next[at])
        if before == _EMPTY:
            self._heads[cell] = self._next[entry]
        else:
            self._next[before] = self._next[entry]
        self._next[entry] = _EMPTY

    def _head(self, key: int) -> int:
        cell = self._cell(key)
        return int(self._heads[cell]) if self._used[cell] else _EMPTY

    def _cell(self, key: int) -> int:
        """The key's cell, or the empty one where it belongs."""
        cell = ((key * _MULTIPLIER) & _MASK) >> (64 - self._bits)
        while self._used[cell] and int(self._cells[cell]) != key:
            cell = (cell + 1) & self._wrap
        return cell

    def _allocate(self) -> None:
        size = 1 << self._bits
        self._wrap = size - 1
        self._used = np.zeros(size, dtype=np.bool_)
        self._cells = np.zeros(size, dtype=np.uint64)
        self._heads = np.full(size, _EMPTY, dtype=np.int32)
        self._filled = 0

    def _grow_entries(self, needed: int) -> None:
        size = max(needed, 2 * len(self._next), 1024)
        for name, fill in (("_next", _EMPTY), ("_keys_of", 0)):
            old = getattr(self, name)
            new = np.full(size, fill, dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    def _rebuild(self) -> None:
        """Double the cells and drop the keys that have no entries left."""
        live = self._used & (self._heads != _EMPTY)
        keys, heads = self._cells[live], self._heads[live]
        while 4 * len(keys) > 1 << self._bits:
            self._bits += 1
        self._allocate()
        with np.errstate(over="ignore"):
            cells = ((keys * np.uint64(_MULTIPLIER)) >> np.uint64(64 - self._bits)).astype(np.intp)
        left = np.arange(len(keys))
        while left.size:
            free = left[~self._used[cells[left]]]
            # Of several keys that want one empty cell the first takes it, the others go on.
            places, first = np.unique(cells[free], return_index=True)
            winners = free[first]
            self._used[places] = True
            self._cells[places] = keys[winners]
            self._heads[places] = heads[winners]
            left = np.setdiff1d(left, winners, assume_unique=True)
            taken = self._used[cells[left]]
            cells[left[taken]] = (cells[left[taken]] + 1) & self._wrap
        self._filled = len(keys)
