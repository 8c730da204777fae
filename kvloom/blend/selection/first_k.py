"""``first_k``: the start of every run, where the missing context shows most.

A chunk's first tokens attended most to the text before it, which is another text now. In the
quality study the first 32 tokens of every run were not worse than CacheBlend's 15 % by deviation,
cheaper, and far better for facts that straddle a border; they are known without an early pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.blend.plan import BlendPlan, Range, boundaries
from kvloom.blend.selection.base import SelectionPolicy
from kvloom.config import KvloomConfig


@dataclass(frozen=True)
class FirstK(SelectionPolicy):
    """Attributes:
    k: tokens at the start of every run.
    width: tokens at both ends of every partial match (``recompute_boundary``).
    """

    k: int
    width: int

    @classmethod
    def from_config(cls, config: KvloomConfig) -> FirstK:
        return cls(k=config.first_k, width=config.recompute_boundary)

    def select(self, plan: BlendPlan) -> list[Range]:
        starts = [(run.start, min(run.start + self.k, run.end)) for run in plan.runs]
        return starts + boundaries(plan.partial_matches, self.width)
