"""The scheduler side without an engine: what its hooks leave behind, and what it learns from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvloom.blend.selection import make_policy
from kvloom.config import KvloomConfig
from kvloom.tokens.expected import ExpectedChunks
from kvloom.tokens.index import ChunkIndex
from kvloom.vllm.metadata import LoadReport, StepMetadata, WorkerReport
from kvloom.vllm.metrics import Metrics
from kvloom.vllm.scheduler import BlendScheduler

CHUNK = 64


def new_scheduler(caching: bool = True, **more: Any) -> BlendScheduler:
    config = KvloomConfig(storage_backends=["/nowhere"])
    scheduler = BlendScheduler(
        config,
        ExpectedChunks(ChunkIndex(CHUNK)),
        make_policy(config),
        Metrics(),
        **{"block_size": 16, "loads": True, "saves": True, **more},
    )
    scheduler.bind(
        SimpleNamespace(
            get_block_ids=lambda _: (list(range(1, 2000)),),
            enable_caching=caching,
            block_pool=SimpleNamespace(hash_block_size=16),
        )
    )
    return scheduler


def new_request(name: str = "a", tokens: int = 200, **more: Any) -> Any:
    ids = list(range(tokens))
    usual: dict[str, Any] = {
        "request_id": name,
        "sampling_params": object(),
        "prompt_token_ids": ids,
        "all_token_ids": ids,
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "prompt_embeds": None,
        "mm_features": [],
        "resumable": False,
        "cache_salt": None,
        "lora_request": None,
        "kv_transfer_params": {"kvloom_report": True},
        "skip_reading_prefix_cache": False,
        "block_hashes": [],
    }
    return SimpleNamespace(**usual | more)


def step(scheduler: BlendScheduler, **tokens: int) -> StepMetadata:
    output: Any = SimpleNamespace(
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values())
    )
    return scheduler.step(output)


def know(scheduler: BlendScheduler, request: Any) -> None:
    """Its whole chunks are stored."""
    state = scheduler._states[request.request_id]
    scheduler._extend_keys(state, request.num_tokens)
    count = len(state.keys)
    scheduler._chunks.index.add_many(
        keys=state.keys,
        parents=[state.scope, *state.keys[:-1]],
        scopes=[state.scope] * count,
        token_ids=np.array(request.all_token_ids[: count * CHUNK], np.int32).reshape(count, CHUNK),
        positions=[number * CHUNK for number in range(count)],
    )


def new_stored_request(scheduler: BlendScheduler, name: str = "a", **more: Any) -> Any:
    """Followed by the scheduler, and stored."""
    request = new_request(name, **more)
    scheduler.add(request)
    know(scheduler, request)
    return request


def test_last_saves_outlive_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM holds the blocks of a finished request until its save is reported: for ever, if lost."""
    scheduler = new_scheduler()
    request = new_request()
    scheduler.add(request)
    scheduler.match(request, 0)
    scheduler.admit(request, 0)
    step(scheduler, a=10)
    request.num_computed_tokens = 200
    held, _ = scheduler.finish(request)
    assert held
    other = new_request("b")
    scheduler.add(other)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_save_plan", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(scheduler, b=200)
    assert [plan.request_id for plan in step(scheduler).saves if plan.last] == ["a"]
    assert not step(scheduler).saves, "each is sent once"


def test_a_request_that_was_never_admitted_computed_nothing() -> None:
    scheduler = new_scheduler()
    request = new_request()
    scheduler.add(request)
    assert scheduler.finish(request) == (False, None)
    assert scheduler.live_requests == 0
    assert scheduler._metrics.take() is None


@pytest.mark.parametrize(
    ("tokens", "timed"),
    [
        ({"prefill": 512}, True),
        ({"prefill": 512, "decodes": 1, "decodes too": 1}, True),
        ({f"decodes {number}": 1 for number in range(100)}, False),
        ({f"guesses {number}": 5 for number in range(100)}, False),
        ({"prefill": 100, **{f"decodes {number}": 1 for number in range(50)}}, False),
    ],
)
def test_prefill_is_timed_where_it_is_most_of_a_step(tokens: dict[str, int], timed: bool) -> None:
    """A step of decodes takes as long for tens of tokens as prefill for thousands."""
    assert step(new_scheduler(), **tokens).timed is timed


def test_a_request_whose_load_failed_is_left_to_the_engine() -> None:
    scheduler = new_scheduler()
    request = new_stored_request(scheduler)
    assert scheduler.match(request, 0) == (192, True)
    scheduler.admit(request, 192)
    (plan,) = step(scheduler).loads
    assert not plan.sliced, "there is nobody to hold up"
    nothing = WorkerReport(loads={"a": LoadReport.of_nothing(plan)})
    scheduler.take_report(nothing, arrived={"a"}, failed={"a"})
    assert scheduler.match(request, 0) == (0, False)

    scheduler.admit(request, 0)
    request.num_computed_tokens = 200
    _, told = scheduler.finish(request)
    assert told is not None
    assert told["kvloom"]["exact"] == 0
    assert told["kvloom"]["failed"] == 192


