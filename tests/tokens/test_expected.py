"""ExpectedChunks: what an engine knows before the index does, and never waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.tokens.expected import Additions, ExpectedChunks
from kvloom.tokens.index import ChunkIndex
from tests.tokens.library import SCOPE, text

SIZE = 8


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def chunks(*numbers: int, generation: int = 0) -> Additions:
    return Additions(
        [key(number) for number in numbers],
        [SCOPE] * len(numbers),
        SCOPE,
        np.stack([text(number, SIZE) for number in numbers]).astype(np.int32),
        [0] * len(numbers),
        generation,
    )


@contextmanager
def expected_of(index: ChunkIndex) -> Iterator[ExpectedChunks]:
    expected = ExpectedChunks(index)
    try:
        yield expected
    finally:
        expected.close()


steps = st.lists(
    st.tuples(
        st.sampled_from(["saved", "saved", "lost", "written"]),
        st.integers(0, 5),
        st.integers(0, 1),
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(steps)
def test_the_last_word_on_a_chunk_counts_written_or_not(done: list[tuple[str, int, int]]) -> None:
    model: dict[int, int] = {}
    with expected_of(ChunkIndex(SIZE)) as expected:
        for what, number, generation in done:
            if what == "saved" and number not in model:
                expected.add(chunks(number, generation=generation))
                model[number] = generation
            elif what == "lost":
                expected.remove([key(number)])
                model.pop(number, None)
            elif what == "written":
                assert expected.wait_written(10)
            keys = [key(each) for each in range(6)]
            assert expected.known(keys).tolist() == [each in model for each in range(6)]
            assert expected.exact(keys).tolist() == [model.get(each) == 0 for each in range(6)]
            first = next((n for n in range(6) if model.get(n) != 0), 6)
            assert expected.prefix_hits(keys) == first
        assert expected.wait_written(10)
        keys = [key(each) for each in range(6)]
        assert expected.index.known(keys).tolist() == [each in model for each in range(6)]


@pytest.mark.timeout(30)
def test_nobody_waits_for_a_writer_of_the_index() -> None:
    """It merges tables for seconds; the steps of the engine go on."""
    index = ChunkIndex(SIZE)
    with expected_of(index) as expected:
        expected.add(chunks(1))
        assert expected.wait_written(10)
        done = threading.Event()

        def step() -> None:
            expected.remove([key(1)])
            expected.add(chunks(2))
            assert expected.prefix_hits([key(2), key(1)]) == 1
            done.set()

        with index._writing:
            threading.Thread(target=step, daemon=True).start()
            assert done.wait(10)
            assert key(2) not in index
        assert expected.wait_written(10)
        assert key(2) in index
        assert key(1) not in index


def test_what_is_written_while_one_asks_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    index = ChunkIndex(SIZE)
    known = index.known
    with expected_of(index) as expected:

        def written_meanwhile(keys: list[bytes]) -> object:
            found = known(keys)
            index._writing.release()
            assert expected.wait_written(10)
            return found

        index._writing.acquire()
        expected.add(chunks(1))
        with monkeypatch.context() as patch:
            patch.setattr(index, "known", written_meanwhile)
            assert expected.known([key(1)])[0]


def test_what_can_not_be_written_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    index = ChunkIndex(SIZE)
    with expected_of(index) as expected:
        with monkeypatch.context() as patch:
            patch.setattr(index, "add_many", lambda **arguments: 1 / 0)
            expected.add(chunks(1))
            assert expected.wait_written(10)
        assert not expected.known([key(1)])[0]
        expected.add(chunks(2))
        assert expected.wait_written(10)
        assert key(2) in index


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.tokens.expected._MOST", 10)
    index = ChunkIndex(SIZE)
    with expected_of(index) as expected:
        with index._writing:
            for first in range(0, 15, 3):
                expected.add(chunks(first, first + 1, first + 2))
            known = expected.known([key(number) for number in range(15)])
            assert known.tolist() == [True] * 9 + [False] * 6
        assert expected.wait_written(10)
        expected.add(chunks(20))
        assert expected.known([key(20)])[0]
