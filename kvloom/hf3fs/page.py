"""What a page holds: the KV of one block, then a trailer that says whose it is (spec row H8).

    [payload][trailer of 64 bytes][padding to 4 KiB]

A page that was given to another key, half written or rotten does not verify, whatever the metadata
service believes: it is a miss.
"""

from __future__ import annotations

import hashlib
import struct

import xxhash

_ALIGNMENT = 4096
_MAGIC = b"kvlmpag1"
# magic, payload bytes, generation, xxh3 of the payload, digest of the key
_TRAILER = struct.Struct("<8sQqQ32s")


def page_bytes(payload_bytes: int) -> int:
    """Bytes of a page, a multiple of 4 KiB: for direct I/O."""
    return -(-(payload_bytes + _TRAILER.size) // _ALIGNMENT) * _ALIGNMENT


def seal(page: memoryview, payload_bytes: int, key: str, generation: int) -> None:
    """Write the trailer behind a payload that is in place."""
    checksum = xxhash.xxh3_64_intdigest(page[:payload_bytes])
    _TRAILER.pack_into(
        page, payload_bytes, _MAGIC, payload_bytes, generation, checksum, _digest(key)
    )


def verify(page: memoryview, payload_bytes: int, key: str, generation: int) -> bool:
    """Whether the page holds this key's KV, whole, as this generation of the page."""
    magic, size, written, checksum, digest = _TRAILER.unpack_from(page, payload_bytes)
    return (
        (magic, size, written, digest) == (_MAGIC, payload_bytes, generation, _digest(key))
        and checksum == xxhash.xxh3_64_intdigest(page[:payload_bytes])
    )  # fmt: skip


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=32).digest()
