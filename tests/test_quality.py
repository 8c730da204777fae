"""Spec row B28: the quality benchmark's prompts and figures, without the model where it can be."""

from __future__ import annotations

import re
from itertools import chain

import numpy as np
import pytest

from kvloom.bench.quality import BASELINE, OURS, POLICIES, _interval, _report, _Rows
from kvloom.bench.quality_case import Outcome
from kvloom.bench.quality_prompts import KINDS, SPLITS, Case, make_cases
from kvloom.blend.selection import make_policy
from kvloom.config import KvloomConfig


class Letters:
    """A tokenizer of words, digits and signs."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [hash(word) % 50_000 for word in re.findall(r" ?[A-Za-z]+|(?s:.)", text)]


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Case]]:
    return {split: make_cases(Letters(), split, 42) for split in SPLITS}


def windows(case: Case, width: int = 40) -> set[tuple[int, ...]]:
    """Stretches of a prompt, but for rulers and indentation."""
    parts = {tuple(case.prompt[at : at + width]) for at in range(len(case.prompt) - width)}
    return {part for part in parts if len(set(part)) > width // 2}


def test_there_are_42_prompts_of_three_kinds_and_about_a_thousand_tokens(
    splits: dict[str, list[Case]],
) -> None:
    for cases in splits.values():
        assert [sum(case.kind == kind for case in cases) for kind in KINDS] == [14, 14, 14]
        assert all(850 < len(case.prompt) < 1300 for case in cases)


def test_held_out_prompts_share_no_text_with_development(splits: dict[str, list[Case]]) -> None:
    """Choosing by one split and reporting the other means nothing where text is shared."""
    seen = set(chain.from_iterable(windows(case) for case in splits["development"]))
    shared = [len(windows(case) & seen) for case in splits["held-out"]]
    assert sum(shared) < 0.01 * len(seen), shared


def test_codes_straddle_borders_or_stand_inside_a_chunk(splits: dict[str, list[Case]]) -> None:
    """An answer whose sentence is whole in an earlier prompt is no seam; one that is, no middle."""
    for case in splits["held-out"][:6]:
        for questions, whole in ((case.seams, False), (case.middles, True)):
            assert questions
            for question in questions:
                # The statement is the question but for its line breaks, then the answer.
                sentence = [*question.text[-3:], *question.answer]
                assert holds(case.prompt, sentence)
                assert any(holds(tokens, sentence) for tokens in case.earlier) == whole


def holds(tokens: list[int], part: list[int]) -> bool:
    width = len(part)
    return any(tokens[at : at + width] == part for at in range(len(tokens) - width + 1))


def outcome(kl: float, seam: bool) -> Outcome:
    return Outcome(0.15, kl, 0.9, 50 + 100 * kl, (seam, False), (True,))


def test_ratios_are_paired_and_targets_are_judged_on_the_interval() -> None:
    base = np.linspace(0.02, 0.2, 40)
    rows = _Rows(
        {
            "full": [outcome(0.0, True) for _ in base],
            BASELINE: [outcome(kl, False) for kl in base],
            OURS: [outcome(0.7 * kl, True) for kl in base],
        },
        [100.0] * len(base),
    )
    figures = {figure.name: figure for figure in _report(rows, "quality").figures}
    ratio = f"quality.{OURS}.kl_over_{BASELINE}"
    assert figures[ratio].value == pytest.approx(0.7)
    assert figures[f"{ratio}_high"].value == pytest.approx(0.7), "paired: no spread between prompts"
    assert figures[ratio].reached
    assert figures[f"{ratio}_high"].reached
    assert figures["quality.full.perplexity_gain"].value == pytest.approx(100)
    assert figures[f"quality.{OURS}.seam_accuracy"].value == 0.5
    low, high = _interval(base)
    assert low < base.mean() < high


@pytest.mark.parametrize("name", POLICIES)
def test_benchmarked_policies_exist(name: str) -> None:
    make_policy(KvloomConfig.from_extra(POLICIES[name]))
