"""PageIO: how bytes get between memory and a page file (spec row H3)."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar


class PageIO(ABC):
    """Batched reads and writes of one open file; used by one thread at a time.

    Results are, for each entry, the bytes moved or a negative errno. Nothing is raised for what a
    file system answers.
    """

    name: ClassVar[str]

    @abstractmethod
    def read(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> list[int]: ...

    @abstractmethod
    def write(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> list[int]: ...

    @abstractmethod
    def close(self) -> None:
        """Release what the engine holds beside the file; idempotent."""


class PosixIO(PageIO):
    """preadv and pwritev: any file system, and a 3FS mount through FUSE."""

    name = "posix"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> list[int]:
        return [self._read(at, buffer) for at, buffer in zip(offsets, buffers, strict=True)]

    def write(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> list[int]:
        return [self._write(at, buffer) for at, buffer in zip(offsets, buffers, strict=True)]

    def close(self) -> None:
        """Nothing is held beside the file."""

    def _read(self, offset: int, buffer: memoryview) -> int:
        done = 0
        try:
            # A short read is no error: it is asked on until nothing more comes.
            while done < len(buffer):
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
                if not count:
                    break
                done += count
        except OSError as error:
            return -(error.errno or 5)
        return done

    def _write(self, offset: int, buffer: memoryview) -> int:
        done = 0
        try:
            while done < len(buffer):
                done += os.pwritev(self._descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            return -(error.errno or 5)
        return done
