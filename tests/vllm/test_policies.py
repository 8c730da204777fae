"""Spec row B13 in the engine: policies that look at what was loaded before they choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvloom.bench.quality_case import BlendedPrompt
from kvloom.bench.quality_model import CacheModel
from kvloom.blend.selection import SelectionPolicy, make_policy
from kvloom.config import KvloomConfig

from .engines import Engine, largest_difference, prose

LOOKING = ["hkvd", "hkvd_block", "query_aware"]


def policy(name: str, **config: object) -> SelectionPolicy:
    return make_policy(KvloomConfig.from_extra({"recompute_policy": name, **config}))


@contextmanager
def following(engine: Engine, policy: SelectionPolicy) -> Iterator[None]:
    scheduler, filler = engine.scheduler, engine.worker._filler
    before = scheduler._policy
    scheduler._policy = filler._policy = policy
    try:
        yield
    finally:
        scheduler._policy = filler._policy = before


def moved_document(engine: Engine) -> tuple[list[list[int]], list[int]]:
    """Two chunks of earlier prompts, in another order between new text."""
    first, second = prose(engine, 200, 200), prose(engine, 201, 190)
    earlier = [
        prose(engine, 202, 80) + first + prose(engine, 203, 70),
        prose(engine, 204, 110) + second + prose(engine, 205, 70),
    ]
    return earlier, prose(engine, 206, 50) + second + first + prose(engine, 207, 30)


@pytest.fixture(scope="module")
def cache_model(model: Path) -> CacheModel:
    return CacheModel(model)


@pytest.mark.parametrize("name", ["first_k", "mean_shift", *LOOKING])
def test_engine_and_benchmark_blend_alike(
    engine: Engine, cache_model: CacheModel, name: str
) -> None:
    """The quality figures are the engine's: same tokens chosen, same KV in all layers."""
    earlier, prompt = moved_document(engine)
    for tokens in earlier:
        engine.ask(tokens)
    engine.forget()
    with following(engine, policy(name)):
        blend = engine.ask(prompt)
    cache, _ = BlendedPrompt(cache_model, earlier, prompt).blend(policy(name))
    assert blend.figures["reused"] > 250
    # One token chosen differently would differ by whole units somewhere in 30 layers.
    assert largest_difference(blend.kv[:, :, :-1], cache[:, :, :-1]) < 5e-3


@pytest.mark.parametrize("name", LOOKING)
def test_the_budget_is_kept_and_reported(engine: Engine, name: str) -> None:
    earlier, prompt = moved_document(engine)
    for tokens in earlier:
        engine.ask(tokens)
    engine.forget()
    with following(engine, policy(name, recompute_ratio=0.2)):
        figures = engine.ask(prompt, max_tokens=2).figures
    budget = round(0.2 * (figures["reused"] + figures["recomputed"]))
    assert budget - 16 <= figures["recomputed"] <= budget
    assert figures["exact"] + figures["reused"] + figures["recomputed"] + figures["new"] == len(
        prompt
    )


def test_all_tokens_by_deviation_is_full_prefill(engine: Engine) -> None:
    earlier, prompt = moved_document(engine)
    for tokens in earlier:
        engine.ask(tokens)
    cold = engine.cold(prompt)
    with following(engine, policy("hkvd", recompute_ratio=1.0)):
        blend = engine.ask(prompt)
    assert blend.figures["exact"] == 0
    assert largest_difference(blend.kv, cold.kv) <= 1e-4


def test_a_first_pass_in_slices_leaves_its_layers_exact_and_the_engine_as_it_was(
    engine: Engine,
) -> None:
    """More tokens than one forward may take: every layer up to the one looked at is fresh."""
    earlier, prompt = moved_document(engine)
    for tokens in earlier:
        engine.ask(tokens)
    cold = engine.cold(prompt)
    recompute = engine.worker._filler._engine
    limit, recompute._max_tokens = recompute._max_tokens, 100
    try:
        with following(engine, policy("hkvd", recompute_layer=2)):
            blend = engine.ask(prompt)
    finally:
        recompute._max_tokens = limit
    assert blend.figures["reused"] > 250
    assert largest_difference(blend.kv[:3], cold.kv[:3]) <= 1e-4
    assert largest_difference(blend.kv[4:], cold.kv[4:]) > 0.1
    assert all("forward" not in vars(layer.impl) for layer in recompute._layers.values())


def test_what_can_not_be_loaded_is_computed_before_the_choice(engine: Engine) -> None:
    """A chunk that went missing under a looking policy: its tokens come out fresh, none is lost."""
    earlier, prompt = moved_document(engine)
    for tokens in earlier:
        engine.ask(tokens)
    engine.settle()
    store = engine.connector._store
    gone = [header.key for header in store.headers()][:2]
    load = store.load

    def losing(keys: list[bytes], *args: object) -> object:
        return load([b"?" * len(key) if key in gone else key for key in keys], *args)

    engine.forget()
    store.load = losing
    try:
        with following(engine, policy("hkvd", recompute_ratio=1.0)):
            blend = engine.ask(prompt)
    finally:
        del store.load
    assert blend.failed > 0
    assert largest_difference(blend.kv, engine.cold(prompt).kv) <= 1e-4
    assert np.isfinite(blend.kv.numpy()).all()
