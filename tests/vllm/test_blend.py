"""Reuse on the real engine: exact prefixes and blends, and that neither passes for the other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from .engines import Engine, largest_difference, prose

CHUNK = 64


def test_a_stored_prompt_is_an_exact_prefix_bit_for_bit(engine: Engine) -> None:
    """B1, invariants: what a later request finds is what was computed, and so is its answer."""
    prompt = prose(engine, 10, 700)
    first = engine.ask(prompt, max_tokens=8)
    engine.forget()
    again = engine.ask(prompt, max_tokens=8)
    assert again.figures["exact"] == 700 // CHUNK * CHUNK
    assert torch.equal(
        again.kv[:, :, : again.figures["exact"]], first.kv[:, :, : again.figures["exact"]]
    )
    assert again.tokens == first.tokens


@pytest.mark.parametrize("length", [CHUNK * 2, 128, 256, 384])
def test_a_prompt_that_is_stored_to_its_last_token_leaves_one_to_compute(
    engine: Engine, length: int
) -> None:
    """A prompt that ends exactly at a chunk and block border, wholly cached."""
    prompt = prose(engine, 11 + length, length)
    first = engine.ask(prompt, max_tokens=4)
    engine.forget()
    again = engine.ask(prompt, max_tokens=4)
    assert again.figures["exact"] == length - 1
    assert again.tokens == first.tokens


@pytest.mark.parametrize("shift", [1, 37, 64, 100])
def test_a_moved_document_is_blended(engine: Engine, shift: int) -> None:
    """B5: at any offset of the new prompt, also one token off."""
    document = prose(engine, 20 + shift, 500)
    engine.ask(prose(engine, 21, 90) + document)
    engine.forget()
    prompt = prose(engine, 22 + shift, 90 + shift) + document + prose(engine, 23, 20)
    blend = engine.ask(prompt)
    assert blend.figures["recomputed"] == 32
    assert blend.figures["reused"] + 32 >= 500 - 2 * CHUNK
    assert blend.cached == len(prompt) - 1
    assert blend.failed == 0


def test_reused_values_are_the_stored_ones_and_keys_are_rotated(engine: Engine) -> None:
    """B9 in the engine: V bit for bit, K of layer 0 (free of context) as computed in place."""
    document = prose(engine, 30, 400)
    source = engine.ask(prose(engine, 31, 77) + document)
    engine.forget()
    blend = engine.ask(prose(engine, 32, 130) + document + prose(engine, 33, 20))
    origins = np.array(blend.figures["origins"])
    reused = np.flatnonzero(origins == 1)
    assert reused.size > 200
    stored = torch.from_numpy(reused - 130 + 77)
    where = torch.from_numpy(reused)
    assert torch.equal(blend.kv[:, 1, where], source.kv[:, 1, stored])
    cold = engine.cold(prose(engine, 32, 130) + document + prose(engine, 33, 20))
    # The engine takes its angles in float32: at position 530 that alone is 1e-4 on keys up to 10.
    assert largest_difference(blend.kv[0, 0, where], cold.kv[0, 0, where]) < 5e-4
    assert largest_difference(source.kv[0, 0, stored], cold.kv[0, 0, where]) > 1.0


def test_new_tokens_see_the_blended_cache_before_them(engine: Engine) -> None:
    """B15: computing the new tokens again over the finished cache changes nothing."""
    document = prose(engine, 40, 450)
    engine.ask(prose(engine, 41, 64) + document)
    engine.forget()
    prompt = prose(engine, 42, 100) + document + prose(engine, 43, 100)
    blend = engine.ask(prompt)
    computed = np.flatnonzero(np.array(blend.figures["origins"]) >= 2).astype(np.int64)
    (cache,), recompute = engine.worker._cache.groups, engine.worker._filler._engine
    blocks = list(range(3, 3 + -(-len(prompt) // cache.block_size)))
    slots = cache.slots(blocks, torch.arange(len(prompt)))
    cache.scatter(blend.kv, slots)
    recompute.compute(blocks, np.asarray(prompt, dtype=np.int32)[computed], computed)
    after = torch.empty_like(blend.kv)
    cache.gather(slots, after)
    assert largest_difference(after, blend.kv) <= 1e-4


def test_a_blend_is_close_to_the_cold_answer(engine: Engine) -> None:
    """Rotation and recompute give nearly the cold distribution; no rotation gives another."""
    document = prose(engine, 50, 600)
    question = engine.encode("\n\nIn one word, this text is about")
    engine.ask(prose(engine, 51, 150) + document)
    engine.forget()
    prompt = prose(engine, 52, 100) + document + question
    cold = engine.cold(prompt)
    blend = engine.ask(prompt)
    assert blend.figures["reused"] > 400
    common = set(cold.logprobs[0]) & set(blend.logprobs[0])
    assert len(common) >= 3
    assert max(abs(cold.logprobs[0][t] - blend.logprobs[0][t]) for t in common) < 1.0


def test_a_blend_is_never_served_as_exact(engine: Engine) -> None:
    """B16, invariants: not from vLLM's prefix cache, not from the store, not by later tokens.

    The second blended request and the cold ones after it are what would go wrong: an engine that
    left blended blocks in its prefix cache, or saved them under prefix keys, would answer them
    from approximate KV and call it exact.
    """
    document = prose(engine, 60, 500)
    engine.ask(prose(engine, 61, 80) + document)
    prompt = prose(engine, 62, 120) + document + prose(engine, 63, 40)
    engine.forget()
    first = engine.ask(prompt, max_tokens=150)
    assert first.figures["reused"] > 300
    again = engine.ask(prompt, max_tokens=4)  # vLLM's cache was not emptied in between
    assert again.figures["local"] <= first.figures["exact"]
    assert again.figures["exact"] <= 120
    assert again.figures["reused"] == first.figures["reused"]
    engine.settle()
    longer = prompt + first.tokens
    follow = engine.ask(longer, max_tokens=1)
    assert follow.figures["local"] <= 120
    assert follow.figures["exact"] <= 120
    cold = engine.cold(longer)
    assert cold.figures["exact"] == 0
    exact = engine.ask(longer)  # vLLM's cache is empty again, so this one stores or blends
    assert exact.figures["exact"] <= 120


def test_tokens_generated_on_a_blend_stay_out_of_the_prefix_cache_for_good(engine: Engine) -> None:
    """B16: exact blocks of the prompt, cached later, must not lead on to a blend's blocks."""
    document = prose(engine, 70, 300)
    engine.ask(prose(engine, 71, 80) + document)
    engine.forget()
    prompt = prose(engine, 72, 60) + document + prose(engine, 73, 30)
    blend = engine.ask(prompt, max_tokens=200)  # fills one block and more while decoding
    assert blend.figures["reused"] > 150
    loads, engine.scheduler._loads = engine.scheduler._loads, False
    try:
        engine.ask(prompt)  # exact: its blocks enter vLLM's prefix cache
        whole = prompt + blend.tokens
        probe = engine.ask(whole)
    finally:
        engine.scheduler._loads = loads
    assert probe.cached <= len(prompt), "blocks decoded on a blend were found under exact hashes"


