"""The paged caches of all KV cache groups as one: a token's KV lies in a block of each.

vLLM groups layers that keep the same blocks: those of full attention keep all, those of a sliding
window or of local chunks only what later tokens still see. What a group has let go of, or never
needed, stands in its table as the null block: nothing is read from there and nothing written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvloom.vllm.compat import NULL_BLOCK
from kvloom.vllm.paged_cache import PagedCache, UnknownLayoutError

Tables = Sequence[Sequence[int]]
"""A request's block table in each group."""


class GroupedCache:
    """Reads and writes KV of ranges of a request's tokens, in all layers of all groups.

    Payloads are those of ``PagedCache``, with the groups' layers one after the other.

    Attributes:
        groups: one cache a group.
        layers: of all groups.

    Raises:
        UnknownLayoutError: groups of unequal blocks or heads, whose tokens no one payload holds.
    """

    def __init__(self, groups: Sequence[PagedCache]) -> None:
        self.groups = tuple(groups)
        self.layers = tuple(layer for group in groups for layer in group.layers)
        first = groups[0]
        if len({(g.block_size, g.dtype, g.payload_shape(1)[1:]) for g in groups}) != 1:
            raise UnknownLayoutError("KV cache groups of unequal blocks, heads or dtypes")
        self.dtype, self.device, self.block_size = first.dtype, first.device, first.block_size

    @property
    def parts(self) -> int:
        return self.groups[0].parts

    def payload_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        return (len(self.layers), *self.groups[0].payload_shape(tokens)[1:])

    def part_size(self, tokens: int) -> int:
        """Bytes of one layer's part of a payload."""
        return self.groups[0].part_size(tokens)

    def gather(self, tables: Tables, start: int, out: Tensor) -> None:
        """Copy the KV from position ``start`` on into ``out``, a payload; tokens in null blocks
        are left as they are there."""
        for group, slots, part in self._held(tables, start, out):
            group.gather(slots, part)

    def scatter(self, payload: Tensor, tables: Tables, start: int) -> None:
        """Write a payload to the positions from ``start`` on, but for those in null blocks."""
        for group, slots, part in self._held(tables, start, payload.to(self.device)):
            group.scatter(part, slots)

    def _held(
        self, tables: Tables, start: int, payload: Tensor
    ) -> Iterator[tuple[PagedCache, Tensor, Tensor]]:
        """Each group with the slots of the tokens that it holds, and their part of ``payload``."""
        end = start + payload.shape[2]
        layer = 0
        for group, table in zip(self.groups, tables, strict=True):
            part = payload[layer : layer + len(group.layers)]
            layer += len(group.layers)
            first = first_held(table, self.block_size, start, end)
            if first < end:
                slots = group.slots(table, torch.arange(first, end))
                yield group, slots, part[:, :, first - start :]


def first_held(table: Sequence[int], block_size: int, start: int, end: int) -> int:
    """The first position of ``[start, end)`` that is not in a null block; ``end`` if there is none.

    Null blocks come before all others.
    """
    while start < end and table[start // block_size] == NULL_BLOCK:
        start += block_size - start % block_size
    return min(start, end)
