"""Whether reuse is worth its time: loading and recomputing against prefill (spec row B19).

The rates are learned from what runs, and told as prices: what a token that is loaded, or computed
in the middle of a blend, costs in tokens of a prefill.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

LOADED_PRICE = 1 / 16
"""Until it is known. On two cores loading, rotating and writing a token of a 135M model took 1/40
of computing it; of a larger model it is less."""

_REMEMBERED = 16
_BELIEVED_S = 60.0
_AGREE = 4
FEW_TOKENS = 64
"""What fewer take says more about a step than about a token."""


class CostRule:
    """Learns rates and judges plans.

    Args:
        min_gain: part of the time of a full prefill that reuse must save; None: none is refused.
        clock: monotonic seconds.
    """

    def __init__(self, min_gain: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._min_gain = min_gain
        self._clock = clock
        self._loads: deque[tuple[float, int, float]] = deque(maxlen=_REMEMBERED)
        self._blends: deque[tuple[float, int, float]] = deque(maxlen=_REMEMBERED)
        self._computes: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def loaded(self, tokens: int, ms: float) -> None:
        """A load brought ``tokens`` within ``ms``: none, where it waited in vain."""
        if tokens >= FEW_TOKENS or (not tokens and ms):
            self._loads.append((self._clock(), tokens, ms))

    def blended(self, tokens: int, ms: float) -> None:
        """``tokens`` were computed where a blend needs them, within ``ms``."""
        if tokens >= FEW_TOKENS:
            self._blends.append((self._clock(), tokens, ms))

    def computed(self, tokens: int, ms: float) -> None:
        """A prefill of ``tokens`` took ``ms``."""
        if tokens >= FEW_TOKENS:
            self._computes.append((tokens, ms))

    @property
    def price(self) -> float:
        """Of a loaded token."""
        return self._price(self._loads, LOADED_PRICE)

    @property
    def blended_price(self) -> float:
        """Of a token computed in a blend: many small groups take longer than one large one, and
        never less (on a GPU no more is known than how long it took to launch them).

        One blend that met a busy machine must not stop all others: several have to agree.
        """
        price = self._price(self._blends, 1.0)
        return max(price, 1.0) if len(self._blends) >= _AGREE else 1.0

    def _price(self, seen: deque[tuple[float, int, float]], unknown: float) -> float:
        """What was seen is believed for a minute: what was too slow is then tried again, or it
        would never be used any more."""
        while seen and seen[0][0] < self._clock() - _BELIEVED_S:
            seen.popleft()
        if not seen or not self._computes:
            return unknown
        return _rate((tokens, ms) for _, tokens, ms in seen) / _rate(self._computes)

    def worth(self, *, loaded: int, computed: int) -> bool:
        """Whether to load ``loaded`` tokens and compute ``computed`` rather than compute all."""
        if self._min_gain is None:
            return True
        full = loaded + computed
        cost = self.price * loaded + self.blended_price * computed
        return cost <= (1 - self._min_gain) * full


def _rate(samples: Iterable[tuple[int, float]]) -> float:
    """Milliseconds a token."""
    pairs = list(samples)
    return max(sum(ms for _, ms in pairs), 1e-6) / max(sum(tokens for tokens, _ in pairs), 1)
