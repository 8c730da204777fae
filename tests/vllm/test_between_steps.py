"""Spec row B17: loads that others need not wait for are filled between their steps, in slices."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from .engines import Answer, Engine, largest_difference, prose

SLICE = 32
DECODED = 40


@pytest.fixture(autouse=True)
def small_slices(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    update = {"blend_tokens_per_step": SLICE}
    for side in (engine.scheduler, engine.worker):
        monkeypatch.setattr(side, "_config", side._config.model_copy(update=update))
    engine.clear()
    yield
    assert engine.scheduler.live_requests == 0
    assert not engine.scheduler._admitted
    assert not engine.worker._sliced
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "all but vLLM's null block"


@dataclass
class Crowd:
    """Requests that decode, and what each step of the engine brings them."""

    engine: Engine
    tokens: dict[str, list[int]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def core(self) -> Any:
        return self.engine.llm.llm_engine

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvloom_report": True}},
        )
        self.tokens[name] = []
        self.core.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> set[str]:
        """The requests that got a token."""
        got = set()
        for output in self.core.step():
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) > len(self.tokens[output.request_id]):
                got.add(output.request_id)
            self.tokens[output.request_id] = tokens
            if output.kv_transfer_params:
                self.figures[output.request_id] = output.kv_transfer_params["kvloom"]
        return got

    def until_first(self, name: str, limit: int = 400) -> list[set[str]]:
        """Who got a token in each step, up to the first of ``name``."""
        steps: list[set[str]] = []
        while not steps or name not in steps[-1]:
            assert len(steps) < limit, f"{name} waits for ever"
            steps.append(self.step())
        return steps

    def finish(self) -> None:
        while self.core.has_unfinished_requests():
            self.step()


def two_decode(engine: Engine) -> Crowd:
    """Two requests that decode; from here on only the crowd may step the engine."""
    engine.forget()
    engine._kv.clear()
    crowd = Crowd(engine)
    for number, name in enumerate(("one", "two")):
        crowd.add(name, prose(engine, 300 + number, 40), max_tokens=DECODED)
    while not all(crowd.tokens.values()):
        crowd.step()
    return crowd


_alone: list[list[int]] = []


def decoded_alone(engine: Engine) -> list[list[int]]:
    if not _alone:
        _alone.extend(
            engine.cold(prose(engine, 300 + n, 40), max_tokens=DECODED).tokens for n in range(2)
        )
    return _alone


def blend(engine: Engine) -> list[int]:
    """A prompt of moved and new text whose earlier prompt is stored."""
    document = prose(engine, 310, 500)
    engine.ask(prose(engine, 311, 70) + document)
    engine.forget()
    return prose(engine, 312, 100) + document + prose(engine, 313, 60)


def test_others_decode_while_a_blend_is_filled(engine: Engine) -> None:
    prompt = blend(engine)
    at_once: Answer = engine.ask(prompt, max_tokens=3)
    alone = decoded_alone(engine)
    crowd = two_decode(engine)
    crowd.add("blend", prompt, max_tokens=3)
    steps = crowd.until_first("blend")
    computed = at_once.figures["recomputed"] + at_once.figures["new"]
    assert len(steps) >= computed // SLICE, "more than a slice was computed in a step"
    assert all(got >= {"one", "two"} for got in steps), "a step gave the others nothing"
    crowd.finish()
    assert crowd.tokens["blend"] == at_once.tokens
    same = ("exact", "reused", "recomputed", "new", "failed", "bytes")
    assert {k: crowd.figures["blend"][k] for k in same} == {k: at_once.figures[k] for k in same}
    (kv,) = [kv for name, kv in engine._kv.items() if name.startswith("blend")]
    assert largest_difference(kv, at_once.kv) <= 1e-4
    assert [crowd.tokens["one"], crowd.tokens["two"]] == alone


def test_an_exact_prefix_too_and_bit_for_bit(engine: Engine) -> None:
    prompt = prose(engine, 320, 1000)
    first = engine.ask(prompt, max_tokens=1)
    crowd = two_decode(engine)
    crowd.add("exact", prompt, max_tokens=1)
    steps = crowd.until_first("exact")
    assert len(steps) > 2
    crowd.finish()
    (kv,) = [kv for name, kv in engine._kv.items() if name.startswith("exact")]
    exact = crowd.figures["exact"]["exact"]
    assert exact == 960
    assert torch.equal(kv[:, :, :exact], first.kv[:, :, :exact])
    assert crowd.tokens["exact"] == first.tokens


def test_alone_or_small_it_is_filled_at_once(engine: Engine) -> None:
    prompt = blend(engine)
    crowd = Crowd(engine)
    crowd.add("alone", prompt, max_tokens=1)
    assert crowd.step() == set(), "it waits for its load"
    assert crowd.step() == {"alone"}
    crowd = two_decode(engine)
    crowd.add("small", prose(engine, 311, 70) + prose(engine, 310, 500)[:200], max_tokens=1)
    assert "small" not in crowd.step()
    assert "small" in crowd.step()
    assert crowd.figures["small"]["exact"] == 256
    crowd.finish()


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_aborted_in_any_phase(engine: Engine, steps: int) -> None:
    """Nothing is left of it (the fixture looks), and a later request is right."""
    prompt = blend(engine)
    expected = engine.ask(prompt, max_tokens=2).tokens
    alone = decoded_alone(engine)
    crowd = two_decode(engine)
    crowd.add("gone", prompt, max_tokens=2)
    for _ in range(steps):
        crowd.step()
    assert not crowd.tokens["gone"], "it was to be aborted while it waits"
    crowd.core.abort_request(["gone"])
    crowd.add("again", prompt, max_tokens=2)
    crowd.finish()
    assert crowd.tokens["again"] == expected
    assert [crowd.tokens["one"], crowd.tokens["two"]] == alone


def test_two_blends_are_filled_one_after_the_other(engine: Engine) -> None:
    prompt = blend(engine)
    other = prompt[50:]
    expected = [engine.ask(p, max_tokens=2).tokens for p in (prompt, other)]
    crowd = two_decode(engine)
    crowd.add("first", prompt, max_tokens=2)
    crowd.add("second", other, max_tokens=2)
    crowd.until_first("first")
    assert not crowd.tokens["second"]
    crowd.finish()
    assert [crowd.tokens["first"], crowd.tokens["second"]] == expected


def test_preempted_it_does_not_find_itself_in_the_engines_cache(
    engine: Engine,
) -> None:
    """It would pass for exact, be saved as such, and every answer on top of it would be wrong."""
    prompt = blend(engine)
    once: Answer = engine.ask(prompt)
    engine.forget()
    crowd = two_decode(engine)
    crowd.add("preempted", prompt, max_tokens=3)
    crowd.until_first("preempted")
    scheduler = engine.core.scheduler
    request = scheduler.running.pop()
    assert request.request_id.startswith("preempted")
    scheduler._preempt_request(request, time.monotonic())
    crowd.step()
    crowd.finish()
    figures = crowd.figures["preempted"]
    assert figures["local"] <= once.figures["exact"]
    assert figures["reused"] == once.figures["reused"]
    engine.forget()
    again = engine.ask(prompt)
    assert again.figures["exact"] == once.figures["exact"]
    assert again.figures["reused"] == once.figures["reused"]


@pytest.mark.parametrize("broken", ["fill", "plan", "step"])
def test_what_fails_is_computed_by_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A request that waits for a load is never left waiting, and not sent round in circles."""
    prompt = blend(engine)
    cold = engine.cold(prompt, max_tokens=3)
    crowd = two_decode(engine)

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("broken on purpose")

    side, hook = {
        "fill": (engine.worker._filler, "_compute"),
        "plan": (engine.scheduler, "_load_plan"),
        "step": (engine.scheduler, "step"),
    }[broken]
    with monkeypatch.context() as patch:
        patch.setattr(side, hook, fails)
        crowd.add("blend", prompt, max_tokens=3)
        crowd.until_first("blend")
    crowd.finish()
    assert crowd.tokens["blend"] == cold.tokens


def test_a_store_that_hangs_holds_up_nobody_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = blend(engine)
    cold = engine.cold(prompt, max_tokens=3)
    engine.forget_memory()
    reader = engine.worker._filler._in_slices
    monkeypatch.setattr(
        reader, "_config", reader._config.model_copy(update={"load_timeout_s": 1.0})
    )
    released = threading.Event()
    posix = engine.connector._store._stages[1]
    monkeypatch.setattr(posix, "_read_file", lambda *args: released.wait(60) and False)
    try:
        crowd = two_decode(engine)
        crowd.add("late", prompt, max_tokens=3)
        steps = crowd.until_first("late")
    finally:
        released.set()
    assert all("one" in got for got in steps)
    crowd.finish()
    assert crowd.figures["late"]["failed"] > 0
    assert crowd.tokens["late"] == cold.tokens
