"""The one contract of every store stage and pipeline (spec row S2).

A store keeps blocks: a header that says everything about them (``BlockHeader``) and a payload of
bytes. It knows nothing of tensors. Every call is batched and thread-safe; moving payloads is
asynchronous (``Task``). Nothing but a programming error raises: a block that is missing, damaged,
foreign or late is a miss, and a dump that fails is dropped and counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a stored block says about itself (spec row S4).

    Attributes:
        namespace: digest of everything that changes KV bytes (hex, path-safe).
        key: the block's prefix key, the name it is stored under.
        parent: prefix key of the chunk before it in its prompt; the scope's root key for the first.
        scope: digest of what separates requests (cache salt, LoRA, ...); never matched across.
        position: position of the first token in the prompt it was computed in.
        generation: 0 for exact KV, 1 for KV computed on top of a blend.
        token_ids: int32 array [n_tokens].
        part_sizes: payload bytes of each part (a part is one layer), in payload order; each part
            has a checksum of its own.
        created_ns: wall clock at creation, nanoseconds.
    """

    namespace: str
    key: bytes
    parent: bytes
    scope: bytes
    position: int
    generation: int
    token_ids: npt.NDArray[np.int32]
    part_sizes: tuple[int, ...]
    created_ns: int

    @property
    def payload_size(self) -> int:
        return sum(self.part_sizes)


@dataclass(frozen=True, slots=True)
class PayloadSlice:
    """A byte range of a block's payload, ``[offset, offset + length)``."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened in a store since the last poll: new blocks, and keys that are gone."""

    added: tuple[BlockHeader, ...] = ()
    removed: tuple[bytes, ...] = ()


class Task(ABC):
    """A batch under way. Entry i is the i-th key's outcome: True only if it is wholly done."""

    @abstractmethod
    def check(self) -> bool:
        """Whether every entry has an outcome; never blocks."""

    @abstractmethod
    def wait(self, deadline_s: float) -> list[bool]:
        """Outcomes in key order, waiting at most ``deadline_s`` seconds; what is late is False.

        After ``wait`` returned, no thread writes into the task's buffers any more, even for
        entries that were late: the caller may reuse them.
        """

    @abstractmethod
    def as_completed(self, deadline_s: float) -> Iterator[tuple[int, bool]]:
        """(entry index, outcome) as entries finish, each once; late ones come last, as False."""


class Watcher(ABC):
    """A consumer's view of a store's changes (spec row S11)."""

    @abstractmethod
    def poll(self, limit: int = 4096, timeout_s: float = 0.0) -> Changes:
        """At most ``limit`` changes since the last poll; the first polls list what is there.

        Writes of this process are reported at once (``timeout_s`` waits for them), those of other
        processes to a shared directory within the stage's scan interval. Empty: nothing is new.
        """


class Store(ABC):
    """A stage or a pipeline of stages. ``namespace`` is fixed when it is opened."""

    namespace: str

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys can be loaded now; what a stage can't tell within its deadline is a miss."""

    def lookup_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys can be loaded, up to the first that can't."""
        for count, found in enumerate(self.lookup(keys)):
            if not found:
                return count
        return len(keys)

    @abstractmethod
    def load(
        self,
        keys: Sequence[bytes],
        slices: Sequence[PayloadSlice | None],
        buffers: Sequence[memoryview],
    ) -> Task:
        """Read the payload (None) or a slice of it into ``buffers[i]``, which has that size.

        The checksums of every part that the slice touches are verified before an entry is True.
        """

    @abstractmethod
    def dump(self, headers: Sequence[BlockHeader], buffers: Sequence[memoryview]) -> Task:
        """Store payloads under their headers. A key that exists already is done at once.

        The caller keeps ``buffers`` unchanged until the entry has an outcome.
        """

    def prefetch(self, keys: Sequence[bytes]) -> None:  # noqa: B027  (a stage may ignore it)
        """A hint that keys will be loaded soon; a fast stage may fetch them in the background."""

    def touch(self, keys: Sequence[bytes]) -> None:  # noqa: B027  (a stage may ignore it)
        """A hint that keys were served by a faster stage: a slower one that did not count that as
        a use would evict first what is used most."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; how many were there."""

    @abstractmethod
    def header(self, key: bytes) -> BlockHeader | None:
        """A block's header, None where there is no whole one."""

    @abstractmethod
    def headers(self) -> Iterator[BlockHeader]:
        """Headers of all whole blocks, in no order."""

    @abstractmethod
    def watch(self) -> Watcher: ...

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Counters and gauges, named ``<stage>.<what>``."""

    @abstractmethod
    def close(self) -> None:
        """Finish within a bound and release everything; idempotent."""
