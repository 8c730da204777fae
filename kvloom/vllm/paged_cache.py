"""Tokens in and out of vLLM's paged cache, at any slot (DESIGN.md, spec H21).

A slot is ``block id * block size + offset``. Writing goes through the engine's own
``do_kv_cache_update``, which knows the backend's layout; reading uses strided views of the
``[blocks, heads, block_size, 2 * head_dim]`` tensor, or of MLA's ``[blocks, block_size, width]``.
Which view is right is not assumed: known values are written by the engine and must come back bit
for bit, or the layout is refused. A new engine version with another layout then costs speed, never
wrong KV.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SLOTS_A_PIECE = 8

WriteFn = Callable[[Tensor, Tensor], None]
Views = tuple[Tensor, ...]
"""[parts, blocks, block_size, heads, width] each: K and V in one view, in two, or MLA's latent."""


class UnknownLayoutError(RuntimeError):
    """What the engine wrote could not be read back by any known layout."""


@dataclass(frozen=True)
class CacheLayer:
    """One attention layer's part of the paged cache.

    Attributes:
        name: the engine's layer name.
        cache: [blocks, heads, block_size, 2 * head_dim], or [blocks, block_size, width] of MLA.
        write: (kv, slots) -> None, kv [parts, tokens, heads, width], slots int64 [tokens]; the
            engine's own cache update.
    """

    name: str
    cache: Tensor
    write: WriteFn


def _transposed_keys(cache: Tensor) -> Views:
    """The CPU backend's layout: per block and head K as [head_dim, block_size], then V as
    [block_size, head_dim]."""
    blocks, heads, block_size, width = cache.shape
    head_dim = width // 2
    shape = (1, blocks, block_size, heads, head_dim)
    by_block, by_head = cache.stride(0), cache.stride(1)
    keys = cache.as_strided(shape, (0, by_block, 1, by_head, block_size), cache.storage_offset())
    values = cache.as_strided(
        shape,
        (0, by_block, head_dim, by_head, 1),
        cache.storage_offset() + block_size * head_dim,
    )
    return keys, values


def _side_by_side(cache: Tensor) -> Views:
    """Per token K, then V, in the last dimension."""
    return (cache.view(*cache.shape[:-1], 2, -1).permute(3, 0, 2, 1, 4),)


def _latent(cache: Tensor) -> Views:
    """MLA: what all heads share, one vector a token."""
    return (cache[None, :, :, None],)


_LAYOUTS: dict[int, tuple[Callable[[Tensor], Views], ...]] = {
    3: (_latent,),
    4: (_transposed_keys, _side_by_side),
}


