"""A stand-in for ``hf3fs_fuse.io``: same names and signatures, over any directory.

Rings hold as many operations as they have entries; submitted ones are done by ``wait``. A test can
make it answer short, fail, refuse, or not at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any


class StandIn:
    """The module. ``answer(read, offset, size)`` replaces an operation's result when not None.

    Attributes:
        mute: submitted operations are never answered.
        alive: iovecs that were made and not yet given back.
    """

    def __init__(self, mount: Path) -> None:
        self._mount = mount
        self.registered: set[int] = set()
        self.answer: Callable[[bool, int, int], int | None] = lambda read, offset, size: None
        self.mute = False
        self.room: int | None = None
        self.alive = 0
        self.rings = 0

    def extract_mount_point(self, path: str) -> str | None:
        return str(self._mount) if Path(path).is_relative_to(self._mount) else None

    def register_fd(self, fd: int) -> None:
        assert fd not in self.registered, "a descriptor may be registered once"
        self.registered.add(fd)

    def deregister_fd(self, fd: int) -> None:
        self.registered.remove(fd)

    def make_iovec(
        self, shm: SharedMemory, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1
    ) -> Iovec:
        assert hf3fs_mount_point == str(self._mount)
        return Iovec(self, shm)

    def make_ioring(  # noqa: PLR0917  (the published signature)
        self,
        hf3fs_mount_point: str,
        entries: int,
        for_read: bool = True,
        io_depth: int = 0,
        priority: int | None = None,
        timeout: int | None = None,
        numa: int = -1,
        flags: int = 0,
    ) -> Ioring:
        self.rings += 1
        return Ioring(self, entries if self.room is None else self.room, for_read)


class Slice:
    """A piece of an iovec; ``result`` and ``userdata`` are set when its operation is done."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.result = 0
        self.userdata: Any = None


class Iovec:
    def __init__(self, library: StandIn, shm: SharedMemory) -> None:
        self._library, self._shm = library, shm
        library.alive += 1

    def __getitem__(self, key: slice) -> Slice:
        assert key.step in (None, 1)
        assert self._shm.buf is not None
        return Slice(self._shm.buf[key])

    def __del__(self) -> None:
        self._library.alive -= 1


class Ioring:
    def __init__(self, library: StandIn, entries: int, for_read: bool) -> None:
        self._library, self._entries, self._for_read = library, entries, for_read
        self._prepared: list[tuple[Slice, int, int]] = []
        self._submitted: list[tuple[Slice, int, int]] = []

    def prepare(self, iov: Slice, read: bool, fd: int, off: int, userdata: Any = None) -> Ioring:
        assert read == self._for_read, "a ring is for reads or for writes"
        assert fd in self._library.registered, "an unregistered descriptor"
        if len(self._prepared) + len(self._submitted) >= self._entries:
            raise OSError(errno.EAGAIN, "the ring is full")
        iov.userdata = userdata
        self._prepared.append((iov, fd, off))
        return self

    def submit(self) -> Ioring:
        self._submitted += self._prepared
        self._prepared = []
        return self

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | None = None
    ) -> list[Slice]:
        if self._library.mute:
            assert timeout is not None, "would wait for ever"
            return []
        done, self._submitted = self._submitted, []
        for piece, fd, offset in done:
            size = len(piece.view)
            told = self._library.answer(self._for_read, offset, size)
            count = size if told is None else max(told, 0)
            if self._for_read:
                data = os.pread(fd, count, offset)
                piece.view[: len(data)] = data
                piece.result = len(data) if told is None or told >= 0 else told
            else:
                written = os.pwrite(fd, piece.view[:count], offset)
                piece.result = written if told is None or told >= 0 else told
        return [piece for piece, _, _ in done]
