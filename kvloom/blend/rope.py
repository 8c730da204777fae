"""Moving cached keys to new positions (spec rows B9, B11).

RoPE turns pair ``i`` of a key at position ``p`` by the angle ``p * inv_freq[i]`` (Su et al., 2021,
"RoFormer"). A key computed at ``source`` is therefore the key at ``target`` after one more turn by
``(target - source) * inv_freq[i]``; values carry no position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeSpec:
    """The rotation of a model's keys.

    Attributes:
        base: the model's ``rope_theta``.
        rotary_dim: leading dimensions of a head that are rotated; the others are left alone.
        interleaved: pairs are neighbours (GPT-J) instead of half a head apart (NeoX).
    """

    base: float
    rotary_dim: int
    interleaved: bool = False

    def inv_freq(self) -> Tensor:
        """Angle per position of each pair, float64 [rotary_dim / 2]."""
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
        return torch.pow(torch.tensor(self.base, dtype=torch.float64), -exponent)


class PositionCorrector:
    """Rotates stored keys by ``target - source`` positions.

    Angles are taken in float64: in float32 an angle of a million radians is off by 3e-2 and the
    error would grow with the distance a chunk moved. The rotation itself is float32.
    """

    def __init__(self, spec: RopeSpec) -> None:
        self.spec = spec
        self._inv_freq = spec.inv_freq()

    def correct_kv(self, kv: Tensor, source_positions: Tensor, target_positions: Tensor) -> Tensor:
        """KV as it would stand at the target positions.

        Args:
            kv: [..., 2, tokens, heads, head_dim], K then V, in the cache dtype. Must be as stored,
                never an already rotated copy: rounding adds up with every turn.
            source_positions: int64 [tokens].
            target_positions: int64 [tokens].

        Returns:
            ``kv`` itself where nothing moves (bit for bit), else a new tensor of the same dtype.
        """
        delta = target_positions.to("cpu", torch.int64) - source_positions.to("cpu", torch.int64)
        if not bool(delta.any()):
            return kv
        corrected = kv.clone()
        self.rotate_(corrected.select(-4, 0), delta)
        return corrected

    def rotate_(self, keys: Tensor, delta: Tensor | int) -> None:
        """Turn ``keys`` [..., tokens, heads, head_dim] in place.

        Args:
            keys: a fresh copy of stored keys.
            delta: positions to move, one for all tokens or int64 [tokens].
        """
        steps = torch.as_tensor(delta, dtype=torch.float64).reshape(-1, 1)
        angles = (steps * self._inv_freq).unsqueeze(1)  # [tokens or 1, 1, rotary_dim / 2]
        cos = angles.cos().to(keys.device, torch.float32)
        sin = angles.sin().to(keys.device, torch.float32)
        rotary = keys[..., : self.spec.rotary_dim]
        if self.spec.interleaved:
            first, second = rotary[..., 0::2], rotary[..., 1::2]
        else:
            first, second = rotary.chunk(2, dim=-1)
        x = first.to(torch.float32, copy=True)
        y = second.to(torch.float32, copy=True)
        first.copy_(torch.mul(x, cos).addcmul_(y, sin, value=-1))
        second.copy_(y.mul_(cos).addcmul_(x, sin))
