"""``Posix``: blocks as files in one directory or several: local disks, NFS, a 3FS mount.

A block is written to a file of its own name, then renamed: a reader sees it whole or not at all,
whatever dies when (spec rows S5, S9). The root of a block follows from its key (rendezvous
hashing) and readers look in all roots, so adding or reordering roots hides nothing. Room is counted
before a block is written, and made by evicting others (``janitor``, S7). Whatever a file system
answers becomes a miss or a dropped save, a counter and a warning (S6, S8, S14).
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock, local
from typing import NamedTuple

import numpy as np

from kvloom.config import StoreConfig
from kvloom.store.base import BlockHeader, Changes, PayloadSlice, Store, Task, Watcher
from kvloom.store.block_file import Scratch, opened, pack, read_header, read_payload, write_block
from kvloom.store.block_format import BadBlockError
from kvloom.store.compression import require_zstandard
from kvloom.store.janitor import Janitor, Sweeper
from kvloom.store.layout import (
    QUARANTINE,
    SUFFIX,
    block_files,
    block_name,
    fan_out,
    is_block,
    make_private,
    pages,
    temporary_path,
)
from kvloom.store.presence import Presence, is_settled
from kvloom.store.tasks import BatchTask
from kvloom.store.threads import BoundedCalls, Job, WorkerThreads
from kvloom.store.watching import Announcer, Events

logger = logging.getLogger(__name__)

# Takes verified bytes at an offset of the caller's buffer; False: they are not wanted any more.
Put = Callable[[int, memoryview], bool]

_QUARANTINED_FILES = 64
_CLOSE_S = 10.0
_CHECK_DIRECTORY = "check that storage_backends is writable, has space, and is reachable"
_WARN_EVERY_S = 30.0
# How exactly the time of the last use is known: what is used more often costs nothing more.
_USED_GRANULARITY_NS = 1_000_000_000


class _Directory(NamedTuple):
    """One of the roots: this namespace's folder in it, its files, and who keeps its limit."""

    folder: str
    presence: Presence
    janitor: Janitor