def test_one_of_several_that_want_the_same_loads_it() -> None:
    """Each would hold blocks of its own meanwhile, and read the store as often."""
    scheduler = new_scheduler()
    first, second = (new_stored_request(scheduler, name) for name in ("a", "b"))
    other = new_stored_request(scheduler, "c", cache_salt="another tenant")
    assert scheduler.match(first, 0) == (192, True)
    scheduler.admit(first, 192)
    assert scheduler.match(second, 0) == (None, False)
    assert scheduler.match(other, 0) == (192, True)
    step(scheduler)
    assert scheduler.match(second, 0) == (None, False)
    scheduler.take_report(WorkerReport(), arrived={"a"}, failed={"a"})
    assert scheduler.match(second, 0) == (192, True), "the first has failed, or is gone"


def test_after_a_reset_nobody_waits_for_a_load_of_before() -> None:
    scheduler = new_scheduler()
    first, second = (new_stored_request(scheduler, name) for name in ("a", "b"))
    scheduler.match(first, 0)
    scheduler.admit(first, 192)
    scheduler.reset()
    know(scheduler, second)
    assert scheduler.match(second, 0) == (192, True)


def test_prefill_is_timed_while_others_wait_for_blocks() -> None:
    """Matched, and not admitted: nothing is filled for them in this step."""
    scheduler = new_scheduler()
    request = new_stored_request(scheduler)
    assert scheduler.match(request, 0) == (192, True)
    assert step(scheduler, prefill=512).timed


def test_after_a_reset_an_unreadable_adapter_costs_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = new_scheduler()
    requests = [new_stored_request(scheduler, name) for name in ("a", "b", "c")]
    scope = scheduler._scopes.scope

    def unreadable(request: Any, salt: Any) -> bytes:
        if request.request_id == "b":
            raise OSError("the adapter is gone")
        return scope(request, salt)

    monkeypatch.setattr(scheduler._scopes, "scope", unreadable)
    scheduler.reset()
    assert [scheduler.match(request, 0)[0] for request in requests] == [0, 0, 0]
    assert scheduler.live_requests == 2


def test_what_another_connector_loads_is_neither_ours_nor_saved_before_it_is_there() -> None:
    """The engine counts it as computed when it admits the request. Gone before that is true, it
    would leave garbage in the store as an exact hit."""
    scheduler = new_scheduler()
    request = new_request()
    scheduler.add(request)
    assert scheduler.match(request, 0) == (0, False)
    scheduler.admit(request, 0)
    request.num_computed_tokens = 192
    assert scheduler.finish(request)[0] is False
    assert not step(scheduler).saves

    other = new_stored_request(scheduler, "b", tokens=400)
    assert scheduler.match(other, 0) == (384, True)
    scheduler.admit(other, 0)
    step(scheduler, b=16)
    other.num_computed_tokens = 400
    _, told = scheduler.finish(other)
    assert told is not None
    assert (told["kvloom"]["exact"], told["kvloom"]["new"]) == (0, 400)


def test_figures_of_a_preempted_request_are_of_its_prompt() -> None:
    """It finds what it generated, too."""
    scheduler = new_scheduler()
    request = new_request()
    scheduler.add(request)
    scheduler.match(request, 0)
    scheduler.admit(request, 0)
    request.all_token_ids, request.num_tokens = list(range(600)), 600
    know(scheduler, request)
    assert scheduler.match(request, 0) == (576, True)
    scheduler.admit(request, 576)
    (plan,) = step(scheduler).loads
    lost = LoadReport(384, failed_tokens=192, failed_exact=192, failed_reused=0)
    scheduler.take_report(WorkerReport(loads={plan.request_id: lost}), arrived={"a"})
    _, told = scheduler.finish(request)
    assert told is not None
    figures = told["kvloom"]
    assert sum(figures[origin] for origin in ("exact", "reused", "recomputed", "new")) == 200
    assert all(figures[origin] >= 0 for origin in ("exact", "reused", "recomputed", "new"))


@pytest.mark.parametrize(("caching", "block_size"), [(False, 16), (True, 256)])
def test_nobody_waits_for_what_the_engine_will_not_have(caching: bool, block_size: int) -> None:
    """Requests with a common beginning would be loaded one a step."""
    scheduler = new_scheduler(caching, block_size=block_size)
    first, second = (new_stored_request(scheduler, name) for name in ("a", "b"))
    assert scheduler.match(first, 0) == (192, True)
    scheduler.admit(first, 192)
    assert scheduler.match(second, 0) == (192, True)


def test_a_small_load_does_not_wait_for_one_of_many_steps() -> None:
    scheduler = new_scheduler()
    running = new_request("running", status=None)
    scheduler.add(running)
    scheduler.match(running, 0)
    scheduler.admit(running, 0)
    long = new_stored_request(scheduler, "long", tokens=400 * CHUNK + 1)
    assert scheduler.match(long, 0) == (400 * CHUNK, True)
    scheduler.admit(long, 400 * CHUNK)
    (plan,) = step(scheduler).loads
    assert plan.sliced
    small = new_request("small", tokens=130)
    scheduler.add(small)
    assert scheduler.match(small, 0) == (128, True)
    same = new_request("same", tokens=400 * CHUNK + 1)
    scheduler.add(same)
    assert scheduler.match(same, 0) == (None, False)
