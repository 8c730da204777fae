"""``Posix``: blocks as files in one directory or several: local disks, NFS, a 3FS mount.

    <root>/<namespace>/<first byte of key>/<key>.kv

A block is written to a file of its own name, then renamed: a reader sees it whole or not at all,
whatever dies when (spec rows S5, S9). The root of a block follows from its key (rendezvous
hashing) and readers look in all roots, so adding or reordering roots hides nothing. Whatever a
file system answers becomes a miss or a dropped save, a counter and a warning (S6, S8, S14).
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Lock, local

import numpy as np

from kvloom.config import KvloomConfig
from kvloom.store.base import BlockHeader, Changes, PayloadSlice, Store, Task, Watcher
from kvloom.store.block_format import (
    ALIGNMENT,
    BadBlockError,
    StoredHeader,
    decode_header,
    encode_header,
    header_size,
    parts_of,
    verify_parts,
)
from kvloom.store.memory import HostMemory
from kvloom.store.tasks import BatchTask
from kvloom.store.threads import WorkerThreads
from kvloom.store.watching import Announcer, Events

logger = logging.getLogger(__name__)

_SUFFIX = ".kv"
_TEMPORARY = ".tmp"
_QUARANTINE = "quarantine"
_QUARANTINED_FILES = 64
_STALE_S = 3600.0
_CLOSE_S = 10.0
_WARN_EVERY_S = 30.0
# A directory that changed this shortly before it was listed may change again without a new mtime.
_MTIME_GRANULARITY_NS = 2_000_000_000


class Posix(Store):
    """A stage of files.

    Args:
        roots: directories; created when first written to, again when they vanish.
        durability: ``none``, ``data`` or ``full`` (see the configuration reference).
        threads: threads for reads, and as many for writes.
        scan_every_s: how often a watcher looks for other processes' writes (``index_poll_s``).
    """

    def __init__(
        self,
        namespace: str,
        roots: Sequence[Path],
        durability: str,
        threads: int,
        scan_every_s: float = 1.0,
    ) -> None:
        self.namespace = namespace
        self._folders = [root / namespace for root in roots]
        self._durability = durability
        self._scan_every_s = scan_every_s
        self._readers = WorkerThreads("kvloom-read", threads)
        self._writers = WorkerThreads("kvloom-write", threads)
        self._announcer = Announcer()
        self._scratch = local()
        self._closed = False
        self._lock = Lock()
        self._warned: dict[str, float] = {}
        self._host = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
        names = ("hits", "misses", "stored", "dropped", "bad", "errors")
        self._counts = dict.fromkeys(names, 0)
        self._writers.submit(self._remove_stale)

    @classmethod
    def from_config(cls, namespace: str, config: KvloomConfig) -> Posix:
        roots = [Path(backend).expanduser() for backend in config.storage_backends]
        return cls(namespace, roots, config.durability, config.io_threads, config.index_poll_s)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [any(path.exists() for path in self._paths(key)) for key in keys]

    def load(
        self,
        keys: Sequence[bytes],
        slices: Sequence[PayloadSlice | None],
        buffers: Sequence[memoryview],
    ) -> Task:
        task = BatchTask(len(keys))
        for entry, (key, part, buffer) in enumerate(zip(keys, slices, buffers, strict=True)):
            if self._closed:
                task.settle(entry, False)
            else:
                self._readers.submit(partial(self._load, task, entry, key, part, buffer))
        return task

    def dump(self, headers: Sequence[BlockHeader], buffers: Sequence[memoryview]) -> Task:
        task = BatchTask(len(headers))
        for entry, (header, buffer) in enumerate(zip(headers, buffers, strict=True)):
            if self._closed:
                task.settle(entry, False)
            else:
                self._writers.submit(partial(self._dump, task, entry, header, buffer))
        return task

    def delete(self, keys: Sequence[bytes]) -> int:
        deleted = 0
        for key in keys:
            there = False
            for path in self._paths(key):
                try:
                    path.unlink()
                    there = True
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._warn("delete", path, error)
            deleted += there
            if there:
                self._announcer.announce(key)
        return deleted

    def header(self, key: bytes) -> BlockHeader | None:
        found = (self._read_header(path) for path in self._paths(key))
        return next((header for header in found if header is not None), None)

    def headers(self) -> Iterator[BlockHeader]:
        for folder in self._folders:
            for path in _block_files(folder):
                header = self._read_header(path)
                if header is not None:
                    yield header

    def watch(self) -> Watcher:
        return PosixWatcher(self)

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {f"posix.{name}": count for name, count in self._counts.items()}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._readers.close(_CLOSE_S)
            self._writers.close(_CLOSE_S)

    # Reading

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
        for path in self._paths(key):
            try:
                wanted = self._wanted_bytes(path, key, part)
            except FileNotFoundError:
                continue
            except BadBlockError as error:
                self._quarantine(path, key, error)
                continue
            except OSError as error:
                self._warn("read", path, error)
                continue
            if len(wanted) != len(buffer):
                continue
            with task.writing(entry) as granted:
                if granted:
                    np.copyto(
                        np.frombuffer(buffer, dtype=np.uint8), np.frombuffer(wanted, dtype=np.uint8)
                    )
                return granted
        return False

    def _wanted_bytes(self, path: Path, key: bytes, part: PayloadSlice | None) -> memoryview:
        """Verified payload bytes, in this thread's scratch memory: valid until its next read.

        Reads never go straight into the caller's buffer: one that hangs could not be taken back.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            scratch = self._scratch_memory(size)
            if part is None:
                _read_fully(descriptor, scratch, 0)
                stored = decode_header(scratch)
            else:
                stored = _stored_header(descriptor, scratch)
            self._check(stored, key, size)
            whole = PayloadSlice(0, stored.block.payload_size)
            first, _, span = parts_of(stored.block, part or whole)
            at = stored.payload_offset + span.offset
            payload = scratch[at : at + span.length]
            if part is not None:
                _read_fully(descriptor, payload, at)
            verify_parts(stored, first, payload)
        finally:
            os.close(descriptor)
        if part is None:
            return payload
        return payload[part.offset - span.offset : part.offset - span.offset + part.length]

    def _check(self, stored: StoredHeader, key: bytes, size: int) -> None:
        if stored.block.key != key or stored.block.namespace != self.namespace:
            raise BadBlockError("the block of another key or namespace")
        if stored.file_size != size:
            raise BadBlockError(f"{size} bytes, should be {stored.file_size}")

    def _scratch_memory(self, size: int) -> memoryview:
        memory: memoryview | None = getattr(self._scratch, "memory", None)
        if memory is None or len(memory) < size:
            memory = HostMemory(size).take(size) if size else memoryview(bytearray())
            if memory is None:
                raise BadBlockError(f"a file of {size} bytes")
            self._scratch.memory = memory
        return memory[:size]

    def _read_header(self, path: Path) -> BlockHeader | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            stored = _stored_header(descriptor, memoryview(bytearray(min(size, 1 << 24))))
            self._check(stored, bytes.fromhex(path.stem), size)
            return stored.block
        except (BadBlockError, OSError, ValueError) as error:
            if not isinstance(error, OSError):
                self._quarantine(path, None, error)
            return None
        finally:
            os.close(descriptor)

    def _quarantine(self, path: Path, key: bytes | None, error: Exception) -> None:
        """Move a bad block out of sight; a few are kept to be looked at."""
        self._count("bad")
        self._warn("verify", path, error)
        aside = path.parents[1] / _QUARANTINE
        try:
            aside.mkdir(mode=0o700, exist_ok=True)
            if len(os.listdir(aside)) < _QUARANTINED_FILES:
                path.rename(aside / f"{path.stem}.{time.time_ns()}")
            else:
                path.unlink()
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
            self._warn("write", self._paths(header.key)[0], error)
        finally:
            if not done:
                self._count("dropped")
            task.settle(entry, done)

    def _write(self, header: BlockHeader, buffer: memoryview) -> bool:
        if header.namespace != self.namespace:
            return False
        paths = self._paths(header.key)
        if any(path.exists() for path in paths):
            return True
        path = paths[0]
        _make_private(path.parent)
        temporary = path.with_name(
            f"{path.stem}.{self._host}.{os.getpid()}.{secrets.token_hex(8)}{_TEMPORARY}"
        )
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write_fully(descriptor, [memoryview(encode_header(header, buffer)), buffer])
                if self._durability != "none":
                    os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if self._durability == "full":
            _sync_folder(path.parent)
        self._count("stored")
        self._announcer.announce(header)
        return True

    def _remove_stale(self) -> None:
        """Remove temporary files whose writer is dead: this host's by pid, others' by age."""
        for folder in self._folders:
            for path in folder.glob(f"*/*{_TEMPORARY}"):
                try:
                    if self._is_stale(path):
                        path.unlink(missing_ok=True)
                except (OSError, ValueError) as error:
                    self._warn("clean", path, error)

    def _is_stale(self, path: Path) -> bool:
        _, host, pid, *_ = path.name.split(".")
        if host == self._host:
            return not Path(f"/proc/{int(pid)}").exists()
        return time.time() - path.stat().st_mtime > _STALE_S

    # Common

    def _paths(self, key: bytes) -> list[Path]:
        """Where a block may lie, the place to write it first."""
        name = key.hex()

        def weight(folder: Path) -> bytes:
            return hashlib.blake2b(key + os.fsencode(folder), digest_size=8).digest()

        return [
            folder / name[:2] / f"{name}{_SUFFIX}"
            for folder in sorted(self._folders, key=weight, reverse=True)
        ]

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _warn(self, what: str, path: Path, error: Exception) -> None:
        """Count a failure; say so at most every half minute for each kind."""
        kind = f"{what} {getattr(error, 'errno', type(error).__name__)}"
        now = time.monotonic()
        with self._lock:
            self._counts["errors"] += 1
            if now - self._warned.get(kind, -_WARN_EVERY_S) < _WARN_EVERY_S:
                return
            self._warned[kind] = now
        logger.warning(
            "kvloom: the store could not %s %s (%s): requests are computed instead; check that "
            "storage_backends is writable, has space, and is reachable",
            what,
            path,
            error,
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
        for root in self._stage._folders:
            folders = _fan_out(root)
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
                bytes.fromhex(entry.name[: -len(_SUFFIX)])
                for entry in os.scandir(folder)
                if _is_block(entry.name)
            }
        except OSError:
            return
        if now - changed > _MTIME_GRANULARITY_NS:
            self._listed[folder] = changed
        before = self._seen.get(folder, set())
        self._seen[folder] = names
        yield from before - names
        for key in names - before:
            header = self._stage._read_header(folder / f"{key.hex()}{_SUFFIX}")
            if header is not None:
                yield header


