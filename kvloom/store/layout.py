"""Where everything lies in a store directory, and how to list it.

    <root>/<namespace>/<first byte of key>/<key>.kv                               blocks
    <root>/<namespace>/<first byte of key>/<key>.<host>.<pid>.<size>.<random>.tmp being written
    <root>/<namespace>/quarantine/<key>.<nanoseconds>                             bad blocks
    <root>/.limits/                                  usage, lock and queues of the limits

Names are digests in hex: no key or namespace can become another path (spec row S14).
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".kv"
TEMPORARY = ".tmp"
QUARANTINE = "quarantine"
LIMITS = ".limits"
PAGE = 4096
_STALE_S = 3600.0
_HOST = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
_HEX = frozenset("0123456789abcdef")
_BLOCK = re.compile(r"[0-9a-f]{32}\.kv")


class BlockFile(NamedTuple):
    """A file of a store, as listing tells it, unread.

    Attributes:
        size: bytes that it takes, in whole pages.
        written_ns, used_ns: its mtime, and the later of mtime and atime.
    """

    path: str
    namespace: str
    key: bytes
    size: int
    written_ns: int
    used_ns: int


def block_name(key: bytes) -> str:
    """The file of a block, as seen from its namespace's folder."""
    name = key.hex()
    return f"{name[:2]}/{name}{SUFFIX}"


def block_path(folder: Path, key: bytes) -> Path:
    """The file of a block in a namespace's folder."""
    return folder / block_name(key)


def temporary_path(path: str, size: int) -> str:
    """A name of its own for a block under way: two writers never share one, and whoever counts
    the directory meanwhile knows how large it is going to be."""
    stem = path.removesuffix(SUFFIX)
    return f"{stem}.{_HOST}.{os.getpid()}.{size}.{secrets.token_hex(8)}{TEMPORARY}"


def promised_size(temporary: str) -> int:
    """Bytes that a temporary file will have, in whole pages.

    Raises:
        ValueError: no name of ``temporary_path``.
    """
    _, _, _, size, *_ = os.path.basename(temporary).split(".")
    return pages(int(size))


def is_stale(path: str) -> bool:
    """Whether a temporary file's writer is dead: this host's by pid, others' by age.

    Raises:
        OSError: it is gone.
        ValueError: no name of ``temporary_path``.
    """
    _, host, pid, *_ = os.path.basename(path).split(".")
    if host == _HOST and not os.path.exists(f"/proc/{int(pid)}"):
        return True
    return time.time() - os.stat(path).st_mtime > _STALE_S


def namespaces(root: Path) -> list[Path]:
    """Folders of the namespaces in a store directory; none where there is no directory."""
    return _folders(root, 32)


def fan_out(folder: Path) -> list[Path]:
    """A namespace's folders of blocks."""
    return _folders(folder, 2)


def block_files(folder: Path) -> Iterator[Path]:
    """Files of blocks in a namespace's folder, whole or not."""
    for part in fan_out(folder):
        for name in _names(part):
            if is_block(name):
                yield part / name


def is_block(name: str) -> bool:
    return _BLOCK.fullmatch(name) is not None


class Listing:
    """One look at all files of a store directory, of all namespaces.

    Attributes:
        blocks: files of blocks.
        temporary: paths of files being written, or left by the dead.
        quarantined: (path, bytes, nanoseconds of the last write) of bad blocks.
        size: bytes of all of them, in whole pages; those being written at their later size.
    """

    def __init__(self, root: Path) -> None:
        self.blocks: list[BlockFile] = []
        self.temporary: list[str] = []
        self.quarantined: list[tuple[str, int, int]] = []
        self.size = 0
        for folder in namespaces(root):
            for part in fan_out(folder):
                self._list(part, folder.name)
            self._list_quarantine(folder / QUARANTINE)

    def _list(self, part: Path, namespace: str) -> None:
        for entry in _entries(part):
            name = entry.name
            try:
                if is_block(name):
                    info = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode):
                        continue  # whoever wants the block finds that out
                    size = pages(info.st_size)
                    self.size += size
                    self.blocks.append(
                        BlockFile(
                            entry.path,
                            namespace,
                            bytes.fromhex(name[:32]),
                            size,
                            info.st_mtime_ns,
                            max(info.st_mtime_ns, info.st_atime_ns),
                        )
                    )
                elif name.endswith(TEMPORARY):
                    self.size += promised_size(name)
                    self.temporary.append(entry.path)
            except (OSError, ValueError):
                continue  # gone meanwhile, or no file of ours

    def _list_quarantine(self, folder: Path) -> None:
        for entry in _entries(folder):
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            size = pages(info.st_size)
            self.quarantined.append((entry.path, size, info.st_mtime_ns))
            self.size += size


def pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, all 0700: ``mkdir(parents=True)`` would leave the
    parents to the umask, readable by all."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _folders(folder: Path, length: int) -> list[Path]:
    return [
        Path(entry.path)
        for entry in _entries(folder)
        if len(entry.name) == length
        and _HEX.issuperset(entry.name)
        and entry.is_dir(follow_symlinks=False)
    ]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
