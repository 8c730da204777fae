"""The words of matching: what is stored of a prompt, and how a new prompt is tiled by it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ChunkType(enum.Enum):
    """How much of a target chunk was found in the store (spec rows B4, B5)."""

    FULL_MATCH = "full_match"
    PARTIAL_MATCH = "partial_match"
    NO_MATCH = "no_match"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens of the target prompt that equal, one by one, tokens of one stored chunk.

    ``target_start .. target_start + length`` of the new prompt equals
    ``source_offset .. source_offset + length`` of the stored chunk ``source_block_id``.

    Attributes:
        target_start: position of the first token in the new prompt.
        length: number of tokens.
        source_block_id: key of the stored chunk.
        source_offset: index of the first token inside the stored chunk.
        source_position: position of the first token in the prompt it was computed in.
        continues: True if the stretch before this one (in target order) ends right before
            this one in the target AND in the same source prompt: both belong to one run.
    """

    target_start: int
    length: int
    source_block_id: bytes
    source_offset: int
    source_position: int
    continues: bool = False

    @property
    def target_end(self) -> int:
        return self.target_start + self.length

    @property
    def delta(self) -> int:
        """How far the keys must be rotated: target minus source position."""
        return self.target_start - self.source_position


@dataclass(frozen=True, slots=True)
class Chunk:
    """One tile ``[start_idx, end_idx)`` of the new prompt (spec row B4).

    A FULL_MATCH has one stretch that covers the tile; a PARTIAL_MATCH one or more, in target
    order, with holes between them; a NO_MATCH none.
    """

    start_idx: int
    end_idx: int
    chunk_type: ChunkType
    stretches: tuple[Stretch, ...] = ()

    @property
    def source_block_id(self) -> bytes | None:
        return self.stretches[0].source_block_id if self.stretches else None

    @property
    def source_position(self) -> int | None:
        """Source position of the first reused token."""
        return self.stretches[0].source_position if self.stretches else None
