"""Spec row B18: kinds of requests that a blend must serve right, or leave alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from .engines import Engine, prose


def moved(engine: Engine) -> list[int]:
    """A prompt around a document of an earlier prompt."""
    document = prose(engine, 400, 300)
    engine.ask(prose(engine, 401, 70) + document)
    engine.forget()
    return prose(engine, 402, 100) + document + prose(engine, 403, 20)


def generate(engine: Engine, prompt: list[int], **params: Any) -> Any:
    from vllm import SamplingParams

    report = {"kv_transfer_params": {"kvloom_report": True}}
    request: Any = {"prompt_token_ids": prompt}
    params_ = SamplingParams(ignore_eos=True, extra_args=report, **params)
    (output,) = engine.llm.generate([request], params_, use_tqdm=False)
    return output


def test_several_answers_to_one_prompt_stand_on_the_same_blend(engine: Engine) -> None:
    prompt = moved(engine)
    one = engine.ask(prompt)
    assert one.figures["reused"] > 200
    seen: list[int] = []
    figures = engine.scheduler._figures

    def keep(state: Any, **detail: bool) -> dict[str, Any]:
        found: dict[str, Any] = figures(state, **detail)
        if detail:
            seen.append(found["reused"])
        return found

    engine.scheduler._figures = keep
    try:
        output = generate(engine, prompt, n=3, temperature=1.0, seed=1, max_tokens=2, logprobs=5)
    finally:
        engine.scheduler._figures = figures
    assert seen == [one.figures["reused"]] * 3
    assert len(output.outputs) == 3
    for answer in output.outputs:
        first = {token: entry.logprob for token, entry in answer.logprobs[0].items()}
        for token in first.keys() & one.logprobs[0].keys():
            assert math.isclose(first[token], one.logprobs[0][token], abs_tol=1e-3)


def test_log_probabilities_of_the_prompt_are_computed_by_vllm(engine: Engine) -> None:
    """They need every token's forward: nothing is reused, exactly or blended."""
    prompt = moved(engine)
    for tokens in (prompt, prose(engine, 401, 70) + prose(engine, 400, 300)):
        output = generate(engine, tokens, temperature=0, max_tokens=1, prompt_logprobs=1)
        figures = output.kv_transfer_params["kvloom"]
        assert (figures["exact"], figures["reused"]) == (0, 0)
        assert len(output.prompt_logprobs) == len(tokens)
        assert all(entry for entry in output.prompt_logprobs[1:])


@pytest.mark.parametrize("field", ["prompt_embeds", "mm_features", "resumable", "prompt_token_ids"])
def test_what_depends_on_more_than_tokens_is_left_alone(engine: Engine, field: str) -> None:
    """Their KV is not told by token ids: no key of ours would say whose it is."""

    odd = SimpleNamespace(
        request_id="odd",
        sampling_params=object(),
        prompt_token_ids=[1],
        prompt_embeds=None,
        mm_features=[],
        resumable=False,
        lora_request=None,
        cache_salt=None,
        skip_reading_prefix_cache=False,
    )
    setattr(odd, field, {"prompt_token_ids": None, "resumable": True}.get(field, [object()]))
    engine.scheduler.add(odd)
    assert engine.scheduler.match(odd, 0) == (0, False)
    assert engine.scheduler.live_requests == 0
