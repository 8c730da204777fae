"""What a load may cost a step of the engine, and what it has cost so far (spec row B17)."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Slices: TypeAlias = Generator[None, None, T]
"""Work that yields where the step must go on without it; its return value is the outcome."""


_NAP_S = 0.0005
_NAPS_PER_STEP = 10  # the store answers within one or two; a step must not be held up if it hangs


class Budget:
    """Counted in computed tokens; what costs less than computing has a lower price.

    Attributes:
        limited: the load runs between steps, in slices, and waits for nothing; else it is done
            within one step.
        asked: when the load was, monotonic seconds; others may have been done before it.
        left: tokens that this step can still afford.
        waited_s: time between steps in which the store was seen to be late.
    """

    def __init__(self, *, limited: bool, asked: float) -> None:
        self.limited = limited
        self.asked = asked
        self.left = 0.0 if limited else math.inf
        self.waited_s = 0.0
        self._worked_s = 0.0
        self._naps = 0
        self._since = time.perf_counter()

    @contextmanager
    def step(self, tokens: float) -> Iterator[None]:
        """A step in which the load goes on, with ``tokens`` to spend."""
        self.left = tokens if self.limited else math.inf
        self._naps = _NAPS_PER_STEP
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._worked_s += time.perf_counter() - self._since

    def take(self, wanted: int, price: float = 1.0) -> int:
        """Pay for as many of ``wanted`` tokens as can be afforded, at least one."""
        count = int(max(min(wanted, self.left // price), 1))
        self.left -= count * price
        return count

    def nap(self) -> bool:
        """Give the store a moment to answer; whether the step could afford it."""
        if not self._naps:
            return False
        self._naps -= 1
        time.sleep(_NAP_S)
        return True

    @property
    def spent(self) -> bool:
        return self.left < 1

    def worked_s(self) -> float:
        """Time in its steps so far, pauses between them not counted; asked within a step."""
        return self._worked_s + time.perf_counter() - self._since
