"""``query_aware``: deviation weighted by what the prompt's last tokens look at, and ``first_k``.

What deviates and is never looked at does no harm. The start of every run is computed anew too: its
tokens miss the text before them most, and a question that comes later may look there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvloom.blend.plan import BlendPlan, Range
from kvloom.blend.selection.base import LayerView
from kvloom.blend.selection.first_k import FirstK
from kvloom.blend.selection.hkvd import Hkvd
from kvloom.config import KvloomConfig

_FIRST = 8  # a small part of the budget: the rest follows the attention


@dataclass(frozen=True)
class QueryAware(Hkvd):
    """Attributes:
    k: tokens at the start of every run; they count towards ``ratio``.
    """

    k: int

    @classmethod
    def from_config(cls, config: KvloomConfig) -> QueryAware:
        return cls(
            layer=config.recompute_layer,
            ratio=config.recompute_ratio,
            width=config.recompute_boundary,
            k=_FIRST,
        )

    def select(self, plan: BlendPlan) -> list[Range]:
        return FirstK(self.k, self.width).select(plan)

    def score(self, view: LayerView) -> Tensor:
        return view.deviation().sqrt() * view.attention()
