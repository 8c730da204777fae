"""Which keys have files, without asking the file system for each (spec row S10).

A folder of blocks is listed once, and again when its mtime says that files came or went. A folder
that is asked for a few keys only is not worth a listing: its files are asked for one by one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from kvloom.store.layout import SUFFIX, is_block

_WORTH_LISTING = 8
# A directory that changed this shortly before it was listed may change again without a new mtime.
MTIME_GRANULARITY_NS = 2_000_000_000


class Presence:
    """The files of one namespace's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.fspath(folder)
        self._listed: dict[int, tuple[int, frozenset[bytes]]] = {}

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys have a file."""
        parts = {key[0] for key in keys}
        worth_listing = len(keys) >= _WORTH_LISTING * len(parts)
        listings = {part: self._known(part, worth_listing) for part in parts}
        return [
            key in listed if (listed := listings[key[0]]) is not None else self._is_there(key)
            for key in keys
        ]

    def _is_there(self, key: bytes) -> bool:
        return os.path.isfile(f"{self._folder}/{key[0]:02x}/{key.hex()}{SUFFIX}")

    def _known(self, part: int, worth_listing: bool) -> frozenset[bytes] | None:
        """Keys in a part's folder as listed, if the listing is good, or worth making."""
        folder = f"{self._folder}/{part:02x}"
        try:
            changed = os.stat(folder).st_mtime_ns
            listed = self._listed.get(part)
            if listed is not None and listed[0] == changed:
                return listed[1]
            if not worth_listing:
                return None
            now = time.time_ns()
            names = filter(is_block, os.listdir(folder))
            keys = frozenset(bytes.fromhex(name[: -len(SUFFIX)]) for name in names)
        except OSError:
            return frozenset()
        if now - changed > MTIME_GRANULARITY_NS:
            self._listed[part] = changed, keys
        return keys
