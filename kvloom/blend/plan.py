"""From matched chunks to a plan: what of a prompt is reused, recomputed or new (spec row B7)."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvloom.tokens.chunks import Chunk, ChunkType, Stretch

Range = tuple[int, int]


class Origin(enum.IntEnum):
    """Where a token's KV comes from."""

    EXACT = 0
    REUSED = 1
    RECOMPUTED = 2
    NEW = 3


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring stretches from one source prompt with one delta.

    An edit that keeps the delta (a substitution inside a chunk) does not end a run: what follows
    still stands in its old context, but for the edit.
    """

    stretches: tuple[Stretch, ...]

    @property
    def start(self) -> int:
        return self.stretches[0].target_start

    @property
    def end(self) -> int:
        return self.stretches[-1].target_end


@dataclass(frozen=True)
class BlendPlan:
    """What to load and what to compute of the tokens ``[start, end)`` of a prompt.

    Attributes:
        start: tokens before it are covered by an exact prefix.
        end: the tokens from here on are left to the engine (at least the last of the prompt).
        runs: reused stretches, grouped, in target order.
        partial_matches: target ranges of edited chunks.
        origin: uint8 [end - start], an ``Origin`` for each token.
        source: int64 [end - start], source position of reused and recomputed tokens, else -1.
    """

    start: int
    end: int
    runs: tuple[Run, ...]
    partial_matches: tuple[Range, ...]
    origin: npt.NDArray[np.uint8]
    source: npt.NDArray[np.int64]

    def count(self, origin: Origin, end: int | None = None) -> int:
        """Tokens of an origin, of those before position ``end``."""
        origins = self.origin if end is None else self.origin[: max(end - self.start, 0)]
        return int(np.count_nonzero(origins == origin))

    def compute_positions(self) -> npt.NDArray[np.int64]:
        """Positions in the prompt whose KV must be computed, ascending."""
        return np.flatnonzero(self.origin >= Origin.RECOMPUTED) + self.start

    def loads(self) -> Iterator[Stretch]:
        """The stretches to load, without the tokens at their ends that are recomputed anyway."""
        for run in self.runs:
            for stretch in run.stretches:
                reused = np.flatnonzero(
                    self.origin[stretch.target_start - self.start : stretch.target_end - self.start]
                    == Origin.REUSED
                )
                if reused.size:
                    skip = int(reused[0])
                    yield Stretch(
                        target_start=stretch.target_start + skip,
                        length=int(reused[-1]) + 1 - skip,
                        source_block_id=stretch.source_block_id,
                        source_offset=stretch.source_offset + skip,
                        source_position=stretch.source_position + skip,
                    )

    def recompute(self, ranges: Sequence[Range]) -> BlendPlan:
        """The same plan with the reused tokens in ``ranges`` (prompt positions) recomputed."""
        chosen = np.zeros(self.origin.shape, dtype=np.bool_)
        for first, last in ranges:
            chosen[max(first - self.start, 0) : max(last - self.start, 0)] = True
        origin = self.origin.copy()
        origin[chosen & (origin == Origin.REUSED)] = Origin.RECOMPUTED
        return BlendPlan(self.start, self.end, self.runs, self.partial_matches, origin, self.source)


def make_plan(chunks: Sequence[Chunk], end: int) -> BlendPlan:
    """Plan over chunks that tile ``[start, n)``; nothing is recomputed yet.

    Args:
        chunks: of ``ChunkAnalyzer.analyze``, at least one.
        end: the plan covers tokens before it; matches are cut there.
    """
    start = chunks[0].start_idx
    origin = np.full(end - start, Origin.NEW, dtype=np.uint8)
    source = np.full(end - start, -1, dtype=np.int64)
    partial: list[Range] = []
    runs: list[list[Stretch]] = []
    for chunk in chunks:
        if chunk.start_idx >= end:
            break
        if chunk.chunk_type is ChunkType.PARTIAL_MATCH:
            partial.append((chunk.start_idx, min(chunk.end_idx, end)))
        for stretch in (_cut(item, end) for item in chunk.stretches):
            if stretch is None:
                continue
            here = slice(stretch.target_start - start, stretch.target_end - start)
            origin[here] = Origin.REUSED
            source[here] = np.arange(stretch.length) + stretch.source_position
            if runs and _same_run(runs[-1][-1], stretch):
                runs[-1].append(stretch)
            else:
                runs.append([stretch])
    return BlendPlan(
        start, end, tuple(Run(tuple(run)) for run in runs), tuple(partial), origin, source
    )


def boundaries(ranges: Sequence[Range], width: int) -> list[Range]:
    """The first and last ``width`` tokens of every range."""
    ends: list[Range] = []
    for first, last in ranges:
        ends.append((first, min(first + width, last)))
        ends.append((max(last - width, first), last))
    return ends


def _cut(stretch: Stretch, end: int) -> Stretch | None:
    length = min(stretch.length, end - stretch.target_start)
    if length <= 0:
        return None
    return replace(stretch, length=length)


def _same_run(before: Stretch, after: Stretch) -> bool:
    if before.delta != after.delta:
        return False
    return after.continues or before.source_block_id == after.source_block_id