class Posix(Store):
    """A stage of files.

    Args:
        roots: directories; created when first written to, again when they vanish.
        durability: ``none``, ``data`` or ``full`` (see the configuration reference).
        threads: threads for reads, and as many for writes.
        scan_every_s: how often a watcher looks for other processes' writes (``index_poll_s``).
        limit_bytes: the most that each directory takes (``disk_bytes``).
        eviction: name of the eviction policy.
        ttl_s: seconds after which a block is gone; None: never.
        lookup_timeout_s: a lookup that takes longer finds nothing (``load_timeout_s``).
        compression: ``none`` or ``zstd``, of blocks that are written; what is read says its own.

    Raises:
        ConfigError: ``zstd``, and zstandard is not installed.
    """

    def __init__(
        self,
        namespace: str,
        roots: Sequence[Path],
        durability: str,
        threads: int,
        *,
        scan_every_s: float = 1.0,
        limit_bytes: int | None = None,
        eviction: str = "s3fifo",
        ttl_s: float | None = None,
        lookup_timeout_s: float = 10.0,
        compression: str = "none",
    ) -> None:
        self.namespace = namespace
        self._compressed = compression == "zstd"
        if self._compressed:
            require_zstandard()
        self._durability = durability
        self._ttl_s = ttl_s
        self._scan_every_s = scan_every_s
        self._readers = WorkerThreads("kvloom-read", threads)
        self._writers = WorkerThreads("kvloom-write", threads)
        self._lookups = BoundedCalls("kvloom-lookup", lookup_timeout_s)
        self._announcer = Announcer()
        self._local = local()
        self._closed = False
        self._lock = Lock()
        self._warned: dict[str, float] = {}
        names = ("hits", "misses", "stored", "dropped", "bad", "errors")
        self._counts = dict.fromkeys(names, 0)
        self._directories = [
            _Directory(
                os.fspath(root / namespace),
                Presence(root / namespace),
                Janitor(root, limit_bytes, eviction, ttl_s, self._removed),
            )
            for root in roots
        ]
        janitors = [directory.janitor for directory in self._directories]
        self._sweeper = Sweeper(janitors, ttl_s, self._sweep_failed)

    @classmethod
    def from_config(cls, namespace: str, config: StoreConfig) -> Posix:
        return cls(
            namespace,
            [Path(backend).expanduser() for backend in config.storage_backends],
            config.durability,
            config.threads,
            scan_every_s=config.index_poll_s,
            limit_bytes=config.disk_bytes,
            eviction=config.eviction,
            ttl_s=config.ttl_s,
            lookup_timeout_s=config.load_timeout_s,
            compression=config.compression,
        )

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        if not self._closed:
            found = self._lookups.call(partial(self._present, keys))
            if found is not None:
                return found
            folders = " or ".join(directory.folder for directory in self._directories)
            self._warn("look into", folders, TimeoutError("it does not answer"))
        return [False] * len(keys)

    def load(
        self,
        keys: Sequence[bytes],
        slices: Sequence[PayloadSlice | None],
        buffers: Sequence[memoryview],
    ) -> Task:
        task = BatchTask(len(keys))
        for entry, (key, part, buffer) in enumerate(zip(keys, slices, buffers, strict=True)):
            job = partial(self._load, task, entry, key, part, buffer)
            self._submit(self._readers, task, entry, job)
        return task

    def dump(self, headers: Sequence[BlockHeader], buffers: Sequence[memoryview]) -> Task:
        task = BatchTask(len(headers))
        for entry, (header, buffer) in enumerate(zip(headers, buffers, strict=True)):
            job = partial(self._dump, task, entry, header, buffer)
            self._submit(self._writers, task, entry, job)
        return task

    def touch(self, keys: Sequence[bytes]) -> None:
        if not self._closed:
            self._writers.submit(partial(self._touch_all, list(keys)))

    def delete(self, keys: Sequence[bytes]) -> int:
        deleted = 0
        for key in keys:
            there = False
            for directory, path in self._places(key):
                try:
                    size = pages(os.stat(path).st_size)
                    os.unlink(path)
                    there = True
                    directory.janitor.limit.release(size)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._warn("delete", path, error)
            deleted += there
            if there:
                self._announcer.announce(key)
        return deleted

    def header(self, key: bytes) -> BlockHeader | None:
        found = (self._read_header(path, key) for _, path in self._places(key))
        return next((header for header in found if header is not None), None)

    def headers(self) -> Iterator[BlockHeader]:
        for directory in self._directories:
            for path in block_files(Path(directory.folder)):
                header = self._read_header(os.fspath(path), bytes.fromhex(path.stem))
                if header is not None:
                    yield header

    def watch(self) -> Watcher:
        return PosixWatcher(self)

    def stats(self) -> dict[str, int]:
        with self._lock:
            counts = {f"posix.{name}": count for name, count in self._counts.items()}
        janitors = [directory.janitor for directory in self._directories]
        counts["posix.evicted"] = sum(janitor.evicted for janitor in janitors)
        counts["posix.expired"] = sum(janitor.expired for janitor in janitors)
        return counts

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._readers.close(_CLOSE_S)
            self._writers.close(_CLOSE_S)
            self._lookups.close(_CLOSE_S)
            self._sweeper.close(_CLOSE_S)

    def _submit(self, threads: WorkerThreads, task: BatchTask, entry: int, job: Job) -> None:
        if self._closed or not threads.submit(job):
            task.settle(entry, False)

    # Reading

    def _present(self, keys: Sequence[bytes]) -> list[bool]:
        if self._ttl_s is not None:  # ages are in the files
            return [any(self._is_there(*place) for place in self._places(key)) for key in keys]
        found = [directory.presence.present(keys) for directory in self._directories]
        return found[0] if len(found) == 1 else [any(there) for there in zip(*found, strict=True)]

    def _is_there(self, directory: _Directory, path: str) -> bool:
        try:
            written_ns = os.stat(path).st_mtime_ns
        except OSError:
            return False
        return not directory.janitor.is_over(written_ns)

    def _load(
        self, task: BatchTask, entry: int, key: bytes, part: PayloadSlice | None, buffer: memoryview
    ) -> None:
        done = False
        try:
            if task.wants(entry):
                done = self._read(task, entry, key, part, buffer)
        finally:
            self._count("hits" if done else "misses")
            task.settle(entry, done)

    def _read(
        self, task: BatchTask, entry: int, key: bytes, part: PayloadSlice | None, buffer: memoryview
    ) -> bool:
        def put(at: int, piece: memoryview) -> bool:
            with task.writing(entry) as granted:
                if granted:
                    np.copyto(
                        np.frombuffer(buffer[at : at + len(piece)], dtype=np.uint8),
                        np.frombuffer(piece, dtype=np.uint8),
                    )
                return granted

        for directory, path in self._places(key):
            try:
                if self._read_file(directory, path, key, part, len(buffer), put=put):
                    return True
            except FileNotFoundError:
                continue
            except BadBlockError as error:
                self._quarantine(path, key, error)
            except ValueError:
                continue  # a slice past the payload's end
            except OSError as error:
                self._warn("read", path, error)
        return False

    def _read_file(
        self,
        directory: _Directory,
        path: str,
        key: bytes,
        part: PayloadSlice | None,
        size: int,
        *,
        put: Put,
    ) -> bool:
        """Read a slice of ``size`` bytes; False where that is not its size, or it is not wanted."""
        with opened(path) as descriptor:
            stat = os.fstat(descriptor)
            if directory.janitor.is_over(stat.st_mtime_ns):
                return False
            stored = read_header(descriptor, self.namespace, key)
            if size != (part.length if part else stored.block.payload_size):
                return False
            for at, piece in read_payload(descriptor, stored, part, self._scratch()):
                if not put(at, piece):
                    return False
            self._touch(descriptor, stat)
        return True

    def _scratch(self) -> Scratch:
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = Scratch()
        return scratch

    def _touch(self, file: int | str, stat: os.stat_result) -> None:
        """Note that a block was used: what eviction goes by, in every process."""
        now = time.time_ns()
        if (
            abs(now - stat.st_atime_ns) > _USED_GRANULARITY_NS
            or stat.st_atime_ns <= stat.st_mtime_ns
        ):
            with suppress(OSError):  # a read-only directory still serves
                os.utime(file, ns=(now, stat.st_mtime_ns))

    def _touch_all(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            for _, path in self._places(key):
                with suppress(OSError):
                    self._touch(path, os.stat(path))
                    break

    def _read_header(self, path: str, key: bytes) -> BlockHeader | None:
        try:
            with opened(path) as descriptor:
                return read_header(descriptor, self.namespace, key).block
        except BadBlockError as error:
            self._quarantine(path, None, error)
        except OSError:
            pass  # gone, or not to be read now
        return None

    def _quarantine(self, path: str, key: bytes | None, error: Exception) -> None:
        """Move a bad block out of sight; a few are kept to be looked at."""
        self._count("bad")
        self._warn("verify", path, error, f"it goes to {QUARANTINE}/; check the disk if it recurs")
        block = Path(path)
        aside = block.parents[1] / QUARANTINE
        try:
            aside.mkdir(mode=0o700, exist_ok=True)
            if len(os.listdir(aside)) < _QUARANTINED_FILES:
                block.rename(aside / f"{block.stem}.{time.time_ns()}")
            else:
                block.unlink()
        except OSError as failure:
            self._warn("quarantine", path, failure)
        if key is not None:
            self._announcer.announce(key)

    # Writing

    def _dump(self, task: BatchTask, entry: int, header: BlockHeader, buffer: memoryview) -> None:
        done = False
        try:
            done = self._write(header, buffer)
        except (OSError, ValueError) as error:
            self._warn("write", self._places(header.key)[0][1], error)
        finally:
            if not done:
                self._count("dropped")
            task.settle(entry, done)

    def _write(self, header: BlockHeader, buffer: memoryview) -> bool:
        if header.namespace != self.namespace:
            return False
        places = self._places(header.key)
        if any(self._is_there(*place) for place in places):
            return True
        (_, _, janitor), path = places[0]
        block = pack(header, buffer, self._compressed)
        size = pages(block.file_size)
        if size > janitor.limit.most():  # before a sweep counts it, and evicts all others for it
            raise OSError(errno.ENOSPC, "disk_bytes is less than this block takes")
        temporary = temporary_path(path, size)
        descriptor = _create(temporary)
        reserved = False
        try:
            try:
                level = janitor.make_room(size)
                if level is None:
                    raise OSError(errno.ENOSPC, "disk_bytes leaves no room for this block")
                reserved = True
                write_block(descriptor, block)
                if self._durability != "none":
                    os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, path)
        except BaseException as error:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            if reserved:
                janitor.limit.release(size)
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    janitor.sweep(at_least=size)  # or it would be full for ever
            raise
        if self._durability == "full":
            _sync_folder(os.path.dirname(path))
        if level.crowded():
            self._sweeper.wake()
        self._count("stored")
        self._announcer.announce(header)
        return True

    def _removed(self, namespace: str, key: bytes) -> None:
        """A janitor removed a block."""
        if namespace == self.namespace:
            self._announcer.announce(key)

    def _sweep_failed(self, root: Path, error: OSError) -> None:
        self._warn("sweep", root, error)

    # Common

    def _places(self, key: bytes) -> list[tuple[_Directory, str]]:
        """Where a block may lie, the place to write it first."""
        directories = self._directories
        if len(directories) > 1:
            directories = sorted(directories, key=partial(_weight, key), reverse=True)
        name = block_name(key)
        return [(directory, f"{directory.folder}/{name}") for directory in directories]

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _warn(
        self, what: str, path: str | Path, error: Exception, remedy: str = _CHECK_DIRECTORY
    ) -> None:
        """Count a failure; say so at most every half minute for each kind."""
        kind = f"{what} {getattr(error, 'errno', type(error).__name__)}"
        now = time.monotonic()
        with self._lock:
            self._counts["errors"] += 1
            if now - self._warned.get(kind, -_WARN_EVERY_S) < _WARN_EVERY_S:
                return
            self._warned[kind] = now
        logger.warning(
            "kvloom: the store could not %s %s (%s): requests are computed instead; %s",
            what,
            path,
            error,
            remedy,
        )