def test_nothing_of_a_blended_request_is_stored(engine: Engine) -> None:
    """B20: no chunk of it, prompt or answer, under any key."""
    document = prose(engine, 80, 300)
    engine.ask(prose(engine, 81, 70) + document)
    engine.forget()
    keys = {header.key for header in engine.connector._store.headers()}
    prompt = prose(engine, 82, 150) + document + prose(engine, 83, 30)
    blend = engine.ask(prompt, max_tokens=100)
    assert blend.figures["reused"] > 150
    engine.settle()
    assert {header.key for header in engine.connector._store.headers()} == keys


def test_what_is_computed_on_a_blend_is_reused_by_blends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B20, ``reuse_blended``: stored as generation 1, matched anywhere, never an exact prefix."""
    config = engine.scheduler._config.model_copy(update={"reuse_blended": True})
    monkeypatch.setattr(engine.scheduler, "_config", config)
    monkeypatch.setattr(engine.connector._feeder, "_generation", 1)
    store = engine.connector._store
    document, new = prose(engine, 84, 300), prose(engine, 85, 300)
    engine.ask(prose(engine, 86, 70) + document)
    engine.forget()
    prompt = prose(engine, 87, 64) + document + new
    blend = engine.ask(prompt, max_tokens=80)
    assert blend.figures["reused"] > 150
    engine.forget()
    later = [header for header in store.headers() if header.generation == 1]
    assert {header.generation for header in store.headers()} == {0, 1}
    origins = np.array(blend.figures["origins"])
    for header in later:
        assert not (origins[header.position : header.position + CHUNK] == 1).any(), "a copy (B11)"
    assert len(later) >= (300 + 80) // CHUNK - 1

    same = engine.ask(prompt)
    assert same.figures["exact"] == 0, "a prompt's beginning that was never computed exactly"
    engine.forget()
    moved = prose(engine, 88, 100) + new + prose(engine, 89, 20)
    again = engine.ask(moved, max_tokens=100)
    assert again.figures["reused"] > 200
    assert {run["chunk"] for run in again.figures["runs"]} <= {h.key.hex() for h in later}
    engine.forget()
    assert {h.key for h in store.headers() if h.generation} == {h.key for h in later}, (
        "what was computed on top of generation 1 is stored no more"
    )


def test_generated_text_is_stored_and_found_by_the_next_turn(engine: Engine) -> None:
    """B20: exact chunks of prompts and of generated text."""
    prompt = prose(engine, 90, 150)
    first = engine.ask(prompt, max_tokens=120)
    engine.forget()
    turn = prompt + first.tokens + prose(engine, 91, 30)
    second = engine.ask(turn)
    assert second.figures["exact"] >= (150 + 119) // CHUNK * CHUNK


def test_salts_never_share_exactly_or_blended(engine: Engine) -> None:
    """Never somebody else's KV: one tenant's chunks are no other's."""
    document = prose(engine, 100, 400)
    mine = prose(engine, 101, 64) + document
    moved = prose(engine, 102, 100) + document + prose(engine, 103, 9)
    engine.ask_all([mine], salt="tenant a")
    engine.forget()
    for salt in ("tenant b", None):
        for prompt in (mine, moved):
            other = engine.ask_all([prompt], salt=salt)[0]
            assert (other.figures["exact"], other.figures["reused"]) == (0, 0)
            engine.forget()
            engine.connector._store.delete(
                [
                    h.key
                    for h in engine.connector._store.headers()
                    if h.scope != scope_of("tenant a")
                ]
            )
            engine.settle()
    assert engine.ask_all([mine], salt="tenant a")[0].figures["exact"] > 0


