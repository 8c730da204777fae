"""HintTable: a compact multimap from 32-bit hashes to numbers, asked by the ten thousand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.intp]
Hashes = npt.NDArray[np.uint32]

_ENTRY = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_FANOUT = 8  # a level is merged into the one before it when that is less than this much longer
_SMALL = 1024  # shorter levels are merged at once: asking costs by the level
_BITS_PER_ENTRY = 16  # of the filter: with three looks 0.5 % of unknown hashes get past it
_AT_ONCE = 65536  # hashes: temporaries stay small
_FACTORS = (np.uint32(1), np.uint32(0x9E3779B1), np.uint32(0x85EBCA77))
_LEAST_BITS = 16  # the filter has 2**16 bits at least


class HintTable:
    """(hash, entry) pairs; entries are numbers below 2**32. About 10 bytes a pair.

    Pairs lie in sorted levels, each far longer than the next, that are merged as they grow; a
    filter of bits turns away most hashes that are not there with one look. Entries are never
    removed one by one: they are hints, which the owner verifies, and ``kept`` makes a clean table.

    One thread may write while others read: what readers use is swapped as a whole.
    """

    def __init__(self) -> None:
        self._levels: tuple[npt.NDArray[np.uint64], ...] = ()
        self._filter = _Filter(_LEAST_BITS)

    def __len__(self) -> int:
        return sum(len(level) for level in self._levels)

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in self._levels) + self._filter.nbytes

    def add(self, hashes: Hashes, entries: Numbers) -> None:
        """Add pairs: hashes uint32 [n], entries [n]."""
        level = (hashes.astype(np.uint64) << _HALF) | entries.astype(np.uint64)
        level.sort()
        levels = list(self._levels)
        while levels and len(levels[-1]) < max(_FANOUT * len(level), _SMALL):
            # The stable sort finds its two sorted halves and merges them in linear time.
            level = np.concatenate((levels.pop(), level))
            level.sort(kind="stable")
        self._filter.add(hashes)  # before readers see the level: the filter must know all of it
        levels.append(level)
        total = sum(len(each) for each in levels)
        if total * _BITS_PER_ENTRY > self._filter.size:
            self._filter = _filter_of(levels, total)
        self._levels = tuple(levels)

    def kept(self, keep: Callable[[Numbers], npt.NDArray[np.bool_]]) -> HintTable:
        """A new table of the pairs whose entries ``keep`` is true for."""
        pairs = np.concatenate(self._levels) if self._levels else np.empty(0, dtype=np.uint64)
        pairs = pairs[keep((pairs & _ENTRY).astype(np.intp))]
        pairs.sort(kind="stable")
        table = HintTable()
        table._levels = (pairs,)
        table._filter = _filter_of([pairs], len(pairs))
        return table

    def may_have(self, hashes: Hashes) -> Numbers:
        """Indices of the hashes that may be there; most of the others are left out."""
        return self._filter.passed(hashes)

    def find(self, hashes: Hashes, limit: int | None = None) -> tuple[Numbers, Numbers, bool]:
        """Entries of many hashes.

        Args:
            limit: entries of one hash, of the last added levels first, there the greatest first.

        Returns:
            (index into ``hashes``, entry) pairs, by ascending index; and whether these are all.
        """
        none = np.empty(0, dtype=np.intp)
        asked = self.may_have(hashes)
        low = hashes[asked].astype(np.uint64) << _HALF
        left = np.full(len(asked), len(self) if limit is None else limit, dtype=np.intp)
        indices, entries, complete = [none], [none], True
        for level in reversed(self._levels):
            end = np.searchsorted(level, low | _ENTRY, side="right")
            hit = np.flatnonzero(level[np.maximum(end - 1, 0)] >= low) if len(level) else none
            hit = hit[end[hit] > 0]
            if not hit.size:
                continue
            found = end[hit] - np.searchsorted(level, low[hit], side="left")
            count = np.minimum(found, left[hit])
            complete &= bool((count == found).all())
            left[hit] -= count
            backwards = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            at = np.repeat(end[hit] - 1, count) - backwards
            indices.append(np.repeat(asked[hit], count))
            entries.append((level[at] & _ENTRY).astype(np.intp))
        index, entry = np.concatenate(indices), np.concatenate(entries)
        order = np.argsort(index, kind="stable")
        return index[order], entry[order], complete


class _Filter:
    """A Bloom filter: a hash one of whose bits is not set was never added."""

    def __init__(self, bits: int) -> None:
        self._shift = np.uint32(32 - bits)
        self._bytes = np.zeros(1 << (bits - 3), dtype=np.uint8)

    @property
    def size(self) -> int:
        return 8 * len(self._bytes)

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    def add(self, hashes: Hashes) -> None:
        for factor in _FACTORS:
            bits = (hashes * factor) >> self._shift
            np.bitwise_or.at(self._bytes, bits >> 3, np.uint8(1) << (bits & 7).astype(np.uint8))

    def passed(self, hashes: Hashes) -> Numbers:
        left = np.arange(len(hashes))
        for factor in _FACTORS:
            bits = (hashes[left] * factor) >> self._shift
            left = left[(self._bytes[bits >> 3] >> (bits & 7).astype(np.uint8)) & 1 != 0]
        return left


def _filter_of(levels: list[npt.NDArray[np.uint64]], total: int) -> _Filter:
    bits = max((total * _BITS_PER_ENTRY - 1).bit_length(), _LEAST_BITS)
    made = _Filter(min(bits, 32))
    for level in levels:
        for first in range(0, len(level), _AT_ONCE):
            made.add((level[first : first + _AT_ONCE] >> _HALF).astype(np.uint32))
    return made
