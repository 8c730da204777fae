"""Spec rows S4, S6: a stored block says everything, and any harm to it is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.store.base import BlockHeader, PayloadSlice
from kvloom.store.block_format import (
    ALIGNMENT,
    BadBlockError,
    checksum,
    decode_header,
    encode_header,
    parts_of,
    verify_parts,
)
from kvloom.store.contract import assert_same_header, make_block

digests = st.binary(min_size=16, max_size=16)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[BlockHeader, bytes]:
    sizes = tuple(draw(st.lists(st.integers(1, 300), min_size=1, max_size=6)))
    header = BlockHeader(
        namespace=draw(digests).hex(),
        key=draw(digests),
        parent=draw(digests),
        scope=draw(digests),
        position=draw(st.integers(0, 2**32 - 1)),
        generation=draw(st.integers(0, 1)),
        token_ids=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), max_size=70)), np.int32),
        part_sizes=sizes,
        created_ns=draw(st.integers(0, 2**64 - 1)),
    )
    return header, draw(st.binary(min_size=sum(sizes), max_size=sum(sizes)))


def whole(header: BlockHeader, payload: bytes) -> bytes:
    return encoded(header, payload) + payload


def encoded(header: BlockHeader, payload: bytes | memoryview) -> bytes:
    ends = np.cumsum(header.part_sizes)
    parts = [payload[end - size : end] for end, size in zip(ends, header.part_sizes, strict=True)]
    return encode_header(header, [checksum(part) for part in parts])


def check(file: bytes) -> BlockHeader:
    """Everything that a reader checks of a whole file."""
    stored = decode_header(file)
    if stored.file_size != len(file):
        raise BadBlockError("size")
    verify_parts(stored, 0, memoryview(file)[stored.payload_offset :])
    return stored.block


@given(blocks())
def test_a_block_comes_back_as_it_was(block: tuple[BlockHeader, bytes]) -> None:
    header, payload = block
    file = whole(header, payload)
    assert_same_header(check(file), header)
    assert check(file).created_ns == header.created_ns
    assert decode_header(file).payload_offset % ALIGNMENT == 0
    assert file[decode_header(file).payload_offset :] == payload


@given(blocks(), st.data())
def test_any_flipped_bit_is_noticed(block: tuple[BlockHeader, bytes], data: st.DataObject) -> None:
    file = bytearray(whole(*block))
    payload_offset = decode_header(bytes(file)).payload_offset
    place = st.integers(0, payload_offset - 1) | st.integers(payload_offset, len(file) - 1)
    file[data.draw(place)] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadBlockError):
        check(bytes(file))


@given(blocks(), st.data())
def test_any_truncation_is_noticed(block: tuple[BlockHeader, bytes], data: st.DataObject) -> None:
    file = whole(*block)
    with pytest.raises(BadBlockError):
        check(file[: data.draw(st.integers(0, len(file) - 1))])


@given(st.binary(max_size=5000))
def test_garbage_is_no_block(garbage: bytes) -> None:
    with pytest.raises(BadBlockError):
        check(garbage)


@given(blocks(), st.data())
def test_a_slice_is_read_and_verified_by_the_parts_it_touches(
    block: tuple[BlockHeader, bytes], data: st.DataObject
) -> None:
    header, payload = block
    offset = data.draw(st.integers(0, len(payload) - 1))
    length = data.draw(st.integers(1, len(payload) - offset))
    first, last, span = parts_of(header, PayloadSlice(offset, length))
    starts = [sum(header.part_sizes[:i]) for i in range(len(header.part_sizes) + 1)]
    touched = [
        i
        for i in range(len(header.part_sizes))
        if starts[i] < offset + length and starts[i + 1] > offset
    ]
    assert list(range(first, last)) == touched
    assert span == PayloadSlice(starts[first], starts[last] - starts[first])
    stored = decode_header(encoded(header, payload))
    verify_parts(stored, first, memoryview(payload)[span.offset : span.offset + span.length])


def test_another_version_is_refused() -> None:
    header, payload = make_block(1)
    file = bytearray(encoded(header, payload))
    file[8] += 1
    with pytest.raises(BadBlockError, match="version"):
        decode_header(bytes(file))
