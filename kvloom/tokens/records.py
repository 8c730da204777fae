"""Records: a growing array of rows in an unlinked file, which the kernel may page out."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import IO, Any

import numpy as np
import numpy.typing as npt


class Records:
    """Rows of ``dtype``, zeroed; in memory where no file can be had or grown.

    Views got before ``grow`` stay valid for the rows they have.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._dtype = dtype
        self._file = _scratch_file()
        self.rows: npt.NDArray[Any] = np.zeros(0, dtype=dtype)

    @property
    def in_file(self) -> bool:
        return self._file is not None

    def grow(self, count: int) -> None:
        if self._file is not None:
            try:
                size = count * self._dtype.itemsize
                # Space is taken now: a page of a sparse file that finds the disk full later is a
                # SIGBUS, which would take the engine down.
                os.posix_fallocate(self._file.fileno(), 0, size)
                mapped = mmap.mmap(self._file.fileno(), size)
                self.rows = np.frombuffer(mapped, dtype=self._dtype)
                return
            except (OSError, AttributeError):  # no space, or a system without posix_fallocate
                self._file = None
        rows = np.zeros(count, dtype=self._dtype)
        rows[: len(self.rows)] = self.rows
        self.rows = rows


def _scratch_file() -> IO[bytes] | None:
    try:
        return tempfile.TemporaryFile(prefix="kvloom-tokens-")
    except OSError:
        return None
