"""What an engine knows of its chunks before the index does.

Writing to a full index merges tables, for seconds at a time; a step of the engine must never wait
for that. So the engine only says what it has handed to the store and what it could not load, and
whoever feeds the index comes to it later (``settle``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvloom.tokens.index import ChunkIndex

_MOST = 65536  # for what is neither stored nor reported as lost; a miss, if it is asked for

Flags = npt.NDArray[np.bool_]


class ExpectedChunks:
    """An index with what is on its way into it and out of it; thread-safe.

    A chunk that is on its way in counts as known by its key, and is found by its tokens when it has
    arrived.

    Attributes:
        index: that it is about.
    """

    def __init__(self, index: ChunkIndex) -> None:
        self.index = index
        self._lock = threading.Lock()
        self._coming: OrderedDict[bytes, int] = OrderedDict()  # generations by key
        self._leaving: set[bytes] = set()

    def add(self, keys: Sequence[bytes], generation: int) -> None:
        """These were handed to the store."""
        with self._lock:
            for key in keys:
                self._coming[key] = generation
                self._leaving.discard(key)
            while len(self._coming) > _MOST:
                self._coming.popitem(last=False)

    def remove(self, keys: Sequence[bytes]) -> None:
        """These are not in the store after all."""
        with self._lock:
            for key in keys:
                self._coming.pop(key, None)
                self._leaving.add(key)

    def known(self, keys: Sequence[bytes]) -> Flags:
        """Which chunks are known, bool [n]."""
        return self._corrected(self.index.known(keys), keys, any_generation=True)

    def exact(self, keys: Sequence[bytes]) -> Flags:
        """Which chunks are known as exact KV (generation 0), bool [n]."""
        return self._corrected(self.index.exact(keys), keys, any_generation=False)

    def prefix_hits(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are known as exact KV."""
        missing = np.flatnonzero(~self.exact(keys))
        return int(missing[0]) if missing.size else len(keys)

    def settle(self) -> None:
        """Forget in the index what was removed, and here what the index knows by now."""
        with self._lock:
            leaving, coming = list(self._leaving), list(self._coming)
        for key in leaving:
            self.index.remove(key)
        arrived = self.index.known(coming)
        with self._lock:
            self._leaving.difference_update(leaving)
            for key, there in zip(coming, arrived, strict=True):
                if there:
                    self._coming.pop(key, None)

    def _corrected(self, found: Flags, keys: Sequence[bytes], *, any_generation: bool) -> Flags:
        with self._lock:
            if not (self._coming or self._leaving):
                return found
            for number, key in enumerate(keys):
                if key in self._leaving:
                    found[number] = False
                elif key in self._coming:
                    found[number] |= any_generation or self._coming[key] == 0
        return found
