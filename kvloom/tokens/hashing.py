"""Names of text: prefix keys and scopes (cryptographic), and rolling fingerprints (only hints)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16

_U64 = np.uint64
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_BASE_INVERSE = pow(_BASE, -1, 2**64)


def scope_id(**fields: str | None) -> bytes:
    """Digest of what separates requests, 16 bytes; fields that are None do not count.

    Fields are tagged by name, so two of them can never take each other's place.
    """
    given = {name: value for name, value in sorted(fields.items()) if value is not None}
    return _digest(b"scope", json.dumps(given, sort_keys=True).encode())


def namespace_id(fields: Mapping[str, object]) -> str:
    """Digest of everything that changes KV bytes, hex, safe as a directory's name.

    Raises:
        TypeError: a value that JSON can't write in one way only.
    """
    return _digest(b"namespace", json.dumps(dict(fields), sort_keys=True).encode()).hex()


def prefix_keys(
    token_ids: npt.NDArray[np.int32], chunk_size: int, scope: bytes, parent: bytes | None = None
) -> list[bytes]:
    """Keys of the whole chunks of a prompt, each over everything before it.

    Args:
        token_ids: int32 [n], from a chunk border on.
        scope: of the request; the parent of the first chunk, so that scopes share no key.
        parent: key of the chunk before ``token_ids``; None at the start of the prompt.
    """
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    width = 4 * chunk_size
    keys = []
    parent = scope if parent is None else parent
    for first in range(0, len(data) - width + 1, width):
        parent = _digest(b"prefix", parent + data[first : first + width])
        keys.append(parent)
    return keys


def rolling_fingerprints(token_ids: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.uint64]:
    """A fingerprint of the ``width`` tokens at every offset, uint64 [n - width + 1].

    The sum of mixed tokens times powers of an odd base, modulo 2**64: prefix sums give every
    window at once. Equal windows have equal fingerprints; unequal ones rarely, so tokens must be
    compared before anything is made of it.
    """
    count = len(token_ids)
    if count < width:
        return np.empty(0, dtype=_U64)
    with np.errstate(over="ignore"):
        powers = np.empty(count, dtype=_U64)
        powers[0] = 1
        powers[1:] = _BASE
        np.multiply.accumulate(powers, out=powers)
        inverses = np.empty(count - width + 1, dtype=_U64)
        inverses[0] = 1
        inverses[1:] = _BASE_INVERSE
        np.multiply.accumulate(inverses, out=inverses)
        sums = np.zeros(count + 1, dtype=_U64)
        np.cumsum(_mix(token_ids) * powers, out=sums[1:])
        return (sums[width:] - sums[:-width]) * inverses


def _mix(token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """Spread small integers over 64 bits (the finaliser of splitmix64)."""
    x = token_ids.astype(np.uint32).astype(_U64) + _U64(_BASE)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def _digest(purpose: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=purpose).digest()
