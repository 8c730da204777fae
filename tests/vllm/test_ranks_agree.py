"""B14: what fails on one of two ranks, on real processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
import torch.distributed

from kvloom.vllm.metadata import LoadReport, Obstacle, WorkerReport
from kvloom.vllm.ranks import Ranks


def outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except BaseException as error:  # noqa: BLE001  (an ApartError is none of Exception)
        return type(error).__name__
    return "done"


def fail(ranks: Ranks, way: str, failing: set[int]) -> str:
    def work() -> None:
        with getattr(ranks, way)():
            if torch.distributed.get_rank() in failing:
                raise KeyError("here")

    return outcome(work)


def rank_main(rank: int, meeting: str, answers: Connection) -> None:
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    ranks = Ranks(torch.distributed.group.WORLD)
    found: dict[str, object] = {
        f"{way} {sorted(failing)}": fail(ranks, way, failing)
        for way in ("together", "in_step")
        for failing in (set(), {0}, {1}, {0, 1})
    }
    found["all"] = ranks.all(np.array([True, rank == 0, rank == 1, False])).tolist()
    found["sum"] = ranks.sum(torch.tensor([1.0, rank])).tolist()
    found["max"] = ranks.max(torch.tensor([-1.0, rank])).tolist()
    answers.send(found)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    meeting = str(tmp_path_factory.mktemp("ranks") / "meeting")
    spawn = multiprocessing.get_context("spawn")
    answers, processes = [], []
    for rank in range(2):
        here, there = spawn.Pipe()
        process = spawn.Process(target=rank_main, args=(rank, meeting, there))
        process.start()
        answers.append(here)
        processes.append(process)
    try:
        assert all(here.poll(120) for here in answers)
        return [here.recv() for here in answers]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


@pytest.mark.parametrize("way", ["together", "in_step"])
def test_what_goes_well_everywhere_goes_on(found: list[dict[str, object]], way: str) -> None:
    assert [rank[f"{way} []"] for rank in found] == ["done", "done"]


@pytest.mark.parametrize("way", ["together", "in_step"])
def test_what_fails_everywhere_is_an_error_like_others(
    found: list[dict[str, object]], way: str
) -> None:
    assert [rank[f"{way} [0, 1]"] for rank in found] == ["KeyError", "KeyError"]


def test_what_fails_on_one_rank_fails_on_the_other(found: list[dict[str, object]]) -> None:
    assert [rank["together [0]"] for rank in found] == ["KeyError", "OtherRankError"]
    assert [rank["together [1]"] for rank in found] == ["OtherRankError", "KeyError"]


def test_ranks_that_parted_in_a_forward_do_not_go_on(found: list[dict[str, object]]) -> None:
    for case in ("in_step [0]", "in_step [1]"):
        assert [rank[case] for rank in found] == ["ApartError", "ApartError"]


def test_all_ranks_get_the_same(found: list[dict[str, object]]) -> None:
    for rank in found:
        assert rank["all"] == [True, False, False, False]
        assert rank["sum"] == [2.0, 1.0]
        assert rank["max"] == [-1.0, 1.0]


def report(**fields: object) -> WorkerReport:
    return WorkerReport(**fields)  # type: ignore[arg-type]


def test_reports_of_ranks_become_one() -> None:
    def load(bytes_read: int, load_ms: float) -> LoadReport:
        return LoadReport(10, 2, 1, 0, bytes_read=bytes_read, load_ms=load_ms, compute_ms=4.0)

    joined = report(loads={"a": load(100, 7.0)}, lost=[b"x", b"y"]).aggregate(
        report(loads={"a": load(50, 9.0)}, lost=[b"y", b"z"], timed=True)
    )
    assert joined == report(
        loads={"a": load(150, 9.0)}, lost=[b"x", b"y", b"z"], obstacle=None, timed=True
    )


@pytest.mark.parametrize("first", [True, False])
def test_what_failed_on_one_rank_failed(first: bool) -> None:
    good = report(loads={"a": LoadReport(192, 0, 0, 0)})
    bad = report(loads={"a": LoadReport(64, 128, 100, 28)})
    joined = (good if first else bad).aggregate(bad if first else good)
    assert joined == bad


@pytest.mark.parametrize("first", [True, False])
def test_of_two_obstacles_the_larger_counts(first: bool) -> None:
    some, all_ = Obstacle("some", everything=False), Obstacle("all", everything=True)
    one, other = (some, all_) if first else (all_, some)
    joined = report(obstacle=one).aggregate(report(obstacle=other))
    assert isinstance(joined, WorkerReport)
    assert joined.obstacle == all_
