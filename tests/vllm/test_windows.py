"""B10: models some of whose layers keep a window only are served exact prefixes, on real engines.

A Gemma 3 of three layers that see 96 tokens and one that sees all, computed in pieces of 160.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .scripts import found_by
from .windows_engine import CHUNK, KINDS, LENGTH

WHOLE = LENGTH // CHUNK * CHUNK


def same(answer: dict[str, Any], cold: dict[str, Any]) -> bool:
    """Log-probabilities show what the tokens may hide: KV that is not what it should be."""
    return bool(
        answer["tokens"] == cold["tokens"]
        and np.allclose(answer["logprobs"], cold["logprobs"], atol=1e-4)
    )


@pytest.fixture(scope="module", params=list(KINDS))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("windows")
    return found_by("windows_engine", folder, request.param, timeout_s=600, OMP_NUM_THREADS="1")


def test_a_prefix_of_many_windows_is_loaded(found: dict[str, Any]) -> None:
    assert found["first"]["figures"]["exact"] == 0
    assert found["again"]["figures"]["exact"] == WHOLE
    assert same(found["first"], found["cold"])
    assert same(found["again"], found["cold"])


def test_every_chunk_is_stored_though_windows_move_on(found: dict[str, Any]) -> None:
    assert set(found["stored"]) == {(LENGTH + 7) // CHUNK}


def test_loads_go_on_behind_what_the_engine_has_itself(found: dict[str, Any]) -> None:
    cold, warm = found["part"]
    assert same(warm, cold)
    assert warm["figures"]["exact"] == 300 // CHUNK * CHUNK
    behind = found["behind_part"]
    assert 0 < behind["figures"]["local"] < behind["figures"]["exact"] == WHOLE
    assert same(behind, found["cold"])


@pytest.mark.parametrize("where", ["in_window", "behind_window"])
def test_a_lost_chunk_costs_the_load_and_comes_back(found: dict[str, Any], where: str) -> None:
    """A part of the load would be worth nothing: before it the blocks of a window are missing."""
    lost, later = found[where]
    assert lost["figures"]["exact"] == 0
    assert lost["figures"]["new"] == LENGTH
    assert later["figures"]["exact"] == WHOLE
    assert same(lost, found["cold"])
    assert same(later, found["cold"])


def test_a_promise_that_nobody_keeps_is_a_cold_answer(found: dict[str, Any]) -> None:
    assert same(found["no_plan"], found["cold"])
    assert found["live"] == 0


def test_generated_text_is_stored_though_windows_move_on(found: dict[str, Any]) -> None:
    cold, warm = found["turns"]
    assert warm["figures"]["exact"] == 210 // CHUNK * CHUNK
    assert same(warm, cold)
