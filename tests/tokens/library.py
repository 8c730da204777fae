"""Stored prompts for the tests, and a slow, obvious account of what matching must find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.tokens.chunks import Chunk, ChunkType
from kvloom.tokens.hashing import prefix_keys, scope_id
from kvloom.tokens.index import ChunkIndex

Tokens = npt.NDArray[np.int32]
SCOPE = scope_id(cache_salt="tests")


def text(seed: int, length: int) -> Tokens:
    """Random tokens: no two stretches of any two texts are equal, for all that tests need."""
    return np.random.default_rng(seed).integers(0, 2**30, length, dtype=np.int32)


def join(*parts: Sequence[int] | Tokens) -> Tokens:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


@dataclass(frozen=True)
class Stored:
    key: bytes
    parent: bytes
    scope: bytes
    tokens: tuple[int, ...]
    position: int
    created_ns: int


class Library:
    """An index, and in plain Python what was put into it."""

    def __init__(self, size: int, **options: int) -> None:
        self.size = size
        self.index = ChunkIndex(size, **options)
        self.chunks: dict[bytes, Stored] = {}

    def store(self, tokens: Tokens, scope: bytes = SCOPE, created_ns: int = 0) -> list[bytes]:
        """Add a prompt's whole chunks."""
        keys = prefix_keys(tokens, self.size, scope)
        for number, key in enumerate(keys):
            part = tokens[number * self.size : (number + 1) * self.size]
            chunk = Stored(
                key=key,
                parent=keys[number - 1] if number else scope,
                scope=scope,
                tokens=tuple(part.tolist()),
                position=number * self.size,
                created_ns=created_ns,
            )
            self.chunks.setdefault(key, chunk)
            self.index.add(
                key=key,
                parent=chunk.parent,
                scope=scope,
                token_ids=part,
                position=chunk.position,
                created_ns=created_ns,
            )
        return keys

    def check(
        self,
        tiles: Sequence[Chunk],
        prompt: Tokens,
        ratio: float,
        scope: bytes = SCOPE,
        start: int = 0,
    ) -> None:
        """Everything that must hold of any answer: tiling, soundness, kinds, ``continues``."""
        at = start
        before = None
        for tile in tiles:
            assert tile.start_idx == at < tile.end_idx
            at = tile.end_idx
            covered = sum(stretch.length for stretch in tile.stretches)
            if tile.chunk_type is ChunkType.NO_MATCH:
                assert tile.stretches == ()
            elif tile.chunk_type is ChunkType.FULL_MATCH:
                assert len(tile.stretches) == 1
                assert covered == tile.end_idx - tile.start_idx <= self.size
            else:
                assert len(tile.stretches) > 1
                assert covered >= ratio * (tile.end_idx - tile.start_idx)
                assert len({stretch.source_block_id for stretch in tile.stretches}) == 1
            place, offset = tile.start_idx, 0
            for stretch in tile.stretches:
                stored = self.chunks[stretch.source_block_id]
                assert stored.scope == scope
                assert stretch.target_start >= place
                assert stretch.source_offset >= offset
                place, offset = stretch.target_end, stretch.source_offset + stretch.length
                assert offset <= self.size
                assert stretch.source_position == stored.position + stretch.source_offset
                reused = prompt[stretch.target_start : stretch.target_end]
                assert tuple(reused.tolist()) == stored.tokens[stretch.source_offset : offset]
                goes_on = (
                    before is not None
                    and before.target_end == stretch.target_start
                    and before.source_position + before.length == stretch.source_position
                    and before.source_block_id in (stretch.source_block_id, stored.parent)
                )
                assert stretch.continues == goes_on
                before = stretch
            assert place <= tile.end_idx
        assert at == max(len(prompt), start)

    def whole_chunks(
        self, prompt: Tokens, scope: bytes = SCOPE, start: int = 0
    ) -> dict[int, bytes]:
        """Where whole stored chunks must be reused, by row B6: the longest run first.

        Of runs as long as each other the one with the longest equal text before it, then the
        newest, then the last in the prompt, then the first in its source; a run that lost keeps the
        whole chunks that are left.
        """
        plain, size = tuple(prompt.tolist()), self.size
        mine = [chunk for chunk in self.chunks.values() if chunk.scope == scope]
        found = {
            (at, chunk.key)
            for at in range(start, len(plain) - size + 1)
            for chunk in mine
            if chunk.tokens == plain[at : at + size]
        }
        runs = []
        for at, key in found:
            if (at - size, self.chunks[key].parent) in found:
                continue
            run = [(at, key)]
            while following := [
                (where, other)
                for where, other in found
                if where == run[-1][0] + size and self.chunks[other].parent == run[-1][1]
            ]:
                run.append(following[0])
            runs.append((run, self._context(plain, at, key)))
        chosen: dict[int, bytes] = {}
        taken: set[int] = set()
        while runs:
            runs.sort(
                key=lambda item: (
                    -len(item[0]),
                    -item[1],
                    -self.chunks[item[0][-1][1]].created_ns,
                    -item[0][0][0],
                    self.chunks[item[0][0][1]].position,
                )
            )
            run, _ = runs.pop(0)
            chosen.update(run)
            taken.update(range(run[0][0], run[-1][0] + size))
            runs = [part for rest, context in runs for part in self._left(rest, context, taken)]
        return chosen

    def _context(self, plain: tuple[int, ...], at: int, key: bytes) -> int:
        before: list[int] = []
        parent = self.chunks.get(self.chunks[key].parent)
        while parent is not None:
            before = [*parent.tokens, *before]
            parent = self.chunks.get(parent.parent)
        count = 0
        while count < min(at, len(before)) and before[-1 - count] == plain[at - 1 - count]:
            count += 1
        return count

    def _left(
        self, run: list[tuple[int, bytes]], context: int, taken: set[int]
    ) -> Iterable[tuple[list[tuple[int, bytes]], int]]:
        part: list[tuple[int, bytes]] = []
        for number, (at, key) in enumerate(run):
            if taken.isdisjoint(range(at, at + self.size)):
                part = [*part, (at, key)]
            elif part:
                yield part, context + (number - len(part)) * self.size
                part = []
        if part:
            yield part, context + (len(run) - len(part)) * self.size


def reused(tiles: Iterable[Chunk]) -> set[int]:
    """Positions of the prompt that are reused."""
    return {
        position
        for tile in tiles
        for stretch in tile.stretches
        for position in range(stretch.target_start, stretch.target_end)
    }
