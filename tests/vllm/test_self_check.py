"""Spec row B27: what does not hold on this very model is found before the first request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom.blend.rope import RopeSpec
from kvloom.vllm.compat import EngineMismatchError
from kvloom.vllm.ranks import Ranks
from kvloom.vllm.self_check import SelfCheck

from .engines import Engine


@pytest.fixture
def check(engine: Engine) -> SelfCheck:
    worker = engine.worker
    config = engine.llm.llm_engine.vllm_config
    return SelfCheck(config, worker._filler._engine, worker._filler._engine.cache, Ranks())


def test_a_sound_model_passes_and_its_cache_is_left_as_it_was(
    engine: Engine, check: SelfCheck
) -> None:
    worker = engine.worker
    before = [layer.cache.clone() for layer in worker._cache.layers]
    check.recompute()
    assert (
        check.rotations(worker._filler._corrector.rotations) == worker._filler._corrector.rotations
    )
    for layer, content in zip(worker._cache.layers, before, strict=True):
        assert torch.equal(layer.cache, content)


@pytest.mark.parametrize("base", [10_000.0, 99_000.0])
def test_a_wrong_rotation_is_found(engine: Engine, check: SelfCheck, base: float) -> None:
    """The model's base is 100,000; one per cent less is found too."""
    layers = len(engine.worker._cache.layers)
    with pytest.raises(EngineMismatchError, match=r"^self-check: keys of .*, moved, differ"):
        check.rotations([RopeSpec.default(base, 64)] * layers)


def test_one_layer_that_rotates_otherwise_is_found(engine: Engine, check: SelfCheck) -> None:
    rotations = list(engine.worker._filler._corrector.rotations)
    rotations[17] = RopeSpec.default(100_000.0, 64, interleaved=True)
    with pytest.raises(EngineMismatchError, match=r"layers\.17\."):
        check.rotations(rotations)


def test_recompute_that_is_not_prefill_is_found(
    engine: Engine, check: SelfCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that is one position off wherever it does not begin with the prompt."""
    recompute = engine.worker._filler._engine
    compute = recompute._compute_batch

    def off_by_one(blocks: Any, tokens: Any, positions: Any, shift: int = 0) -> None:
        compute(blocks, tokens, positions, shift + int(positions[0] > 0))

    monkeypatch.setattr(recompute, "_compute_batch", off_by_one)
    with pytest.raises(EngineMismatchError, match="differ from full prefill"):
        check.recompute()


def test_a_model_that_can_not_be_run_is_a_reason_and_no_crash(
    engine: Engine, check: SelfCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("forward() missing 1 required argument: 'images'")

    monkeypatch.setattr(engine.worker._filler._engine, "_compute_batch", fail)
    with pytest.raises(EngineMismatchError, match=r"self-check: the model can't be run: .*images"):
        check.recompute()
