"""Tokens in and out of vLLM's paged cache, at any slot (DESIGN.md, spec H21).

A slot is ``block id * block size + offset``. Writing goes through the engine's own
``do_kv_cache_update``, which knows the backend's layout; reading uses strided views of the
``[blocks, heads, block_size, 2 * head_dim]`` tensor. Which view is right is not assumed: known
values are written by the engine and must come back bit for bit, or the layout is refused. A new
engine version with another layout then costs speed, never wrong KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SLOTS_A_PIECE = 8

WriteFn = Callable[[Tensor, Tensor, Tensor], None]
Views = tuple[Tensor, Tensor]


class UnknownLayoutError(RuntimeError):
    """What the engine wrote could not be read back by any known layout."""


@dataclass(frozen=True)
class CacheLayer:
    """One attention layer's part of the paged cache.

    Attributes:
        name: the engine's layer name.
        cache: [blocks, heads, block_size, 2 * head_dim].
        write: (keys, values, slots) -> None, keys and values [tokens, heads, head_dim], slots
            int64 [tokens]; the engine's own cache update.
    """

    name: str
    cache: Tensor
    write: WriteFn


def _transposed_keys(cache: Tensor) -> Views:
    """The CPU backend's layout: per block and head K as [head_dim, block_size], then V as
    [block_size, head_dim]."""
    blocks, heads, block_size, width = cache.shape
    head_dim = width // 2
    shape = (blocks, block_size, heads, head_dim)
    by_block, by_head = cache.stride(0), cache.stride(1)
    keys = cache.as_strided(shape, (by_block, 1, by_head, block_size), cache.storage_offset())
    values = cache.as_strided(
        shape,
        (by_block, head_dim, by_head, 1),
        cache.storage_offset() + block_size * head_dim,
    )
    return keys, values


def _side_by_side(cache: Tensor) -> Views:
    """Per token K, then V, in the last dimension."""
    keys, values = cache.chunk(2, dim=-1)
    return keys.transpose(1, 2), values.transpose(1, 2)


_LAYOUTS: tuple[Callable[[Tensor], Views], ...] = (_transposed_keys, _side_by_side)


class PagedCache:
    """Reads and writes KV of chosen tokens in all layers.

    Payloads are [layers, 2, tokens, heads, head_dim] in the cache dtype, K then V.

    Raises:
        UnknownLayoutError: the engine's layout is not one we can read.
    """

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        if not layers:
            raise UnknownLayoutError("the engine registered no KV cache")
        shapes = {layer.cache.shape for layer in layers}
        if len(shapes) != 1 or len(next(iter(shapes))) != 4:
            raise UnknownLayoutError(f"layers of unequal or unknown cache shapes: {sorted(shapes)}")
        self.layers = tuple(layers)
        first = layers[0].cache
        self.num_blocks, self.num_heads, self.block_size, width = first.shape
        self.head_dim = width // 2
        self.dtype = first.dtype
        self.device = first.device
        self._views = [_confirmed_views(layer) for layer in layers]

    def payload_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        return (len(self.layers), 2, tokens, self.num_heads, self.head_dim)

    def part_size(self, tokens: int) -> int:
        """Bytes of one layer's part of a payload."""
        return 2 * tokens * self.num_heads * self.head_dim * self.dtype.itemsize

    def slots(self, block_ids: Sequence[int], positions: Tensor) -> Tensor:
        """Slots of prompt positions, int64, given the request's block table."""
        table = torch.as_tensor(block_ids, dtype=torch.int64)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def gather(self, slots: Tensor, out: Tensor) -> None:
        """Copy the KV of ``slots`` [tokens] into ``out``, a payload of as many tokens."""
        pieces = self._pieces(slots)
        if _SLOTS_A_PIECE * len(pieces) > len(slots):
            blocks, offsets = slots // self.block_size, slots % self.block_size
            for (keys, values), part in zip(self._views, out, strict=True):
                part[0] = keys[blocks, offsets]
                part[1] = values[blocks, offsets]
            return
        # Chunks lie in few pieces, and copying those took a quarter of the time of indexing.
        for block, offset, at, length in pieces:
            for (keys, values), part in zip(self._views, out, strict=True):
                part[0, at : at + length] = keys[block, offset : offset + length]
                part[1, at : at + length] = values[block, offset : offset + length]

    def gather_layer(self, layer: int, slots: Tensor) -> Tensor:
        """A copy of one layer's KV of ``slots``, [2, tokens, heads, head_dim]."""
        keys, values = self._views[layer]
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return torch.stack([keys[blocks, offsets], values[blocks, offsets]])

    def _pieces(self, slots: Tensor) -> list[tuple[int, int, int, int]]:
        """Neighbouring slots of one block: block, offset in it, index in ``slots``, length."""
        breaks = (slots.diff() != 1) | (slots[1:] % self.block_size == 0)
        starts = [0, *(breaks.nonzero().flatten() + 1).tolist()]
        ends = [*starts[1:], len(slots)]
        firsts = slots[starts].tolist()
        return [
            (*divmod(first, self.block_size), start, end - start)
            for first, start, end in zip(firsts, starts, ends, strict=True)
        ]

    def scatter(self, payload: Tensor, slots: Tensor) -> None:
        """Write a payload's tokens to ``slots`` [tokens], in all layers."""
        for layer, part in zip(self.layers, payload, strict=True):
            layer.write(part[0], part[1], slots)


def _confirmed_views(layer: CacheLayer) -> Views:
    """Views that read what the engine writes.

    Runs when the cache is empty, on the first and the last block, at offsets that a mistaken
    stride would mix up; the blocks are cleared again.
    """
    cache = layer.cache
    blocks, heads, block_size, width = cache.shape
    if width % 2:
        raise UnknownLayoutError(f"{layer.name}: odd cache width {width}")
    slots = torch.tensor(
        sorted({0, 1, block_size - 1, (blocks - 1) * block_size, blocks * block_size - 2}),
        dtype=torch.int64,
        device=cache.device,
    )
    generator = torch.Generator().manual_seed(len(layer.name))
    shape = (2, len(slots), heads, width // 2)
    probe = torch.randn(shape, generator=generator).to(cache.device, cache.dtype)
    touched = cache[[0, blocks - 1]].clone()
    try:
        layer.write(probe[0], probe[1], slots)
        for layout in _LAYOUTS:
            keys, values = layout(cache)
            where = (slots // block_size, slots % block_size)
            if torch.equal(keys[where], probe[0]) and torch.equal(values[where], probe[1]):
                return keys, values
    finally:
        cache[[0, blocks - 1]] = touched
    raise UnknownLayoutError(
        f"{layer.name}: the round trip through a cache of shape {tuple(cache.shape)}, "
        f"{cache.dtype}, does not fit any known layout"
    )
