"""Gather and scatter at any slot, and layouts that must be refused (DESIGN.md)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvloom.vllm.connector import why_off
from kvloom.vllm.paged_cache import CacheLayer, PagedCache, UnknownLayoutError

BLOCKS, HEADS, BLOCK, DIM = 5, 2, 8, 4


def side_by_side(cache: torch.Tensor) -> CacheLayer:
    """A backend that keeps K and V of a token together."""

    def write(kv: torch.Tensor, slots: torch.Tensor) -> None:
        keys, values = kv
        for i, slot in enumerate(slots.tolist()):
            cache[slot // BLOCK, :, slot % BLOCK, :DIM] = keys[i]
            cache[slot // BLOCK, :, slot % BLOCK, DIM:] = values[i]

    return CacheLayer("side", cache, write)


def transposed(cache: torch.Tensor) -> CacheLayer:
    """A backend that keeps K of a block as [dim, token], then V as [token, dim]."""

    def write(kv: torch.Tensor, slots: torch.Tensor) -> None:
        keys, values = kv
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
        "shifted", cache, lambda kv, slots: layer.write(kv, (slots + 1) % (BLOCKS * BLOCK))
    )


def latent(cache: torch.Tensor) -> CacheLayer:
    """MLA's backends: one vector a token."""
    cache = torch.zeros(BLOCKS, BLOCK, DIM)

    def write(kv: torch.Tensor, slots: torch.Tensor) -> None:
        cache.view(-1, DIM)[slots] = kv[0, :, 0]

    return CacheLayer("latent", cache, write)


def new_cache() -> torch.Tensor:
    return torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)


@pytest.mark.parametrize("backend", [side_by_side, transposed, latent])
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


@pytest.mark.parametrize("backend", [side_by_side, transposed, latent])
@settings(max_examples=30)
@given(st.lists(st.integers(0, BLOCKS - 1), min_size=1, unique=True))
def test_blocks_move_as_their_slots_do(backend, blocks: list[int]) -> None:  # type: ignore[no-untyped-def]
    """H21: whole blocks in batches, against the same slots one by one."""
    cache = PagedCache([backend(new_cache()), backend(new_cache())])
    everything = torch.arange(BLOCKS * BLOCK)
    before = torch.randn(cache.payload_shape(BLOCKS * BLOCK))
    cache.scatter(before, everything)
    pages = [torch.empty(cache.payload_shape(BLOCK)) for _ in blocks]
    cache.gather_blocks(blocks, pages)
    for block, page in zip(blocks, pages, strict=True):
        assert torch.equal(page, before[:, :, block * BLOCK : (block + 1) * BLOCK])
    news = [torch.randn_like(page) for page in pages]
    cache.scatter_blocks(news, blocks)
    expected = before.clone()
    for block, new in zip(blocks, news, strict=True):
        expected[:, :, block * BLOCK : (block + 1) * BLOCK] = new
    after = torch.empty_like(before)
    cache.gather(everything, after)
    assert torch.equal(after, expected)


@pytest.mark.parametrize("backend", [side_by_side, transposed, latent])
@pytest.mark.parametrize("blocks", [[1], [3, 0, 4]])
def test_a_batch_is_one_copy_a_layer_whatever_its_size(  # type: ignore[no-untyped-def]
    backend, blocks: list[int]
) -> None:
    """H21."""
    writes: list[int] = []

    def counting(layer: CacheLayer) -> CacheLayer:
        def write(kv: torch.Tensor, slots: torch.Tensor) -> None:
            writes.append(len(slots))
            layer.write(kv, slots)

        return CacheLayer(layer.name, layer.cache, write)

    cache = PagedCache([counting(backend(new_cache())) for _ in range(3)])
    pages = [torch.empty(cache.payload_shape(BLOCK)) for _ in blocks]
    with mock.patch("torch.index_select", wraps=torch.index_select) as copies:
        cache.gather_blocks(blocks, pages)
    assert copies.call_count == 3
    writes.clear()
    cache.scatter_blocks(pages, blocks)
    assert writes == [len(blocks) * BLOCK] * 3


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(UnknownLayoutError, match="shifted"):
        PagedCache([side_by_side(new_cache()), shifted(new_cache())])


def test_a_backend_that_loses_precision_is_refused() -> None:
    def rounding(cache: torch.Tensor) -> CacheLayer:
        layer = side_by_side(cache)
        return CacheLayer("fp8", cache, lambda kv, slots: layer.write(kv.half().float(), slots))

    with pytest.raises(UnknownLayoutError):
        PagedCache([rounding(new_cache())])


@pytest.mark.parametrize("shape", [(5, 8), (5, 2, 8, 7), (5, 2, 8, 8, 1)])
def test_unknown_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnknownLayoutError):
        PagedCache([CacheLayer("odd", torch.zeros(shape), lambda kv, slots: None)])


def test_the_round_trip_leaves_the_cache_as_it_was() -> None:
    memory = torch.randn(BLOCKS, HEADS, BLOCK, 2 * DIM)
    before = memory.clone()
    PagedCache([transposed(memory)])
    assert torch.equal(memory, before)


def test_slots_follow_the_block_table_across_borders() -> None:
    cache = PagedCache([side_by_side(new_cache())])
    assert cache.slots([4, 0, 2], torch.tensor([0, 7, 8, 17])).tolist() == [32, 39, 0, 17]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_a_quantized_cache_is_refused_by_its_name(dtype: torch.dtype) -> None:
    """What would be copied in is in another form than what lies there."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=dtype)
    groups: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(cache_dtype="fp8"),
    )
    assert "kv_cache_dtype = 'fp8'" in (why_off(config, groups) or "")
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    groups.kv_cache_groups[0].kv_cache_spec = spec
    assert why_off(config, groups) is None
