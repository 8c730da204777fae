"""ChunkAnalyzer: how a new prompt is tiled by stored chunks (spec rows B4, B5, B6).

Way of a prompt: fingerprints at every offset -> stored chunks that equal a window -> chains of
chunks that follow each other in prompt and source -> the longest chain first -> its ends stretched
token by token into the neighbouring stored chunks -> edited chunks in the gaps that are left.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvloom.tokens.chunks import Chunk, ChunkType, Stretch
from kvloom.tokens.hashing import rolling_fingerprints
from kvloom.tokens.index import ChunkIndex

Tokens = npt.NDArray[np.int32]

# Bounds on work for text that is stored again and again; the newest sources are looked at.
_CANDIDATES = 4
_CHILDREN = 8
_ANCHOR_CANDIDATES = 2
_ALIGNMENTS_PER_GAP_CHUNK = 4
_CONTEXT = 1024
_MIN_PIECE = 4  # shorter pieces count as edits


@dataclass(frozen=True, slots=True)
class _Chain:
    """``slots`` follow each other in their source; the first stands at ``start`` of the prompt."""

    start: int
    slots: tuple[int, ...]


class ChunkAnalyzer:
    """Tiles prompts by stored chunks.

    Args:
        chunk_size: tokens of a stored chunk.
        min_match_ratio: least part of an edited tile that must align with a stored chunk.
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
        """
        tokens = np.ascontiguousarray(
            token_ids if isinstance(token_ids, np.ndarray) else list(token_ids), dtype=np.int32
        )
        with cached.lock:
            matching = _Matching(
                tokens, cached, scope=scope, start=start, size=self._size, ratio=self._ratio
            )
            return matching.tiles()


class _Matching:
    """The work on one prompt. ``taken`` marks the tokens that a stretch covers already."""

    def __init__(
        self,
        tokens: Tokens,
        index: ChunkIndex,
        *,
        scope: bytes,
        start: int,
        size: int,
        ratio: float,
    ) -> None:
        self._tokens = tokens
        self._index = index
        self._scope = scope
        self._start = start
        self._size = size
        self._ratio = ratio
        self._taken = np.zeros(len(tokens), dtype=np.bool_)
        self._taken[:start] = True
        self._tiles: list[Chunk] = []
        self._slots: dict[bytes, int] = {}  # of the chunks that tiles use, by key

    def tiles(self) -> list[Chunk]:
        for chain in self._longest_first(self._chains()):
            self._take_chain(chain)
        for first, last in self._gaps():
            self._match_edited(first, last)
        self._tiles.sort(key=lambda tile: tile.start_idx)
        self._join_edited()
        for first, last in self._gaps():
            self._tiles.append(Chunk(first, last, ChunkType.NO_MATCH))
        self._tiles.sort(key=lambda tile: tile.start_idx)
        return self._mark_continuations()

    # Whole chunks

    def _chains(self) -> list[_Chain]:
        """Maximal chains of whole stored chunks, each chunk following the one before in both."""
        rest = self._tokens[self._start :]
        if len(rest) < self._size:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(rest, self._size)
        prints = rolling_fingerprints(rest, self._size)
        where, slots = self._index.candidates(windows, prints, self._scope, _CANDIDATES)
        where, slots = _without_overlaps(where, slots, self._size)
        if not where.size:
            return []
        before = self._predecessors(where, slots)
        after: dict[int, int] = {}
        for pair, predecessor in enumerate(before.tolist()):
            if predecessor >= 0:
                after.setdefault(predecessor, pair)
        chains = []
        offsets, numbers = where.tolist(), slots.tolist()
        linked = set(after.values())
        for pair in range(len(offsets)):
            if pair in linked:
                continue
            members = [pair]
            while (follower := after.get(members[-1])) is not None:
                members.append(follower)
            chains.append(
                _Chain(self._start + offsets[pair], tuple(numbers[member] for member in members))
            )
        return chains

    def _predecessors(
        self, where: npt.NDArray[np.intp], slots: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        """For each (offset, slot) pair the pair of its parent one chunk earlier, or -1."""
        unique, inverse = np.unique(slots, return_inverse=True)
        parents = self._index.parent_slots(unique)[inverse].astype(np.int64)
        width = int(slots.max()) + 1
        names = where.astype(np.int64) * width + slots
        order = np.argsort(names)
        wanted = (where.astype(np.int64) - self._size) * width + parents
        place = np.minimum(np.searchsorted(names, wanted, sorter=order), len(names) - 1)
        found = order[place]
        hit = (names[found] == wanted) & (parents >= 0) & (parents < width)
        return np.where(hit, found, -1)

    def _longest_first(self, chains: list[_Chain]) -> Iterable[_Chain]:
        """Chains, or what other chains have left of them, the best first, none overlapping.

        Best: most chunks; then the longest equal text before; then the newest source.
        """
        number = itertools.count()  # settles ties: chains themselves have no order
        heap = [(self._rank(chain), next(number), chain) for chain in chains]
        heapq.heapify(heap)
        while heap:
            chain = heapq.heappop(heap)[-1]
            free = self._free_parts(chain)
            if free == [chain]:
                yield chain
            elif not free and not self._room():
                return
            else:
                for part in free:
                    heapq.heappush(heap, (self._rank(part), next(number), part))

    def _room(self) -> bool:
        """Whether a whole chunk still fits somewhere: most losers of equal text need no look."""
        return any(last - first >= self._size for first, last in self._gaps())

    def _rank(self, chain: _Chain) -> tuple[int, int, int]:
        return (
            -len(chain.slots),
            -self._equal_before(chain),
            -self._index.created_ns(chain.slots[-1]),
        )

    def _equal_before(self, chain: _Chain) -> int:
        """Tokens right before the chain that are equal in the prompt and in its source."""
        total, end = 0, chain.start
        slot = self._index.parent_slot(chain.slots[0])
        while slot is not None and total < _CONTEXT:
            same = _equal_at_end(self._index.tokens(slot), self._tokens[:end])
            total += same
            if same < self._size:
                break
            end -= self._size
            slot = self._index.parent_slot(slot)
        return total

    def _free_parts(self, chain: _Chain) -> list[_Chain]:
        """The parts of a chain whose whole chunks nothing covers yet."""
        stop = chain.start + len(chain.slots) * self._size
        taken = self._taken[chain.start : stop].reshape(-1, self._size).any(axis=1)
        if not taken.any():
            return [chain]
        parts = []
        edges = np.flatnonzero(np.diff(np.concatenate(([1], taken.astype(np.int8), [1]))))
        for first, last in edges.reshape(-1, 2).tolist():
            parts.append(_Chain(chain.start + first * self._size, chain.slots[first:last]))
        return parts

    def _take_chain(self, chain: _Chain) -> None:
        start = chain.start
        for slot in chain.slots:
            self._take(start, slot, 0, self._size)
            start += self._size
        self._stretch_back(chain.start, chain.slots[0])
        self._stretch_on(start, chain.slots[-1])

    def _stretch_back(self, start: int, slot: int) -> None:
        parent = self._index.parent_slot(slot)
        if parent is None:
            return
        room = self._free_before(start)
        length = min(_equal_at_end(self._index.tokens(parent), self._tokens[:start]), room)
        if length >= _MIN_PIECE:
            self._take(start - length, parent, self._size - length, length)

    def _stretch_on(self, start: int, slot: int) -> None:
        room = self._free_after(start)
        if room < _MIN_PIECE:
            return
        ahead = self._tokens[start : start + min(room, self._size)]
        best, length = None, 0
        for child in self._index.child_slots(slot, _CHILDREN):
            equal = _equal_at_start(self._index.tokens(child), ahead)
            if equal > length:
                best, length = child, equal
        if best is not None and length >= _MIN_PIECE:
            self._take(start, best, 0, length)

    def _take(self, start: int, slot: int, offset: int, length: int) -> None:
        stretch = self._stretch(start, slot, offset, length)
        self._tiles.append(Chunk(start, start + length, ChunkType.FULL_MATCH, (stretch,)))
        self._taken[start : start + length] = True

    def _stretch(self, start: int, slot: int, offset: int, length: int) -> Stretch:
        key = self._index.key(slot)
        self._slots[key] = slot
        return Stretch(
            target_start=start,
            length=length,
            source_block_id=key,
            source_offset=offset,
            source_position=self._index.position(slot) + offset,
        )

    def _free_before(self, start: int) -> int:
        taken = np.flatnonzero(self._taken[max(start - self._size, 0) : start])
        return (
            min(start, self._size)
            if not taken.size
            else min(start, self._size) - int(taken[-1]) - 1
        )

    def _free_after(self, start: int) -> int:
        ahead = self._taken[start : start + self._size]
        taken = np.flatnonzero(ahead)
        return int(taken[0]) if taken.size else len(ahead)

    def _gaps(self) -> list[tuple[int, int]]:
        edges = np.flatnonzero(np.diff(np.concatenate(([1], self._taken.astype(np.int8), [1]))))
        return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]

    # Edited chunks

    def _match_edited(self, first: int, last: int) -> None:
        """Tile a gap by stored chunks of which most tokens are still there, best of each place."""
        if last - first < self._size // 2:
            return
        edits = self._size - int(self._ratio * self._size)
        tried: set[tuple[int, int]] = set()
        budget = _ALIGNMENTS_PER_GAP_CHUNK * (-(-(last - first) // self._size))
        for at, slot in self._edited_candidates(first, last):
            if len(tried) >= budget or (at // _MIN_PIECE, slot) in tried:
                continue
            low, high = max(at - edits, first), min(at + self._size + edits, last)
            taken = np.flatnonzero(self._taken[low:high])
            if taken.size:  # an earlier candidate of this gap covers part of it
                middle = min(max(at + self._size // 2, low), high - 1)
                if self._taken[middle]:
                    continue
                left, right = taken[taken < middle - low], taken[taken > middle - low]
                high = low + int(right[0]) if right.size else high
                low = low + int(left[-1]) + 1 if left.size else low
            tried.add((at // _MIN_PIECE, slot))
            self._take_edited(low, high, slot)

    def _edited_candidates(self, first: int, last: int) -> list[tuple[int, int]]:
        """(where its first token would stand, slot), neighbours of the gap's matches first."""
        found: list[tuple[int, int]] = []
        for tile in self._tiles:
            if tile.end_idx == first and tile.stretches:
                slot = self._slots.get(tile.stretches[-1].source_block_id)
                if slot is not None:
                    left = self._size - (
                        tile.stretches[-1].source_offset + tile.stretches[-1].length
                    )
                    if left >= _MIN_PIECE:
                        found.append((first - (self._size - left), slot))
                    found += [(first + left, c) for c in self._index.child_slots(slot, 1)]
            if tile.start_idx == last and tile.stretches:
                slot = self._slots.get(tile.stretches[0].source_block_id)
                if slot is not None:
                    offset = tile.stretches[0].source_offset
                    if offset >= _MIN_PIECE:
                        found.append((last - offset, slot))
                    parent = self._index.parent_slot(slot)
                    if parent is not None:
                        found.append((last - offset - self._size, parent))
        prints = rolling_fingerprints(self._tokens[first:last], self._index.anchor_size)
        anchored = self._index.anchored(prints, self._scope, _ANCHOR_CANDIDATES)
        return found + [(first + offset, slot) for offset, slot in anchored]

    def _take_edited(self, low: int, high: int, slot: int) -> None:
        pieces = _equal_pieces(self._index.tokens(slot), self._tokens[low:high])
        aligned = sum(length for _, _, length in pieces)
        if not pieces or aligned < self._size // 2:
            return
        start = low + pieces[0][1]
        end = low + pieces[-1][1] + pieces[-1][2]
        if aligned < self._ratio * (end - start):
            return
        stretches = tuple(
            self._stretch(low + there, slot, here, length) for here, there, length in pieces
        )
        whole = len(pieces) == 1
        kind = ChunkType.FULL_MATCH if whole else ChunkType.PARTIAL_MATCH
        self._tiles.append(Chunk(start, end, kind, stretches))
        self._taken[start:end] = True

    def _join_edited(self) -> None:
        """Pieces of one stored chunk with edits between them are one partial match."""
        joined: list[Chunk] = []
        for tile in self._tiles:
            both = self._joined(joined[-1], tile) if joined else None
            if both is None:
                joined.append(tile)
            else:
                joined[-1] = both
                self._taken[both.start_idx : both.end_idx] = True
        self._tiles = joined

    def _mark_continuations(self) -> list[Chunk]:
        """Set ``continues`` where a stretch goes on right where the one before ends, in both."""
        used = np.fromiter(self._slots.values(), dtype=np.int32, count=len(self._slots))
        parents = dict(zip(self._slots, self._index.parent_slots(used).tolist(), strict=True))
        marked = []
        before: Stretch | None = None
        for tile in self._tiles:
            stretches = []
            for stretch in tile.stretches:
                if (
                    before is not None
                    and before.target_end == stretch.target_start
                    and before.delta == stretch.delta
                    and (
                        before.source_block_id == stretch.source_block_id
                        or self._slots[before.source_block_id] == parents[stretch.source_block_id]
                    )
                ):
                    stretches.append(replace(stretch, continues=True))
                else:
                    stretches.append(stretch)
                before = stretch
            marked.append(replace(tile, stretches=tuple(stretches)) if stretches else tile)
        return marked

    def _joined(self, left: Chunk, right: Chunk) -> Chunk | None:
        before, after = left.stretches[-1], right.stretches[0]
        if (
            before.source_block_id != after.source_block_id
            or before.source_offset + before.length > after.source_offset
        ):
            return None
        stretches = (*left.stretches, *right.stretches)
        aligned = sum(stretch.length for stretch in stretches)
        if aligned < self._ratio * (right.end_idx - left.start_idx):
            return None
        return Chunk(left.start_idx, right.end_idx, ChunkType.PARTIAL_MATCH, stretches)


