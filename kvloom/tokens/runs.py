"""Runs of whole stored chunks, the longest first, and their ends (spec rows B5, B6)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.tokens.cover import Cover, Piece, Tile
from kvloom.tokens.hints import Numbers
from kvloom.tokens.index import ChunkIndex, Tokens

CONTEXT = 1024  # tokens before a run that are compared to choose between runs as long as each other
_CHILDREN = 8  # continuations tried at a run's end, the newest: a system prompt has thousands


@dataclass(frozen=True, slots=True)
class Run:
    """``slots`` follow each other in their source; the first one stands at ``start``.

    ``context``: tokens right before it that equal those in its source, counted up to CONTEXT.
    ``ages``: when each chunk was created. ``position``: of the first one in its source.
    """

    start: int
    slots: tuple[int, ...]
    context: int
    ages: tuple[int, ...]
    position: int


def take_runs(tokens: Tokens, index: ChunkIndex, scope: bytes, start: int, cover: Cover) -> None:
    """Cover a prompt from ``start`` on with whole stored chunks."""
    where, slots, complete = index.find_whole(tokens[start:], scope)
    if not where.size:
        return
    size = index.chunk_size
    runs = sorted(_chains(tokens, index, where + start, slots), key=lambda run: run.start)
    # Sources that were not looked at, where not all were, may have been a run's own neighbours.
    if all(a.start + len(a.slots) * size <= b.start for a, b in itertools.pairwise(runs)):
        for run in runs:  # no choice to make
            _take(run, cover, size)
        if not complete:
            extend(tokens, index, cover, cover.tiles, shortest=size)
        return
    for run in _longest_first(runs, cover, size):
        _take(run, cover, size)
        if not complete:
            extend(tokens, index, cover, cover.tiles[-len(run.slots) :], shortest=size)


def _take(run: Run, cover: Cover, size: int) -> None:
    starts = range(run.start, run.start + len(run.slots) * size, size)
    cover.take_each(Piece(at, slot, 0, size) for at, slot in zip(starts, run.slots, strict=True))


def extend(
    tokens: Tokens, index: ChunkIndex, cover: Cover, tiles: Sequence[Tile], shortest: int
) -> None:
    """Stretch tiles into the stored chunks before and after theirs, as far as tokens are equal.

    Args:
        shortest: tokens of an end piece that is worth it.
    """
    heads, tails = list(tiles), list(tiles)
    while heads or tails:
        pieces = [(piece, False) for piece in _pieces_before(tokens, index, cover, heads)]
        pieces += [(piece, True) for piece in _pieces_after(tokens, index, cover, tails)]
        pieces.sort(key=lambda item: (-item[0].length, item[0].start))
        heads, tails = [], []
        for piece, onwards in pieces:
            length = (
                cover.free_after(piece.start, piece.length)
                if onwards
                else cover.free_before(piece.end, piece.length)
            )
            if length >= shortest:
                cut = 0 if onwards else piece.length - length
                cover.take(Piece(piece.start + cut, piece.slot, piece.offset + cut, length))
                if length == index.chunk_size:
                    (tails if onwards else heads).append((piece,))


def _chains(tokens: Tokens, index: ChunkIndex, where: Numbers, slots: Numbers) -> list[Run]:
    """Join (offset, slot) pairs that follow each other in the prompt and in their source."""
    before = _pairs_before(index, where, slots)
    # The first pair of each chain, and how far every pair is from it, by doubling the steps.
    root = np.where(before >= 0, before, np.arange(len(where)))
    while not np.array_equal(further := root[root], root):
        root = further
    order = np.lexsort((where, root))
    bounds = np.flatnonzero(np.concatenate(([True], np.diff(root[order]) != 0, [True])))
    heads = root[order[bounds[:-1]]]
    context = _equal_before(tokens, index, where[heads], slots[heads])
    rows = index.rows(slots[order])
    ages, chained = rows["created_ns"].tolist(), slots[order].tolist()
    fields = (where[heads], context, rows["position"][bounds[:-1]], bounds[:-1], bounds[1:])
    return [
        Run(start, tuple(chained[first:last]), before, tuple(ages[first:last]), position)
        for start, before, position, first, last in zip(
            *(field.tolist() for field in fields), strict=True
        )
    ]


def _pairs_before(index: ChunkIndex, where: Numbers, slots: Numbers) -> Numbers:
    """For each (offset, slot) pair the pair of its parent one chunk earlier, or -1."""
    unique, inverse = np.unique(slots, return_inverse=True)
    parents = index.parents(unique)[inverse]
    names = (where << 32) | slots
    order = np.argsort(names)
    wanted = ((where - index.chunk_size) << 32) | parents
    place = np.minimum(np.searchsorted(names, wanted, sorter=order), len(names) - 1)
    before = order[place]
    before[(names[before] != wanted) | (parents < 0) | (where < index.chunk_size)] = -1
    # Chunks with one parent and equal tokens have one key; were they two, one goes on alone.
    linked = np.flatnonzero(before >= 0)
    once = linked[np.unique(before[linked], return_index=True)[1]]
    single: Numbers = np.full_like(before, -1)
    single[once] = before[once]
    return single


def _equal_before(
    tokens: Tokens, index: ChunkIndex, starts: Numbers, slots: Numbers
) -> npt.NDArray[np.intp]:
    """Tokens right before each place that are equal in the prompt and before the chunk."""
    size = index.chunk_size
    total = np.zeros(len(starts), dtype=np.intp)
    which, ends, slots = np.arange(len(starts)), starts, index.parents(slots)
    for _ in range(-(-CONTEXT // size)):
        known = (slots >= 0) & (ends > 0)
        which, ends, slots = which[known], ends[known], slots[known]
        if not which.size:
            break
        same = _equal_at_end(tokens, ends, index.tokens(slots))
        total[which] += same
        on = same == size
        which, ends, slots = which[on], ends[on] - size, index.parents(slots[on])
    return np.minimum(total, CONTEXT)


def _longest_first(runs: list[Run], cover: Cover, size: int) -> Iterator[Run]:
    """Runs, or what others have left of them, the best first; each is taken before the next.

    Best: most chunks, then the longest equal text before, then the newest source, then the last
    in the prompt, then the first in its source.
    """
    heap = [(_rank(run), number, run) for number, run in enumerate(runs)]
    heapq.heapify(heap)
    number = len(runs)  # settles what is left of ties
    while heap:
        _, _, run = heapq.heappop(heap)
        taken = cover.taken_by_chunk(run.start, len(run.slots), size)
        if not taken.any():
            yield run
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([1], taken.astype(np.int8), [1]))))
        for first, last in edges.reshape(-1, 2).tolist():
            part = Run(
                run.start + first * size,
                run.slots[first:last],
                min(run.context + first * size, CONTEXT),
                run.ages[first:last],
                run.position + first * size,
            )
            heapq.heappush(heap, (_rank(part), number, part))
            number += 1


def _rank(run: Run) -> tuple[int, ...]:
    return -len(run.slots), -run.context, -run.ages[-1], -run.start, run.position


def _pieces_before(
    tokens: Tokens, index: ChunkIndex, cover: Cover, tiles: Sequence[Tile]
) -> Iterator[Piece]:
    if not tiles:
        return
    size = index.chunk_size
    heads = [tile[0] for tile in tiles if tile[0].offset == 0]
    free = cover.is_free_at(np.array([head.start - 1 for head in heads], dtype=np.intp))
    heads = [heads[i] for i in np.flatnonzero(free)]
    if not heads:
        return
    parents = index.parents(np.array([head.slot for head in heads]))
    known = np.flatnonzero(parents >= 0)
    ends = np.array([heads[i].start for i in known], dtype=np.intp)
    same = _equal_at_end(tokens, ends, index.tokens(parents[known]))
    for end, slot, length in zip(
        ends.tolist(), parents[known].tolist(), same.tolist(), strict=True
    ):
        yield Piece(end - length, slot, size - length, length)


def _pieces_after(
    tokens: Tokens, index: ChunkIndex, cover: Cover, tiles: Sequence[Tile]
) -> Iterator[Piece]:
    if not tiles:
        return
    size = index.chunk_size
    tails = [tile[-1] for tile in tiles if tile[-1].offset + tile[-1].length == size]
    free = cover.is_free_at(np.array([tail.end for tail in tails], dtype=np.intp))
    tails = [tails[i] for i in np.flatnonzero(free)]
    if not tails:
        return
    which, children = index.children(np.array([tail.slot for tail in tails]), _CHILDREN)
    starts = np.array([tail.end for tail in tails], dtype=np.intp)[which]
    same = _equal_at_start(tokens, starts, index.tokens(children))
    for start, slot, length in zip(starts.tolist(), children.tolist(), same.tolist(), strict=True):
        yield Piece(start, slot, 0, length)


def _equal_at_start(tokens: Tokens, starts: Numbers, rows: Tokens) -> npt.NDArray[np.intp]:
    """Length of the common start of the prompt from each place on and of each row."""
    at = starts[:, None] + np.arange(rows.shape[1])
    equal = (tokens[np.minimum(at, len(tokens) - 1)] == rows) & (at < len(tokens))
    return _leading(equal)


def _equal_at_end(tokens: Tokens, ends: Numbers, rows: Tokens) -> npt.NDArray[np.intp]:
    """Length of the common end of the prompt before each place and of each row."""
    at = ends[:, None] - np.arange(1, rows.shape[1] + 1)
    equal = (tokens[np.maximum(at, 0)] == rows[:, ::-1]) & (at >= 0)
    return _leading(equal)


def _leading(equal: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """How many entries from the start of each row are true."""
    return np.where(equal.all(axis=1), equal.shape[1], np.argmin(equal, axis=1))
