"""Several groups of layers as one cache; blocks that a window has let go of (spec row B10)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.vllm.grouped_cache import GroupedCache, first_held
from kvloom.vllm.paged_cache import PagedCache, UnknownLayoutError

from .test_paged_cache import BLOCK, BLOCKS, DIM, HEADS, latent, new_cache, side_by_side, transposed

TOKENS = 3 * BLOCK


def everything(group: PagedCache) -> torch.Tensor:
    out = torch.empty(group.payload_shape(BLOCKS * BLOCK))
    group.gather(torch.arange(BLOCKS * BLOCK), out)
    return out


@settings(max_examples=40)
@given(
    tables=st.lists(st.permutations(range(1, BLOCKS)), min_size=2, max_size=2),
    gone=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    start=st.integers(0, TOKENS - 1),
    data=st.data(),
)
def test_tokens_go_to_every_group_that_holds_them_and_nowhere_else(
    tables: list[list[int]], gone: tuple[int, int], start: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, TOKENS - start))
    groups = [
        PagedCache([side_by_side(new_cache()), side_by_side(new_cache())]),
        PagedCache([transposed(new_cache())]),
    ]
    cache = GroupedCache(groups)
    tables = [[0] * lost + table[lost:3] for table, lost in zip(tables, gone, strict=True)]
    before = [everything(group) for group in groups]
    payload = torch.randn(cache.payload_shape(count))
    cache.scatter(payload, tables, start)
    back = torch.zeros_like(payload)
    cache.gather(tables, start, back)
    expected = torch.zeros_like(payload)
    layer = 0
    for group, table, content in zip(groups, tables, before, strict=True):
        part = slice(layer, layer + len(group.layers))
        layer += len(group.layers)
        for position in range(start, start + count):
            block, offset = table[position // BLOCK], position % BLOCK
            if block:
                content[:, :, block * BLOCK + offset] = payload[part, :, position - start]
                expected[part, :, position - start] = payload[part, :, position - start]
        assert torch.equal(everything(group), content)
    assert torch.equal(back, expected)


def test_latents_are_one_vector_a_token() -> None:
    """MLA: what is stored of an exact prefix comes back bit for bit."""
    cache = GroupedCache([PagedCache([latent(new_cache()), latent(new_cache())])])
    assert cache.payload_shape(9) == (2, 1, 9, 1, DIM)
    payload = torch.randn(cache.payload_shape(9))
    cache.scatter(payload, [[4, 2, 1]], 5)
    back = torch.empty_like(payload)
    cache.gather([[4, 2, 1]], 5, back)
    assert torch.equal(back, payload)


def test_groups_whose_tokens_no_payload_holds_are_refused() -> None:
    other = torch.zeros(BLOCKS, HEADS + 1, BLOCK, 2 * DIM)
    groups = [PagedCache([side_by_side(new_cache())]), PagedCache([side_by_side(other)])]
    with pytest.raises(UnknownLayoutError, match="unequal"):
        GroupedCache(groups)


@pytest.mark.parametrize(
    ("table", "start", "end", "first"),
    [([3, 4], 2, 10, 2), ([0, 4], 2, 10, 8), ([0, 0], 2, 10, 10), ([0, 4], 8, 10, 8)],
)
def test_where_a_window_begins(table: list[int], start: int, end: int, first: int) -> None:
    assert first_held(table, 8, start, end) == first
