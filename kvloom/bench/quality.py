"""``kvloom bench quality``: how near a blend comes to full recompute, by policy (spec row B28).

Every policy blends the same prompts from the same stored KV, so differences between policies are
paired; intervals are 95 % bootstrap intervals over prompts. Policies were chosen on development
prompts; figures come from held-out ones, which share no document with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvloom.bench.quality_case import Outcome, PreparedCase
from kvloom.bench.quality_model import CacheModel
from kvloom.bench.quality_prompts import SPLITS, make_cases
from kvloom.bench.report import Report
from kvloom.blend.selection import make_policy
from kvloom.config import KvloomConfig

Progress = Callable[[int, int, str], None]
"""(prompts done, prompts, what goes on)"""

BASELINE = "hkvd_15"
OURS = "mean_shift_15"
MOST_OF_BASELINE_KL = 0.75
_RESAMPLES = 2000

POLICIES: dict[str, dict[str, object]] = {
    "none": {"recompute_policy": "none"},
    "boundary": {"recompute_policy": "boundary"},
    "first_k_32": {"recompute_policy": "first_k"},
    BASELINE: {"recompute_policy": "hkvd"},
    "hkvd_30": {"recompute_policy": "hkvd", "recompute_ratio": 0.3},
    "hkvd_block_15": {"recompute_policy": "hkvd_block"},
    "query_aware_15": {"recompute_policy": "query_aware"},
    OURS: {"recompute_policy": "mean_shift"},
}
"""Benchmarked configurations by the name of their figures."""


@dataclass
class _Rows:
    """Outcomes of all prompts by policy, and what the figures are made of."""

    outcomes: dict[str, list[Outcome]]
    surprise_without: list[float]

    def kl(self, name: str) -> npt.NDArray[np.float64]:
        return np.array([row.kl for row in self.outcomes[name]])


def run(
    model_folder: Path,
    prompts: int,
    progress: Progress,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    split: str = SPLITS[1],
) -> Iterator[Report]:
    """Blend ``prompts`` prompts by each policy; a report of those so far after each, for the whole
    takes an hour or more.

    Args:
        policies: of ``POLICIES``; the baseline is added where it is missing.
        split: ``held-out`` for figures, ``development`` to choose by.

    Raises:
        ValueError: there is not text for so many prompts, or no such policy.
    """
    unknown = set(policies) - POLICIES.keys()
    if unknown:
        raise ValueError(f"no policies {sorted(unknown)}; known are {', '.join(POLICIES)}")
    names = list(dict.fromkeys([*policies, BASELINE]))
    chosen = {name: make_policy(KvloomConfig.from_extra(POLICIES[name])) for name in names}
    model = CacheModel(model_folder)
    rows = _Rows({"full": [], **{name: [] for name in names}}, [])
    for number, case in enumerate(make_cases(model.tokenizer, split, prompts)):
        progress(number, prompts, f"prompt {number + 1}, {case.kind}: full recompute")
        prepared = PreparedCase(model, case)
        rows.outcomes["full"].append(prepared.recomputed())
        rows.surprise_without.append(prepared.surprise_without)
        for name in names:
            progress(number, prompts, f"prompt {number + 1}, {case.kind}: {name}")
            rows.outcomes[name].append(prepared.blended(chosen[name]))
        title = f"Quality on {number + 1} {split} prompts, {model_folder.name}, float32"
        yield _report(rows, title)


def _report(rows: _Rows, title: str) -> Report:
    report = Report(title)
    full = rows.outcomes["full"]
    gain = sum(rows.surprise_without) - sum(row.surprise for row in full)
    for name, outcomes in rows.outcomes.items():
        prefix = f"quality.{name}"
        report.add(f"{prefix}.cost", 100 * _mean(row.cost for row in outcomes), "%")
        report.add(f"{prefix}.kl", float(rows.kl(name).mean()), "nats")
        low, high = _interval(rows.kl(name))
        report.add(f"{prefix}.kl_low", low, "nats")
        report.add(f"{prefix}.kl_high", high, "nats")
        report.add(f"{prefix}.top1", 100 * _mean(row.top1 for row in outcomes), "%")
        lost = sum(row.surprise for row in outcomes) - sum(row.surprise for row in full)
        report.add(f"{prefix}.perplexity_gain", 100 * (1 - lost / gain), "%")
        seam = _mean(right for row in outcomes for right in row.seams)
        report.add(f"{prefix}.seam_accuracy", seam, "")
        middle = _mean(right for row in outcomes for right in row.middles)
        report.add(f"{prefix}.needle_accuracy", middle, "")
    base = rows.kl(BASELINE)
    for name in (n for n in rows.outcomes if n not in ("full", BASELINE)):
        kl = rows.kl(name)
        most = MOST_OF_BASELINE_KL if name == OURS else None
        ratio = float(kl.mean() / base.mean())
        report.at_most(f"quality.{name}.kl_over_{BASELINE}", ratio, "x", most)
        low, high = _interval(kl, base)
        report.add(f"quality.{name}.kl_over_{BASELINE}_low", low, "x")
        ceiling = None if most is None else 1.0
        report.at_most(f"quality.{name}.kl_over_{BASELINE}_high", high, "x", ceiling)
    return report


def _interval(
    values: npt.NDArray[np.float64], over: npt.NDArray[np.float64] | None = None
) -> tuple[float, float]:
    """95 % bootstrap interval of a mean, or of a ratio of means of paired values."""
    drawn = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    means = values[drawn].mean(axis=1)
    if over is not None:
        means = means / over[drawn].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _mean(values: Iterator[float]) -> float:
    return float(np.mean(list(values)))
