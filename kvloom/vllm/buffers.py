"""Payload buffers between store and paged cache: the same memory as bytes and as a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvloom.store.memory import HostMemory


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    memory: memoryview
    tensor: Tensor


class BufferPool:
    """At most ``count`` payloads of one shape, reused.

    Args:
        size: bytes of a buffer, if it holds more than the payload at its beginning.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, count: int, size: int | None = None
    ) -> None:
        self._shape, self._dtype = shape, dtype
        self._elements = torch.Size(shape).numel()
        self._size = self._elements * dtype.itemsize if size is None else size
        self._memory = HostMemory(count * self._size)

    def acquire(self) -> Buffer | None:
        """A buffer, or None when all are in use: the caller does without, it never waits."""
        memory = self._memory.take(self._size)
        if memory is None:
            return None
        payload = torch.frombuffer(memory, dtype=self._dtype, count=self._elements)
        return Buffer(memory, payload.view(self._shape))

    def release(self, buffer: Buffer) -> None:
        self._memory.give(buffer.memory)
