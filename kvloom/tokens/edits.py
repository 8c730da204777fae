"""Edited chunks: stored chunks of which most tokens still stand in a gap (spec row B5).

A candidate says where a chunk's first token would stand. Its tokens are compared with the prompt
on every diagonal near that place, so insertions and deletions up to a quarter of the chunk are
followed; of the equal stretches the longest is taken first, then what fits before and after it.
All candidates are aligned at once; the work grows with their number, which is bounded by the gaps'
tokens, never with the square of the prompt.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvloom.tokens.cover import Cover, Piece, Tile
from kvloom.tokens.hints import Numbers
from kvloom.tokens.index import ChunkIndex, Tokens

_HOPS = 4  # chunks tried from each end of a gap: those between two runs of one source
_PER_CHUNK = 4  # candidates aligned for each chunk's length of a gap, the likeliest
_ALIGNED_AT_ONCE = 256  # 256 candidates of 64 tokens on 33 diagonals: half a MiB


def take_edited(
    tokens: Tokens,
    index: ChunkIndex,
    scope: bytes,
    cover: Cover,
    *,
    ratio: float,
    shortest: int,
) -> None:
    """Cover what gaps have of edited chunks.

    A tile reaches from the first to the last aligned token; ``ratio`` of its tokens must be
    aligned, and half a chunk's: less is a phrase, not a chunk with edits.

    Args:
        shortest: tokens of an equal stretch that is worth reuse; shorter ones count as edits.
    """
    size = index.chunk_size
    gaps = cover.gaps()
    gaps = gaps[gaps[:, 1] - gaps[:, 0] >= size // 2]
    if not len(gaps) or len(tokens) < index.anchor_size:
        return
    places, slots, near = _candidates(tokens, index, scope, cover, gaps)
    found: list[tuple[tuple[int, bool, int, int], Tile]] = []
    created = index.created_ns(slots)
    free = cover.free_tokens(tokens, 2 * size)
    for first in range(0, len(places), _ALIGNED_AT_ONCE):
        part = slice(first, first + _ALIGNED_AT_ONCE)
        aligned = _align(free, index.tokens(slots[part]), places[part], shortest)
        for number, stretches in enumerate(aligned, start=first):
            total = sum(length for _, _, length in stretches)
            if total < max(size // 2, 1):
                continue
            slot = int(slots[number])
            tile = tuple(Piece(start, slot, offset, length) for start, offset, length in stretches)
            if total >= ratio * (tile[-1].end - tile[0].start):
                rank = (-total, not near[number], -int(created[number]), tile[0].start)
                found.append((rank, tile))
    for _, tile in sorted(found, key=lambda item: item[0]):
        if cover.is_free(tile[0].start, tile[-1].end):
            cover.take(*tile)


def _candidates(
    tokens: Tokens, index: ChunkIndex, scope: bytes, cover: Cover, gaps: Numbers
) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
    """(place of the first token, slot, whether a neighbour in its source is matched next to it)."""
    width = index.anchor_size
    inside = np.zeros(len(tokens) - width + 1, dtype=np.int8)
    starts, ends = gaps[:, 0], gaps[:, 1] - width + 1
    fits = ends > starts
    np.add.at(inside, starts[fits], 1)
    np.add.at(inside, ends[fits][ends[fits] < len(inside)], -1)
    chosen = np.cumsum(inside, dtype=np.int8).astype(np.bool_)
    places, slots = index.find_anchored(tokens, chosen, scope)
    near_places, near_slots = _neighbours(index, cover, gaps)
    near = np.repeat([True, False], [len(near_slots), len(slots)])
    places, slots = np.concatenate((near_places, places)), np.concatenate((near_slots, slots))
    _, once = np.unique((places + index.chunk_size << 32) | slots, return_index=True)
    places, slots, near = places[once], slots[once], near[once]
    best = _likeliest(tokens, index, places, slots)
    return places[best], slots[best], near[best]


def _neighbours(index: ChunkIndex, cover: Cover, gaps: Numbers) -> tuple[Numbers, Numbers]:
    """The chunks that follow and precede, in their sources, those at both ends of the gaps."""
    size = index.chunk_size
    left = {tile[-1].end: tile[-1].slot for tile in cover.tiles}
    right = {tile[0].start: tile[0].slot for tile in cover.tiles}
    none = np.empty(0, dtype=np.intp)
    places, slots = [none], [none]
    at = np.array([[f, left[f], e] for f, e in gaps.tolist() if f in left], dtype=np.intp)
    at = at.reshape(-1, 3)
    for _ in range(_HOPS):
        which, children = index.children(at[:, 1], 1)
        at = np.column_stack((at[which, 0], children, at[which, 2]))
        places.append(at[:, 0])
        slots.append(at[:, 1])
        at = (at + np.array([size, 0, 0]))[at[:, 0] + size < at[:, 2]]
    at = np.array([[e, right[e], f] for f, e in gaps.tolist() if e in right], dtype=np.intp)
    at = at.reshape(-1, 3)
    for _ in range(_HOPS):
        parents = index.parents(at[:, 1])
        at = np.column_stack((at[:, 0] - size, parents, at[:, 2]))[parents >= 0]
        places.append(at[:, 0])
        slots.append(at[:, 1])
        at = at[at[:, 0] > at[:, 2]]
    return np.concatenate(places), np.concatenate(slots)


def _likeliest(tokens: Tokens, index: ChunkIndex, places: Numbers, slots: Numbers) -> Numbers:
    """The candidates with the most tokens equal where they stand, a few for each place."""
    size = index.chunk_size
    equal = np.empty(len(places), dtype=np.intp)
    for first in range(0, len(places), 4096):
        part = slice(first, first + 4096)
        at = places[part, None] + np.arange(size)
        same = tokens[at.clip(0, len(tokens) - 1)] == index.tokens(slots[part])
        equal[part] = np.count_nonzero(same & (at >= 0) & (at < len(tokens)), axis=1)
    # Places of one chunk that one band covers are one candidate.
    order = np.lexsort((places, slots))
    apart = (np.diff(slots[order]) != 0) | (np.diff(places[order]) > _band(size))
    group = np.empty(len(places), dtype=np.intp)
    group[order] = np.cumsum(np.concatenate(([0], apart)))[: len(places)]
    order = _first_of_each(group, np.lexsort((places, -equal, group)), 1)
    cell = places // size
    age = -index.created_ns(slots)
    best = order[np.lexsort((places[order], age[order], -equal[order], cell[order]))]
    return _first_of_each(cell, best, _PER_CHUNK)


def _first_of_each(group: Numbers, order: Numbers, count: int) -> Numbers:
    """Of ``order``, which is sorted by group, the first ``count`` of each group."""
    groups = group[order]
    first = np.searchsorted(groups, groups, side="left")
    chosen: Numbers = order[np.arange(len(order)) - first < count]
    return chosen


def _band(size: int) -> int:
    return max(size // 4, 1)


def _align(
    free: npt.NDArray[np.int64], rows: Tokens, places: Numbers, shortest: int
) -> list[list[tuple[int, int, int]]]:
    """Equal stretches (prompt position, chunk offset, length) of each candidate, in order.

    Args:
        free: the prompt's tokens, of ``Cover.free_tokens`` with a margin of two chunks.
        rows: int32 [n, size], the chunks' tokens; places: where their first tokens would stand.
    """
    count, size = rows.shape
    band = _band(size)
    # The place itself comes first: of equally long stretches the first found is taken.
    shifts = np.array(sorted(range(-band, band + 1), key=lambda shift: (abs(shift), shift)))
    offsets = np.arange(size, dtype=np.int16)
    windows = np.lib.stride_tricks.sliding_window_view(free, size)
    equal = windows[places[:, None] + shifts + 2 * size] == rows[:, None, :]
    # A chunk has room for so many stretches, each on one diagonal: the others go.
    likely = np.argsort(-np.count_nonzero(equal, axis=2), axis=1, kind="stable")
    likely = np.sort(likely[:, : size // shortest], axis=1)
    equal = np.take_along_axis(equal, likely[:, :, None], axis=1)
    shift = shifts[likely]
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    active = np.arange(count)
    while active.size:
        unequal = np.where(equal, np.int16(-1), offsets)
        lengths = offsets - np.maximum.accumulate(unequal, axis=2)
        lengths = lengths.reshape(len(active), -1)
        best = lengths.argmax(axis=1)
        length = lengths[np.arange(len(active)), best].astype(np.intp)
        good = length >= shortest
        active, best, length, equal, shift = (
            each[good] for each in (active, best, length, equal, shift)
        )
        diagonal, end = np.divmod(best, size)
        end += 1
        chosen = shift[np.arange(len(active)), diagonal]
        start = places[active] + chosen + end - length
        for number, *stretch in zip(
            active.tolist(), start.tolist(), (end - length).tolist(), length.tolist(), strict=True
        ):
            found[number].append(tuple(stretch))
        # What is left must stand before it in both texts, or after it in both.
        source = offsets - end[:, None, None]
        target = source + (shift - chosen[:, None])[:, :, None]
        before = -length[:, None, None]
        equal &= ((target < before) & (source < before)) | ((target >= 0) & (source >= 0))
    return [sorted(stretches) for stretches in found]
