"""How much of a disk a store directory may take, agreed on by all who write into it (row S7).

With ``disk_bytes``, a counter in the directory says what is taken; a writer counts its block before
it writes, so the limit holds at every instant, and a count that a killed process left too high is
put right by the next look at the files. Without, the file system's own free space is the counter.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvloom.store.layout import LIMITS, make_private

_KEPT_FREE = 10  # a part of the file system: 1 / 10
_KEPT_FREE_MOST = 4 * 1024**3
SLACK = 20  # a part of the limit: 1 / 20
_SLACK_MOST = 2 * 1024**3
_LOCK_S = 2.0
_LOCK_POLL_S = 0.001


@dataclass(frozen=True)
class Level:
    """Bytes taken, the most that may be, and how far below that an eviction goes, so that not
    every block that comes costs one."""

    used: int
    limit: int
    slack: int

    def crowded(self) -> bool:
        """Whether it is time to make room in the background."""
        return self.used > self.limit - self.slack // 2

    def excess(self, need: int) -> int:
        """Bytes that have to go for ``need`` more to fit, with some slack; 0 when they fit."""
        if self.used + need <= self.limit and not self.crowded():
            return 0
        return max(self.used + need - (self.limit - self.slack), 0)


class DiskLimit(ABC):
    """The limit of one store directory. Any ``OSError`` is the caller's to turn into a miss."""

    @abstractmethod
    def most(self) -> int:
        """Bytes of the largest block that there can ever be room for."""

    @abstractmethod
    def level(self) -> Level: ...

    @abstractmethod
    def reserve(self, size: int) -> Level | None:
        """Count a block that is about to be written, and tell the level with it; None, and nothing
        counted, if it is one too many.

        Its temporary file exists already, so that a recount never misses it.
        """

    def release(self, size: int) -> None:  # noqa: B027  (free space releases itself)
        """Take off what was reserved and not written, or was deleted."""

    @contextmanager
    def recounting(self) -> Iterator[Callable[[int], None]]:
        """While the files are listed; call what it gives with the bytes that were found."""
        yield lambda found: None


class FreeSpace(DiskLimit):
    """A tenth of the file system, at most 4 GiB, is left free for others."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def most(self) -> int:
        return self.level().limit

    def level(self) -> Level:
        stat = _statvfs(self._root)
        total = stat.f_blocks * stat.f_frsize
        return Level(
            used=total - stat.f_bavail * stat.f_frsize,
            limit=total - min(total // _KEPT_FREE, _KEPT_FREE_MOST),
            slack=min(total // SLACK, _SLACK_MOST),
        )

    def reserve(self, size: int) -> Level | None:
        now = self.level()
        level = Level(now.used + size, now.limit, now.slack)
        return level if level.used <= level.limit else None


class Quota(DiskLimit):
    """``limit`` bytes, whoever writes.

    Args:
        count: bytes of all files of the directory, asked where there is no counter yet.
    """

    _RECORD = struct.Struct("<QQ")  # bytes taken; bytes ever reserved, which only grows

    def __init__(self, root: Path, limit: int, count: Callable[[], int]) -> None:
        self._path = root / LIMITS / "usage"
        self._limit = limit
        self._count = count

    def most(self) -> int:
        return self._limit

    def level(self) -> Level:
        with self._record() as ((used, _), _):
            return self._level(used)

    def reserve(self, size: int) -> Level | None:
        with self._record() as ((used, reserved), write):
            if used + size > self._limit:
                return None
            write(used + size, reserved + size)
            return self._level(used + size)

    def release(self, size: int) -> None:
        with self._record() as ((used, reserved), write):
            write(max(used - size, 0), reserved)

    @contextmanager
    def recounting(self) -> Iterator[Callable[[int], None]]:
        with self._record() as ((_, before), _):
            pass

        def settle(found: int) -> None:
            # What was reserved meanwhile may be found or not: counted twice is the safe mistake.
            with self._record() as ((_, reserved), write):
                write(found + reserved - before, reserved)

        yield settle

    def _level(self, used: int) -> Level:
        return Level(used, self._limit, self._limit // SLACK)

    @contextmanager
    def _record(self) -> Iterator[tuple[tuple[int, int], Callable[[int, int], None]]]:
        """The two numbers and how to change them, with nobody else at them."""
        make_private(self._path.parent)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

        def write(used: int, reserved: int) -> None:
            os.pwrite(descriptor, self._RECORD.pack(used, reserved), 0)

        try:
            lock(descriptor, _LOCK_S)
            data = os.pread(descriptor, self._RECORD.size, 0)
            if len(data) < self._RECORD.size:
                numbers = self._count(), 0
                write(*numbers)
            else:
                numbers = self._RECORD.unpack(data)
            yield numbers, write
        finally:
            os.close(descriptor)


def _statvfs(folder: Path) -> os.statvfs_result:
    """Of the file system that a folder is in, or will be."""
    while True:
        try:
            return os.statvfs(folder)
        except (FileNotFoundError, NotADirectoryError):
            if folder == folder.parent:
                raise
            folder = folder.parent


def free_bytes(root: Path) -> int:
    """Bytes that can still be written to a file system."""
    stat = os.statvfs(root)
    return stat.f_bavail * stat.f_frsize


def lock(descriptor: int, within_s: float) -> None:
    """Lock a file for this open descriptor alone; the kernel unlocks it when its owner dies.

    Raises:
        TimeoutError: somebody else held it all the time. Never waits for ever: its owner may be
            stopped, or hang in a file system.
        OSError: the file system has no locks.
    """
    ends = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= ends:
                raise TimeoutError("the lock of the store directory is held too long") from None
            time.sleep(_LOCK_POLL_S)
