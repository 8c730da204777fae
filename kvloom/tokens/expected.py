"""An index as an engine's steps see it: what they add and remove counts at once, written later.

Writing to a full index merges tables, for seconds at a time, and a step must never wait for that.
So a thread of its own writes, and until it has, a key's last word stands here. By its tokens a
chunk is found when it is written, which is mostly at once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvloom.tokens.index import ChunkIndex, Tokens

logger = logging.getLogger(__name__)

Flags = npt.NDArray[np.bool_]

_MOST = 65536  # chunks that wait to be written; beyond, they are found when the store is scanned
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Additions:
    """Chunks of one request, as ``ChunkIndex.add_many`` takes them."""

    keys: Sequence[bytes]
    parents: Sequence[bytes]
    scope: bytes
    token_ids: Tokens
    positions: Sequence[int]
    generation: int = 0
    created_ns: int = 0


@dataclass(slots=True)
class _Change:
    number: int
    added: Additions | None = None
    removed: list[bytes] = field(default_factory=list)


class ExpectedChunks:
    """An index with what is on its way into it and out of it; thread-safe.

    Attributes:
        index: that it is about; to be searched by tokens.
    """

    def __init__(self, index: ChunkIndex) -> None:
        self.index = index
        self._changes: deque[_Change] = deque()
        self._waiting = 0  # chunks in them
        self._number = 0
        # Of each key the last change that is not written, and the generation it gets: None, gone.
        self._last: dict[bytes, tuple[int, int | None]] = {}
        self._changed = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvloom-index-write", daemon=True)
        self._thread.start()

    def add(self, chunks: Additions) -> None:
        """These were handed to the store."""
        with self._changed:
            if self._waiting + len(chunks.keys) > _MOST:
                return
            self._waiting += len(chunks.keys)
            self._announce(_Change(self._number, added=chunks), chunks.keys, chunks.generation)

    def remove(self, keys: Sequence[bytes]) -> None:
        """These are not in the store after all."""
        if keys:
            with self._changed:
                self._announce(_Change(self._number, removed=list(keys)), keys, None)

    def known(self, keys: Sequence[bytes]) -> Flags:
        """Which chunks are known, bool [n]."""
        last = self._unwritten(keys)
        known = self.index.known(keys)
        for number, generation in last.items():
            known[number] = generation is not None
        return known

    def exact(self, keys: Sequence[bytes]) -> Flags:
        """Which chunks are known as exact KV (generation 0), bool [n]."""
        last = self._unwritten(keys)
        exact = self.index.exact(keys)
        for number, generation in last.items():
            exact[number] = generation == 0
        return exact

    def prefix_hits(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are known as exact KV."""
        missing = np.flatnonzero(~self.exact(keys))
        return int(missing[0]) if missing.size else len(keys)

    def wait_written(self, timeout_s: float) -> bool:
        """Whether the index knows all that was said before this call."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._last, timeout_s)

    def close(self) -> None:
        """Stop within a bound; idempotent."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _announce(self, change: _Change, keys: Sequence[bytes], generation: int | None) -> None:
        self._number += 1
        self._changes.append(change)
        self._last.update(dict.fromkeys(keys, (change.number, generation)))
        self._changed.notify_all()

    def _unwritten(self, keys: Sequence[bytes]) -> dict[int, int | None]:
        """Generations by place in ``keys``. To be asked before the index: what is written in
        between is then told by one of them."""
        with self._changed:
            if not self._last:
                return {}
            return {i: self._last[key][1] for i, key in enumerate(keys) if key in self._last}

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._changes or self._stop)
                if self._stop:
                    return
                change = self._changes.popleft()
            try:
                self._write(change)
            except Exception:
                # What is not written is a miss, and found when the store is scanned.
                logger.exception("kvloom: the chunk index could not be written")
            with self._changed:
                keys = change.removed
                if change.added is not None:
                    keys = [*change.added.keys]
                    self._waiting -= len(keys)
                for key in keys:
                    if self._last.get(key, (None,))[0] == change.number:
                        del self._last[key]
                self._changed.notify_all()

    def _write(self, change: _Change) -> None:
        for key in change.removed:
            self.index.remove(key)
        if (chunks := change.added) is not None:
            self.index.add_many(
                keys=chunks.keys,
                parents=chunks.parents,
                scopes=[chunks.scope] * len(chunks.keys),
                token_ids=chunks.token_ids,
                positions=chunks.positions,
                generations=chunks.generation,
                created_ns=chunks.created_ns,
            )
