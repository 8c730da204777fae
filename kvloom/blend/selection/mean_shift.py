"""``mean_shift``: the start of every run and a sample of the rest, which corrects what is left.

Ours. A run's first tokens miss the text before it most, and facts that straddle its border hang on
them. All other tokens of the run are off by less, and partly by the same: every n-th of them is
computed anew, and half of their mean change is added to those between. Everything is known in the
scheduler; there is no first pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvloom.blend.plan import BlendPlan, Origin, Range, boundaries
from kvloom.blend.selection.base import SelectionPolicy
from kvloom.config import KvloomConfig

_FIRST = 16


@dataclass(frozen=True)
class MeanShift(SelectionPolicy):
    """Attributes:
    ratio: part of the reused tokens (``recompute_ratio``).
    width: tokens at both ends of every partial match (``recompute_boundary``); on top.
    """

    correction: ClassVar[float] = 0.5
    ratio: float
    width: int

    @classmethod
    def from_config(cls, config: KvloomConfig) -> MeanShift:
        return cls(config.recompute_ratio, config.recompute_boundary)

    def select(self, plan: BlendPlan) -> list[Range]:
        if not plan.runs:
            return []
        reused = plan.count(Origin.REUSED)
        budget = int(self.ratio * reused)
        first = min(_FIRST, budget // (2 * len(plan.runs)))
        starts = [(run.start, min(run.start + first, run.end)) for run in plan.runs]
        rest = reused - sum(end - start for start, end in starts)
        step = -(-rest // max(budget - (reused - rest), 1))
        samples = [
            (position, position + 1)
            for run in plan.runs
            for position in range(run.start + first + step // 2, run.end, max(step, 1))
        ]
        return starts + samples + boundaries(plan.partial_matches, self.width)
