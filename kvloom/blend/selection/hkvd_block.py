"""``hkvd_block``: blocks of 16 tokens by their mean deviation at an early layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvloom.blend.selection.hkvd import Hkvd

_BLOCK = 16


@dataclass(frozen=True)
class HkvdBlock(Hkvd):
    """Few long groups instead of many short ones: attention kernels prefer them."""

    def choose(self, scores: Tensor, candidates: Tensor, count: int) -> npt.NDArray[np.int64]:
        positions = candidates.cpu().numpy()
        _, members, sizes = np.unique(positions // _BLOCK, return_inverse=True, return_counts=True)
        means = np.bincount(members, weights=scores.cpu().numpy()) / sizes
        order = np.argsort(-means, kind="stable")
        fits = np.zeros(len(sizes), dtype=np.bool_)
        fits[order] = np.cumsum(sizes[order]) <= count
        chosen: npt.NDArray[np.int64] = positions[fits[members]]
        return chosen
