"""Moving reused tokens that are not computed anew by what the computed ones near them moved.

The text before a run changes the KV of all its tokens, partly in one direction. The tokens of a run
that were loaded and then computed anew are a sample of that change; a part of its mean is added to
the other tokens of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvloom.blend.plan import Range

Positions = npt.NDArray[np.int64]


def samples_and_rest(
    runs: Sequence[Range], loaded: Positions, computed: Positions
) -> Iterator[tuple[Positions, Positions]]:
    """For each run its sampled tokens and those to correct, where it has both; all ascending.

    Args:
        runs: prompt positions ``[start, end)``.
        loaded: positions whose KV came out of the store.
        computed: positions whose KV is computed anew.
    """
    samples = np.intersect1d(loaded, computed)
    rest = np.setdiff1d(loaded, computed)
    for start, end in runs:
        mine, others = (
            part[np.searchsorted(part, start) : np.searchsorted(part, end)]
            for part in (samples, rest)
        )
        if mine.size and others.size:
            yield mine, others
