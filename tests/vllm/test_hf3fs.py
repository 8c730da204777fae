"""HF3FSKVConnector on the real engine, a directory in the place of 3FS, and the real service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hf3fs.service import ServiceProcess, running

from .engines import transfer_config_hf3fs
from .scripts import found_by
from .test_processes import PROMPT, answers

BLOCK = 128


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running(tmp_path_factory.mktemp("service") / "state") as service:
        yield service


def run(what: str, model: Path, folder: Path, service: ServiceProcess) -> dict[str, Any]:
    arguments = (what, model, folder, service.url, service.process.pid)
    return found_by("hf3fs_engine", *arguments, timeout_s=600, VLLM_CPU_KVCACHE_SPACE="1")


@pytest.fixture(scope="module")
def found(
    model: Path, service: ServiceProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return run("scenarios", model, tmp_path_factory.mktemp("pages"), service)


def test_a_second_engine_answers_from_the_first_ones_pages(
    model: Path, service: ServiceProcess, tmp_path: Path
) -> None:
    """H1, H23: in processes of their own, by configuration alone."""
    config = transfer_config_hf3fs(tmp_path, service.url)
    (first,) = answers(model, config, [PROMPT])
    (second,) = answers(model, config, [PROMPT])
    assert (first["exact"], second["exact"]) == (0, len(PROMPT) // BLOCK * BLOCK)
    assert second["tokens"] == first["tokens"]


def test_a_hit_has_the_cold_answer(found: dict[str, Any]) -> None:
    assert found["first"]["exact"] == 0
    assert found["hit"]["exact"] == 400 // BLOCK * BLOCK
    assert found["cold"]["tokens"] == found["first"]["tokens"] == found["hit"]["tokens"]


def test_at_most_all_but_one_token_is_loaded(found: dict[str, Any]) -> None:
    """H16: whole blocks, and one token is left to the engine."""
    hits = [answer["exact"] for answer in found["borders_hit"]]
    assert hits == [0, 0, 0, 128, 128]
    cold = [answer["tokens"] for answer in found["borders_cold"]]
    assert [answer["tokens"] for answer in found["borders_hit"]] == cold


def test_generated_blocks_are_found_by_the_next_turn(found: dict[str, Any]) -> None:
    """H17: saves while decoding."""
    assert found["turn"]["exact"] == (100 + 39) // BLOCK * BLOCK
    assert found["turn"]["tokens"] == found["turn_cold"]["tokens"]


def test_damaged_pages_are_computed_and_saved_anew(found: dict[str, Any]) -> None:
    """H15: exactly what did not come is recomputed, and it is not tried for ever."""
    assert found["damaged"]["exact"] == 0
    assert found["damaged"]["tokens"] == found["cold"]["tokens"]
    assert found["saved_anew"]["exact"] == found["hit"]["exact"]
    assert found["saved_anew"]["tokens"] == found["cold"]["tokens"]


def test_a_service_that_hangs_costs_one_look_up(found: dict[str, Any]) -> None:
    """H16: 0 within 50 ms after the first failure; recovery by itself."""
    for answer in found["stopped"]:
        assert (answer["exact"], answer["tokens"]) == (0, found["cold"]["tokens"])
    first, *later = found["stopped_match_s"]
    assert first < 1.0
    assert max(later) < 0.05
    assert found["continued"]["exact"] == found["hit"]["exact"]
    assert found["continued"]["tokens"] == found["cold"]["tokens"]


def test_a_load_that_is_late_is_given_up(found: dict[str, Any]) -> None:
    """H15, and no thread writes to its blocks afterwards."""
    assert found["late"]["exact"] == 0
    assert found["late"]["tokens"] == found["cold"]["tokens"]
    assert found["late"]["seconds"] < 60


def test_a_promise_without_a_plan_is_computed(found: dict[str, Any]) -> None:
    """A hook that fails between promise and plan: the engine must not wait for ever."""
    assert found["broken_hook"]["tokens"] == found["cold"]["tokens"]
    assert found["after_broken_hook"]["tokens"] == found["cold"]["tokens"]


def test_nothing_is_left_of_finished_and_aborted_requests(found: dict[str, Any]) -> None:
    """H14, H17: blocks, states, loads, saves."""
    assert found["aborted"] == 1, "the pool keeps one block, the null block, for itself"
    assert found["left"] == {"requests": 0, "loads": 0, "saves": 0, "promised": 0}


def test_a_crowd_in_a_tiny_cache(model: Path, service: ServiceProcess, tmp_path: Path) -> None:
    """H17: 200 requests, chunked and preempted, get the answers that they get alone."""
    result = run("crowd", model, tmp_path, service)
    assert result["together"] == result["alone"]
    assert result["again"] == result["alone"]
    assert result["hits"] > 100
    assert result["preempted"] > 0
    assert result["left"] == {"requests": 0, "loads": 0, "saves": 0, "promised": 0}
