"""UsrbioIO: reads and writes through 3FS's user-space rings (spec rows H3, H4).

    buffer -> shared memory (iovec) -> ring -> 3FS client daemon -> storage, and back

A ring for reads and one for writes, each with an iovec of ``entries`` pages. What the daemon has
taken it may still write to or read from when a wait has timed out: such a ring and its memory are
never used again, new ones take their place.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from kvloom.hf3fs.page_io import PageIO

_WAIT_S = 10.0


def load_library() -> Any:
    """``hf3fs_fuse.io`` of the package ``hf3fs-py-usrbio``.

    Raises:
        ImportError: it is not installed, or its native part does not load.
    """
    return importlib.import_module("hf3fs_fuse.io")


@dataclass
class _Ring:
    """A ring, its memory, and how many entries the daemon holds."""

    ring: Any
    iovec: Any
    memory: SharedMemory


class UsrbioIO(PageIO):
    """One read ring and one write ring over an open file on a 3FS mount.

    Args:
        library: ``hf3fs_fuse.io``.
        entries: most entries of a batch; larger ones go in several submits.

    Raises:
        OSError: the path is on no 3FS mount, or rings or memory can't be had.
    """

    name = "usrbio"

    def __init__(
        self,
        library: Any,
        path: str,
        descriptor: int,
        *,
        bytes_per_page: int,
        entries: int,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._library = library
        self._descriptor = descriptor
        self._bytes_per_page = bytes_per_page
        self._entries = entries
        self._wait = timedelta(seconds=wait_s)
        self._mount = library.extract_mount_point(path)
        if self._mount is None:
            raise OSError(errno.ENOTSUP, "on no 3FS mount", path)
        self._rings: dict[bool, _Ring] = {}
        self._registered = False
        library.register_fd(descriptor)
        self._registered = True
        try:
            for for_read in (True, False):
                self._rings[for_read] = self._make_ring(for_read)
        except BaseException:
            self.close()
            raise

    def read(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> list[int]:
        return self._run(True, offsets, buffers)

    def write(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> list[int]:
        return self._run(False, offsets, buffers)

    def close(self) -> None:
        for ring in self._rings.values():
            _drop(ring)
        self._rings = {}
        if self._registered:
            self._registered = False
            self._library.deregister_fd(self._descriptor)

    def _run(
        self, for_read: bool, offsets: Sequence[int], buffers: Sequence[memoryview]
    ) -> list[int]:
        results: list[int] = []
        for first in range(0, len(offsets), self._entries):
            part = slice(first, first + self._entries)
            results += self._submit(for_read, offsets[part], buffers[part])
        return results

    def _submit(
        self, for_read: bool, offsets: Sequence[int], buffers: Sequence[memoryview]
    ) -> list[int]:
        results = [-errno.EIO] * len(offsets)
        try:
            ring = self._rings.get(for_read) or self._make_ring(for_read)
        except OSError as error:
            return [-(error.errno or errno.EIO)] * len(offsets)
        self._rings[for_read] = ring
        waiting: set[int] = set()
        try:
            for entry, (offset, buffer) in enumerate(zip(offsets, buffers, strict=True)):
                start = entry * self._bytes_per_page
                if not for_read:
                    _bytes_of(ring)[start : start + len(buffer)] = buffer
                piece = ring.iovec[start : start + len(buffer)]
                try:
                    ring.ring.prepare(piece, for_read, self._descriptor, offset, userdata=entry)
                except OSError as error:  # the ring is full: this entry fails, the others go
                    results[entry] = -(error.errno or errno.EAGAIN)
                    continue
                waiting.add(entry)
            if waiting:
                ring.ring.submit()
            while waiting:
                done = ring.ring.wait(min_results=len(waiting), timeout=self._wait)
                if not done:
                    break
                for piece in done:
                    waiting.discard(piece.userdata)
                    results[piece.userdata] = piece.result
                    if for_read and piece.result > 0:
                        start = piece.userdata * self._bytes_per_page
                        buffer = buffers[piece.userdata]
                        count = min(piece.result, len(buffer))
                        buffer[:count] = _bytes_of(ring)[start : start + count]
        except OSError as error:
            for entry in waiting:
                results[entry] = -(error.errno or errno.EIO)
        else:
            for entry in waiting:
                results[entry] = -errno.ETIMEDOUT
        if waiting:
            _drop(self._rings.pop(for_read))
        return results

    def _make_ring(self, for_read: bool) -> _Ring:
        memory = SharedMemory(create=True, size=self._entries * self._bytes_per_page)
        try:
            iovec = self._library.make_iovec(memory, self._mount)
            ring = self._library.make_ioring(self._mount, self._entries, for_read=for_read)
            return _Ring(ring, iovec, memory)
        except BaseException:
            memory.close()
            raise
        finally:
            # The daemon has it mapped: without its name it goes when both have let go of it, also
            # after kill -9.
            memory.unlink()


def _bytes_of(ring: _Ring) -> memoryview:
    view = ring.memory.buf
    if view is None:
        raise OSError(errno.EBADF, "the shared memory is closed")
    return view


def _drop(ring: _Ring) -> None:
    """iovec before ring before memory: each points into the next."""
    ring.iovec = None
    ring.ring = None
    with contextlib.suppress(BufferError):  # a late result still holds a view: freed with it
        ring.memory.close()
