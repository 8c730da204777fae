"""``kvloom bench save``: what saving costs a cold prefill (target: at most 5 %)."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from kvloom.bench.prompts import PromptMaker
from kvloom.bench.report import Report
from kvloom.bench.ttft import Progress
from kvloom.demo.engine import EngineUnderTest

MOST_OVERHEAD = 0.05


def run(model: Path, tokens: int, pairs: int, progress: Progress) -> Report:
    """Cold prefills of the same prompts by an engine with kvloom and one without, in turns.

    Args:
        tokens: prompt length.
        pairs: prompts; both engines get each, who goes first alternates.
    """
    report = Report(f"Cold prefill with and without saving, {tokens} tokens, {model.name}")
    with tempfile.TemporaryDirectory(prefix="kvloom-bench-") as store:
        progress("starting an engine with kvloom, and one without")
        engines = {
            "saving": EngineUnderTest(model, Path(store), max_model_len=tokens + 128),
            "plain": EngineUnderTest(model, None, max_model_len=tokens + 128),
        }
        maker = PromptMaker(engines["plain"].tokenizer, budget=(pairs + 1) * tokens)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(pairs + 1):
            progress(f"prompt {number} of {pairs}" if number else "warm-up")
            prompt = maker.take(tokens)
            for name in sorted(engines, reverse=bool(number % 2)):
                reply = engines[name].ask(prompt)
                if number:
                    times[name].append(reply.ttft_ms)
        for engine in engines.values():
            engine.stop()
    ratios = [a / b for a, b in zip(times["saving"], times["plain"], strict=True)]
    for name, values in times.items():
        report.add(f"save.{name}_ms", statistics.median(values), "ms")
    report.at_most("save.overhead", statistics.median(ratios) - 1, "", MOST_OVERHEAD)
    report.add("save.overhead_worst", max(ratios) - 1, "")
    return report
