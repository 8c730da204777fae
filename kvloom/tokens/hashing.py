"""Names of text: prefix keys and scopes (cryptographic), and rolling fingerprints (only hints)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16

_U64 = np.uint64
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_BASE_INVERSE = pow(_BASE, -1, 2**64)


def scope_id(**fields: str | None) -> bytes:
    """Digest of what separates requests (salt, LoRA name, ...), 16 bytes; None fields don't count.

    Fields are tagged by name, so two of them can never take each other's place.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    return _digest(b"scope", _canonical(given))


def namespace_id(fields: Mapping[str, object]) -> str:
    """Digest of everything that changes KV bytes, 32 hex digits, safe as a directory's name.

    Raises:
        TypeError: a value other than str, int, float, bool, None, and lists and mappings of them.
        ValueError: a float that is not finite.
    """
    return _digest(b"namespace", _canonical(fields)).hex()


def prefix_keys(
    token_ids: npt.NDArray[np.int32],
    chunk_size: int,
    scope: bytes,
    start: int = 0,
    parent: bytes | None = None,
) -> list[bytes]:
    """Keys of the whole chunks of a prompt, each over everything before it.

    Args:
        token_ids: int32 [n], from a chunk border on.
        scope: of the request; the parent of the first chunk, so that scopes share no key.
        start: number of the first chunk of ``token_ids`` whose key is wanted.
        parent: key of the chunk before that one; None at the start of the prompt.

    Raises:
        ValueError: a chunk in the middle of ``token_ids`` without the key before it: its keys
            would be those of a prompt that begins there.
    """
    if start > 0 and parent is None:
        raise ValueError(f"chunk {start} needs the key of the chunk before it")
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    width = 4 * chunk_size
    keys = []
    parent = scope if parent is None else parent
    for first in range(start * width, len(data) - width + 1, width):
        parent = _digest(b"prefix", parent + data[first : first + width])
        keys.append(parent)
    return keys


def blended_key(prefix_key: bytes) -> bytes:
    """Name of a chunk computed on top of a blend: one that no prefix look-up ever asks for."""
    return _digest(b"blended", prefix_key)


def rolling_fingerprints(token_ids: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.uint64]:
    """A fingerprint of the ``width`` tokens at every offset, uint64 [n - width + 1].

    The sum of mixed tokens times powers of an odd base, modulo 2**64: prefix sums give every
    window at once. Equal windows have equal fingerprints; unequal ones rarely, so tokens must be
    compared before anything is made of it.
    """
    count = len(token_ids)
    if count < width:
        return np.empty(0, dtype=_U64)
    sums = np.zeros(count + 1, dtype=_U64)
    np.cumsum(_mix(token_ids) * _powers(_BASE, count), out=sums[1:])
    return (sums[width:] - sums[:-width]) * _powers(_BASE_INVERSE, count - width + 1)


def row_fingerprints(rows: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """The fingerprint of each row of int32 [n, width], uint64 [n], as the rolling one gives it."""
    prints: npt.NDArray[np.uint64] = (_mix(rows) * _powers(_BASE, rows.shape[1])).sum(axis=1)
    return prints


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    powers = np.full(count, base, dtype=_U64)
    powers[:1] = 1
    np.multiply.accumulate(powers, out=powers)
    return powers


def _mix(token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """Spread small integers over 64 bits (the finaliser of splitmix64)."""
    x: npt.NDArray[np.uint64] = token_ids.astype(np.uint32).astype(_U64)
    x += _U64(_BASE)
    x ^= x >> _U64(30)
    x *= _U64(0xBF58476D1CE4E5B9)
    x ^= x >> _U64(27)
    x *= _U64(0x94D049BB133111EB)
    x ^= x >> _U64(31)
    return x


def _canonical(fields: Mapping[str, object]) -> bytes:
    _check_plain(fields)
    return json.dumps(
        fields, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict
    ).encode()


def _check_plain(value: object) -> None:
    """json turns the key 1 into "1" and writes strange objects by luck: two texts, one name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a field's name must be text, not {key!r}")
            _check_plain(item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            _check_plain(item)
    elif not isinstance(value, str | int | float | None):
        raise TypeError(f"{value!r} has no one way to be written")


def _digest(purpose: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=purpose).digest()
