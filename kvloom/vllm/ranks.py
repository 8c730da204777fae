"""What the workers of one engine agree on under tensor parallelism (spec row B14).

Every rank holds some heads of all tokens, stores them by itself, and calls the model together with
the others: a forward of one rank waits for the same forward of the others. So whatever decides
which tokens are computed is decided by all: a chunk that one rank could not load counts as lost for
all, and what a policy saw of its heads is summed. In the memory of the processor, where every rank
gets the same bits.

Work that may fail on one rank alone is done in pieces that end with a vote (``together``), before
the next forward: a rank that left early would vote while the others are in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch import Tensor

Flags = npt.NDArray[np.bool_]


class OtherRankError(RuntimeError):
    """Another rank failed; its log says why."""


class ApartError(BaseException):
    """A forward failed on some ranks and not on others.

    No ``Exception``, for nobody may go on: collectives that the failed ranks never joined would be
    answered by those of the next step, and its tokens be wrong.
    """


class Ranks:
    """The ranks of a tensor-parallel group; calls are made by all of them, in the same order.

    Args:
        group: of torch.distributed, on processors; None for a rank that is alone.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        self._group = group

    def all(self, flags: Flags) -> Flags:
        """What is true on all ranks, bool [n]."""
        if self._group is None:
            return flags
        shared = torch.from_numpy(flags.astype(np.uint8))
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN, self._group)
        agreed: Flags = shared.numpy().astype(np.bool_)
        return agreed

    def sum(self, values: Tensor) -> Tensor:
        """Float values of all ranks added."""
        return self._reduced(values, torch.distributed.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """The largest of each float value on any rank; NaN may be lost."""
        return self._reduced(values, torch.distributed.ReduceOp.MAX)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that fails on all ranks if it fails on one.

        Raises:
            OtherRankError: it went well here, but not everywhere.
        """
        try:
            yield
        except Exception:
            self.all(np.zeros(1, np.bool_))
            raise
        if not self.all(np.ones(1, np.bool_))[0]:
            raise OtherRankError("another rank failed")

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Work with forwards, all else in which is done ``together``.

        Raises:
            ApartError: it failed on some ranks only.
        """
        try:
            yield
        except Exception as error:
            if not self.all(np.array([False, True]))[1]:
                raise ApartError(f"a forward failed on this rank alone: {error!r}") from error
            raise
        if not self.all(np.array([True, False]))[0]:
            raise ApartError("a forward failed on another rank")

    def _reduced(self, values: Tensor, how: torch.distributed.ReduceOp.RedOpType) -> Tensor:
        if self._group is None:
            return values
        shared = values.cpu()
        torch.distributed.all_reduce(shared, how, self._group)
        return shared.to(values.device)
