"""``kvloom bench ttft``: time to first token, cold and by every kind of reuse (spec row B29)."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvloom.bench.prompts import PromptMaker
from kvloom.bench.report import Report
from kvloom.demo.engine import EngineUnderTest, Reply, blend_over

Progress = Callable[[str], None]

_PAST_BORDER = 16
_REST_S = 3.0
BLEND_SPEEDUP = {2048: 6.0, 4096: 6.0, 7900: 8.0}
EXACT_SPEEDUP = {4096: 15.0}
EXACT_OVER_VLLM = {4096: 1.5}


def run(model: Path, sizes: Sequence[int], repeats: int, progress: Progress) -> Report:
    """Measure prompts of real text of the given sizes.

    One engine reads the documents in earlier prompts and each prompt cold, then again out of vLLM's
    own prefix cache. A second, fresh engine on the same store answers the prompt as an exact
    prefix hit and as a blend. Cache salts keep the two apart.

    Args:
        sizes: prompt lengths in tokens, but for the 16 that each is longer.
        repeats: of everything but the first answers of the fresh engine.
    """
    report = Report(f"Time to first token, {model.name}, float32")
    longest = max(sizes) + 256
    with tempfile.TemporaryDirectory(prefix="kvloom-bench-") as store:
        progress("starting the first engine")
        first = EngineUnderTest(model, blend_over(Path(store)), max_model_len=longest)
        maker = PromptMaker(first.tokenizer, budget=6 * sum(sizes))
        # Shortly behind a block border: vLLM always computes the block that its own hit ends in,
        # and prompts that end on a border would make it look slower than it is.
        cases = {size: maker.rag(size + _PAST_BORDER) for size in sizes}
        cold: dict[int, float] = {}
        own: dict[int, float] = {}
        for size, case in cases.items():
            progress(f"{size} tokens: cold, and from vLLM's prefix cache")
            for prompt in case.earlier:
                first.ask(prompt, salt="blend")
            cold[size] = _ask(first, case.prompt, "exact").ttft_ms
            own[size] = _median([_ask(first, case.prompt, "exact") for _ in range(repeats)])
        first.stop()
        progress("starting a fresh engine")
        fresh = EngineUnderTest(model, blend_over(Path(store)), max_model_len=longest)
        for size, case in cases.items():
            progress(f"{size} tokens: exact prefix and blend in the fresh engine")
            exact = _ask(fresh, case.prompt, "exact")
            blend = _ask(fresh, case.prompt, "blend", max_tokens=2)
            exact_again, blend_again = [], []
            for _ in range(repeats):
                fresh.forget()
                exact_again.append(_ask(fresh, case.prompt, "exact"))
                blend_again.append(_ask(fresh, case.prompt, "blend"))
            name = f"ttft.{size}"
            report.add(f"{name}.cold_ms", cold[size], "ms")
            report.add(f"{name}.vllm_prefix_ms", own[size], "ms")
            report.add(f"{name}.exact_first_ms", exact.ttft_ms, "ms")
            report.add(f"{name}.exact_ms", _median(exact_again), "ms")
            report.add(f"{name}.blend_first_ms", blend.ttft_ms, "ms")
            report.add(f"{name}.blend_ms", _median(blend_again), "ms")
            for kind in ("exact", "reused", "recomputed", "new"):
                report.add(f"{name}.blend_tokens_{kind}", blend.figures[kind], "tokens")
            for step in ("match", "load", "rotate", "recompute"):
                report.add(f"{name}.blend_{step}_ms", blend.figures[f"{step}_ms"], "ms")
            for way, reply, targets in (
                ("exact", exact, EXACT_SPEEDUP),
                ("blend", blend, BLEND_SPEEDUP),
            ):
                speedup = cold[size] / reply.ttft_ms
                report.at_least(f"{name}.{way}_speedup", speedup, "x", targets.get(size))
            over = _median(exact_again) / own[size]
            report.at_most(f"{name}.exact_over_vllm", over, "x", EXACT_OVER_VLLM.get(size))
            report.add(f"{name}.exact_first_over_vllm", exact.ttft_ms / own[size], "x")
        fresh.stop()
    return report


def _ask(engine: EngineUnderTest, prompt: list[int], salt: str, max_tokens: int = 1) -> Reply:
    """An answer that the work which the one before left behind (saves, blocks that move up in the
    store) does not slow down."""
    time.sleep(_REST_S)
    return engine.ask(prompt, max_tokens, salt)


def _median(replies: Sequence[Reply]) -> float:
    return statistics.median(reply.ttft_ms for reply in replies)
