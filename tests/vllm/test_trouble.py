"""The metadata service stopped, killed, slow, answering garbage, under an engine (H15, H16)."""

from __future__ import annotations

from typing import Any

import pytest

from .scripts import found_by

TROUBLES = ["stopped", "killed", "late", "dripping", "garbage", "no_json", "failing", "silent"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("trouble_engine", tmp_path_factory.mktemp("trouble"), timeout_s=400)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_engine_answers_and_waits_once_at_most(found: dict[str, Any], trouble: str) -> None:
    """The cold answers meanwhile; no step waits after the first failure; hits again afterwards."""
    hit, meanwhile = found["hit"], found["troubles"][trouble]
    cold = found["cold"]["tokens"]
    assert hit["exact"] == 192
    assert hit["tokens"] == cold
    assert all(tokens == cold for tokens in meanwhile["tokens"])
    assert not any(meanwhile["exact"]), "the trouble must have been met"
    # Look-ups, one a request, wait 50 ms at most, and only until the first one failed. On a busy
    # machine any step may be held up: a look-up that waits would hold up one of every request's.
    assert len(meanwhile["after_s"]) > len(meanwhile["tokens"])
    assert sum(seconds > 0.05 for seconds in meanwhile["after_s"]) <= 1
    assert max(meanwhile["before_s"]) < 1.0
    assert meanwhile["recovered"]["exact"] == 192, "recovers by itself"
    assert meanwhile["recovered"]["tokens"] == cold


def test_nothing_is_left_of_the_requests(found: dict[str, Any]) -> None:
    assert found["left"] == {"requests": 0, "loads": 0, "saves": 0, "promised": 0}
