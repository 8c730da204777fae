"""Lossless compression of a block's parts by zstd (spec row S13).

Each part is compressed on its own, so that some layers can be read without the others, and one that
gets no smaller stays as it is. Splitting the numbers into planes of their bytes first, as is usual
for floats, gained 1 % on a real model's KV and halved the speed; levels above 1 gained as little.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from enum import IntEnum
from types import ModuleType

from kvloom.config import ConfigError

_LEVEL = 1


class Encoding(IntEnum):
    """How the parts of a block are stored, as its header says."""

    RAW = 0
    ZSTD = 1


class UndecodableError(ValueError):
    """Bytes that are no part of the size they should have."""


def zstandard() -> ModuleType:
    """The package, which is an extra.

    Raises:
        OSError: it is not installed; the text names the remedy.
    """
    try:
        import zstandard as package
    except ImportError:
        remedy = "zstd needs the package zstandard: pip install 'kvloom[zstd]'"
        raise OSError(errno.ENOTSUP, remedy) from None
    return package


def require_zstandard() -> None:
    """Stop a start that could not do what it is told to.

    Raises:
        ConfigError: zstandard is not installed.
    """
    try:
        zstandard()
    except OSError as error:
        raise ConfigError(f"compression = 'zstd': {error.strerror}") from None


def compress(parts: Sequence[memoryview]) -> tuple[Encoding, list[memoryview]]:
    """The parts as they are to be stored, and their encoding: RAW where none gets smaller.

    Raises:
        OSError: zstandard is not installed.
    """
    compressor = zstandard().ZstdCompressor(level=_LEVEL)
    stored = [min(part, memoryview(compressor.compress(part)), key=len) for part in parts]
    smaller = any(len(made) < len(part) for made, part in zip(stored, parts, strict=True))
    return (Encoding.ZSTD if smaller else Encoding.RAW), stored


def decompress(stored: memoryview, size: int) -> memoryview:
    """A part of ``size`` bytes, as it was before ``compress``.

    Raises:
        UndecodableError: it is none; no more memory than ``size`` is taken to find out.
        OSError: zstandard is not installed.
    """
    if len(stored) == size:
        return stored
    package = zstandard()
    try:
        if package.frame_content_size(stored) != size:
            raise UndecodableError(f"no zstd frame of {size} bytes")
        return memoryview(package.ZstdDecompressor().decompress(stored))
    except package.ZstdError as error:
        raise UndecodableError(str(error)) from None
