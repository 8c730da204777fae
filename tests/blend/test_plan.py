"""Spec row B7: mapping and recompute ranges are properties of the plan."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.blend.plan import BlendPlan, Origin, make_plan
from kvloom.blend.selection import Boundary, FirstK, Nothing
from kvloom.tokens.chunks import Chunk, ChunkType, Stretch


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[Chunk], int]:
    """Chunks that tile a prompt from some start, and an end of the plan before the prompt's."""
    position = start = draw(st.integers(0, 40))
    chunks: list[Chunk] = []
    for number in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(list(ChunkType)))
        length = draw(st.integers(3, 30))
        stretches: list[Stretch] = []
        if kind is ChunkType.FULL_MATCH:
            before = chunks[-1].stretches[-1] if chunks and chunks[-1].stretches else None
            continues = bool(before) and before.target_end == position and draw(st.booleans())
            source = (
                before.source_position + before.length if continues else draw(st.integers(0, 500))
            )
            stretches = [Stretch(position, length, b"%d" % number, 0, source, continues)]
        elif kind is ChunkType.PARTIAL_MATCH:
            hole = draw(st.integers(1, length - 2))
            source = draw(st.integers(0, 500))
            after = length - hole - 1
            shift = draw(st.sampled_from([0, 0, 1, -1]))
            stretches = [
                Stretch(position, hole, b"%d" % number, 0, source),
                Stretch(
                    position + hole + 1,
                    after,
                    b"%d" % number,
                    hole + 1 + shift,
                    source + hole + 1 + shift,
                ),
            ]
        chunks.append(Chunk(position, position + length, kind, tuple(stretches)))
        position += length
    return chunks, draw(st.integers(start + 1, position))


def reused_reference(chunks: list[Chunk], end: int) -> dict[int, int]:
    """Target -> source of every reused token, token by token."""
    return {
        stretch.target_start + i: stretch.source_position + i
        for chunk in chunks
        for stretch in chunk.stretches
        for i in range(stretch.length)
        if stretch.target_start + i < end
    }


def run_reference(chunks: list[Chunk], end: int) -> list[list[int]]:
    """Positions of each run: same delta as the stretch before, continued or in the same block."""
    runs: list[list[int]] = []
    before: Stretch | None = None
    for stretch in (s for chunk in chunks for s in chunk.stretches if s.target_start < end):
        joined = before is not None and (
            before.target_start - before.source_position
            == stretch.target_start - stretch.source_position
            and (stretch.continues or before.source_block_id == stretch.source_block_id)
        )
        span = list(range(stretch.target_start, min(stretch.target_end, end)))
        if joined:
            runs[-1] += span
        else:
            runs.append(span)
        before = stretch
    return runs


def origin_of(plan: BlendPlan) -> dict[int, int]:
    return {plan.start + i: int(origin) for i, origin in enumerate(plan.origin)}


@given(tilings())
def test_every_token_has_one_origin_and_reused_ones_their_source(
    case: tuple[list[Chunk], int],
) -> None:
    chunks, end = case
    plan = make_plan(chunks, end)
    expected = reused_reference(chunks, end)
    assert {p for p, o in origin_of(plan).items() if o == Origin.REUSED} == set(expected)
    assert {p for p, o in origin_of(plan).items() if o == Origin.NEW} == (
        set(range(plan.start, end)) - set(expected)
    )
    for position, source in expected.items():
        assert plan.source[position - plan.start] == source


@given(tilings(), st.integers(0, 5), st.integers(0, 12))
def test_first_k_recomputes_run_starts_and_boundaries_of_partial_matches(
    case: tuple[list[Chunk], int], width: int, k: int
) -> None:
    chunks, end = case
    plan = make_plan(chunks, end)
    reused = set(reused_reference(chunks, end))
    chosen = set()
    for run in run_reference(chunks, end):
        chosen |= set(range(run[0], min(run[0] + k, run[-1] + 1)))
    chosen |= partial_ends(chunks, end, width)
    done = plan.recompute(FirstK(k=k, width=width).select(plan))
    assert {p for p, o in origin_of(done).items() if o == Origin.RECOMPUTED} == chosen & reused


def partial_ends(chunks: list[Chunk], end: int, width: int) -> set[int]:
    found = set()
    for chunk in chunks:
        if chunk.chunk_type is ChunkType.PARTIAL_MATCH and chunk.start_idx < end:
            span = list(range(chunk.start_idx, min(chunk.end_idx, end)))
            found |= set(span[:width]) | set(span[len(span) - width :] if width else [])
    return found


@given(tilings(), st.integers(0, 5))
def test_boundary_recomputes_both_ends_of_runs_and_partial_matches(
    case: tuple[list[Chunk], int], width: int
) -> None:
    chunks, end = case
    plan = make_plan(chunks, end)
    chosen = partial_ends(chunks, end, width)
    for run in run_reference(chunks, end):
        chosen |= set(range(run[0], run[0] + width)) | set(range(run[-1] + 1 - width, run[-1] + 1))
    done = plan.recompute(Boundary(width=width).select(plan))
    assert {p for p, o in origin_of(done).items() if o == Origin.RECOMPUTED} == (
        chosen & set(reused_reference(chunks, end))
    )


@given(tilings())
def test_nothing_recomputes_nothing(case: tuple[list[Chunk], int]) -> None:
    chunks, end = case
    plan = make_plan(chunks, end)
    assert plan.recompute(Nothing().select(plan)).count(Origin.RECOMPUTED) == 0


@given(tilings(), st.integers(0, 5), st.integers(0, 12))
def test_loads_and_computed_positions_cover_the_plan(
    case: tuple[list[Chunk], int], width: int, k: int
) -> None:
    chunks, end = case
    plan = make_plan(chunks, end)
    plan = plan.recompute(FirstK(k=k, width=width).select(plan))
    loaded = {p for load in plan.loads() for p in range(load.target_start, load.target_end)}
    computed = set(plan.compute_positions().tolist())
    assert loaded | computed == set(range(plan.start, end))
    sources = reused_reference(chunks, end)
    for load in plan.loads():
        for i in range(load.length):
            assert sources[load.target_start + i] == load.source_position + i


@given(tilings(), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=5))
def test_recomputing_never_invents_sources_or_loses_new_tokens(
    case: tuple[list[Chunk], int], ranges: list[tuple[int, int]]
) -> None:
    chunks, end = case
    plan = make_plan(chunks, end)
    done = plan.recompute(ranges)
    assert np.array_equal(done.origin == Origin.NEW, plan.origin == Origin.NEW)
    assert np.array_equal(done.source, plan.source)


def test_a_plan_needs_a_start() -> None:
    with pytest.raises(IndexError):
        make_plan([], 10)
