"""ChunkIndex: membership against an ordered dict, look-up, memory, threads."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.tokens.analyzer import ChunkAnalyzer
from kvloom.tokens.index import ChunkIndex
from tests.tokens.library import SCOPE, Library, join, reused, text

SIZE = 8


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def add(index: ChunkIndex, number: int, **other: Any) -> None:
    chunk = {"parent": SCOPE, "scope": SCOPE, "token_ids": text(number, SIZE), "position": 0}
    index.add(**{"key": key(number), **chunk, **other})


def finds(index: ChunkIndex, number: int) -> bool:
    with index.lock:
        where, slots, _ = index.find_whole(text(number, SIZE), SCOPE)
        return (
            [row["key"].tobytes() for row in index.rows(slots)] == [key(number)] * len(where) != []
        )


operations = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "many", "remove"]), st.integers(0, 30)),
    max_size=200,
)


@given(operations, st.integers(1, 12))
@settings(max_examples=60)
def test_the_newest_chunks_are_known_and_just_those(
    steps: list[tuple[str, int]], most: int
) -> None:
    index = ChunkIndex(SIZE, max_chunks=most)
    model: OrderedDict[bytes, None] = OrderedDict()
    for what, number in steps:
        if what == "remove":
            assert index.remove(key(number)) == (key(number) in model)
            model.pop(key(number), None)
            continue
        numbers = [number] if what == "add" else list(range(100 + number, 100 + number + most))
        numbers = [each for each in numbers if key(each) not in model]
        if what == "add" and numbers:
            add(index, number)
        elif numbers:
            index.add_many(
                keys=[key(each) for each in numbers],
                parents=[SCOPE] * len(numbers),
                scopes=[SCOPE] * len(numbers),
                token_ids=np.stack([text(each, SIZE) for each in numbers]),
                positions=0,
            )
        for each in numbers:
            model[key(each)] = None
            if len(model) > most:
                model.popitem(last=False)
        assert len(index) == len(model)
    for number in [*range(31), *range(100, 143)]:
        assert (key(number) in index) == (key(number) in model) == finds(index, number)


@pytest.mark.parametrize("seed", range(4))
def test_places_used_anew_do_not_inherit_the_age_of_what_was_there(seed: int) -> None:
    """Long enough that places of forgotten and removed chunks are cleaned and used many times."""
    random = np.random.default_rng(seed)
    index, model = ChunkIndex(SIZE, max_chunks=40), OrderedDict[bytes, None]()
    for _ in range(1500):
        number = int(random.integers(120))
        if random.random() < 0.3 and model:
            name = list(model)[random.integers(len(model))]
            assert index.remove(name)
            del model[name]
        else:
            add(index, number)
            model.setdefault(key(number))
            if len(model) > 40:
                model.popitem(last=False)
        assert len(index) == len(model)
    assert index.known([key(number) for number in range(120)]).tolist() == [
        key(number) in model for number in range(120)
    ]


def test_forgotten_chunks_leave_no_growth() -> None:
    index = ChunkIndex(SIZE, max_chunks=64)
    sizes = []
    for first in range(0, 6400, 64):
        index.add_many(
            keys=[key(number) for number in range(first, first + 64)],
            parents=[SCOPE] * 64,
            scopes=[SCOPE] * 64,
            token_ids=text(first, 64 * SIZE).reshape(64, SIZE),
            positions=0,
        )
        sizes.append((index.nbytes, index.token_bytes))
    assert len(index) == 64
    assert max(sizes[10:]) == max(sizes[:10])


def test_adding_a_chunk_again_changes_nothing() -> None:
    index = ChunkIndex(SIZE, max_chunks=2)
    add(index, 1, position=8)
    add(index, 2)
    add(index, 1, position=16)
    add(index, 3)
    assert [key(number) in index for number in (1, 2, 3)] == [False, True, True]


def test_a_chunk_twice_in_one_batch_is_added_once() -> None:
    index = ChunkIndex(SIZE)
    index.add_many(
        keys=[key(1), key(1)],
        parents=[SCOPE] * 2,
        scopes=[SCOPE] * 2,
        token_ids=np.stack([text(1, SIZE)] * 2),
        positions=[0, 8],
    )
    assert len(index) == 1
    assert index.remove(key(1))
    assert key(1) not in index


@pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE + 1, 2 * SIZE])
def test_chunks_of_another_size_are_ignored(length: int) -> None:
    index = ChunkIndex(SIZE)
    add(index, 1, token_ids=text(1, length))
    assert len(index) == 0
    assert key(1) not in index


def test_a_key_of_another_length_is_never_known() -> None:
    index = ChunkIndex(SIZE)
    add(index, 1, key=b"short")
    add(index, 0)  # the key of zeros
    assert len(index) == 1
    assert b"short" not in index
    assert b"" not in index
    assert not index.remove(b"short")
    assert index.exact([key(0), b"short"]).tolist() == [True, False]


def test_exact_is_what_is_known_as_it_was_computed() -> None:
    index = ChunkIndex(SIZE)
    for number in (1, 2, 4):
        add(index, number)
    add(index, 3, generation=1)
    keys = [key(number) for number in (1, 2, 3, 4, 5)]
    assert index.exact(keys).tolist() == [True, True, False, True, False]
    assert index.exact([]).tolist() == []


def test_many_chunks_at_once_are_as_one_after_the_other() -> None:
    together, apart = Library(SIZE), Library(SIZE)
    prompt = text(5, 20 * SIZE)
    keys = apart.store(prompt, created_ns=7)
    together.index.add_many(
        keys=keys,
        parents=[SCOPE, *keys[:-1]],
        scopes=[SCOPE] * 20,
        token_ids=prompt.reshape(20, SIZE),
        positions=np.arange(20) * SIZE,
        created_ns=7,
    )
    moved = join(text(6, 3), prompt[5:90], text(7, 4), prompt[100:])
    analyzer = ChunkAnalyzer(SIZE, 0.8)
    tiles = analyzer.analyze(moved, together.index, SCOPE)
    assert tiles == analyzer.analyze(moved, apart.index, SCOPE)
    assert reused(tiles)


def test_parents_are_found_whichever_came_first() -> None:
    prompt = text(8, 6 * SIZE)
    moved = join([1], prompt)
    forwards = Library(SIZE)
    keys = forwards.store(prompt)
    backwards = ChunkIndex(SIZE)
    for name in reversed(keys):
        chunk = forwards.chunks[name]
        backwards.add(
            key=name,
            parent=chunk.parent,
            scope=chunk.scope,
            token_ids=chunk.tokens,
            position=chunk.position,
        )
    analyzer = ChunkAnalyzer(SIZE, 0.8)
    tiles = analyzer.analyze(moved, backwards, SCOPE)
    assert tiles == analyzer.analyze(moved, forwards.index, SCOPE)
    assert [stretch.continues for tile in tiles for stretch in tile.stretches] == [False] + [
        True
    ] * 5


def test_a_million_chunks_would_cost_less_than_100_bytes_each() -> None:
    count = 40_000
    index = ChunkIndex(64, max_chunks=count)
    tokens = text(0, 64 * count).reshape(count, 64)
    for first in range(0, count, 4000):
        index.add_many(
            keys=[key(number) for number in range(first, first + 4000)],
            parents=[SCOPE] * 4000,
            scopes=[SCOPE] * 4000,
            token_ids=tokens[first : first + 4000],
            positions=0,
        )
    assert len(index) == count
    assert index.nbytes < 100 * count
    assert index.token_bytes >= 256 * count


def test_without_temporary_files_the_index_lives_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise OSError("no temporary directory")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    library = Library(SIZE)
    prompt = text(1, 2000 * SIZE)
    library.store(prompt)
    assert library.index.token_bytes == 0
    assert len(reused(ChunkAnalyzer(SIZE, 0.8).analyze(prompt, library.index, SCOPE))) == len(
        prompt
    )


def test_a_disk_that_fills_up_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing a file that has no room: without reserving it, the kernel would kill the engine."""
    library = Library(SIZE)
    prompt = text(1, 3000 * SIZE)
    library.store(prompt[: 1000 * SIZE])
    assert library.index.token_bytes > 0

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    library.store(prompt)
    assert library.index.token_bytes == 0
    tiles = ChunkAnalyzer(SIZE, 0.8).analyze(join([3], prompt), library.index, SCOPE)
    library.check(tiles, join([3], prompt), 0.8)
    assert len(reused(tiles)) == len(prompt)


