"""``hkvd_block``: blocks of 16 tokens by their mean deviation at an early layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvloom.blend.selection.hkvd import Hkvd

_BLOCK = 16


@dataclass(frozen=True)
class HkvdBlock(Hkvd):
    """Few long groups instead of many short ones: attention kernels prefer them."""

    def choose(self, scores: Tensor, candidates: Tensor, count: int) -> npt.NDArray[np.int64]:
        blocks, members, sizes = (candidates // _BLOCK).unique(
            return_inverse=True, return_counts=True
        )
        sums = torch.zeros(len(blocks), device=scores.device).index_add_(0, members, scores.float())
        order = (sums / sizes).argsort(descending=True)
        fits = torch.zeros(len(blocks), dtype=torch.bool, device=scores.device)
        fits[order] = sizes[order].cumsum(0) <= count
        positions: npt.NDArray[np.int64] = candidates[fits[members]].cpu().numpy()
        return positions