class PagedCache:
    """Reads and writes KV of chosen tokens in all layers.

    Payloads are [layers, parts, tokens, heads, width] in the cache dtype; parts are K and V, of
    width head_dim, or MLA's latent alone.

    Raises:
        UnknownLayoutError: the engine's layout is not one we can read.
    """

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        if not layers:
            raise UnknownLayoutError("the engine registered no KV cache")
        shapes = {layer.cache.shape for layer in layers}
        if len(shapes) != 1 or len(next(iter(shapes))) not in _LAYOUTS:
            raise UnknownLayoutError(f"layers of unequal or unknown cache shapes: {sorted(shapes)}")
        self.layers = tuple(layers)
        first = layers[0].cache
        self.dtype = first.dtype
        self.device = first.device
        layouts = {_confirmed_layout(layer) for layer in layers}
        if len(layouts) != 1:
            raise UnknownLayoutError(f"layers of {len(layouts)} layouts")
        self._layout = layouts.pop()
        self._views = [self._layout(layer.cache) for layer in layers]
        views = self._views[0]
        _, self.num_blocks, self.block_size, self.num_heads, self.head_dim = views[0].shape
        self.parts = sum(len(view) for view in views)
        self._staged = torch.empty(0, dtype=self.dtype, device=self.device)

    def payload_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        return (len(self.layers), self.parts, tokens, self.num_heads, self.head_dim)

    def part_size(self, tokens: int) -> int:
        """Bytes of one layer's part of a payload."""
        return self.parts * tokens * self.num_heads * self.head_dim * self.dtype.itemsize

    def slots(self, block_ids: Sequence[int], positions: Tensor) -> Tensor:
        """Slots of prompt positions, int64 on the cache's device, given the request's blocks."""
        table = torch.as_tensor(block_ids, dtype=torch.int64)
        blocks, offsets = table[positions // self.block_size], positions % self.block_size
        return (blocks * self.block_size + offsets).to(self.device)

    def gather(self, slots: Tensor, out: Tensor) -> None:
        """Copy the KV of ``slots`` [tokens] into ``out``, a payload of as many tokens."""
        pieces = self._pieces(slots)
        if _SLOTS_A_PIECE * len(pieces) > len(slots):
            blocks, offsets = slots // self.block_size, slots % self.block_size
            for view, part in self._by_view(out):
                part[:] = view[:, blocks, offsets]
            return
        # Chunks lie in few pieces, and copying those took a quarter of the time of indexing.
        for block, offset, at, length in pieces:
            for view, part in self._by_view(out):
                part[:, at : at + length] = view[:, block, offset : offset + length]

    def gather_layer(self, layer: int, slots: Tensor) -> Tensor:
        """A copy of one layer's KV of ``slots``, [parts, tokens, heads, width]."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return torch.cat([view[:, blocks, offsets] for view in self._views[layer]])

    def gather_blocks(self, block_ids: Sequence[int], pages: Sequence[Tensor]) -> None:
        """Copy whole blocks into ``pages``, a payload of ``block_size`` tokens for each.

        One indexed copy a layer, of blocks as they lie, on the cache's device; then one strided
        copy a page and view. (Indexing strided views took eight times as long on CPUs.) For one
        thread: what is staged between lies in memory that is kept, since touching fresh memory
        took longer than all of the copies.
        """
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        shape = (len(self.layers), len(block_ids), *self.layers[0].cache.shape[1:])
        if self._staged.numel() < math.prod(shape):
            self._staged = torch.empty(math.prod(shape), dtype=self.dtype, device=self.device)
        staged = self._staged[: math.prod(shape)].view(shape)
        for layer, part in zip(self.layers, staged, strict=True):
            torch.index_select(layer.cache, 0, index, out=part)
        at = 0
        for view in self._layout(staged.flatten(0, 1)):
            parts = view.view(len(view), *shape[:2], *view.shape[2:])
            for number, page in enumerate(pages):
                page[:, at : at + len(view)] = parts[:, :, number].transpose(0, 1)
            at += len(view)

    def scatter_blocks(self, pages: Sequence[Tensor], block_ids: Sequence[int]) -> None:
        """Write payloads of ``block_size`` tokens to whole blocks: one write a layer for all.

        Returns when it is done; for threads beside the engine's.
        """
        self._synchronize()  # the blocks may still be read by what their last owner launched
        first = torch.tensor(block_ids, dtype=torch.int64, device=self.device) * self.block_size
        slots = first[:, None] + torch.arange(self.block_size, device=self.device)
        for number, layer in enumerate(self.layers):
            kv = torch.cat([page[number] for page in pages], dim=1)
            layer.write(kv.to(self.device), slots.flatten())
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _by_view(self, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every view of every layer with its parts of ``payload`` [layers, parts, ...]."""
        for views, layer in zip(self._views, payload, strict=True):
            yield from zip(views, layer.split([len(view) for view in views]), strict=True)

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
            layer.write(part, slots)


def _confirmed_layout(layer: CacheLayer) -> Callable[[Tensor], Views]:
    """The layout that reads what the engine writes.

    Runs when the cache is empty, on the first and the last block, at offsets that a mistaken
    stride would mix up; the blocks are cleared again.
    """
    cache = layer.cache
    if cache.dim() == 4 and cache.shape[-1] % 2:
        raise UnknownLayoutError(f"{layer.name}: odd cache width {cache.shape[-1]}")
    generator = torch.Generator().manual_seed(len(layer.name))
    touched = cache[[0, len(cache) - 1]].clone()
    try:
        for layout in _LAYOUTS[cache.dim()]:
            views = layout(cache)
            _, blocks, block_size, heads, width = views[0].shape
            slots = torch.tensor(
                sorted({0, 1, block_size - 1, (blocks - 1) * block_size, blocks * block_size - 2}),
                dtype=torch.int64,
                device=cache.device,
            )
            shape = (sum(len(view) for view in views), len(slots), heads, width)
            probe = torch.randn(shape, generator=generator).to(cache.device, cache.dtype)
            layer.write(probe, slots)
            read = [view[:, slots // block_size, slots % block_size] for view in views]
            if torch.equal(torch.cat(read), probe):
                return layout
    finally:
        cache[[0, len(cache) - 1]] = touched
    raise UnknownLayoutError(
        f"{layer.name}: the round trip through a cache of shape {tuple(cache.shape)}, "
        f"{cache.dtype}, does not fit any known layout"
    )
