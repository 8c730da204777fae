"""Small file systems of their own, for the tests that fill, lock and take them away."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(root: Path, options: str) -> Iterator[None]:
    """A tmpfs at ``root``; skips the test where nobody may mount one."""
    root.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root can mount a tmpfs, and not on every machine")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def used_bytes(root: Path) -> int:
    """Bytes taken in the file system of ``root``, at one instant."""
    stat = os.statvfs(root)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def remove(folder: Path) -> None:
    """Whatever threads of a store write into it meanwhile: their sweep, for one."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def put_in_the_way(folder: Path) -> None:
    """A file in the place of a folder that threads of a store may make anew."""
    while not folder.is_file():
        remove(folder)
        with suppress(IsADirectoryError):
            folder.write_text("in the way")
