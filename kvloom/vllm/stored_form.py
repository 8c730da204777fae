"""The form in which chunks are stored: bit for bit, or in 8 bits (spec row S13)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvloom.blend.int8 import Int8Form
from kvloom.config import KvloomConfig
from kvloom.vllm.buffers import Buffer, BufferPool
from kvloom.vllm.grouped_cache import GroupedCache, Tables


class StoredForm:
    """Used by the engine's worker thread alone: a chunk on its way from one form to the other lies
    in memory that the next one takes.

    Attributes:
        part_size: stored bytes of one layer's part of a chunk.
    """

    def __init__(self, config: KvloomConfig, cache: GroupedCache) -> None:
        self._cache = cache
        self._shape: tuple[int, ...] = cache.payload_shape(config.blend_chunk_size)
        self._dtype = cache.dtype
        self.part_size = cache.part_size(config.blend_chunk_size)
        self._int8: Int8Form | None = None
        if config.store_dtype == "int8":
            self._int8 = Int8Form(self._shape)
            self._chunk = torch.empty(self._shape, dtype=cache.dtype)
            self._shape, self._dtype = self._int8.stored_shape, torch.uint8
            self.part_size = self._int8.part_size

    def buffers(self, count: int) -> BufferPool:
        return BufferPool(self._shape, self._dtype, count)

    def gather(self, tables: Tables, start: int, buffer: Buffer) -> bool:
        """Copy the chunk at position ``start`` out of the cache; False: this form can't hold it."""
        if self._int8 is None:
            self._cache.gather(tables, start, buffer.tensor)
            return True
        self._cache.gather(tables, start, self._chunk)
        return self._int8.encode(self._chunk, buffer.tensor)

    def payload(self, buffer: Buffer) -> Tensor:
        """What a buffer holds, [layers, 2, tokens, heads, head_dim]; valid until the next."""
        if self._int8 is None:
            return buffer.tensor
        self._int8.decode(buffer.tensor, self._chunk)
        return self._chunk
