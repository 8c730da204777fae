"""The interface of recompute policies: those that know the plan, and those that look first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvloom.blend.plan import BlendPlan, Origin, Range
from kvloom.config import KvloomConfig

LAST_TOKENS = 48  # of a first pass, whose queries a policy is shown


class SelectionPolicy(ABC):
    """Chooses reused tokens whose KV is computed anew in the context of the new prompt.

    ``select`` is asked by the scheduler, before anything is loaded.

    Attributes:
        correction: how much of the mean change of a run's loaded and computed tokens is added to
            its other tokens.
    """

    correction: ClassVar[float] = 0.0

    @classmethod
    @abstractmethod
    def from_config(cls, config: KvloomConfig) -> SelectionPolicy: ...

    @abstractmethod
    def select(self, plan: BlendPlan) -> list[Range]:
        """Ranges of prompt positions; tokens in them that are not reused are left as they are."""

    def budget(self, found: BlendPlan, plan: BlendPlan) -> int:
        """Reused tokens to be chosen later, when they are loaded; none, but by a LookingPolicy.

        Args:
            found: what was matched.
            plan: the same, with the tokens of ``select`` recomputed.
        """
        return 0


@dataclass(frozen=True)
class LayerView:
    """What a first pass shows of one layer, before that layer's attention.

    Attributes:
        keys, values: [tokens of the prompt, heads, head_dim], as they now lie in the cache; keys
            carry their positions.
        candidates: int64 [candidates], positions of the reused tokens that may be chosen.
        loaded: [2, candidates, heads, head_dim], their K and V before the pass.
        queries: [last tokens, query heads, head_dim] of the last tokens of the pass.
        query_positions: int64 [last tokens].
    """

    keys: Tensor
    values: Tensor
    candidates: Tensor
    loaded: Tensor
    queries: Tensor
    query_positions: Tensor

    def deviation(self) -> Tensor:
        """Squared distance of computed from loaded KV, [candidates] (CacheBlend, 2024)."""
        keys = self.keys[self.candidates] - self.loaded[0]
        values = self.values[self.candidates] - self.loaded[1]
        return (keys.float().pow(2) + values.float().pow(2)).sum(dim=(1, 2))

    def attention(self) -> Tensor:
        """What the last tokens give each candidate, summed over heads and queries, [candidates]."""
        groups = self.queries.shape[1] // self.keys.shape[1]
        keys = self.keys.float().transpose(0, 1).repeat_interleave(groups, dim=0)
        scores = self.queries.float().transpose(0, 1) @ keys.transpose(1, 2)
        later = torch.arange(keys.shape[1], device=keys.device) > self.query_positions[:, None]
        scores = (scores / self.queries.shape[2] ** 0.5).masked_fill(later, float("-inf"))
        weights: Tensor = scores.softmax(dim=-1).sum(dim=(0, 1))[self.candidates]
        return weights


class LookingPolicy(SelectionPolicy):
    """Chooses further tokens once the KV is loaded, by scores from a first pass of the model.

    Attributes:
        whole: the first pass computes all tokens of the plan, up to ``layer``; else only those
            that are computed anyway, through all layers.
        layer: the pass ends before this layer's attention, and only this layer is looked at; None:
            all layers are.
        ratio: part of the reused tokens to be computed anew, those of ``select`` among them.
    """

    whole: ClassVar[bool]
    layer: int | None
    ratio: float

    @abstractmethod
    def score(self, view: LayerView) -> Tensor:
        """How much each candidate deserves it, [candidates]; summed over the layers looked at."""

    def choose(self, scores: Tensor, candidates: Tensor, count: int) -> npt.NDArray[np.int64]:
        """Positions of at most ``count`` candidates, ascending.

        Args:
            scores: float [candidates].
            candidates: int64 [candidates], positions, ascending.
        """
        best = scores.topk(min(count, len(scores))).indices
        positions: npt.NDArray[np.int64] = candidates[best].sort().values.cpu().numpy()
        return positions

    def budget(self, found: BlendPlan, plan: BlendPlan) -> int:
        reused = found.count(Origin.REUSED)
        return max(round(self.ratio * reused) - plan.count(Origin.RECOMPUTED), 0)
