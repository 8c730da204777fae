"""ChunkIndex: which stored chunks hold these tokens (spec rows B5, B6, B8, S11).

Fixed-width columns, one row ("slot") a chunk: fingerprint, key, parent, scope, position, age; and
multimaps from whole-chunk fingerprints, from fingerprints of parts (``anchors``, to find edited
chunks), from keys and from parents to slots. Token ids lie in a file-backed array that the kernel
may page out: they are read only for the few chunks that a prompt is compared with.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from typing import IO

import numpy as np
import numpy.typing as npt

from kvloom.tokens.hashing import rolling_fingerprints
from kvloom.tokens.table import MultiMap

ANCHORS = 8  # parts of a chunk: one that no edit touched finds it
_COMPARE = 4096  # windows compared at once: 1 MiB of tokens, whatever the number of candidates
_ROW = np.dtype(
    [
        ("live", "?"),
        ("generation", "u1"),
        ("scope", "i4"),
        ("position", "i4"),
        ("created_ns", "i8"),
        ("key", "<u8", (2,)),
        ("parent", "<u8", (2,)),
    ]
)


class ChunkIndex:
    """Chunks by their tokens, thread-safe; over ``max_chunks`` the oldest added is forgotten.

    Slots are numbers of this index alone. Whoever uses several calls on slots holds ``lock``
    meanwhile, so that a slot keeps its meaning.
    """

    def __init__(self, chunk_size: int, max_chunks: int = 1_000_000) -> None:
        self.chunk_size = chunk_size
        self.anchor_size = max(chunk_size // ANCHORS, 1)
        self.lock = threading.RLock()
        self._max_chunks = max_chunks
        self._count = 0
        self._cursor = 0
        self._scopes: dict[bytes, int] = {}
        self._by_print, self._by_anchor = MultiMap(), MultiMap()
        self._by_key, self._by_parent = MultiMap(), MultiMap()
        self._rows = np.zeros(0, dtype=_ROW)
        self._tokens: npt.NDArray[np.int32] = np.empty((0, chunk_size), dtype=np.int32)
        self._file = _scratch_file()
        self._grow(min(1024, max_chunks))

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: bytes) -> bool:
        with self.lock:
            return self.slot_of(key) is not None

    @property
    def nbytes(self) -> int:
        """Bytes of anonymous memory; token ids are in a file."""
        maps = (self._by_print, self._by_anchor, self._by_key, self._by_parent)
        return self._rows.nbytes + sum(table.nbytes for table in maps)

    @property
    def token_bytes(self) -> int:
        return self._tokens.nbytes

    def add(
        self,
        *,
        key: bytes,
        parent: bytes,
        scope: bytes,
        token_ids: npt.NDArray[np.int32],
        position: int,
        generation: int = 0,
        created_ns: int = 0,
    ) -> None:
        """Make a chunk known; a key that is known already, or another chunk size, is ignored."""
        if len(token_ids) != self.chunk_size:
            return
        fingerprint = int(rolling_fingerprints(token_ids, self.chunk_size)[0])
        step = self.anchor_size
        anchors = rolling_fingerprints(token_ids, step)[::step][:ANCHORS]
        with self.lock:
            if self.slot_of(key) is not None:
                return
            slot = self._take_slot()
            scope_number = self._scopes.setdefault(scope, len(self._scopes))
            self._rows[slot] = (
                True,
                generation,
                scope_number,
                position,
                created_ns,
                _words(key),
                _words(parent),
            )
            self._tokens[slot] = token_ids
            self._by_print.add(fingerprint, slot)
            for part, anchor in enumerate(anchors.tolist()):
                self._by_anchor.add(anchor, slot * ANCHORS + part)
            self._by_key.add(_short(key), slot)
            self._by_parent.add(_short(parent), slot)
            self._count += 1

    def remove(self, key: bytes) -> bool:
        """Forget a chunk; whether it was known."""
        with self.lock:
            slot = self.slot_of(key)
            if slot is None:
                return False
            self._forget(slot)
            return True

    def prefix_hits(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are known as exact KV."""
        with self.lock:
            for count, key in enumerate(keys):
                slot = self.slot_of(key)
                if slot is None or self._rows["generation"][slot] != 0:
                    return count
            return len(keys)

    def slot_of(self, key: bytes) -> int | None:
        for slot in self._by_key.entries(_short(key), limit=self._max_chunks):
            if self.key(slot) == key:
                return slot
        return None

    def key(self, slot: int) -> bytes:
        return bytes(self._rows["key"][slot].tobytes())

    def parent_slot(self, slot: int) -> int | None:
        return self.slot_of(bytes(self._rows["parent"][slot].tobytes()))

    def child_slots(self, slot: int, limit: int) -> list[int]:
        """Chunks that followed this one in some prompt, the newest first."""
        key = self.key(slot)
        children = self._by_parent.entries(_short(key), limit)
        return [child for child in children if self._rows["parent"][child].tobytes() == key]

    def position(self, slot: int) -> int:
        return int(self._rows["position"][slot])

    def created_ns(self, slot: int) -> int:
        return int(self._rows["created_ns"][slot])

    def tokens(self, slots: int | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Token ids of a chunk [chunk_size], or of several [n, chunk_size]."""
        return self._tokens[slots]

    def parent_slots(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """``parent_slot`` of many; -1 where the parent is not known."""
        wanted = self._rows["parent"][slots]
        found = self._by_key.find(np.ascontiguousarray(wanted[:, 0]))
        same = (self._rows["key"][found] == wanted).all(axis=1)
        # Two keys of one first word are next to impossible, but then the chain has both.
        for place in np.flatnonzero((found >= 0) & ~same).tolist():
            parent = self.parent_slot(int(slots[place]))
            found[place] = -1 if parent is None else parent
        return found

    def candidates(
        self,
        windows: npt.NDArray[np.int32],
        fingerprints: npt.NDArray[np.uint64],
        scope: bytes,
        limit: int,
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
        """Stored chunks that equal windows of a prompt, token by token.

        Args:
            windows: int32 [n, chunk_size]; fingerprints: uint64 [n], of the windows.
            limit: candidates looked at for each window, the newest first: text that is stored a
                thousand times (boilerplate) must not be compared a thousand times.

        Returns:
            (window, slot) pairs, by ascending window.
        """
        scope_number = self._scopes.get(scope)
        if scope_number is None:
            return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int32)
        heads = self._by_print.find(fingerprints)
        hit = np.flatnonzero(heads >= 0)
        pairs: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]] = []
        slots = heads[hit]
        for _ in range(limit):
            if not hit.size:
                break
            mine = self._rows["scope"][slots] == scope_number
            pairs.append((hit[mine], slots[mine]))
            slots = self._by_print.next(slots)
            left = slots >= 0
            hit, slots = hit[left], slots[left]
        if not pairs:
            return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int32)
        where = np.concatenate([pair[0] for pair in pairs])
        which = np.concatenate([pair[1] for pair in pairs])
        equal = np.concatenate(
            [
                (windows[where[i : i + _COMPARE]] == self._tokens[which[i : i + _COMPARE]]).all(
                    axis=1
                )
                for i in range(0, len(where), _COMPARE)
            ]
            or [np.empty(0, dtype=np.bool_)]
        )
        where, which = where[equal], which[equal]
        order = np.argsort(where, kind="stable")
        return where[order], which[order]

    def anchored(
        self, fingerprints: npt.NDArray[np.uint64], scope: bytes, limit: int
    ) -> list[tuple[int, int]]:
        """(offset, slot) of chunks one of whose parts may stand in a stretch of a prompt.

        Args:
            fingerprints: uint64, of ``anchor_size`` tokens at each offset of the stretch.
            limit: candidates for each offset, the newest first.

        Returns:
            Where the chunk's first token would stand, perhaps before the stretch, and its slot;
            hints only, each once, in the order of the text.
        """
        scope_number = self._scopes.get(scope)
        heads = self._by_anchor.find(fingerprints)
        found: dict[tuple[int, int], None] = {}
        for offset in np.flatnonzero(heads >= 0).tolist():
            for entry in self._by_anchor.entries(int(fingerprints[offset]), limit):
                slot, part = divmod(entry, ANCHORS)
                if self._rows["scope"][slot] == scope_number:
                    found[offset - part * self.anchor_size, slot] = None
        return list(found)

    def _take_slot(self) -> int:
        slot = self._cursor
        self._cursor = (slot + 1) % self._max_chunks
        if slot >= len(self._rows):
            self._grow(min(2 * len(self._rows), self._max_chunks))
        if self._rows["live"][slot]:
            self._forget(slot)
        return slot

    def _forget(self, slot: int) -> None:
        self._rows["live"][slot] = False
        self._by_print.remove(slot)
        for part in range(min(ANCHORS, self.chunk_size // self.anchor_size)):
            self._by_anchor.remove(slot * ANCHORS + part)
        self._by_key.remove(slot)
        self._by_parent.remove(slot)
        self._count -= 1

    def _grow(self, slots: int) -> None:
        rows = np.zeros(slots, dtype=_ROW)
        rows[: len(self._rows)] = self._rows
        self._rows = rows
        shape = (slots, self.chunk_size)
        if self._file is not None:
            self._file.truncate(4 * slots * self.chunk_size)
            self._tokens = np.memmap(self._file, dtype=np.int32, mode="r+", shape=shape)
        else:
            tokens = np.zeros(shape, dtype=np.int32)
            tokens[: len(self._tokens)] = self._tokens
            self._tokens = tokens


def _words(key: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(key, dtype="<u8")


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def _scratch_file() -> IO[bytes] | None:
    """An unlinked file for token ids; None (memory instead) where no disk can be had."""
    try:
        return tempfile.TemporaryFile(prefix="kvloom-tokens-")
    except OSError:
        return None
