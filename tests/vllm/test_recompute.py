"""Spec rows B12, B15: the model run over chosen tokens is the model run over the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvloom.vllm import compat

from .engines import Engine, all_tokens_chosen, largest_difference, prose


@pytest.mark.parametrize(("seed", "length"), [(1, 130), (2, 333), (3, 512), (4, 700), (5, 1025)])
def test_choosing_all_tokens_is_full_prefill(engine: Engine, seed: int, length: int) -> None:
    prompt = prose(engine, seed, length)
    cold = engine.cold(prompt, max_tokens=64)
    engine.forget()
    with all_tokens_chosen(engine):
        chosen = engine.ask(prompt, max_tokens=64)
    assert chosen.figures["new"] == length
    assert chosen.cached == length - 1, "vLLM must have been told that all but one are in place"
    assert largest_difference(chosen.kv, cold.kv) <= 1e-4
    assert chosen.tokens == cold.tokens


def test_slices_of_a_long_plan_see_the_slices_before(engine: Engine) -> None:
    """More tokens than one forward may take: computed slice by slice, in prompt order."""
    prompt = prose(engine, 6, 600)
    cold = engine.cold(prompt)
    recompute = engine.worker._filler._engine
    limit, recompute._max_tokens = recompute._max_tokens, 100
    engine.forget()
    try:
        with all_tokens_chosen(engine):
            chosen = engine.ask(prompt)
    finally:
        recompute._max_tokens = limit
    assert chosen.cached == 600 - 1
    assert largest_difference(chosen.kv, cold.kv) <= 1e-4


@pytest.mark.parametrize("most", [256, 3])
def test_scattered_tokens_are_put_back_as_full_prefill_had_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Any subset, any gaps: over an exact cache the chosen tokens come out as they were. No forward
    has more groups than the engine has requests: attention backends keep buffers for those."""
    prompt = np.asarray(prose(engine, 7, 500), dtype=np.int32)
    cold = engine.cold(prompt.tolist())
    (cache,), recompute = engine.worker._cache.groups, engine.worker._filler._engine
    monkeypatch.setattr(recompute, "_max_groups", most)
    seen: list[int] = []
    build = compat.attention_metadata

    def counted(*args: Any, **named: Any) -> Any:
        seen.append(len(named["seq_lens"]))
        return build(*args, **named)

    monkeypatch.setattr(compat, "attention_metadata", counted)
    blocks = list(range(3, 3 + -(-len(prompt) // cache.block_size)))
    slots = cache.slots(blocks, torch.arange(len(prompt)))
    random = np.random.default_rng(0)
    for share in (0.02, 0.2, 0.7):
        chosen = np.flatnonzero(random.random(len(prompt)) < share).astype(np.int64)
        damaged = cold.kv.clone()
        damaged[:, :, torch.from_numpy(chosen)] = 77.0
        cache.scatter(damaged, slots)
        recompute.compute(blocks, prompt[chosen], chosen)
        after = torch.empty_like(cold.kv)
        cache.gather(slots, after)
        untouched = np.setdiff1d(np.arange(len(prompt)), chosen)
        assert largest_difference(after, cold.kv) <= 1e-4
        assert torch.equal(after[:, :, untouched], cold.kv[:, :, untouched])
    assert max(seen) <= most
    assert len(seen) > 3 * (most == 3)
