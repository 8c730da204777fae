"""Cover: which tokens of a prompt are taken by which stored tokens, while it is being matched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NO_TOKEN = -(2**63)  # equals no token id


class Piece(NamedTuple):  # a plain tuple: a prompt has hundreds, and they sort by their start
    """``length`` tokens from ``start`` of the prompt equal those from ``offset`` of a chunk."""

    start: int
    slot: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


Tile = tuple[Piece, ...]  # in the order of the prompt, with holes between them


class Cover:
    """Tiles, each of one or more pieces, that do not overlap.

    Args:
        count: tokens of the prompt; start: those before it can't be taken.
    """

    def __init__(self, count: int, start: int) -> None:
        self._walled = np.ones(count + 2, dtype=np.bool_)  # nothing is free beyond the ends
        self._taken = self._walled[1:-1]
        self._taken[start:] = False
        self.tiles: list[Tile] = []

    def take(self, *tile: Piece) -> None:
        """Add a tile: pieces in the order of the prompt, whose holes are taken too."""
        self.tiles.append(tile)
        self._taken[tile[0].start : tile[-1].end] = True

    def take_each(self, pieces: Iterable[Piece]) -> None:
        """Add a tile for each of some pieces that stand side by side, in order."""
        tiles = [(piece,) for piece in pieces]
        self.tiles += tiles
        self._taken[tiles[0][0].start : tiles[-1][0].end] = True

    def is_free(self, first: int, last: int) -> bool:
        return not self._taken[first:last].any()

    def free_tokens(self, tokens: npt.NDArray[np.int32], margin: int) -> npt.NDArray[np.int64]:
        """Token ids with NO_TOKEN where taken, and ``margin`` of it at both ends."""
        free = np.full(len(tokens) + 2 * margin, NO_TOKEN, dtype=np.int64)
        free[margin : margin + len(tokens)] = np.where(self._taken, NO_TOKEN, tokens)
        return free

    def is_free_at(self, places: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Whether there is a token that is free at each place, of -1 to one past the last."""
        return ~self._walled[places + 1]

    def taken_by_chunk(self, start: int, chunks: int, size: int) -> npt.NDArray[np.bool_]:
        """Whether any token is taken of each of ``chunks`` chunks from ``start`` on."""
        tokens = self._taken[start : start + chunks * size].reshape(chunks, size)
        taken: npt.NDArray[np.bool_] = np.logical_or.reduce(tokens, axis=1)
        return taken

    def free_before(self, end: int, most: int) -> int:
        """How many tokens right before ``end`` are free, up to ``most``."""
        before = self._taken[max(end - most, 0) : end]
        taken = np.flatnonzero(before)
        return len(before) - 1 - int(taken[-1]) if taken.size else len(before)

    def free_after(self, start: int, most: int) -> int:
        """How many tokens from ``start`` on are free, up to ``most``."""
        after = self._taken[start : start + most]
        taken = np.flatnonzero(after)
        return int(taken[0]) if taken.size else len(after)

    def gaps(self) -> npt.NDArray[np.intp]:
        """Stretches [first, last) that are free, intp [n, 2], in order."""
        edges = np.flatnonzero(np.diff(np.concatenate(([1], self._taken.astype(np.int8), [1]))))
        return edges.reshape(-1, 2)