def scope_of(salt: str) -> bytes:
    from kvloom.tokens.hashing import scope_id

    return scope_id(cache_salt=salt, lora_name=None)


def test_blended_and_ordinary_requests_share_a_step(engine: Engine) -> None:
    """Neighbours of a blend in the batch get the answers they get alone."""
    document = prose(engine, 110, 300)
    engine.ask(prose(engine, 111, 70) + document)
    engine.forget()
    blended = prose(engine, 112, 100) + document + prose(engine, 113, 20)
    others = [prose(engine, 114 + i, 90 + 50 * i) for i in range(3)]
    alone = [engine.cold(other, max_tokens=16).tokens for other in others]
    engine.forget()
    together = engine.ask_all([others[0], blended, others[1], others[2]], max_tokens=16)
    assert together[1].figures["reused"] > 150
    assert [together[0].tokens, together[2].tokens, together[3].tokens] == alone


@pytest.mark.parametrize(
    "prompt",
    [
        [1],
        [1, 1],
        [7] * 63,
        [7] * 64,
        [7] * 65,
        [7] * 700,
        list(itertools.islice(itertools.cycle([5, 6]), 500)),
    ],
    ids=["one", "two", "chunk-1", "chunk", "chunk+1", "equal", "period"],
)
def test_odd_prompts_are_answered_as_ever(engine: Engine, prompt: list[int]) -> None:
    """One token, borders, all tokens equal: the first answer is plain vLLM's, the next right."""
    cold = engine.cold(prompt, max_tokens=8)
    first = engine.ask(prompt, max_tokens=8)
    assert first.tokens == cold.tokens
    engine.forget()
    again = engine.ask(prompt, max_tokens=8)
    assert again.figures["exact"] == min(len(prompt) // CHUNK * CHUNK, len(prompt) - 1)
    assert again.tokens == cold.tokens


def test_no_state_is_left_of_finished_and_aborted_requests(engine: Engine) -> None:
    """B22, the small form; the large one is test_soak."""
    from vllm import SamplingParams

    engine_core = engine.llm.llm_engine
    for i in range(5):
        engine_core.add_request(
            f"abort-{i}",
            {"prompt_token_ids": prose(engine, 120 + i, 200)},
            SamplingParams(max_tokens=50),
        )
        for _ in range(i):
            engine_core.step()
        engine_core.abort_request([f"abort-{i}"])
    while engine_core.has_unfinished_requests():
        engine_core.step()
    assert engine.scheduler.live_requests == 0
