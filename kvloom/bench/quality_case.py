"""One prompt of the quality benchmark, blended by kvloom's own matching, rotation and policies.

Earlier prompts are computed and indexed chunk by chunk -> the prompt is matched and planned -> its
reused KV is rotated into one cache -> a policy chooses -> chosen and new tokens are computed ->
what follows the prompt is read over that cache, and over the one of full recompute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvloom.bench.quality_model import CacheModel
from kvloom.bench.quality_prompts import Case
from kvloom.blend.correction import samples_and_rest
from kvloom.blend.plan import BlendPlan, Origin, make_plan
from kvloom.blend.rope import PositionCorrector, RopeSpec
from kvloom.blend.selection.base import LAST_TOKENS, LayerView, LookingPolicy, SelectionPolicy
from kvloom.tokens.analyzer import ChunkAnalyzer
from kvloom.tokens.hashing import prefix_keys, scope_id
from kvloom.tokens.index import ChunkIndex

_CHUNK_SIZE = 64
_MIN_MATCH_RATIO = 0.8
_GREEDY = 64
_SCOPE = scope_id(cache_salt=None, lora_name=None)


@dataclass(frozen=True)
class Outcome:
    """What one policy did to one prompt.

    Attributes:
        cost: computed token-layers of reused text, the first pass included, of all of them.
        kl: mean divergence from full recompute, nats a token, over its greedy and the true text.
        top1: part of those tokens whose most likely next token is the same.
        surprise: of the true text, nats.
        seams, middles: pass codes answered rightly, of those that straddle a border or do not.
    """

    cost: float
    kl: float
    top1: float
    surprise: float
    seams: tuple[bool, ...]
    middles: tuple[bool, ...]


class BlendedPrompt:
    """A prompt whose text was read in earlier prompts, all computed by one model."""

    def __init__(self, model: CacheModel, earlier: list[list[int]], prompt: list[int]) -> None:
        self._model = model
        self._tokens = torch.tensor(prompt)
        self._found, self._loaded = self._match(earlier)

    def blend(self, policy: SelectionPolicy) -> tuple[Tensor, float]:
        """The prompt's cache by a policy, [layers, 2, tokens, heads, head_dim], and its cost."""
        plan = self._found.recompute(policy.select(self._found))
        cache = self._loaded.clone()
        positions = plan.compute_positions()
        reused = self._found.count(Origin.REUSED)
        cost = plan.count(Origin.RECOMPUTED) / reused
        count = policy.budget(self._found, plan)
        if isinstance(policy, LookingPolicy) and count:
            chosen, looked = self._choose(policy, cache, plan, count)
            positions = np.union1d(positions, chosen)
            cost += len(chosen) / reused + looked / (reused * self._model.layers)
        runs = [(run.start, run.end) for run in plan.runs]
        loaded = [np.arange(load.target_start, load.target_end) for load in plan.loads()]
        # As in Correction: the new tokens behind the last run see the corrected cache.
        end = 0
        parts = []
        if policy.correction:
            parts = list(samples_and_rest(runs, np.concatenate(loaded), positions))
            end = max((int(max(s[-1], r[-1])) + 1 for s, r in parts), default=0)
        before, behind = np.split(positions, [np.searchsorted(positions, end)])
        self._compute(cache, before)
        for samples, rest in parts:
            change = cache[:, :, samples] - self._loaded[:, :, samples]
            cache[:, :, rest] += policy.correction * change.mean(dim=2, keepdim=True)
        self._compute(cache, np.append(behind, plan.end))
        return cache, cost

    def _choose(
        self, policy: LookingPolicy, cache: Tensor, plan: BlendPlan, count: int
    ) -> tuple[npt.NDArray[np.int64], int]:
        """What ``RecomputeEngine.choose`` does; answers also the token-layers that it computed."""
        candidates = torch.from_numpy(np.flatnonzero(plan.origin == Origin.REUSED) + plan.start)
        positions = torch.from_numpy(plan.compute_positions())
        seen = torch.arange(plan.start, plan.end) if policy.whole else positions
        loaded = cache[:, :, candidates]
        scores = torch.zeros(len(candidates))

        def watch(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> bool:
            if policy.layer is None or layer == policy.layer:
                scores.add_(
                    policy.score(
                        LayerView(
                            keys=keys[: plan.end],
                            values=values[: plan.end],
                            candidates=candidates,
                            loaded=loaded[layer],
                            queries=queries[-LAST_TOKENS:],
                            query_positions=seen[-LAST_TOKENS:],
                        )
                    )
                )
            return layer != policy.layer

        self._model.compute(cache, self._tokens[seen], seen, watch=watch)
        layers = self._model.layers if policy.layer is None else policy.layer
        # New tokens before the first reused one come out of the first pass as they must be.
        again = len(candidates) + plan.count(Origin.RECOMPUTED)
        if not policy.whole:
            again = int((positions > candidates[0]).sum())
        return policy.choose(scores, candidates, count), layers * again

    def _match(self, earlier: list[list[int]]) -> tuple[BlendPlan, Tensor]:
        index = ChunkIndex(_CHUNK_SIZE)
        payloads: dict[bytes, Tensor] = {}
        for tokens in earlier:
            cache = self._model.prefill(tokens)
            keys = prefix_keys(np.asarray(tokens, dtype=np.int32), _CHUNK_SIZE, _SCOPE)
            starts = [number * _CHUNK_SIZE for number in range(len(keys))]
            for key, start in zip(keys, starts, strict=True):
                payloads[key] = cache[:, :, start : start + _CHUNK_SIZE]
                index.add(
                    key=key,
                    parent=keys[start // _CHUNK_SIZE - 1] if start else _SCOPE,
                    scope=_SCOPE,
                    token_ids=np.asarray(tokens[start : start + _CHUNK_SIZE], dtype=np.int32),
                    position=start,
                    created_ns=0,
                )
        prompt = self._tokens.numpy().astype(np.int32)
        chunks = ChunkAnalyzer(_CHUNK_SIZE, _MIN_MATCH_RATIO).analyze(prompt, index, _SCOPE)
        plan = make_plan(chunks, len(prompt) - 1)
        rope = PositionCorrector(RopeSpec.default(self._model.rope_base, self._model.head_dim))
        cache = self._model.empty_cache(len(prompt))
        for load in plan.loads():
            stored = payloads[load.source_block_id]
            kv = stored[:, :, load.source_offset : load.source_offset + load.length].clone()
            rope.rotate_(kv[:, 0], load.delta)
            cache[:, :, load.target_start : load.target_end] = kv
        return plan, cache

    def _compute(self, cache: Tensor, positions: npt.NDArray[np.int64]) -> None:
        if positions.size:
            where = torch.from_numpy(positions)
            self._model.compute(cache, self._tokens[where], where)


@dataclass(frozen=True)
class _Segment:
    """A text that follows the prompt, each by itself, and its tokens that are judged."""

    tokens: list[int]
    targets: list[int]


class PreparedCase:
    """A case with what all policies are compared by.

    Attributes:
        surprise_without: of the true text when the chunks are not in the prompt at all, nats.
    """

    def __init__(self, model: CacheModel, case: Case) -> None:
        self._model = model
        self.case = case
        self._tokens = torch.tensor(case.prompt)
        self._prompt = BlendedPrompt(model, case.earlier, case.prompt)
        self._full = model.prefill(case.prompt)
        greedy = self._continue()
        self._segments = [
            _Segment([case.prompt[-1], *text[:-1]], text) for text in (greedy, case.truth)
        ]
        self._segments += [
            _Segment([*q.text, *q.answer[:-1]], q.answer) for q in (*case.seams, *case.middles)
        ]
        self._reference = self._read(self._full)
        self.surprise_without = self._surprise_without()

    def recomputed(self) -> Outcome:
        """Full recompute, against itself."""
        return self._judge(self._reference, 1.0)

    def blended(self, policy: SelectionPolicy) -> Outcome:
        cache, cost = self._prompt.blend(policy)
        return self._judge(self._read(cache), cost)

    def _continue(self) -> list[int]:
        """Greedy text after full recompute."""
        last = len(self._tokens) - 1
        cache = torch.cat([self._full, self._model.empty_cache(_GREEDY)], dim=2)
        text = [int(self._tokens[-1])]
        for number in range(_GREEDY):
            where = torch.tensor([last + number])
            hidden = self._model.compute(cache, torch.tensor(text[-1:]), where)
            text.append(int(self._model.log_probabilities(hidden).argmax()))
        return text[1:]

    def _read(self, cache: Tensor) -> list[Tensor]:
        """Log-probabilities at the judged tokens of each segment, all read in one pass."""
        prompt = len(self._tokens)
        tokens = [token for segment in self._segments for token in segment.tokens]
        owner = torch.tensor([n for n, s in enumerate(self._segments) for _ in s.tokens])
        # The first two begin with the prompt's last token, which is not in place for them.
        begins = torch.tensor([prompt - 1, prompt - 1] + [prompt] * (len(self._segments) - 2))
        index = torch.arange(len(tokens))
        of_own = owner[:, None] == owner
        mask = torch.zeros(len(tokens), prompt + len(tokens), dtype=torch.bool)
        mask[:, :prompt] = torch.arange(prompt) < begins[owner][:, None]
        mask[:, prompt:] = of_own & (index <= index[:, None])
        hidden = self._model.compute(
            torch.cat([cache, self._model.empty_cache(len(tokens))], dim=2),
            torch.tensor(tokens),
            prompt + index,
            positions=begins[owner] + mask[:, prompt:].sum(dim=1) - 1,
            mask=mask,
        )
        ends = np.cumsum([len(segment.tokens) for segment in self._segments]).tolist()
        return [
            self._model.log_probabilities(hidden[end - len(segment.targets) : end])
            for end, segment in zip(ends, self._segments, strict=True)
        ]

    def _judge(self, read: list[Tensor], cost: float) -> Outcome:
        exact, blended = torch.cat(self._reference[:2]), torch.cat(read[:2])
        right = [
            bool((part.argmax(dim=1) == torch.tensor(segment.targets)).all())
            for part, segment in zip(read[2:], self._segments[2:], strict=True)
        ]
        seams = len(self.case.seams)
        return Outcome(
            cost=cost,
            kl=float((exact.exp() * (exact - blended)).sum(dim=1).mean()),
            top1=float((exact.argmax(dim=1) == blended.argmax(dim=1)).float().mean()),
            surprise=_surprise(read[1], self.case.truth),
            seams=tuple(right[:seams]),
            middles=tuple(right[seams:]),
        )

    def _surprise_without(self) -> float:
        tokens = [*self.case.bare, *self.case.truth[:-1]]
        cache = self._model.empty_cache(len(tokens))
        hidden = self._model.compute(cache, torch.tensor(tokens), torch.arange(len(tokens)))
        read = self._model.log_probabilities(hidden[-len(self.case.truth) :])
        return _surprise(read, self.case.truth)


def _surprise(log_probabilities: Tensor, text: list[int]) -> float:
    return -float(log_probabilities.gather(1, torch.tensor(text)[:, None]).sum())
