"""``boundary``: both ends of every partial match and run."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.blend.plan import BlendPlan, Range, boundaries
from kvloom.blend.selection.base import SelectionPolicy
from kvloom.config import KvloomConfig


@dataclass(frozen=True)
class Boundary(SelectionPolicy):
    """Attributes:
    width: tokens at each end (``recompute_boundary``).
    """

    width: int

    @classmethod
    def from_config(cls, config: KvloomConfig) -> Boundary:
        return cls(width=config.recompute_boundary)

    def select(self, plan: BlendPlan) -> list[Range]:
        return boundaries(
            [*plan.partial_matches, *((r.start, r.end) for r in plan.runs)], self.width
        )
