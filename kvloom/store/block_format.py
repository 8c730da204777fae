"""The stored form of a block (spec row S4): a header that says everything, then the payload.

    offset 0       fixed fields: magic, version, sizes, digests, position, generation, time
                   token ids    int32 little-endian [tokens]
                   part sizes   uint64 [parts]
                   checksums    uint64 [parts], XXH3 of each part as it is stored
                   stored sizes uint64 [parts], where parts are compressed
                   zeros
                   checksum     uint64, XXH3 of all the bytes before it
    payload_offset parts, one after another; a multiple of 4096 for direct I/O

Self-describing: a directory of such files can be listed, verified and rebuilt with nothing else.
Whatever does not add up is a ``BadBlockError``, which stages turn into a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvloom.store.base import BlockHeader, PayloadSlice
from kvloom.store.compression import Encoding

ALIGNMENT = 4096
VERSION = 1
_MAGIC = b"kvloomKV"
# magic, version, encoding, payload offset, tokens, parts, generation, position, created, then four
# digests.
_FIXED = struct.Struct("<8sHHIIIIQQ16s16s16s16s")
_WORD = 8
_MOST_TOKENS = 1 << 20
_MOST_PARTS = 1 << 16


class BadBlockError(ValueError):
    """Bytes that are no whole, unharmed block of this version."""


@dataclass(frozen=True, slots=True)
class StoredHeader:
    """A header as it was stored.

    Attributes:
        checksums: XXH3 of each part as it is stored, uint64 [parts].
        payload_offset: where the payload starts in the file.
        sizes: bytes that each part takes in the file; those of the block where it is RAW.
    """

    block: BlockHeader
    checksums: npt.NDArray[np.uint64]
    payload_offset: int
    encoding: Encoding
    sizes: tuple[int, ...]

    @property
    def file_size(self) -> int:
        return self.payload_offset + sum(self.sizes)


def payload_offset(header: BlockHeader, encoding: Encoding = Encoding.RAW) -> int:
    """Where the payload of a block starts in its file: the size of the whole header."""
    return _header_size(len(header.token_ids), len(header.part_sizes), encoding)


def checksum(data: bytes | memoryview) -> int:
    """XXH3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def encode_header(
    header: BlockHeader,
    checksums: Sequence[int],
    encoding: Encoding = Encoding.RAW,
    stored_sizes: Sequence[int] = (),
) -> bytes:
    """Header bytes, padded to the payload's offset.

    Args:
        checksums: of each part as it is stored.
        stored_sizes: bytes of each part as it is stored, where that is not RAW.

    Raises:
        ValueError: a digest is not 16 bytes.
    """
    digests = (bytes.fromhex(header.namespace), header.key, header.parent, header.scope)
    if any(len(digest) != 16 for digest in digests):
        raise ValueError("namespace, key, parent and scope are digests of 16 bytes")
    offset = payload_offset(header, encoding)
    fixed = _FIXED.pack(
        _MAGIC,
        VERSION,
        encoding,
        offset,
        len(header.token_ids),
        len(header.part_sizes),
        header.generation,
        header.position,
        header.created_ns,
        *digests,
    )
    tokens = np.ascontiguousarray(header.token_ids, dtype="<i4")
    words = np.asarray([*header.part_sizes, *checksums, *stored_sizes], "<u8")
    body = b"".join((fixed, tokens.tobytes(), words.tobytes()))
    body = body.ljust(offset - _WORD, b"\0")
    return body + struct.pack("<Q", checksum(body))


def header_size(start: bytes | bytearray | memoryview) -> int:
    """Size of the whole header, from its first bytes (``ALIGNMENT`` of them are enough).

    Raises:
        BadBlockError: not the start of a block of this version.
    """
    if len(start) < _FIXED.size:
        raise BadBlockError(f"{len(start)} bytes, shorter than a header")
    magic, version, encoding, offset, tokens, parts, *_ = _FIXED.unpack_from(start)
    if magic != _MAGIC:
        raise BadBlockError("no kvloom block")
    if version != VERSION:
        raise BadBlockError(f"format version {version}, this is {VERSION}")
    if encoding not in tuple(Encoding):
        raise BadBlockError(f"encoding {encoding} is not known")
    if tokens > _MOST_TOKENS or parts > _MOST_PARTS:
        raise BadBlockError("header sizes do not add up")
    if offset != _header_size(tokens, parts, encoding):
        raise BadBlockError("header sizes do not add up")
    return int(offset)


def decode_header(data: bytes | bytearray | memoryview) -> StoredHeader:
    """The header at the start of ``data``.

    Raises:
        BadBlockError: anything is short, foreign, or fails its checksum.
    """
    offset = header_size(data)
    if len(data) < offset:
        raise BadBlockError(f"header cut off at {len(data)} of {offset} bytes")
    _, _, encoding, _, tokens, parts, generation, position, created, *digests = _FIXED.unpack_from(
        data
    )
    namespace, key, parent, scope = digests
    tokens_at = _FIXED.size
    sizes_at = tokens_at + 4 * tokens
    sums_at = sizes_at + _WORD * parts
    (expected,) = struct.unpack_from("<Q", data, offset - _WORD)
    if checksum(memoryview(data)[: offset - _WORD]) != expected:
        raise BadBlockError("header checksum is wrong")
    block = BlockHeader(
        namespace=namespace.hex(),
        key=key,
        parent=parent,
        scope=scope,
        position=position,
        generation=generation,
        token_ids=np.frombuffer(data, dtype="<i4", count=tokens, offset=tokens_at).astype(np.int32),
        part_sizes=struct.unpack_from(f"<{parts}Q", data, sizes_at),
        created_ns=created,
    )
    checksums = np.frombuffer(data, dtype="<u8", count=parts, offset=sums_at).copy()
    sizes = block.part_sizes
    if encoding != Encoding.RAW:
        stored_at = sums_at + _WORD * parts
        sizes = tuple(np.frombuffer(data, "<u8", count=parts, offset=stored_at).tolist())
    return StoredHeader(block, checksums, offset, Encoding(encoding), sizes)


def parts_of(header: BlockHeader, part: PayloadSlice) -> tuple[int, int, PayloadSlice]:
    """The parts that a slice touches: first, one past the last, and their byte range.

    Raises:
        ValueError: the slice reaches past the payload.
    """
    if part.offset < 0 or part.length < 0 or part.offset + part.length > header.payload_size:
        raise ValueError(f"{part} is outside a payload of {header.payload_size} bytes")
    ends = np.cumsum(header.part_sizes)
    first = int(np.searchsorted(ends, part.offset, side="right"))
    last = int(np.searchsorted(ends, part.offset + part.length, side="left")) + 1
    start = int(ends[first - 1]) if first else 0
    return first, last, PayloadSlice(start, int(ends[last - 1]) - start)


def verify_parts(stored: StoredHeader, first: int, payload: memoryview) -> None:
    """Check parts from the ``first`` on as they are stored, as many as ``payload`` holds.

    Raises:
        BadBlockError: names the part that is damaged.
    """
    at = 0
    for part in range(first, len(stored.sizes)):
        if at == len(payload):
            return
        size = stored.sizes[part]
        if checksum(payload[at : at + size]) != int(stored.checksums[part]):
            raise BadBlockError(f"part {part} fails its checksum")
        at += size


def _header_size(tokens: int, parts: int, encoding: int) -> int:
    words = 2 * parts + (parts if encoding != Encoding.RAW else 0) + 1
    length = _FIXED.size + 4 * tokens + _WORD * words
    return -(-length // ALIGNMENT) * ALIGNMENT
