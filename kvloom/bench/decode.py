"""``kvloom bench decode``: what a long prompt costs those that decode when it arrives."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvloom.bench.prompts import PromptMaker
from kvloom.bench.report import Report
from kvloom.bench.ttft import Progress
from kvloom.demo.engine import EngineUnderTest, blend_over

MOST_OVER_CHUNKED = 1.3
_DECODING = 4
_SLICE = 512
_STEPS_BEFORE = 4
_MOST_DECODED = 2000


def run(model: Path, tokens: int, repeats: int, progress: Progress) -> Report:
    """Times between the tokens of four requests while a prompt is read, or blended (spec B17).

    One engine, the same budget of tokens a step for both: vLLM's ``max_num_batched_tokens`` for the
    chunked prefill of an unknown prompt, ``blend_tokens_per_step`` for a blend. Rounds alternate.

    Args:
        tokens: length of the prompt that arrives.
    """
    report = Report(f"Decoding beside a prompt of {tokens} tokens, {model.name}, float32")
    gaps: dict[str, list[float]] = {"chunked": [], "blend": [], "at_once": []}
    first: dict[str, list[float]] = {kind: [] for kind in gaps}
    settings = {"between": {}, "at_once": {"blend_async": False}}
    for name, extra in settings.items():
        progress("starting an engine")
        with tempfile.TemporaryDirectory(prefix="kvloom-bench-") as store:
            engine = EngineUnderTest(
                model,
                blend_over(Path(store), blend_tokens_per_step=_SLICE, **extra),
                max_model_len=tokens + _MOST_DECODED + 128,
                max_step_tokens=_SLICE,
            )
            maker = PromptMaker(engine.tokenizer, budget=(3 * repeats + 2) * tokens)
            decoding = [maker.take(100) for _ in range(_DECODING)]
            for number in range(repeats):
                progress(f"round {number + 1} of {repeats}")
                case = maker.rag(tokens)
                for prompt in case.earlier:
                    engine.ask(prompt, salt="blend")
                kinds = ("chunked", "blend") if name == "between" else ("at_once",)
                for kind in kinds:
                    salt = f"cold {number}" if kind == "chunked" else "blend"
                    engine.forget()
                    between, ttft = _arrival(engine, decoding, case.prompt, salt)
                    gaps[kind] += between
                    first[kind].append(ttft)
            engine.stop()
    for kind, values in gaps.items():
        for percent in (50, 99):
            at = float(np.percentile(values, percent))
            report.add(f"decode.{kind}.p{percent}_ms", at * 1e3, "ms")
        report.add(f"decode.{kind}.ttft_ms", float(np.median(first[kind])) * 1e3, "ms")
    for kind, target in (("blend", MOST_OVER_CHUNKED), ("at_once", None)):
        ratio = float(np.percentile(gaps[kind], 99) / np.percentile(gaps["chunked"], 99))
        report.at_most(f"decode.{kind}.p99_over_chunked", ratio, "x", target)
    return report


def _arrival(
    engine: EngineUnderTest, decoding: Sequence[Sequence[int]], prompt: Sequence[int], salt: str
) -> tuple[list[float], float]:
    """Seconds between tokens of the decoding ones, from the prompt's arrival to its first token;
    and to that token."""
    names = [f"decoding-{number}" for number in range(len(decoding))]
    for name, text in zip(names, decoding, strict=True):
        engine.submit(name, text, _MOST_DECODED)
    seen: dict[str, int] = {}
    while len(seen) < len(names):
        seen |= engine.step()
    for _ in range(_STEPS_BEFORE):
        engine.step()
    arrived = time.perf_counter()
    last = dict.fromkeys(names, arrived)
    between: list[float] = []
    engine.submit("prompt", prompt, _MOST_DECODED, salt)
    while True:
        got = engine.step()
        now = time.perf_counter()
        for name in got.keys() & last.keys():
            between.append(now - last[name])
            last[name] = now
        if "prompt" in got:
            engine.abort([*names, "prompt"])
            return between, now - arrived
