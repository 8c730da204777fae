"""``lead``: the whole budget on the starts of runs, the same number of tokens in each.

Ours. The text before a run shows most in the KV of its first tokens, and fades; what a token there
deviates by is known before anything is loaded, from its place alone. ``first_k`` spends a fixed
number; this one spends ``recompute_ratio`` of what is reused, so long runs are mended deeper, and
short ones leave their share to the others. It needs no first pass, and the tokens form one group a
run, as attention kernels like it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.blend.plan import BlendPlan, Origin, Range, boundaries
from kvloom.blend.selection.base import SelectionPolicy
from kvloom.config import KvloomConfig


@dataclass(frozen=True)
class Lead(SelectionPolicy):
    """Attributes:
    ratio: part of the reused tokens (``recompute_ratio``).
    width: tokens at both ends of every partial match (``recompute_boundary``); on top.
    """

    ratio: float
    width: int

    @classmethod
    def from_config(cls, config: KvloomConfig) -> Lead:
        return cls(config.recompute_ratio, config.recompute_boundary)

    def select(self, plan: BlendPlan) -> list[Range]:
        budget = int(self.ratio * plan.count(Origin.REUSED))
        lengths = np.array([run.end - run.start for run in plan.runs], dtype=np.int64)
        leads = _level(lengths, budget).tolist()
        starts = [(run.start, run.start + k) for run, k in zip(plan.runs, leads, strict=True)]
        return starts + boundaries(plan.partial_matches, self.width)


def _level(lengths: np.ndarray, budget: int) -> np.ndarray:
    """As equal shares of a budget as the lengths allow."""
    shares = np.zeros_like(lengths)
    order = np.argsort(lengths, kind="stable")
    for done, which in enumerate(order):
        shares[which] = min(lengths[which], budget // (len(order) - done))
        budget -= int(shares[which])
    return shares
