"""Gather and scatter at any slot, and layouts that must be refused (DESIGN.md)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.vllm.paged_cache import CacheLayer, PagedCache, UnknownLayoutError

BLOCKS, HEADS, BLOCK, DIM = 5, 2, 8, 4


def side_by_side(cache: torch.Tensor) -> CacheLayer:
    """A backend that keeps K and V of a token together."""

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        for i, slot in enumerate(slots.tolist()):
            cache[slot // BLOCK, :, slot % BLOCK, :DIM] = keys[i]
            cache[slot // BLOCK, :, slot % BLOCK, DIM:] = values[i]

    return CacheLayer("side", cache, write)


def transposed(cache: torch.Tensor) -> CacheLayer:
    """A backend that keeps K of a block as [dim, token], then V as [token, dim]."""

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        for i, slot in enumerate(slots.tolist()):
            for head in range(HEADS):
                flat = cache[slot // BLOCK, head].view(-1)
                flat[: BLOCK * DIM].view(DIM, BLOCK)[:, slot % BLOCK] = keys[i, head]
                flat[BLOCK * DIM :].view(BLOCK, DIM)[slot % BLOCK] = values[i, head]

    return CacheLayer("transposed", cache, write)


def shifted(cache: torch.Tensor) -> CacheLayer:
    """A backend of tomorrow: every token one slot further than today."""
    layer = side_by_side(cache)
    return CacheLayer(
        "shifted", cache, lambda k, v, slots: layer.write(k, v, (slots + 1) % (BLOCKS * BLOCK))
    )


def new_cache() -> torch.Tensor:
    return torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)


@pytest.mark.parametrize("backend", [side_by_side, transposed])
@settings(max_examples=30)
@given(st.lists(st.integers(0, BLOCKS * BLOCK - 1), min_size=1, max_size=20, unique=True))
def test_what_is_scattered_is_gathered_and_nothing_else_changes(backend, slots: list[int]) -> None:  # type: ignore[no-untyped-def]
    cache = PagedCache([backend(new_cache()), backend(new_cache())])
    everything = torch.arange(BLOCKS * BLOCK)
    before = torch.randn(cache.payload_shape(BLOCKS * BLOCK))
    cache.scatter(before, everything)
    payload = torch.randn(cache.payload_shape(len(slots)))
    where = torch.tensor(slots)
    cache.scatter(payload, where)
    after = torch.empty_like(before)
    cache.gather(everything, after)
    expected = before.clone()
    expected[:, :, where] = payload
    assert torch.equal(after, expected)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(UnknownLayoutError, match="shifted"):
        PagedCache([side_by_side(new_cache()), shifted(new_cache())])


def test_a_backend_that_loses_precision_is_refused() -> None:
    def rounding(cache: torch.Tensor) -> CacheLayer:
        layer = side_by_side(cache)
        return CacheLayer(
            "fp8", cache, lambda k, v, s: layer.write(k.half().float(), v.half().float(), s)
        )

    with pytest.raises(UnknownLayoutError):
        PagedCache([rounding(new_cache())])


@pytest.mark.parametrize("shape", [(5, 2, 8), (5, 2, 8, 7)])
def test_unknown_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnknownLayoutError):
        PagedCache([CacheLayer("odd", torch.zeros(shape), lambda k, v, s: None)])


def test_the_round_trip_leaves_the_cache_as_it_was() -> None:
    memory = torch.randn(BLOCKS, HEADS, BLOCK, 2 * DIM)
    before = memory.clone()
    PagedCache([transposed(memory)])
    assert torch.equal(memory, before)


def test_slots_follow_the_block_table_across_borders() -> None:
    cache = PagedCache([side_by_side(new_cache())])
    assert cache.slots([4, 0, 2], torch.tensor([0, 7, 8, 17])).tolist() == [32, 39, 0, 17]