@pytest.mark.parametrize(("size", "most"), [(0, 1), (8, 0), (-1, 5)])
def test_an_index_that_can_hold_nothing_is_refused(size: int, most: int) -> None:
    with pytest.raises(ValueError, match="holds none"):
        ChunkIndex(size, most)


def test_matching_while_chunks_come_and_go_is_sound() -> None:
    library = Library(SIZE, max_chunks=300)
    prompts = [text(seed, 40 * SIZE) for seed in range(20)]
    for prompt in prompts:
        library.store(prompt)  # so that the library knows every chunk that can come
    failures: list[BaseException] = []
    stop = threading.Event()

    def feed() -> None:
        try:
            random = np.random.default_rng(1)
            while not stop.is_set():
                keys = library.store(prompts[random.integers(len(prompts))])
                for name in keys[:: random.integers(2, 6)]:
                    library.index.remove(name)
        except BaseException as error:
            failures.append(error)
            raise

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        analyzer = ChunkAnalyzer(SIZE, 0.8)
        found = 0
        for number in range(60):
            moved = join([number], *prompts[number % 15 : number % 15 + 5])
            tiles = analyzer.analyze(moved, library.index, SCOPE)
            library.check(tiles, moved, 0.8)
            found += len(reused(tiles))
    finally:
        stop.set()
        feeder.join()
    assert not failures
    assert found > 0
    assert len(library.index) <= 300
