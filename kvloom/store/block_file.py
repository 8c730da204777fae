"""Reading and writing the file of one block (spec rows S4, S6, S13).

Payloads are read in pieces of some parts that fit into the processor's cache: a piece is read,
verified and copied on while it is there, so that memory is passed over no more often than by a
plain read. Smaller pieces would stay in a nearer cache, but each makes threads wait for the
interpreter's lock: with 256 KiB a load by four threads took half as long again as with 1 MiB.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from kvloom.store.base import BlockHeader, PayloadSlice
from kvloom.store.block_format import (
    ALIGNMENT,
    BadBlockError,
    StoredHeader,
    checksum,
    decode_header,
    encode_header,
    header_size,
    parts_of,
    payload_offset,
    verify_parts,
)
from kvloom.store.compression import Encoding, UndecodableError, compress, decompress
from kvloom.store.memory import allocate

_PIECE_BYTES = 1024 * 1024
_READ = (
    os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
)  # a FIFO in a block's place must not be waited for


@contextmanager
def opened(path: Path | str) -> Iterator[int]:
    """A block's file, open for reading; its atime stays, for that is how blocks are known as used.

    Raises:
        BadBlockError: something else than a file.
        OSError: it can't be opened.
    """
    try:
        descriptor = os.open(path, _READ | os.O_NOATIME)
    except PermissionError:  # O_NOATIME is for the owner alone
        descriptor = os.open(path, _READ)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadBlockError("no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_header(descriptor: int, namespace: str, key: bytes) -> StoredHeader:
    """The header of an open block.

    Raises:
        BadBlockError: it is damaged, another block's, or the file has not the size it says.
        OSError: it can't be read.
    """
    size = os.fstat(descriptor).st_size
    start = bytearray(min(ALIGNMENT, size))
    read_fully(descriptor, memoryview(start), 0)
    length = header_size(start)
    if length > size:
        raise BadBlockError("header cut off")
    if length > len(start):
        start += bytes(length - len(start))
        read_fully(descriptor, memoryview(start)[ALIGNMENT:], ALIGNMENT)
    stored = decode_header(start)
    if stored.block.key != key or stored.block.namespace != namespace:
        raise BadBlockError("the block of another key or namespace")
    if stored.file_size != size:
        raise BadBlockError(f"{size} bytes, should be {stored.file_size}")
    return stored


class Scratch:
    """Memory for pieces on their way, of one thread."""

    def __init__(self) -> None:
        self._memory = allocate(_PIECE_BYTES)

    def take(self, size: int) -> memoryview:
        if len(self._memory) < size:
            self._memory = allocate(size)
        return self._memory[:size]


def read_payload(
    descriptor: int, stored: StoredHeader, part: PayloadSlice | None, scratch: Scratch
) -> Iterator[tuple[int, memoryview]]:
    """Verified pieces of a slice of the payload, or of all of it: (offset in the slice, bytes).

    A piece is valid until the next is asked for. Reads never go straight into a caller's buffer:
    one that hangs could not be taken back.

    Raises:
        BadBlockError: a part that the slice touches is damaged; what came before is right.
        OSError: it can't be read.
        ValueError: the slice reaches past the payload.
    """
    part = part or PayloadSlice(0, stored.block.payload_size)
    first, last, span = parts_of(stored.block, part)
    at = span.offset
    for begin, end, piece in read_stored(descriptor, stored, first, last, scratch):
        for whole in _decoded(stored, begin, end, piece):
            left, right = max(part.offset, at), min(part.offset + part.length, at + len(whole))
            yield left - part.offset, whole[left - at : right - at]
            at += len(whole)


def read_stored(
    descriptor: int, stored: StoredHeader, first: int, last: int, scratch: Scratch
) -> Iterator[tuple[int, int, memoryview]]:
    """Parts as they are stored, verified: first of a piece, one past its last, and their bytes.

    Raises:
        BadBlockError: a part is damaged.
        OSError: it can't be read.
    """
    at = stored.payload_offset + sum(stored.sizes[:first])
    for begin, end, size in _pieces(stored.sizes, first, last):
        piece = scratch.take(size)
        read_fully(descriptor, piece, at)
        verify_parts(stored, begin, piece)
        yield begin, end, piece
        at += size


def _decoded(
    stored: StoredHeader, first: int, last: int, piece: memoryview
) -> Iterator[memoryview]:
    """The payload of a piece: all at once where it is stored as it is, else part by part."""
    if stored.encoding is Encoding.RAW:
        yield piece
        return
    at = 0
    for part in range(first, last):
        size = stored.sizes[part]
        try:
            yield decompress(piece[at : at + size], stored.block.part_sizes[part])
        except UndecodableError as error:
            raise BadBlockError(f"part {part}: {error}") from None
        at += size


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """A block as its file will hold it.

    Attributes:
        sizes: stored bytes of each part.
        payload: the stored parts, one after another.
    """

    header: BlockHeader
    encoding: Encoding
    sizes: tuple[int, ...]
    payload: memoryview

    @property
    def file_size(self) -> int:
        return payload_offset(self.header, self.encoding) + len(self.payload)


def pack(header: BlockHeader, payload: memoryview, compressed: bool) -> PackedBlock:
    """A block ready to be written; it shares the payload's memory where it is not compressed.

    Raises:
        OSError: it is to be compressed and zstandard is not installed.
        ValueError: the payload has another size than its parts.
    """
    if len(payload) != header.payload_size:
        raise ValueError(f"payload of {len(payload)} bytes, parts of {header.payload_size}")
    if compressed:
        ends = accumulate(header.part_sizes)
        encoding, parts = compress(
            [payload[end - size : end] for end, size in zip(ends, header.part_sizes, strict=True)]
        )
        if encoding is not Encoding.RAW:
            sizes = tuple(len(part) for part in parts)
            return PackedBlock(header, encoding, sizes, memoryview(b"".join(parts)))
    return PackedBlock(header, Encoding.RAW, header.part_sizes, payload)


def write_block(descriptor: int, block: PackedBlock) -> None:
    """Write a whole block into an empty file, at once: file systems lay that out best.

    Raises:
        OSError: it can't be written.
        ValueError: a digest is not 16 bytes.
    """
    ends = list(accumulate(block.sizes))
    starts = [0, *ends[:-1]]
    payload = block.payload
    checksums = [checksum(payload[a:b]) for a, b in zip(starts, ends, strict=False)]
    stored_sizes = () if block.encoding is Encoding.RAW else block.sizes
    header = encode_header(block.header, checksums, block.encoding, stored_sizes)
    start = memoryview(header)
    done = os.pwritev(descriptor, [start, payload], 0)
    write_fully(descriptor, start[done:], done)
    written = max(done - len(start), 0)
    write_fully(descriptor, payload[written:], len(start) + written)


def _pieces(sizes: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Runs of parts that are moved at once: first, one past the last, and their bytes."""
    begin, size = first, 0
    for part in range(first, last):
        if size and size + sizes[part] > _PIECE_BYTES:
            yield begin, part, size
            begin, size = part, 0
        size += sizes[part]
    if begin < last:
        yield begin, last, size


def read_fully(descriptor: int, memory: memoryview, offset: int) -> None:
    """Fill ``memory`` from a file; a short read is gone on with, an end of file is a bad block."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            raise BadBlockError(f"file ends at {offset + done}, {len(memory) - done} bytes early")
        done += count


def write_fully(descriptor: int, memory: memoryview, offset: int) -> None:
    """Write all of ``memory``; a short write is gone on with."""
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done:], offset + done)