def _without_overlaps(
    where: npt.NDArray[np.intp], slots: npt.NDArray[np.int32], size: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
    """Drop places of a chunk that overlap an earlier place of the same chunk.

    Only text that repeats itself within a chunk has them (equal tokens, tables of zeros), and then
    one at every offset: without this the work would grow with offsets instead of chunks.
    """
    order = np.lexsort((where, slots))
    slots_sorted, where_sorted = slots[order], where[order]
    close = (np.diff(slots_sorted) == 0) & (np.diff(where_sorted) < size)
    if not close.any():
        return where, slots
    keep = []
    last_slot, free_from = -1, 0
    for pair, slot, place in zip(
        order.tolist(), slots_sorted.tolist(), where_sorted.tolist(), strict=True
    ):
        if slot != last_slot or place >= free_from:
            keep.append(pair)
            last_slot, free_from = slot, place + size
    kept = np.sort(np.asarray(keep, dtype=np.intp))
    return where[kept], slots[kept]


def _equal_pieces(source: Tokens, target: Tokens) -> list[tuple[int, int, int]]:
    """What edits left standing: (source offset, target offset, length), ascending in both."""
    matcher = difflib.SequenceMatcher(None, source.tolist(), target.tolist(), autojunk=False)
    return [
        (block.a, block.b, block.size)
        for block in matcher.get_matching_blocks()
        if block.size >= _MIN_PIECE
    ]


def _equal_at_start(left: Tokens, right: Tokens) -> int:
    """Length of the common start."""
    count = min(len(left), len(right))
    unequal = np.flatnonzero(left[:count] != right[:count])
    return int(unequal[0]) if unequal.size else count


def _equal_at_end(left: Tokens, right: Tokens) -> int:
    """Length of the common end."""
    count = min(len(left), len(right))
    if not count:
        return 0
    return _equal_at_start(left[-count:][::-1], right[-count:][::-1])
