"""What the scheduler side of HF3FSKVConnector asks and saves, over a service that forgets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom.config import Hf3fsConfig
from kvloom.vllm import hf3fs_scheduler
from kvloom.vllm.hf3fs_scheduler import Hf3fsScheduler
from kvloom.vllm.metrics import Metrics

BLOCK, BLOCKS = 16, 4
TOKENS = BLOCK * BLOCKS + 1


class Service:
    """Knows keys, and which of them somebody asked for last."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.asked: list[str] = []

    def exists(self, keys: Sequence[str], lease: bool = False) -> list[bool]:
        self.asked = list(keys)
        return [key in self.keys for key in keys]


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def scheduler(service: Service, monkeypatch: pytest.MonkeyPatch) -> Hf3fsScheduler:
    """Over a service that knows at once what is saved."""
    monkeypatch.setattr(hf3fs_scheduler, "_SAVING_S", 0.0)
    metadata: Any = service
    scheduler = Hf3fsScheduler(
        Hf3fsConfig(), metadata, Metrics(), block_size=BLOCK, loads=True, saves=True
    )
    scheduler.bind(SimpleNamespace(get_block_ids=lambda _: [list(range(BLOCKS + 1))]))
    return scheduler


def new_request(name: str) -> Any:
    return SimpleNamespace(
        request_id=name,
        sampling_params=object(),
        prompt_token_ids=[0] * TOKENS,
        prompt_embeds=None,
        lora_request=None,
        resumable=False,
        num_preemptions=0,
        skip_reading_prefix_cache=False,
        num_tokens=TOKENS,
        num_prompt_tokens=TOKENS,
        num_computed_tokens=0,
        block_hashes=[bytes([number] * 32) for number in range(BLOCKS)],
        kv_transfer_params=None,
    )


def serve(scheduler: Hf3fsScheduler, service: Service, name: str, local: int = 0) -> list[int]:
    """One request from its look-up to its end: tokens found, blocks saved."""
    request = new_request(name)
    scheduler.add(request)
    found = scheduler.match(request, local)
    scheduler.admit(request, found)
    if found:
        scheduler.step(SimpleNamespace(num_scheduled_tokens={}))  # type: ignore[arg-type]
        scheduler.take_report(None, [name])
    step = scheduler.step(SimpleNamespace(num_scheduled_tokens={name: TOKENS}))  # type: ignore[arg-type]
    saved = [key for plan in step.saves for key in plan.keys]
    service.keys.update(saved)
    request.num_computed_tokens = TOKENS
    scheduler.finish(request)
    return [found, len(saved)]


def test_what_the_service_has_evicted_is_saved_again(
    scheduler: Hf3fsScheduler, service: Service
) -> None:
    """H9: a full file is the usual state, and what comes back must not be lost for good."""
    assert serve(scheduler, service, "new") == [0, BLOCKS]
    assert serve(scheduler, service, "again") == [BLOCKS * BLOCK, 0]
    last = bytes([BLOCKS - 1] * 32).hex()
    service.keys.remove(last)
    assert serve(scheduler, service, "cut") == [(BLOCKS - 1) * BLOCK, 1]
    service.keys.clear()
    assert serve(scheduler, service, "evicted") == [0, BLOCKS]


def test_what_is_on_its_way_is_not_saved_twice(
    scheduler: Hf3fsScheduler, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of one prompt follow each other faster than its blocks are written."""
    monkeypatch.setattr(hf3fs_scheduler, "_SAVING_S", 10.0)
    assert serve(scheduler, service, "new") == [0, BLOCKS]
    service.keys.clear()
    assert serve(scheduler, service, "next") == [0, 0]


def test_blocks_that_the_engine_has_count_as_used(
    scheduler: Hf3fsScheduler, service: Service
) -> None:
    """Else the service evicts those first that every prompt begins with, and saves none anew."""
    serve(scheduler, service, "new")
    service.keys = {bytes([number] * 32).hex() for number in range(1, BLOCKS)}
    assert serve(scheduler, service, "hit", local=2 * BLOCK) == [2 * BLOCK, 1]
    assert service.asked[0] == bytes(32).hex()


def test_a_reset_forgets_what_is_stored(scheduler: Hf3fsScheduler, service: Service) -> None:
    serve(scheduler, service, "new")
    scheduler.reset()
    assert serve(scheduler, service, "reset") == [0, BLOCKS]
    assert serve(scheduler, service, "again") == [BLOCKS * BLOCK, 0]


def test_after_a_reset_an_unreadable_adapter_costs_its_own_request_alone(
    scheduler: Hf3fsScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others compute with the new weights must not be stored as of the old ones."""
    for name in ("a", "b"):
        scheduler.add(new_request(name))
    suffix = scheduler._scopes.suffix

    def unreadable(request: Any) -> str:
        if request.request_id == "a":
            raise OSError("its files are gone")
        return suffix(request)

    monkeypatch.setattr(scheduler._scopes, "suffix", unreadable)
    scheduler.reset()
    assert scheduler._states["b"].suffix
    assert "a" not in scheduler._states


def test_a_request_that_was_never_admitted_computed_nothing(scheduler: Hf3fsScheduler) -> None:
    request = new_request("a")
    scheduler.add(request)
    assert scheduler.finish(request) == (False, None)
    assert scheduler._metrics.take() is None


def test_what_another_connector_loads_is_not_saved_before_it_is_there(
    scheduler: Hf3fsScheduler,
) -> None:
    request = new_request("a")
    scheduler.add(request)
    scheduler.match(request, 0)
    scheduler.admit(request, 0)
    request.num_computed_tokens = TOKENS - 1  # the engine counts it when it admits the request
    assert scheduler.finish(request)[0] is False
