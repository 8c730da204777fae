"""``kvloom bench save``: what saving costs a cold prefill (target: at most 5 %)."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from kvloom.bench.prompts import PromptMaker
from kvloom.bench.report import Report
from kvloom.bench.ttft import Progress
from kvloom.demo.engine import EngineUnderTest, blend_over

MOST_OVERHEAD = 0.05
_PAUSE_S = 1.5
# One engine at a time, since an idle one beside it takes time too; and in this order, so that a
# machine that grows slower or faster meanwhile does so for both.
_ORDER = ("plain", "saving", "saving", "plain")


def run(model: Path, tokens: int, prompts: int, progress: Progress) -> Report:
    """Cold prefills of the same prompts by engines with kvloom and without.

    Args:
        tokens: prompt length.
        prompts: as many with a pause before each, so that what was saved last is on disk, and as
            many back to back, where the writing of one prompt takes cores from the next; each is
            given to four engines, two of each kind.
    """
    report = Report(f"Cold prefill with and without saving, {tokens} tokens, {model.name}")
    times: dict[str, list[list[float]]] = {"plain": [], "saving": []}
    for number, kind in enumerate(_ORDER, 1):
        progress(f"engine {number} of {len(_ORDER)}, {kind}")
        with tempfile.TemporaryDirectory(prefix="kvloom-bench-") as store:
            transfer = blend_over(Path(store)) if kind == "saving" else None
            engine = EngineUnderTest(model, transfer, max_model_len=tokens + 128)
            maker = PromptMaker(engine.tokenizer, budget=(2 * prompts + 1) * tokens)
            engine.ask(maker.take(tokens))  # the first long one pays for first-touched memory
            apart, busy = [], []
            for _ in range(prompts):
                time.sleep(_PAUSE_S)
                apart.append(engine.ask(maker.take(tokens)).ttft_ms)
            for _ in range(prompts):
                busy.append(engine.ask(maker.take(tokens)).ttft_ms)
            times[kind].append(apart + busy)
            engine.stop()
    medians = {
        kind: [statistics.median(pair) for pair in zip(*runs, strict=True)]
        for kind, runs in times.items()
    }
    ratios = [a / b for a, b in zip(medians["saving"], medians["plain"], strict=True)]
    for kind, values in medians.items():
        report.add(f"save.{kind}_ms", statistics.median(values[:prompts]), "ms")
    report.at_most("save.overhead", statistics.median(ratios[:prompts]) - 1, "", MOST_OVERHEAD)
    report.add("save.overhead_back_to_back", statistics.median(ratios[prompts:]) - 1, "")
    return report
