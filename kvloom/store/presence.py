"""Which keys have files, without asking the file system for each (spec row S10).

A folder of blocks is listed once, and again when its mtime says that files came or went. A folder
that is asked for a few of its keys only is not worth a listing: those files are asked for one by
one.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from kvloom.store.layout import SUFFIX, block_name, is_block

_NAMES_A_LOOK = 4  # asking for one file takes as long as listing so many
_FEW = 32
# A directory that changed this shortly before it was listed may change again without a new mtime:
# that is a kernel's tick old, or on some file systems a whole second; clocks of hosts differ too.
_GRANULARITY_NS = 200_000_000
_COARSE_NS = 2_000_000_000


def is_settled(changed_ns: int, now_ns: int) -> bool:
    """Whether a directory that is listed now will have another mtime once it changes again."""
    coarse = changed_ns % 1_000_000_000 == 0
    return now_ns - changed_ns > (_COARSE_NS if coarse else _GRANULARITY_NS)


class Presence:
    """The files of one namespace's folder; for one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.fspath(folder)
        self._listed: dict[int, tuple[int | None, frozenset[bytes]]] = {}

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys have a file."""
        wanted = Counter(map(itemgetter(0), keys))
        listings = {part: self._known(part, count) for part, count in wanted.items()}
        known = {part: listed for part, listed in listings.items() if listed is not None}
        if len(known) == len(listings):
            return [key in known[key[0]] for key in keys]
        return [key in known[key[0]] if key[0] in known else self._is_there(key) for key in keys]

    def _is_there(self, key: bytes) -> bool:
        return os.path.isfile(f"{self._folder}/{block_name(key)}")

    def _known(self, part: int, wanted: int) -> frozenset[bytes] | None:
        """Keys in a part's folder as listed, if the listing is good, or worth making."""
        folder = f"{self._folder}/{part:02x}"
        try:
            changed = os.stat(folder).st_mtime_ns
            listed_when, listed = self._listed.get(part, (None, frozenset()))
            if listed_when == changed:
                return listed
            if _NAMES_A_LOOK * wanted < max(len(listed), _FEW):
                return None
            now = time.time_ns()
            names = filter(is_block, os.listdir(folder))
            keys = frozenset(bytes.fromhex(name[: -len(SUFFIX)]) for name in names)
        except OSError:
            return frozenset()
        # What is not settled is kept for its size alone.
        self._listed[part] = changed if is_settled(changed, now) else None, keys
        return keys
