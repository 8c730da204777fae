"""B14: an engine of two ranks blends what one of one rank blends, and to the same answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from .blend_ranks_engine import CHUNK
from .scripts import found_by


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What engines of one and of two ranks found."""

    def run(ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        return found_by("blend_ranks_engine", folder, ranks, timeout_s=600, OMP_NUM_THREADS="1")

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (1, 2)))


def test_every_rank_stores_its_share_of_all_chunks(engines: list[dict[str, Any]]) -> None:
    one, two = engines
    (names,) = one["stored"]
    assert len(names) == 18
    assert two["stored"] == [names, names]


def test_an_exact_prefix_is_loaded_by_all_ranks(engines: list[dict[str, Any]]) -> None:
    for found in engines:
        cold, warm = found["exact"]
        assert warm["figures"]["exact"] == 6 * CHUNK
        assert warm["tokens"] == cold["tokens"]


def test_choosing_all_is_a_full_prefill(engines: list[dict[str, Any]]) -> None:
    for found in engines:
        cold, blended = found["all"]
        assert blended["figures"]["reused"] == 0
        assert blended["figures"]["recomputed"] > 6 * CHUNK
        assert blended["tokens"] == cold["tokens"]
        assert np.allclose(blended["logprobs"], cold["logprobs"], atol=1e-3)


def test_what_one_rank_lost_is_not_counted_on_again(engines: list[dict[str, Any]]) -> None:
    for found in engines:
        (_, before), (_, after) = found["some"], found["after"]
        assert after["figures"]["failed"] == 0
        assert after["figures"]["new"] == before["figures"]["new"] + CHUNK


@pytest.mark.parametrize("case", ["some", "without"])
def test_ranks_choose_together(engines: list[dict[str, Any]], case: str) -> None:
    """Else their forwards would not be of the same tokens: a wrong answer, or none at all.

    ``without`` a chunk that one rank has lost: it counts as lost for both.
    """
    (_, one), (_, two) = (found[case] for found in engines)
    assert two["figures"] == one["figures"]
    assert one["figures"]["reused"] > 3 * CHUNK
    assert one["figures"]["failed"] == (CHUNK if case == "without" else 0)
    assert two["tokens"] == one["tokens"]
    assert np.allclose(two["logprobs"], one["logprobs"], atol=1e-3)
    assert not np.allclose(one["logprobs"], engines[0][case][0]["logprobs"], atol=1e-3), (
        "a blend that can't be told from a full prefill shows nothing"
    )
