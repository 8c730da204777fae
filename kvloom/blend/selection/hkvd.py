"""``hkvd``: the tokens whose KV deviates most at an early layer (CacheBlend, Yao et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvloom.blend.plan import BlendPlan, Range, boundaries
from kvloom.blend.selection.base import LayerView, LookingPolicy
from kvloom.config import KvloomConfig


@dataclass(frozen=True)
class Hkvd(LookingPolicy):
    """Attributes:
    width: tokens at both ends of every partial match (``recompute_boundary``).
    """

    whole: ClassVar[bool] = True
    layer: int
    ratio: float
    width: int

    @classmethod
    def from_config(cls, config: KvloomConfig) -> Hkvd:
        return cls(config.recompute_layer, config.recompute_ratio, config.recompute_boundary)

    def select(self, plan: BlendPlan) -> list[Range]:
        return boundaries(plan.partial_matches, self.width)

    def score(self, view: LayerView) -> Tensor:
        return view.deviation()
