"""ChunkAnalyzer: spec rows B4, B5 and B6, against the slow account in ``library``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.tokens import hashing
from kvloom.tokens import index as index_module
from kvloom.tokens.analyzer import ChunkAnalyzer
from kvloom.tokens.chunks import Chunk, ChunkType
from kvloom.tokens.hashing import scope_id
from kvloom.tokens.index import ChunkIndex
from tests.tokens.library import SCOPE, Library, Tokens, join, reused, text

RATIO = 0.8
NEW = [2**30 + 1, 2**30 + 2, 2**30 + 3, 2**30 + 4]  # tokens that no text has


def analyze(
    library: Library, prompt: Tokens, scope: bytes = SCOPE, start: int = 0, ratio: float = RATIO
) -> list[Chunk]:
    tiles = ChunkAnalyzer(library.size, ratio).analyze(prompt, library.index, scope, start)
    library.check(tiles, prompt, ratio, scope, start)
    return tiles


# Texts put together from a few passages: shared beginnings, nested and repeated documents.
passages = st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(1, 45))
texts = st.lists(passages, min_size=1, max_size=5).map(
    lambda parts: join(*(text(seed, 80)[first : first + length] for seed, first, length in parts))
)
noisy = st.lists(st.integers(0, 2), max_size=120).map(join)


@given(st.lists(texts, max_size=4), texts, st.sampled_from([8, 11, 16]), st.data())
@settings(max_examples=300)
def test_whole_stored_chunks_are_reused_the_longest_run_first(
    stored: list[Tokens], prompt: Tokens, size: int, data: st.DataObject
) -> None:
    library = Library(size)
    for number, each in enumerate(stored):
        library.store(each, created_ns=number)
    start = data.draw(st.integers(0, len(prompt)))
    expected = library.whole_chunks(prompt, start=start)
    tiles = analyze(library, prompt, start=start)
    answer = {
        stretch.target_start + at: (stretch.source_block_id, stretch.source_offset + at)
        for tile in tiles
        for stretch in tile.stretches
        for at in range(stretch.length)
    }
    for place, key in expected.items():
        for at in range(size):
            assert answer[place + at] == (key, at)


@given(st.lists(noisy, max_size=4), noisy, st.sampled_from([8, 9, 16]), st.data())
@settings(max_examples=150)
def test_any_answer_tiles_the_prompt_and_reuses_equal_tokens_only(
    stored: list[Tokens], prompt: Tokens, size: int, data: st.DataObject
) -> None:
    """Text of three tokens: full of repetition and of false alignments."""
    library = Library(size)
    for number, each in enumerate(stored):
        library.store(each, created_ns=number)
    analyze(library, prompt, start=data.draw(st.integers(0, len(prompt))))


@pytest.mark.parametrize("distinct", [1, 2, 4])
@given(stored=st.lists(texts | noisy, max_size=4), prompt=texts | noisy)
@settings(max_examples=80)
def test_fingerprints_that_collide_never_match_wrong_tokens(
    distinct: int, stored: list[Tokens], prompt: Tokens
) -> None:
    mix: Callable[[Tokens], np.ndarray] = hashing._mix
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "_mix", lambda tokens: mix(tokens % distinct))
        library = Library(8)
        for number, each in enumerate(stored):
            library.store(each, created_ns=number)
        analyze(library, prompt)


@given(st.integers(0, 200), st.integers(0, 100), st.integers(1, 5))
def test_a_document_is_reused_wherever_it_moves(before: int, after: int, chunks: int) -> None:
    library = Library(64)
    document = text(1, 64 * chunks)
    library.store(document)
    tiles = analyze(library, join(text(2, before), document, text(3, after)))
    assert reused(tiles) == set(range(before, before + len(document)))
    full = [tile for tile in tiles if tile.chunk_type is ChunkType.FULL_MATCH]
    assert [tile.source_position for tile in full] == [64 * number for number in range(chunks)]
    assert [tile.stretches[0].continues for tile in full] == [False] + [True] * (chunks - 1)


@given(st.integers(0, 300), st.integers(0, 320), st.integers(0, 70))
def test_a_cut_document_is_reused_up_to_the_cut(first: int, length: int, before: int) -> None:
    """The end pieces too, as tiles shorter than a chunk, if a whole chunk is left beside them."""
    library = Library(64)
    document = text(1, 320)
    library.store(document)
    last = min(first + length, 320)
    prompt = join(text(2, before), document[first:last], text(3, 40))
    tiles = analyze(library, prompt)
    borders = [at for at in range(0, 321, 64) if first <= at <= last]
    if len(borders) >= 2:
        low = first if borders[0] - first >= 8 else borders[0]
        high = last if last - borders[-1] >= 8 else borders[-1]
        assert reused(tiles) == set(range(before + low - first, before + high - first))
    assert all(tile.chunk_type is not ChunkType.PARTIAL_MATCH for tile in tiles)


@given(
    st.sampled_from(["substitute", "insert", "delete"]),
    st.integers(0, 319),
    st.integers(1, 5),
    st.integers(0, 70),
    st.sampled_from([64, 320]),
)
@settings(max_examples=300)
def test_an_edit_costs_no_more_than_itself_and_a_short_end(
    kind: str, at: int, count: int, before: int, length: int
) -> None:
    """In documents of one chunk and of several, at the start, in the middle and at the end."""
    at %= length
    document = text(1, length)
    library = Library(64)
    library.store(document)
    count = min(count, length - at)
    added = [] if kind == "delete" else (NEW * 2)[:count]
    left, right = document[:at], document[at if kind == "insert" else at + count :]
    prompt = join(text(2, before), left, added, right, text(3, 40))
    tiles = analyze(library, prompt)
    own = set(range(before, before + len(left))) | set(
        range(before + len(left) + len(added), before + len(left) + len(added) + len(right))
    )
    chunk_start = at // 64 * 64
    head, tail = at - chunk_start, chunk_start + 64 - (at if kind == "insert" else at + count)
    # What of the edited chunks is too short to be worth it. An edit may reach into a second chunk.
    if kind != "insert" and at + count > chunk_start + 64:
        tail = chunk_start + 128 - (at + count)
    lost = sum(piece for piece in (head, tail) if piece < 8)
    assert reused(tiles) <= own
    assert len(own) - len(reused(tiles)) <= lost


def test_an_edited_chunk_is_one_partial_match_with_a_delta_for_each_stretch() -> None:
    library = Library(64)
    document = text(1, 192)
    keys = library.store(document)
    prompt = join(text(2, 10), document[:100], NEW[:1], document[100:110], document[112:])
    partial = [
        tile for tile in analyze(library, prompt) if tile.chunk_type is ChunkType.PARTIAL_MATCH
    ]
    assert [(tile.start_idx, tile.end_idx) for tile in partial] == [(74, 137)]
    assert partial[0].source_block_id == keys[1]
    assert partial[0].source_position == 64
    stretches = partial[0].stretches
    assert [(s.target_start, s.length, s.delta) for s in stretches] == [
        (74, 36, 10),
        (111, 10, 11),
        (121, 16, 9),
    ]
    assert [s.continues for s in stretches] == [True, False, False]


@given(st.integers(0, 64), st.floats(0.3, 1.0))
def test_an_edited_chunk_is_reused_from_the_ratio_on(edits: int, ratio: float) -> None:
    """Edits from the middle on; a lone chunk, so that nothing but the ratio decides."""
    library = Library(64)
    document = text(1, 64)
    library.store(document)
    first = (64 - edits) // 2
    changed = np.where((np.arange(64) >= first) & (np.arange(64) < first + edits), NEW[0], document)
    tiles = analyze(library, join(text(2, 30), changed, text(3, 30)), ratio=ratio)
    stays = 64 - edits
    if stays >= 48 and stays >= ratio * 64:
        assert len(reused(tiles)) == stays
    if stays < ratio * 64 and edits:
        assert not reused(tiles) or edits == 0


def test_a_chunk_with_an_edit_in_each_quarter_is_found_through_its_neighbours() -> None:
    library = Library(64)
    document = text(1, 192)
    library.store(document)
    changed = document.copy()
    changed[[64 + 10, 64 + 20, 64 + 36, 64 + 50]] = NEW
    tiles = analyze(library, join(text(2, 9), changed))
    kinds = [tile.chunk_type for tile in tiles]
    assert kinds.count(ChunkType.PARTIAL_MATCH) == 1
    assert len(reused(tiles)) == 192 - 4


def test_a_phrase_in_common_is_no_match() -> None:
    library = Library(64)
    library.store(text(1, 128))
    prompt = join(text(2, 50), text(1, 128)[16:40], text(3, 50))
    assert not reused(analyze(library, prompt))


def test_two_documents_joined_keep_their_own_sources() -> None:
    library = Library(64)
    one, two = text(1, 200), text(2, 200)
    library.store(join(text(3, 20), one, text(4, 60)))
    library.store(join(text(5, 50), two, text(6, 60)))
    prompt = join(one, two)
    tiles = analyze(library, prompt)
    deltas = {
        position: stretch.delta
        for tile in tiles
        for stretch in tile.stretches
        for position in range(stretch.target_start, stretch.target_end)
    }
    assert {delta for at, delta in deltas.items() if at < 200} == {-20}
    assert {delta for at, delta in deltas.items() if at >= 200} == {150}
    assert len(deltas) == 400


def test_of_equally_long_runs_the_one_with_the_more_alike_text_before_wins() -> None:
    library = Library(8)
    document, here, there = text(1, 16), text(2, 12), text(3, 12)
    alike = library.store(join(there[:4], here, document), created_ns=1)
    library.store(join(here[:4], there, document), created_ns=2)
    prompt = join(text(4, 5), here[-3:], document)
    chosen = [tile.source_block_id for tile in analyze(library, prompt) if tile.stretches]
    assert chosen == alike[2:]


def test_text_before_the_start_counts_as_context() -> None:
    library = Library(8)
    document, here, there = text(1, 16), text(2, 16), text(3, 16)
    alike = library.store(join(here, document), created_ns=1)
    library.store(join(there, document), created_ns=2)
    tiles = analyze(library, join(text(4, 3), here, document), start=19)
    assert [tile.source_block_id for tile in tiles] == alike[2:]


def test_of_runs_alike_in_all_else_the_newest_wins() -> None:
    library = Library(8)
    document = text(1, 16)
    ages = {age: library.store(join(text(age, 8), document), created_ns=age) for age in (5, 9, 7)}
    tiles = analyze(library, join([1], document))
    assert [tile.source_block_id for tile in tiles if tile.stretches] == ages[9][1:]


def test_the_longer_run_wins_over_the_newer_one() -> None:
    library = Library(8)
    document = text(1, 40)
    long = library.store(document, created_ns=1)
    library.store(join(text(2, 8), document[8:32]), created_ns=2)
    tiles = analyze(library, join([1], document))
    assert [tile.source_block_id for tile in tiles if tile.stretches] == long


@given(st.lists(noisy, min_size=1, max_size=5), noisy, st.integers(1, 3))
@settings(max_examples=200)
def test_where_not_all_sources_are_looked_at_tiles_still_do_not_overlap(
    stored: list[Tokens], prompt: Tokens, sources: int
) -> None:
    """A long prompt of few tokens: a run's own neighbour, found late, may stand where another
    source was taken."""
    library = Library(8)
    for number, each in enumerate(stored):
        library.store(each, created_ns=number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "_SOURCES", sources)
        analyze(library, prompt)


def test_a_neighbour_that_was_not_looked_at_stands_where_another_source_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Library(8)
    here, there, end = text(1, 8), text(2, 8), text(3, 8)
    library.store(join(here, end))
    library.store(join(there, end))
    monkeypatch.setattr(index_module, "_SOURCES", 1)
    tiles = analyze(library, join(here, end))
    assert [tile.start_idx for tile in tiles] == [0, 8]


def test_another_scope_is_never_matched_nor_does_it_hide_ones_own() -> None:
    library = Library(8)
    document = text(1, 64)
    mine = library.store(document, scope_id(cache_salt="mine"), created_ns=0)
    for number in range(50):  # newer, and more than are looked at for one text
        library.store(document, scope_id(cache_salt=f"other {number}"), created_ns=1 + number)
    edited = document.copy()
    edited[20] = NEW[0]
    for prompt in (join([1, 2], document), join([1, 2], edited)):
        tiles = analyze(library, prompt, scope_id(cache_salt="mine"))
        sources = {s.source_block_id for tile in tiles for s in tile.stretches}
        assert sources
        assert sources <= set(mine)
        assert not reused(analyze(library, prompt, scope_id(cache_salt="nobody")))


def test_a_removed_chunk_is_never_matched() -> None:
    library = Library(8)
    document = text(1, 64)
    keys = library.store(document)
    for key in keys[2:4]:
        library.index.remove(key)
    tiles = analyze(library, join([1], document))
    assert reused(tiles) == set(range(1, 17)) | set(range(33, 65))


def test_a_forgotten_chunk_is_never_matched() -> None:
    library = Library(8, max_chunks=10)
    old, new = text(1, 80), text(2, 48)
    library.store(old)
    library.store(new)
    tiles = analyze(library, join([1], old, [2], new))
    assert reused(tiles) == set(range(1 + 48, 1 + 80)) | set(range(82, 82 + 48))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 31])
@pytest.mark.parametrize("size", [8, 64])
def test_short_prompts_are_tiled(count: int, size: int) -> None:
    library = Library(size)
    library.store(text(1, 128))
    tiles = analyze(library, text(1, count))
    assert len(reused(tiles)) == count // size * size
    assert analyze(library, text(1, count), start=count) == []


def test_a_list_of_tokens_will_do() -> None:
    library = Library(8)
    library.store(text(1, 32))
    analyzer = ChunkAnalyzer(8, RATIO)
    tiles = analyzer.analyze(text(1, 32).tolist(), library.index, SCOPE)
    assert tiles == analyzer.analyze(text(1, 32), library.index, SCOPE)
    assert len(reused(tiles)) == 32


def test_an_index_of_another_chunk_size_is_refused() -> None:
    with pytest.raises(ValueError, match="chunks of 16 tokens, not 8"):
        ChunkAnalyzer(8, RATIO).analyze([1, 2], ChunkIndex(16))


@pytest.mark.parametrize("period", [1, 2, 3, 7, 64, 100])
@pytest.mark.parametrize("before", [0, 5])
def test_text_that_repeats_itself_is_reused_in_a_run_or_two(period: int, before: int) -> None:
    library = Library(64)
    repeated = np.resize(text(1, period), 8192)
    library.store(repeated)
    tiles = analyze(library, join(text(2, before), repeated))
    assert len(reused(tiles)) > 8192 - 64
    assert sum(not s.continues for tile in tiles for s in tile.stretches) <= 2


def test_a_document_stored_a_thousand_times_is_found_whole() -> None:
    library = Library(64)
    document = text(0, 256)
    for number in range(1000):
        library.store(join(text(10 + number, 64), document), created_ns=number)
    tiles = analyze(library, join([1], document))
    assert reused(tiles) == set(range(1, 257))
    assert sum(not s.continues for tile in tiles for s in tile.stretches) == 1


def test_documents_within_documents_are_all_reused() -> None:
    library = Library(8)
    inner = text(1, 40)
    middle = join(text(2, 13), inner, text(3, 30))
    outer = join(text(4, 21), middle, text(5, 30))
    for number, each in enumerate((inner, middle, outer)):
        library.store(each, created_ns=number)
    prompt = join([7], outer, [8], middle, [9], inner)
    tiles = analyze(library, prompt)
    assert len(reused(tiles)) >= len(prompt) - 3 - 3 * 8


def test_a_run_that_lost_its_first_chunk_keeps_the_free_part_of_it() -> None:
    """The end of that chunk, at its own offset: its start stands in the run that won."""
    library = Library(64)
    long, rest = text(1, 320), text(2, 146)
    library.store(long, created_ns=1)
    keys = library.store(join(text(3, 10), long[-100:], rest), created_ns=2)
    tiles = analyze(library, join(long, rest))
    assert reused(tiles) == set(range(466))
    piece = tiles[5]
    assert (piece.start_idx, piece.end_idx, piece.source_block_id) == (320, 338, keys[1])
    assert piece.stretches[0].source_offset == 46


def test_of_parts_that_changed_places_only_those_in_order_are_reused() -> None:
    library = Library(64)
    chunk = text(1, 64)
    library.store(chunk)
    swapped = join(chunk[:32], chunk[40:48], chunk[32:40], chunk[48:])
    tiles = analyze(library, join(text(2, 20), swapped, text(3, 20)))
    assert len(reused(tiles)) == 32 + 8 + 16
