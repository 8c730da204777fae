"""ExpectedChunks: what an engine knows before the index does, and never waits for."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.tokens.expected import ExpectedChunks
from kvloom.tokens.index import ChunkIndex
from tests.tokens.library import SCOPE, text

SIZE = 8


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def carry(index: ChunkIndex, number: int, generation: int = 0) -> None:
    """The feeder brings a chunk from the store."""
    index.add(
        key=key(number),
        parent=SCOPE,
        scope=SCOPE,
        token_ids=text(number, SIZE),
        position=0,
        generation=generation,
    )


steps = st.lists(
    st.tuples(
        st.sampled_from(["saved", "lost", "carried", "settled"]),
        st.integers(0, 5),
        st.integers(0, 1),
    ),
    max_size=60,
)


@given(steps)
def test_the_last_word_on_a_chunk_counts(done: list[tuple[str, int, int]]) -> None:
    expected = ExpectedChunks(ChunkIndex(SIZE))
    model: dict[int, int] = {}
    lost: set[int] = set()
    for what, number, generation in done:
        if what == "saved" and number not in model:
            expected.add([key(number)], generation)
            model[number] = generation
            lost.discard(number)
        elif what == "lost":
            expected.remove([key(number)])
            model.pop(number, None)
            lost.add(number)
        elif what == "carried" and number in model:
            carry(expected.index, number, model[number])
        elif what == "settled":
            expected.settle()
        keys = [key(each) for each in range(6)]
        assert expected.known(keys).tolist() == [each in model for each in range(6)]
        assert expected.exact(keys).tolist() == [model.get(each) == 0 for each in range(6)]
        first = next((n for n in range(6) if model.get(n) != 0), 6)
        assert expected.prefix_hits(keys) == first
    expected.settle()
    index = expected.index
    assert not any(key(number) in index for number in lost)


def test_what_has_arrived_is_remembered_once() -> None:
    expected = ExpectedChunks(ChunkIndex(SIZE))
    expected.add([key(1), key(2)], 0)
    carry(expected.index, 1)
    expected.settle()
    assert list(expected._coming) == [key(2)]
    expected.remove([key(1), key(2)])
    expected.settle()
    assert not expected._coming
    assert not expected._leaving
    assert len(expected.index) == 0


@pytest.mark.timeout(30)
def test_nobody_waits_for_a_writer_of_the_index() -> None:
    """It merges tables for seconds; the steps of the engine go on."""
    expected = ExpectedChunks(ChunkIndex(SIZE))
    carry(expected.index, 1)
    with expected.index._writing:
        done = threading.Event()

        def step() -> None:
            expected.remove([key(1)])
            expected.add([key(2)], 0)
            assert expected.prefix_hits([key(2), key(1)]) == 1
            done.set()

        threading.Thread(target=step, daemon=True).start()
        assert done.wait(10)


def test_what_never_arrives_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.tokens.expected._MOST", 10)
    expected = ExpectedChunks(ChunkIndex(SIZE))
    expected.add([key(number) for number in range(15)], 0)
    assert expected.known([key(4), key(5)]).tolist() == [False, True]
