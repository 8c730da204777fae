"""Spec row B13: policies by name, from anywhere, or a clear error."""

from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.blend.correction import samples_and_rest
from kvloom.blend.plan import BlendPlan, Origin, Range, make_plan
from kvloom.blend.selection import (
    Boundary,
    FirstK,
    Hkvd,
    HkvdBlock,
    LayerView,
    LookingPolicy,
    MeanShift,
    Nothing,
    QueryAware,
    SelectionPolicy,
    make_policy,
    registry,
)
from kvloom.config import ConfigError, KvloomConfig
from kvloom.tokens.chunks import Chunk, ChunkType, Stretch


class Everything(SelectionPolicy):
    @classmethod
    def from_config(cls, config: KvloomConfig) -> "Everything":
        return cls()

    def select(self, plan: BlendPlan) -> list[Range]:
        return [(plan.start, plan.end)]


def test_policies_by_name_take_their_numbers_from_the_config() -> None:
    config = {"first_k": 7, "recompute_boundary": 3}
    assert make_policy(KvloomConfig.from_extra(config)) == FirstK(k=7, width=3)
    named = KvloomConfig.from_extra(config | {"recompute_policy": "boundary"})
    assert make_policy(named) == Boundary(width=3)
    assert make_policy(KvloomConfig.from_extra({"recompute_policy": "none"})) == Nothing()


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'frist_k'.*first_k, boundary, none, hk.*mean 'first_k'"
    ):
        make_policy(KvloomConfig.from_extra({"recompute_policy": "frist_k"}))


def test_a_third_party_adds_one_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("everything", f"{__name__}:Everything", "kvloom.policies"),
        EntryPoint("broken", "json:dumps", "kvloom.policies"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    config = KvloomConfig.from_extra({"recompute_policy": "everything"})
    assert isinstance(make_policy(config), Everything)
    with pytest.raises(ConfigError, match="no SelectionPolicy"):
        make_policy(KvloomConfig.from_extra({"recompute_policy": "broken"}))


def plan_of(lengths: list[int], gap: int = 5) -> BlendPlan:
    """Runs of these lengths with new tokens between them, each from another source."""
    chunks, at = [], 0
    for number, length in enumerate(lengths):
        chunks.append(Chunk(at, at + gap, ChunkType.NO_MATCH))
        stretch = Stretch(at + gap, length, bytes([number]), 0, 1000 * (number + 1))
        chunks.append(Chunk(at + gap, at + gap + length, ChunkType.FULL_MATCH, (stretch,)))
        at += gap + length
    return make_plan(chunks, at)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.floats(0.01, 1.0))
