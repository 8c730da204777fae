"""ChunkIndex: which stored chunks hold these tokens (spec rows B5, B6, B8, S11).

A chunk has a record (tokens, key, parent, scope, ...) in a file that the kernel may page out, at a
number of this index alone, its slot. Memory holds only hints, tables from hashes to slots: of the
whole chunk's tokens, of parts of them (anchors, by which edited chunks are found), of its key and
of its parent's. Hints are verified against the record before anything is made of them, so a hash
that collides or a hint that is stale costs a look and no more.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.tokens import hashing
from kvloom.tokens.hashing import KEY_BYTES
from kvloom.tokens.hints import Hashes, HintTable, Numbers
from kvloom.tokens.records import Records

Tokens = npt.NDArray[np.int32]
Fingerprints = npt.NDArray[np.uint64]

ANCHORS = 4  # parts of a chunk: any one that no edit touched finds it
# The newest sources of a text are looked at, so that one stored a thousand times (boilerplate, a
# system prompt) is not compared a thousand times; more of them would hardly give longer runs.
_SOURCES = 8
_MOST_PAIRS = 65536  # of windows and sources in one prompt: then fewer sources for each
_BATCH = 4096
_COMPARE = 4096  # windows compared at once: 1 MiB of tokens


class ChunkIndex:
    """Chunks by their tokens, thread-safe; over ``max_chunks`` the oldest added are forgotten.

    Whoever uses several calls on slots holds ``lock`` meanwhile, so that a slot keeps its meaning.
    Writers prepare their work without it: a look-up never waits for a merge of tables.

    Args:
        chunk_size: tokens of a chunk; others are ignored.
    """

    def __init__(self, chunk_size: int, max_chunks: int = 1_000_000) -> None:
        if chunk_size < 1 or max_chunks < 1:
            raise ValueError(f"an index of {max_chunks} chunks of {chunk_size} tokens holds none")
        self.chunk_size = chunk_size
        self.anchor_size = max(chunk_size // ANCHORS, min(8, chunk_size))
        self.lock = threading.RLock()
        self._writing = threading.Lock()  # taken before ``lock``
        self._max_chunks = max_chunks
        # A slot is used anew only after all tables have dropped its hints, so an old hint never
        # names a new chunk. The slack is what may be forgotten before they are cleaned.
        self._capacity = max_chunks + max(64, max_chunks // 8)
        self._records = Records(_record(chunk_size))
        self._live = np.zeros(0, dtype=np.bool_)
        self._added = np.zeros(0, dtype=np.uint32)  # order of being added
        self._count = 0
        self._clock = 0
        self._unused = 0  # slots from here on were never used
        self._free: Numbers = np.empty(0, dtype=np.intp)
        self._by_age: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)  # the oldest first ...
        self._next_oldest = 0  # ... those before this place are forgotten
        self._whole, self._anchors = HintTable(), HintTable()
        self._keys, self._children = HintTable(), HintTable()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: bytes) -> bool:
        return bool(self.known([key])[0])

    @property
    def nbytes(self) -> int:
        """Bytes of anonymous memory; records are in a file (``token_bytes``)."""
        tables = (self._whole, self._anchors, self._keys, self._children)
        total = sum(table.nbytes for table in tables) + self._live.nbytes + self._added.nbytes
        return total + self._by_age.nbytes + self._free.nbytes + self._memory_records()

    @property
    def token_bytes(self) -> int:
        """Bytes of the file of records: token ids, and what else is known of a chunk."""
        return self._records.rows.nbytes - self._memory_records()

    def add(
        self,
        *,
        key: bytes,
        parent: bytes,
        scope: bytes,
        token_ids: npt.ArrayLike,
        position: int,
        generation: int = 0,
        created_ns: int = 0,
    ) -> None:
        """Make a chunk known; one that is known already, or of another size, is ignored.

        Args: as in ``BlockHeader``. Many chunks at once are much faster by ``add_many``.
        """
        tokens = np.asarray(token_ids, dtype=np.int32)
        if len(tokens) == self.chunk_size:
            self.add_many(
                keys=[key],
                parents=[parent],
                scopes=[scope],
                token_ids=tokens[None],
                positions=[position],
                generations=[generation],
                created_ns=[created_ns],
            )

    def add_many(
        self,
        *,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        scopes: Sequence[bytes],
        token_ids: Tokens,
        positions: npt.ArrayLike,
        generations: npt.ArrayLike = 0,
        created_ns: npt.ArrayLike = 0,
    ) -> None:
        """``add`` for many: sequences of n, ``token_ids`` int32 [n, chunk_size].

        ``generations`` and ``created_ns`` may be one number for all.
        """
        if token_ids.shape[1:] != (self.chunk_size,):
            return
        rows = np.zeros(len(keys), dtype=self._records.rows.dtype)
        rows["tokens"], rows["position"] = token_ids, positions
        rows["generation"], rows["created_ns"] = generations, created_ns
        rows["key"], rows["parent"] = _words(keys), _words(parents)
        tags = {scope: _scope_tag(scope) for scope in set(scopes)}
        rows["scope"] = np.array([tags[scope] for scope in scopes]).reshape(-1, 2)
        rows = rows[[len(key) == KEY_BYTES for key in keys]]
        step = min(_BATCH, self._capacity - self._max_chunks, self._max_chunks)
        with self._writing:
            for first in range(0, len(rows), step):
                self._insert(rows[first : first + step])

    def remove(self, key: bytes) -> bool:
        """Forget a chunk; whether it was known."""
        with self._writing:
            slots = self._slots_of(_words([key]))
            if len(key) != KEY_BYTES or slots[0] < 0:
                return False
            self._forget(slots)
            return True

    def known(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which chunks are known, bool [n]."""
        with self.lock:
            known = self._slots_of(_words(keys)) >= 0
        return known & np.array([len(key) == KEY_BYTES for key in keys], dtype=np.bool_)

    def exact(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which chunks are known as exact KV (generation 0), bool [n]."""
        with self.lock:
            slots = self._slots_of(_words(keys))
            exact = slots >= 0
            exact[exact] = self._records.rows["generation"][slots[exact]] == 0
        return exact & np.array([len(key) == KEY_BYTES for key in keys], dtype=np.bool_)

    # For the matcher, which holds ``lock``

    def rows(self, slots: Numbers) -> npt.NDArray[Any]:
        """Copies of records: fields tokens, key, position, created_ns, ..."""
        return self._records.rows[slots]

    def tokens(self, slots: Numbers) -> Tokens:
        """Token ids int32 [n, chunk_size]."""
        tokens: Tokens = self._records.rows["tokens"][slots]
        return tokens

    def created_ns(self, slots: Numbers) -> npt.NDArray[np.int64]:
        created: npt.NDArray[np.int64] = self._records.rows["created_ns"][slots]
        return created

    def parents(self, slots: Numbers) -> Numbers:
        """Slots of the chunks before; -1 where that is not known."""
        rows = self._records.rows
        wanted, parents = rows["parent"][slots], rows["parent_slot"][slots].astype(np.intp)
        known = self._live[parents] & (rows["key"][parents] == wanted).all(axis=1)
        if not known.all():  # the parent came later, or was forgotten
            parents[~known] = self._slots_of(wanted[~known])
        return parents

    def children(self, slots: Numbers, limit: int) -> tuple[Numbers, Numbers]:
        """(index into ``slots``, slot of a chunk that followed it in some prompt) pairs."""
        keys = self._records.rows["key"][slots]
        which, found, _ = self._children.find(_key_hashes(keys), limit)
        good = self._live[found]
        good &= (self._records.rows["parent"][found] == keys[which]).all(axis=1)
        return which[good], found[good]

    def find_whole(self, tokens: Tokens, scope: bytes) -> tuple[Numbers, Numbers, bool]:
        """Stored chunks of a scope that equal windows of a text, token by token.

        Args:
            tokens: int32 [n].

        Returns:
            (offset, slot) pairs, by ascending offset, at most 8 for an offset; and whether these
            are all there are.
        """
        prints = hashing.rolling_fingerprints(tokens, self.chunk_size)
        where, slots, complete = self._find(self._whole, prints, scope, width=self.chunk_size)
        equal = np.empty(len(where), dtype=np.bool_)
        for i in range(0, len(where), _COMPARE):
            part = slice(i, i + _COMPARE)
            windows = np.lib.stride_tricks.sliding_window_view(tokens, self.chunk_size)
            equal[part] = (windows[where[part]] == self.tokens(slots[part])).all(axis=1)
        return where[equal], slots[equal], complete

    def find_anchored(
        self, tokens: Tokens, chosen: npt.NDArray[np.bool_], scope: bytes
    ) -> tuple[Numbers, Numbers]:
        """Chunks of a scope one of whose parts may stand in a text: hints only.

        Args:
            tokens: int32 [n]; chosen: bool [n - anchor_size + 1], the offsets to look at.

        Returns:
            (offset where the chunk's first token would stand, perhaps negative; slot) pairs.
        """
        prints = hashing.rolling_fingerprints(tokens, self.anchor_size)
        where, entries, _ = self._find(
            self._anchors,
            prints,
            scope,
            width=self.anchor_size,
            chosen=chosen,
            entries_per_slot=ANCHORS,
        )
        slots, part = np.divmod(entries, ANCHORS)
        return where - part * self.anchor_size, slots

    def _find(
        self,
        table: HintTable,
        prints: Fingerprints,
        scope: bytes,
        *,
        width: int,
        chosen: npt.NDArray[np.bool_] | None = None,
        entries_per_slot: int = 1,
    ) -> tuple[Numbers, Numbers, bool]:
        tag = _scope_tag(scope)
        hashes = _print_hashes(prints, tag)
        if chosen is None:
            where = table.may_have(hashes)
        else:
            where = np.flatnonzero(chosen)
            where = where[table.may_have(hashes[where])]
        kept = _without_overlaps(where, prints[where], width)
        limit = max(1, min(_SOURCES, _MOST_PAIRS // max(len(kept), 1)))
        which, entries, complete = table.find(hashes[kept], limit)
        slots = entries // entries_per_slot
        good = self._live[slots]
        good &= (self._records.rows["scope"][slots] == tag).all(axis=1)
        return kept[which[good]], entries[good], complete and len(kept) == len(where)

    def _slots_of(self, keys: Fingerprints) -> Numbers:
        """Slots of keys, uint64 [n, 2]; -1 where a key is not known."""
        slots = np.full(len(keys), -1, dtype=np.intp)
        which, found, _ = self._keys.find(_key_hashes(keys))
        good = self._live[found]
        good &= (self._records.rows["key"][found] == keys[which]).all(axis=1)
        slots[which[good]] = found[good]
        return slots

    # For writers, which hold ``_writing``

    def _insert(self, rows: npt.NDArray[Any]) -> None:
        new = np.sort(np.unique(rows["key"], axis=0, return_index=True)[1])
        rows = rows[new[self._slots_of(rows["key"][new]) < 0]]
        if not len(rows):
            return
        self._forget_oldest(self._count + len(rows) - self._max_chunks)
        slots = self._take_slots(len(rows))
        tags = rows["scope"]
        self._records.rows[slots] = rows
        self._added[slots] = np.arange(self._clock, self._clock + len(rows))
        self._clock += len(rows)
        self._whole.add(_print_hashes(hashing.row_fingerprints(rows["tokens"]), tags), slots)
        for part in range(self.chunk_size // self.anchor_size):
            first = part * self.anchor_size
            prints = hashing.row_fingerprints(rows["tokens"][:, first : first + self.anchor_size])
            self._anchors.add(_print_hashes(prints, tags), ANCHORS * slots + part)
        self._keys.add(_key_hashes(rows["key"]), slots)
        self._children.add(_key_hashes(rows["parent"]), slots)
        with self.lock:
            self._live[slots] = True
            self._count += len(rows)
        self._records.rows["parent_slot"][slots] = self._slots_of(rows["parent"])

    def _forget(self, slots: Numbers) -> None:
        with self.lock:
            self._live[slots] = False
            self._count -= len(slots)

    def _forget_oldest(self, count: int) -> None:
        while count > 0:
            if self._next_oldest >= len(self._by_age):
                self._sort_by_age()
            oldest = self._by_age[self._next_oldest : self._next_oldest + count]
            self._next_oldest += len(oldest)
            oldest = oldest[self._live[oldest]]
            self._forget(oldest.astype(np.intp))
            count -= len(oldest)

    def _sort_by_age(self) -> None:
        live = np.flatnonzero(self._live)
        live = live[np.argsort(self._added[live])]
        self._by_age, self._next_oldest = live.astype(np.int32), 0
        self._added[live] = np.arange(len(live))  # so the clock never runs over
        self._clock = len(live)

    def _take_slots(self, count: int) -> Numbers:
        if self._unused + count <= self._capacity:
            first, self._unused = self._unused, self._unused + count
            self._grow(self._unused)
            return np.arange(first, self._unused)
        if len(self._free) < count:
            self._clean()
        slots, self._free = self._free[:count], self._free[count:]
        return slots

    def _clean(self) -> None:
        """Drop the hints of forgotten chunks, so that their slots can be used anew."""
        self._grow(self._capacity)
        keep = self._live.__getitem__
        tables = (
            self._whole.kept(keep),
            self._anchors.kept(lambda entries: keep(entries // ANCHORS)),
            self._keys.kept(keep),
            self._children.kept(keep),
        )
        with self.lock:
            self._whole, self._anchors, self._keys, self._children = tables
        self._free = np.flatnonzero(~self._live)
        self._unused = self._capacity
        self._sort_by_age()  # a slot used anew is no longer as old as the list says

    def _grow(self, needed: int) -> None:
        have = len(self._live)
        if needed <= have:
            return
        size = min(max(needed, have + have // 4, 1024), max(self._capacity, needed))
        live, added = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.uint32)
        live[:have], added[:have] = self._live, self._added
        self._records.grow(size)
        with self.lock:
            self._live, self._added = live, added

    def _memory_records(self) -> int:
        return 0 if self._records.in_file else self._records.rows.nbytes


def _record(chunk_size: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("key", "<u8", 2),
            ("parent", "<u8", 2),
            ("scope", "<u8", 2),
            ("created_ns", "<i8"),
            ("position", "<i4"),
            ("parent_slot", "<i4"),  # a hint, perhaps stale
            ("generation", "<i4"),
            ("tokens", "<i4", chunk_size),
        ]
    )


def _words(keys: Sequence[bytes]) -> Fingerprints:
    """Keys as uint64 [n, 2]; one of another length (no key at all) as zeros."""
    blank = bytes(KEY_BYTES)
    data = b"".join(key if len(key) == KEY_BYTES else blank for key in keys)
    return np.frombuffer(data, dtype="<u8").reshape(-1, 2)


def _scope_tag(scope: bytes) -> Fingerprints:
    return np.frombuffer(hashlib.blake2b(scope, digest_size=16).digest(), dtype="<u8")


def _key_hashes(keys: Fingerprints) -> Hashes:
    return _top(keys[..., 0] * np.uint64(0x9FB21C651E98DF25) + keys[..., 1])


def _print_hashes(prints: Fingerprints, tags: Fingerprints) -> Hashes:
    """Scopes have hashes of their own: no tenant's chunks crowd out those of another."""
    return _top(prints ^ tags[..., 0])


def _top(values: Fingerprints) -> Hashes:
    top: Hashes = ((values * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(32)).astype(np.uint32)
    return top


def _without_overlaps(where: Numbers, prints: Fingerprints, width: int) -> Numbers:
    """Of the offsets with one fingerprint, one in each stretch of ``width`` tokens.

    Equal windows overlap only in text that repeats itself (equal tokens, tables of zeros), and then
    one stands at every offset: without this, work would grow with offsets instead of chunks. The
    ends that it costs are won back when runs are extended.
    """
    order = np.lexsort((where, prints))
    ordered, places = prints[order], where[order] // width
    again = (ordered[1:] == ordered[:-1]) & (places[1:] == places[:-1])
    if not again.any():
        return where
    kept: Numbers = where[order[np.concatenate(([True], ~again))]]
    kept.sort()
    return kept