def _fan_out(folder: Path) -> list[Path]:
    try:
        return [
            Path(entry.path)
            for entry in os.scandir(folder)
            if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False)
        ]
    except OSError:
        return []


def _block_files(folder: Path) -> Iterator[Path]:
    for part in _fan_out(folder):
        try:
            names = os.listdir(part)
        except OSError:
            continue
        for name in names:
            if _is_block(name):
                yield part / name


def _is_block(name: str) -> bool:
    stem = name.removesuffix(_SUFFIX)
    return stem != name and len(stem) == 32 and all(c in "0123456789abcdef" for c in stem)


def _stored_header(descriptor: int, scratch: memoryview) -> StoredHeader:
    """The header of an open block, read into ``scratch``, which has room for the file."""
    start = scratch[: min(ALIGNMENT, len(scratch))]
    _read_fully(descriptor, start, 0)
    size = header_size(start)
    if size > len(scratch):
        raise BadBlockError("header cut off")
    if size > len(start):
        _read_fully(descriptor, scratch[len(start) : size], len(start))
    return decode_header(scratch[:size])


def _read_fully(descriptor: int, memory: memoryview, offset: int) -> None:
    """Fill ``memory`` from a file; a short read is gone on with, an end of file is a bad block."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            raise BadBlockError(f"file ends at {offset + done}, {len(memory) - done} bytes early")
        done += count


def _write_fully(descriptor: int, pieces: list[memoryview]) -> None:
    while pieces:
        count = os.writev(descriptor, pieces)
        while pieces and count >= len(pieces[0]):
            count -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][count:]


def _make_private(folder: Path) -> None:
    """Make a folder and its missing parents, all 0700: ``mkdir(parents=True)`` would leave the
    parents to the umask, readable by all."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
