"""Moving cached keys to new positions (spec rows B9-B11).

RoPE turns pair ``i`` of a key at position ``p`` by the angle ``p * inv_freq[i]`` (Su et al., 2021,
"RoFormer"). A key computed at ``source`` is therefore the key at ``target`` after one more turn by
``(target - source) * inv_freq[i]``; values carry no position. A factor on the key's length (YaRN's
``mscale``) was applied when the key was computed and must not be applied again: turns keep it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeSpec:
    """The rotation of a layer's keys.

    Attributes:
        inv_freq: angle per position of each pair.
        interleaved: pairs are neighbours (GPT-J) instead of half the rotated part apart (NeoX).
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False

    @classmethod
    def default(cls, base: float, rotary_dim: int, interleaved: bool = False) -> RopeSpec:
        """RoPE without scaling; ``base`` is the model's ``rope_theta``."""
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        inv_freq = torch.tensor(base, dtype=torch.float64) ** -exponents
        return cls(tuple(inv_freq.tolist()), interleaved)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated; the others are left alone."""
        return 2 * len(self.inv_freq)


Rotations = Sequence[RopeSpec | None]
"""Of each layer; None where keys carry no position."""


class PositionCorrector:
    """Rotates stored keys by ``target - source`` positions.

    Angles are taken in float64: in float32 an angle of a million radians is off by 3e-2 and the
    error would grow with the distance a chunk moved. The rotation itself is float32.

    Args:
        rotations: one for all layers, or one of each.
    """

    def __init__(self, rotations: RopeSpec | Rotations) -> None:
        self.rotations = rotations

    def correct_kv(self, kv: Tensor, source_positions: Tensor, target_positions: Tensor) -> Tensor:
        """KV as it would stand at the target positions.

        Args:
            kv: [..., 2, tokens, heads, head_dim], K then V, in the cache dtype; [layers, 2, ...]
                where each layer has its own rotation. Must be as stored, never an already rotated
                copy: rounding adds up with every turn.
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
            keys: a fresh copy of stored keys; [layers, tokens, heads, head_dim] where each layer
                has its own rotation.
            delta: positions to move, one for all tokens or int64 [tokens].
        """
        for spec, part in self._parts(keys):
            turn = _turn(spec, delta) if isinstance(delta, int) else _Turn(spec, delta)
            rotary = part[..., : spec.rotary_dim]
            work = rotary.to(torch.float32)  # the same memory, where the cache is float32
            turn.apply_(work)
            if work.dtype is not rotary.dtype:
                rotary.copy_(work)

    def _parts(self, keys: Tensor) -> Iterator[tuple[RopeSpec, Tensor]]:
        """Neighbouring layers that are rotated alike, together: one large turn is quicker."""
        if isinstance(self.rotations, RopeSpec):
            yield self.rotations, keys
            return
        start = 0
        for spec, layers in groupby(self.rotations):
            end = start + len(list(layers))
            if spec is not None:
                yield spec, keys[start:end]
            start = end


class _Turn:
    """One rotation, ready to be applied.

    Pairs of neighbours are complex numbers. Halves are turned by three shears (Paeth, 1986, "A Fast
    Algorithm for General Raster Rotation"), each in place: copies of the halves made this three
    times as slow. Half turns are taken out first, for near them ``tan(angle / 2)`` would magnify
    the rounding.
    """

    def __init__(self, spec: RopeSpec, delta: Tensor | int) -> None:
        steps = torch.as_tensor(delta, dtype=torch.float64).reshape(-1, 1, 1)
        angles = steps * torch.tensor(spec.inv_freq, dtype=torch.float64)
        self._factors: tuple[Tensor, ...]
        if spec.interleaved:
            self._factors = (torch.polar(torch.ones_like(angles), angles).to(torch.complex64),)
            return
        half_turns = torch.round(angles / math.pi)
        rest = angles - half_turns * math.pi
        sign = 1 - 2 * half_turns.remainder(2)
        factors = torch.cat((sign, sign), dim=-1), -(rest / 2).tan(), rest.sin()
        self._factors = tuple(factor.to(torch.float32) for factor in factors)

    def apply_(self, keys: Tensor) -> None:
        """Turn ``keys``, float32 [..., tokens, heads, rotary_dim], in place."""
        factors = [factor.to(keys.device) for factor in self._factors]
        if len(factors) == 1:
            torch.view_as_complex(keys.view(*keys.shape[:-1], -1, 2)).mul_(factors[0])
            return
        sign, shear, sine = factors
        keys.mul_(sign)
        first, second = keys.chunk(2, dim=-1)
        first.addcmul_(second, shear)
        second.addcmul_(first, sine)
        first.addcmul_(second, shear)


_turn = lru_cache(maxsize=256)(_Turn)  # the pieces of a run all move by the same distance