class PosixWatcher(Watcher):
    """Own writes at once; other processes' by listing the folders whose mtime changed."""

    def __init__(self, stage: Posix) -> None:
        self._stage = stage
        self._events: Events = stage._announcer.listen()
        self._seen: dict[Path, set[bytes]] = {}
        self._listed: dict[Path, int] = {}
        self._scan = self._scanning()
        self._next_scan = 0.0

    def poll(self, limit: int = 4096, timeout_s: float = 0.0) -> Changes:
        added: list[BlockHeader] = []
        removed: list[bytes] = []
        if time.monotonic() >= self._next_scan:
            while len(added) + len(removed) < limit:
                event = next(self._scan, None)
                if event is None:
                    self._scan = self._scanning()
                    self._next_scan = time.monotonic() + self._stage._scan_every_s
                    break
                if isinstance(event, BlockHeader):
                    added.append(event)
                else:
                    removed.append(event)
        if added or removed:
            return Changes(tuple(added), tuple(removed))
        return self._events.take(limit, timeout_s)

    def _scanning(self) -> Iterator[BlockHeader | bytes]:
        """What appeared and vanished in all folders, read bit by bit as it is asked for."""
        for directory in self._stage._directories:
            root = Path(directory.folder)
            folders = fan_out(root)
            for gone in [f for f in self._seen if f.parent == root and f not in set(folders)]:
                yield from self._seen.pop(gone)
                self._listed.pop(gone, None)
            for folder in folders:
                yield from self._changes(folder)

    def _changes(self, folder: Path) -> Iterator[BlockHeader | bytes]:
        try:
            changed = folder.stat().st_mtime_ns
            if changed == self._listed.get(folder):
                return
            now = time.time_ns()
            names = {
                bytes.fromhex(entry.name[: -len(SUFFIX)])
                for entry in os.scandir(folder)
                if is_block(entry.name)
            }
        except OSError:
            return
        if is_settled(changed, now):
            self._listed[folder] = changed
        before = self._seen.get(folder, set())
        self._seen[folder] = names
        yield from before - names
        for key in names - before:
            header = self._stage._read_header(f"{folder}/{key.hex()}{SUFFIX}", key)
            if header is not None:
                yield header


def _weight(key: bytes, directory: _Directory) -> bytes:
    return hashlib.blake2b(key + os.fsencode(directory.folder), digest_size=8).digest()


def _create(path: str) -> int:
    """An empty file, open for writing; its folder is made if there is none."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        make_private(Path(path).parent)
        return os.open(path, flags, 0o600)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
