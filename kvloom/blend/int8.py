"""KV in 8 bits (spec row S13): lossy, so a store of such payloads has a namespace of its own.

Each head of each token is a group, K and V apart: its numbers become integers in [-127, 127] times
one float32 scale, the group's largest magnitude / 127. A number is off by half a scale at most,
1/254 of its group's largest, plus the rounding to the KV's own dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEVELS = 127
_SCALE = torch.float32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Int8Form:
    """Payloads [layers, 2, tokens, heads, head_dim] of floats as bytes, uint8 [layers, part_size].

    A layer's part holds its integers, int8 [2, tokens, heads, head_dim], then its scales, float32
    [2, tokens, heads].

    Args:
        shape: of a payload; its dtype is one of ``DTYPES``.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = torch.Size(shape)
        self._integers = self._shape[1:].numel()
        self.part_size = self._integers + self._shape[1:-1].numel() * _SCALE.itemsize

    @property
    def stored_shape(self) -> tuple[int, int]:
        return (self._shape[0], self.part_size)

    def encode(self, payload: Tensor, out: Tensor) -> bool:
        """Write a payload into ``out``; False: it holds infinities, NaN or next to them, which
        have no such form."""
        numbers = payload.to(_SCALE)
        largest = numbers.abs().amax(-1, keepdim=True)
        if not (2 * largest).isfinite().all():
            return False
        scales = (largest / _LEVELS).clamp_min_(torch.finfo(_SCALE).tiny)
        integers, kept = self._views(out)
        integers.copy_((numbers / scales).round_().clamp_(-_LEVELS, _LEVELS))
        kept.copy_(scales)
        return True

    def decode(self, stored: Tensor, out: Tensor) -> None:
        """Write the payload that ``stored`` holds into ``out``."""
        integers, scales = self._views(stored)
        out.copy_(integers).mul_(scales)  # each product is rounded once, from float32

    def _views(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        integers = stored[:, : self._integers].view(torch.int8).view(self._shape)
        scales = stored[:, self._integers :].view(_SCALE).view(*self._shape[:-1], 1)
        return integers, scales