def test_mean_shift_keeps_its_budget_and_samples_all_long_runs(
    lengths: list[int], ratio: float
) -> None:
    plan = plan_of(lengths)
    after = plan.recompute(MeanShift(ratio=ratio, width=2).select(plan))
    budget = int(ratio * sum(lengths))
    recomputed = after.count(Origin.RECOMPUTED)
    assert recomputed <= budget + len(lengths), "a run of its own rounds up by one sample at most"
    step = -(-sum(lengths) // max(budget // 2, 1))
    for run in plan.runs:
        chosen = np.flatnonzero(after.origin[run.start : run.end] == Origin.RECOMPUTED)
        if run.end - run.start >= 2 * (step + 16):
            assert chosen.size
            assert np.diff(chosen).max(initial=0) <= step


def test_samples_are_what_was_loaded_and_computed() -> None:
    loaded, computed = np.arange(10, 40), np.array([3, 4, 12, 20, 30, 45])
    parts = list(samples_and_rest([(8, 25), (25, 38), (38, 39), (41, 50)], loaded, computed))
    assert [samples.tolist() for samples, _ in parts] == [[12, 20], [30]]
    assert parts[0][1].tolist() == [p for p in range(10, 25) if p not in (12, 20)]
    assert parts[1][1].tolist() == [p for p in range(25, 38) if p != 30]


@given(st.lists(st.integers(40, 400), min_size=1, max_size=8), st.floats(0.05, 1.0))
def test_the_budget_of_looking_policies_counts_what_is_chosen_already(
    lengths: list[int], ratio: float
) -> None:
    found = plan_of(lengths)
    policy = QueryAware(layer=1, ratio=ratio, width=2, k=8)
    plan = found.recompute(policy.select(found))
    budget = policy.budget(found, plan)
    assert budget == max(round(ratio * sum(lengths)) - 8 * len(lengths), 0)
    assert FirstK(k=8, width=2).budget(found, plan) == 0


def view_of(seed: int, tokens: int = 40, heads: int = 2, dim: int = 4) -> LayerView:
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.arange(3, tokens - 6)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return LayerView(
        keys=random(tokens, heads, dim),
        values=random(tokens, heads, dim),
        candidates=candidates,
        loaded=random(2, len(candidates), heads, dim),
        queries=random(5, 3 * heads, dim),
        query_positions=torch.arange(tokens - 5, tokens),
    )


def test_deviation_and_attention_are_what_a_slow_loop_finds() -> None:
    view = view_of(1)
    attention = dict.fromkeys(view.candidates.tolist(), 0.0)
    for row, position in enumerate(view.query_positions.tolist()):
        for head in range(6):
            query, keys = view.queries[row, head], view.keys[: position + 1, head // 3]
            weights = torch.tensor([float(query @ key) / 2.0 for key in keys]).softmax(dim=0)
            for candidate in attention:
                attention[candidate] += float(weights[candidate])
    for found, expected in zip(view.attention().tolist(), attention.values(), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    for index, candidate in enumerate(view.candidates.tolist()):
        expected = sum(
            float((now[candidate] - view.loaded[part, index]).square().sum())
            for part, now in enumerate((view.keys, view.values))
        )
        assert float(view.deviation()[index]) == pytest.approx(expected, rel=1e-4)


def test_an_untouched_token_has_no_deviation_and_is_chosen_last() -> None:
    view = view_of(2)
    view.loaded[0, 7] = view.keys[view.candidates[7]]
    view.loaded[1, 7] = view.values[view.candidates[7]]
    policy = Hkvd(layer=1, ratio=0.5, width=2)
    scores = policy.score(view)
    assert float(scores[7]) == 0.0
    chosen = policy.choose(scores, view.candidates, len(scores) - 1)
    assert chosen.tolist() == [c for c in view.candidates.tolist() if c != int(view.candidates[7])]


@given(st.integers(0, 1000), st.integers(0, 200))
def test_blocks_are_chosen_whole_by_their_mean(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    candidates = torch.from_numpy(np.flatnonzero(random.random(160) < 0.7))
    scores = torch.from_numpy(random.random(len(candidates)))
    chosen = HkvdBlock(layer=1, ratio=0.5, width=2).choose(scores, candidates, count)
    assert len(chosen) <= count
    blocks = {b: (candidates // 16 == b).numpy() for b in set((candidates // 16).tolist())}
    means = {b: float(scores[torch.from_numpy(members)].mean()) for b, members in blocks.items()}
    taken = {b for b in blocks if b in set((chosen // 16).tolist())}
    for block in taken:
        assert set(candidates[torch.from_numpy(blocks[block])].tolist()) <= set(chosen.tolist())
    best = sorted(means, key=lambda b: -means[b])
    assert taken == set(best[: len(taken)])


@pytest.mark.parametrize("name", ["hkvd", "hkvd_block", "query_aware", "mean_shift"])
def test_budgeted_policies_take_their_ratio_from_the_config(name: str) -> None:
    made = make_policy(KvloomConfig.from_extra({"recompute_policy": name, "recompute_ratio": 0.25}))
    assert made.ratio == 0.25  # type: ignore[attr-defined]
    assert isinstance(made, LookingPolicy) == (name != "mean_shift")
