"""The correction of ``kvloom.blend.correction`` in the paged cache, in slices of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvloom.blend.correction import Positions
from kvloom.blend.cost import LOADED_PRICE
from kvloom.vllm.budget import Budget, Slices
from kvloom.vllm.paged_cache import PagedCache

_SLICE = 256


class Correction:
    """``measure`` when the tokens are loaded, ``apply`` when the samples are computed anew.

    Args:
        runs: sampled tokens and those to correct, of each run.
        part: of the samples' mean change that is added to the others; 0: nothing is done.

    Attributes:
        end: tokens from here on should be computed after ``apply``.
    """

    def __init__(
        self,
        cache: PagedCache,
        block_ids: Sequence[int],
        runs: list[tuple[Positions, Positions]],
        *,
        part: float,
    ) -> None:
        self._cache = cache
        self._block_ids = block_ids
        self._runs = runs if part else []
        self._part = part
        self._before: list[Tensor] = []
        self.end = max((int(max(s[-1], r[-1])) + 1 for s, r in self._runs), default=0)

    def measure(self, budget: Budget) -> Slices[None]:
        """Before the samples are computed anew."""
        for samples, _ in self._runs:
            self._before.append((yield from self._mean(samples, budget)))

    def apply(self, budget: Budget) -> Slices[None]:
        """After they were."""
        for (samples, rest), before in zip(self._runs, self._before, strict=True):
            after = yield from self._mean(samples, budget)
            shift = (self._part * (after - before)).unsqueeze(2)
            for slots, payload in self._slices(rest):
                moved = (payload.float() + shift).to(payload.dtype)
                self._cache.scatter(moved, slots)
                budget.take(len(slots), LOADED_PRICE)
                if budget.spent:
                    yield

    def _mean(self, positions: Positions, budget: Budget) -> Slices[Tensor]:
        """Mean KV of these tokens, float32 [layers, 2, heads, head_dim]."""
        total = torch.zeros((), device=self._cache.device)
        for slots, payload in self._slices(positions):
            total = total + payload.float().sum(dim=2)
            budget.take(len(slots), LOADED_PRICE)
            if budget.spent:
                yield
        return total / len(positions)

    def _slices(self, positions: Positions) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, len(positions), _SLICE):
            where = torch.from_numpy(positions[first : first + _SLICE])
            slots = self._cache.slots(self._block_ids, where)
            shape = self._cache.payload_shape(len(where))
            payload = torch.empty(shape, dtype=self._cache.dtype, device=self._cache.device)
            self._cache.gather(slots, payload)
            yield slots, payload
