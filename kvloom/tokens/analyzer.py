"""ChunkAnalyzer: how a new prompt is tiled by stored chunks (spec rows B4, B5, B6).

Way of a prompt: fingerprints at every offset -> stored chunks that equal a window -> runs of chunks
that follow each other in prompt and source, the longest first (``runs``) -> chunks with edits in
the gaps (``edits``) -> all ends stretched token by token into the neighbouring stored chunks.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvloom.tokens.chunks import Chunk, ChunkType, Stretch
from kvloom.tokens.cover import Cover, Tile
from kvloom.tokens.edits import take_edited
from kvloom.tokens.hashing import KEY_BYTES
from kvloom.tokens.index import ChunkIndex, Tokens
from kvloom.tokens.runs import extend, take_runs

SHORTEST = 8  # tokens of an equal stretch that is worth its own load and rotation


class ChunkAnalyzer:
    """Tiles prompts by stored chunks.

    Args:
        chunk_size: tokens of a stored chunk.
        min_match_ratio: least part of an edited tile's tokens that must align with a stored chunk.
    """

    def __init__(self, chunk_size: int, min_match_ratio: float) -> None:
        self._size = chunk_size
        self._ratio = min_match_ratio

    def analyze(
        self,
        token_ids: Iterable[int] | Tokens,
        cached: ChunkIndex,
        scope: bytes = b"",
        start: int = 0,
    ) -> list[Chunk]:
        """Chunks that tile ``[start, n)`` of a prompt, in order, without gap or overlap.

        Args:
            token_ids: int32 [n].
            scope: only chunks of this scope are matched.
            start: tokens before it are covered otherwise (an exact prefix).

        Raises:
            ValueError: the index holds chunks of another size.
        """
        if cached.chunk_size != self._size:
            raise ValueError(f"chunks of {cached.chunk_size} tokens, not {self._size}")
        tokens = np.ascontiguousarray(
            token_ids if isinstance(token_ids, np.ndarray) else list(token_ids), dtype=np.int32
        )
        cover = Cover(len(tokens), start)
        shortest = min(SHORTEST, self._size)
        with cached.lock:
            take_runs(tokens, cached, scope, start, cover)
            take_edited(tokens, cached, scope, cover, ratio=self._ratio, shortest=shortest)
            extend(tokens, cached, cover, cover.tiles, shortest)
            return _chunks(cover, cached)


def _chunks(cover: Cover, index: ChunkIndex) -> list[Chunk]:
    tiles = sorted(cover.tiles)
    stretches = iter(_stretches(tiles, index))
    chunks = [Chunk(first, last, ChunkType.NO_MATCH) for first, last in cover.gaps().tolist()]
    for tile in tiles:
        kind = ChunkType.FULL_MATCH if len(tile) == 1 else ChunkType.PARTIAL_MATCH
        reused = tuple(next(stretches) for _ in tile)
        chunks.append(Chunk(tile[0].start, tile[-1].end, kind, reused))
    chunks.sort(key=lambda chunk: chunk.start_idx)
    return chunks


def _stretches(tiles: list[Tile], index: ChunkIndex) -> list[Stretch]:
    pieces = [piece for tile in tiles for piece in tile]
    if not pieces:
        return []
    start, slot, offset, length = np.array(pieces, dtype=np.intp).T
    rows = index.rows(slot)
    keys = rows["key"].tobytes()
    positions = rows["position"] + offset
    end, slot_before = start + length, np.concatenate(([-1], slot[:-1]))
    adjacent = np.zeros(len(pieces), dtype=np.bool_)
    adjacent[1:] = start[1:] == end[:-1]
    # Of one chunk the next token, or of its child the first after its own last.
    same = (slot == slot_before) & (offset == np.roll(offset + length, 1))
    child = (offset == 0) & (np.roll(offset + length, 1) == index.chunk_size)
    child &= index.parents(slot) == slot_before
    continues = adjacent & (same | child)
    return [
        Stretch(*fields)
        for fields in zip(
            start.tolist(),
            length.tolist(),
            (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)),
            offset.tolist(),
            positions.tolist(),
            continues.tolist(),
            strict=True,
        )
    ]
