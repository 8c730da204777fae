"""Spec row H5: vLLM's own client, from the installed vLLM, against our server as a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hf3fs.service import ServiceProcess, running

server_module = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.hf3fs_metadata_server",
    reason="needs the installed vLLM's HF3FS client (the cpu extra)",
)
Client = server_module.Hf3fsGlobalMetadataClient


def pairs(keys: list[str]) -> list[tuple[str, str]]:
    return [(key, "") for key in keys]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    leases = "--read-lease", "0.5", "--write-lease", "5"
    with running(tmp_path / "state.db", "--world-size", "2", *leases) as service:
        yield service


def test_every_operation_of_vllms_client(service: ServiceProcess) -> None:
    scheduler, workers = Client(service.url), [Client(service.url) for _ in range(2)]
    keys = [f"{i:064x}" for i in range(8)]
    scheduler.initialize(0, role="scheduler")
    assert scheduler.batch_key_exists(keys) == [False] * 8
    for rank, worker in enumerate(workers):
        worker.initialize(rank, 16, role="worker")
        worker.initialize(rank, 16)
    pages = []
    for rank, worker in enumerate(workers):
        results = worker.allocate_pages_for_keys(rank, pairs(keys))
        assert [key for key, _ in results] == keys
        pages.append([page for _, page in results])
        assert len(set(pages[-1])) == 8
        assert set(pages[-1]) <= set(range(16))
        again = worker.allocate_pages_for_keys(rank, pairs(keys))
        assert again == results, "a POST that was sent again gives the same pages"
        assert scheduler.batch_key_exists(keys) == [False] * 8
        assert worker.get_key_locations(rank, keys) == [None] * 8
        written = list(zip(keys, pages[-1], strict=True))
        # The last one could not be written.
        worker.confirm_write_for_keys(rank, written[:-1], [written[-1][1]])
    assert scheduler.batch_key_exists([*keys, "no"]) == [True] * 7 + [False, False]
    for rank, worker in enumerate(workers):
        assert worker.get_key_locations(rank, keys) == [*pages[rank][:-1], None]
        # Complete keys keep their pages when they are written anew.
        assert worker.allocate_pages_for_keys(rank, pairs(keys[:2])) == [
            [key, page] for key, page in zip(keys[:2], pages[rank][:2], strict=True)
        ]
    service.post("/clear", {}).raise_for_status()
    assert scheduler.batch_key_exists(keys) == [False] * 8


def test_a_restart_forgets_nothing(service: ServiceProcess) -> None:
    worker = Client(service.url)
    for rank in range(2):
        worker.initialize(rank, 16)
        results = worker.allocate_pages_for_keys(rank, pairs(["a", "b"]))
        worker.confirm_write_for_keys(rank, [tuple(result) for result in results])
    where = worker.get_key_locations(1, ["a", "b"])
    service.kill()
    service.start()
    assert worker.batch_key_exists(["a", "b", "c"]) == [True, True, False]
    assert worker.get_key_locations(1, ["a", "b"]) == where
    ((_, page),) = worker.allocate_pages_for_keys(1, pairs(["c"]))
    assert page not in where


def test_a_full_file_answers_minus_one_and_goes_on(service: ServiceProcess) -> None:
    worker = Client(service.url)
    for rank in range(2):
        worker.initialize(rank, 4)
    results = worker.allocate_pages_for_keys(0, pairs([f"k{i}" for i in range(6)]))
    assert [page for _, page in results][4:] == [-1, -1]
    for round_ in range(12):
        keys = [f"r{round_}-{i}" for i in range(2)]
        service.post(
            "/keys/confirm_write",
            {"rank": 0, "confirmations": [], "pages_to_release": list(range(4))},
        )
        for rank in range(2):
            results = worker.allocate_pages_for_keys(rank, pairs(keys))
            assert min(page for _, page in results) >= 0
            worker.confirm_write_for_keys(rank, [tuple(result) for result in results])


def test_a_rank_outside_the_world_is_told_how_to_go_on(service: ServiceProcess) -> None:
    answer = service.post("/rank/2/initialize", {"num_pages": 4, "role": "worker"})
    assert answer.status_code == 422
    assert "world of 2" in answer.json()["detail"]
    with pytest.raises(RuntimeError, match="422"):
        Client(service.url).initialize(2, 4)
