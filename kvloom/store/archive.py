"""Blocks as one file that can be streamed (spec row S12): a tar of block files, zstd if wished.

    <namespace>/<first byte of key>/<key>.kv

An import trusts nothing: where a block goes follows from its own header, never from a name in the
archive, and it is published only when all of it has been verified. Blocks of other namespaces lie
beside each other; no engine sees another's.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, cast

from kvloom.store.base import BlockHeader
from kvloom.store.block_file import opened, write_fully
from kvloom.store.block_format import BadBlockError, decode_header, verify_parts
from kvloom.store.janitor import Janitor
from kvloom.store.layout import LIMITS, BlockFile, block_path, make_private, pages, temporary_path
from kvloom.store.survey import Bad, check

_COMPRESSED = ".zst"
_MOST_BYTES = 1 << 32  # of a block; more is no block


class ArchiveError(ValueError):
    """A file that is no archive, or one that ends early."""


@dataclass
class Moved:
    """Outcome of an export or import.

    Attributes:
        blocks, size: blocks that were moved, and their bytes.
        known: blocks that were there already.
        no_room: blocks that the directory has no room for.
    """

    blocks: int = 0
    size: int = 0
    known: int = 0
    no_room: int = 0
    bad: list[Bad] = field(default_factory=list)


@contextmanager
def written(target: Path) -> Iterator[BinaryIO]:
    """A file to export to, under its name only when all of it is written; compressed by zstd where
    it ends in ``.zst``.

    Raises:
        OSError: it can't be written.
        ImportError: zstd is wanted and the package is missing.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            if target.suffix == _COMPRESSED:
                import zstandard

                with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as stream:
                    yield cast(BinaryIO, stream)
            else:
                yield file
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def read(source: Path) -> Iterator[BinaryIO]:
    """A file to import from.

    Raises:
        OSError, ImportError: as ``written``.
    """
    with source.open("rb") as file:
        if source.suffix == _COMPRESSED:
            import zstandard

            with zstandard.ZstdDecompressor().stream_reader(file) as stream:
                yield cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, stream)))
        else:
            yield file


def export_blocks(blocks: Iterable[BlockFile], target: IO[bytes]) -> Moved:
    """Write blocks, each verified before, as a tar; a bad one is left out.

    Raises:
        OSError: the target can't be written.
    """
    moved = Moved()
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for block in blocks:
            path = Path(block.path)
            try:
                size = check(block).file_size
                with opened(path) as descriptor:
                    data = os.pread(descriptor, size, 0)
                _decode(data)  # once more: between the two looks another may have changed it
            except FileNotFoundError:
                continue
            except (BadBlockError, OSError) as error:
                moved.bad.append(Bad(block.path, str(error)))
                continue
            member = tarfile.TarInfo("/".join(path.parts[-3:]))
            member.size, member.mode = len(data), 0o600
            member.mtime = block.written_ns / 1e9
            archive.addfile(member, io.BytesIO(data))
            moved.blocks += 1
            moved.size += len(data)
    return moved


def import_blocks(source: IO[bytes], root: Path, namespace: str | None) -> Iterator[Moved]:
    """Take up the blocks of an archive, one at a time; yields the sum so far after each.

    Args:
        namespace: take blocks only of those that begin so; None: all.

    Raises:
        ArchiveError: no archive, or it ends early; what came before is there, and whole.
        OSError: the directory can't be written.
    """
    moved = Moved()
    janitor = Janitor(root, None, "s3fifo", None)
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() else None
                if file is None or member.size > _MOST_BYTES:
                    moved.bad.append(Bad(member.name, "no block"))
                    continue
                data = file.read()
                if len(data) < member.size:
                    raise ArchiveError("the archive ends early")
                try:
                    header = _decode(data)
                except BadBlockError as error:
                    moved.bad.append(Bad(member.name, str(error)))
                    continue
                if header.namespace.startswith(namespace or ""):
                    _publish(janitor, header, data, member.mtime, moved)
                yield moved
    except (tarfile.TarError, EOFError) as error:
        raise ArchiveError(f"no archive, or it ends early: {error}") from None
    finally:
        # Engines that count what the directory takes do not know of these: they count anew.
        (root / LIMITS / "usage").unlink(missing_ok=True)


def _decode(data: bytes) -> BlockHeader:
    """The header of a whole and right block."""
    stored = decode_header(data)
    if stored.file_size != len(data):
        raise BadBlockError(f"{len(data)} bytes, should be {stored.file_size}")
    verify_parts(stored, 0, memoryview(data)[stored.payload_offset :])
    return stored.block


def _publish(
    janitor: Janitor, header: BlockHeader, data: bytes, written_s: float, moved: Moved
) -> None:
    path = block_path(janitor.root / header.namespace, header.key)
    if path.exists():
        moved.known += 1
        return
    size = pages(len(data))
    if size > janitor.limit.most():
        moved.no_room += 1
        return
    make_private(path.parent)
    temporary = Path(temporary_path(str(path), size))
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            if janitor.make_room(size) is None:
                moved.no_room += 1
                return
            write_fully(file.fileno(), memoryview(data), 0)
        os.utime(temporary, (written_s, written_s))
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    moved.blocks += 1
    moved.size += len(data)
