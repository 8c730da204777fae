"""HintTable against a dict of lists."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.tokens import hints
from kvloom.tokens.hints import HintTable

hashes = st.sampled_from([0, 1, 2, 3, 2**31, 2**32 - 2, 2**32 - 1])
batches = st.lists(st.lists(hashes, max_size=6), max_size=12)


def filled(rounds: list[list[int]]) -> tuple[HintTable, dict[int, list[int]]]:
    table, model, entry = HintTable(), defaultdict(list), 0
    for batch in rounds:
        entries = list(range(entry, entry + len(batch)))
        entry += len(batch)
        table.add(np.array(batch, dtype=np.uint32), np.array(entries, dtype=np.intp))
        for name, number in zip(batch, entries, strict=True):
            model[name].append(number)
    return table, model


@pytest.fixture(params=[1, 1024])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many levels, or one."""
    monkeypatch.setattr(hints, "_SMALL", request.param)


@pytest.mark.usefixtures("small")
def test_every_entry_of_every_hash_is_found() -> None:
    @given(batches, st.lists(hashes, max_size=8))
    def check(rounds: list[list[int]], asked: list[int]) -> None:
        table, model = filled(rounds)
        which, entries, complete = table.find(np.array(asked, dtype=np.uint32))
        assert complete
        assert which.tolist() == sorted(which.tolist())
        for place, name in enumerate(asked):
            assert sorted(entries[which == place].tolist()) == sorted(model[name])

    check()


@pytest.mark.usefixtures("small")
def test_a_limit_keeps_the_newest_and_says_that_there_are_more() -> None:
    @given(batches, hashes, st.integers(1, 5))
    def check(rounds: list[list[int]], name: int, limit: int) -> None:
        table, model = filled(rounds)
        _, entries, complete = table.find(np.array([name], dtype=np.uint32), limit)
        assert entries.tolist() == model[name][::-1][:limit]
        assert complete == (len(model[name]) <= limit)

    check()


@given(batches, st.sets(st.integers(0, 72)))
def test_a_cleaned_table_has_just_what_was_kept(rounds: list[list[int]], gone: set[int]) -> None:
    table, model = filled(rounds)
    kept = table.kept(lambda entries: ~np.isin(entries, list(gone)))
    for name, numbers in model.items():
        _, entries, _ = kept.find(np.array([name], dtype=np.uint32))
        assert sorted(entries.tolist()) == [number for number in numbers if number not in gone]


def test_a_large_table_finds_all_of_its_hashes_and_few_others() -> None:
    random = np.random.default_rng(0)
    names = random.integers(0, 2**32, 50_000, dtype=np.uint32)
    table = HintTable()
    for first in range(0, len(names), 5000):
        table.add(names[first : first + 5000], np.arange(first, first + 5000))
    which, entries, _ = table.find(names)
    assert set(entries[np.equal(which, entries)].tolist()) == set(range(len(names)))
    assert (names[which] == names[entries]).all()
    strangers = np.setdiff1d(random.integers(0, 2**32, 50_000, dtype=np.uint32), names)
    assert not table.find(strangers)[0].size
    assert len(table.may_have(strangers)) < 0.05 * len(strangers)
    assert table.nbytes < 13 * len(names)
