"""Which block goes first when room is needed (spec row S7): one order for memory and for files.

A policy knows keys and sizes, never payloads. It is not thread-safe: ``Cache`` asks it under its
own lock, the files' janitor under the directory's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping

# Lists of keys by queue: what a policy knows beyond the files' own times, for the next process.
Queues = dict[str, list[bytes]]


class EvictionPolicy(ABC):
    """Keys in the order in which they go."""

    @abstractmethod
    def add(self, key: bytes, size: int) -> None:
        """A block that came, of ``size`` bytes; a known key is left where it is."""

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """A block was used; an unknown key is ignored."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """A block went that was not evicted; an unknown key is ignored."""

    @abstractmethod
    def evict(self, spare: Callable[[bytes], bool] = lambda key: False) -> bytes | None:
        """Take out and return the key that goes next; None when all are to be spared."""

    def queues(self) -> Queues:
        """What ``restore`` needs to go on; nothing where the blocks' times say it all."""
        return {}

    def restore(self, queues: Mapping[str, list[bytes]], sizes: Mapping[bytes, int]) -> set[bytes]:
        """Take up queues of an earlier process, as far as their keys have sizes; returns those."""
        return set()


class Lru(EvictionPolicy):
    """The least recently used goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes, size: int) -> None:
        self._order.setdefault(key)

    def touch(self, key: bytes) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)

    def evict(self, spare: Callable[[bytes], bool] = lambda key: False) -> bytes | None:
        key = next((key for key in self._order if not spare(key)), None)
        if key is not None:
            del self._order[key]
        return key


class S3Fifo(EvictionPolicy):
    """What is never used again goes soon, however much of it there is (S3-FIFO, SOSP 2023).

    New blocks wait in a small queue of a tenth of the bytes. Those used while they wait move to
    the main queue, whose blocks get another round for each use, at most three. The others go, and
    their keys are remembered in a ghost queue of as many keys as there are blocks: one that comes
    back goes to the main queue at once. A single use is enough to move, unlike in the paper: the
    uses of a file are counted at most once between two evictions.
    """

    SMALL_SHARE = 0.1
    MOST_USES = 3

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._sizes: dict[bytes, int] = {}
        self._uses: dict[bytes, int] = {}
        self._bytes = 0
        self._small_bytes = 0

    def add(self, key: bytes, size: int) -> None:
        if key not in self._sizes:
            came_back = key in self._ghost
            self._ghost.pop(key, None)
            self._put(self._main if came_back else self._small, key, size)

    def touch(self, key: bytes) -> None:
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, self.MOST_USES)

    def remove(self, key: bytes) -> None:
        if key in self._sizes:
            self._take(key)

    def evict(self, spare: Callable[[bytes], bool] = lambda key: False) -> bytes | None:
        # Every step uses up a use, moves a key to the main queue, or spares one: after as many
        # steps, all that is left is to be spared.
        for _ in range((self.MOST_USES + 2) * len(self._sizes)):
            from_small = not self._main or self._small_bytes >= self.SMALL_SHARE * self._bytes
            from_small = from_small and bool(self._small)
            key = next(iter(self._small if from_small else self._main))
            uses, size = self._uses[key], self._sizes[key]
            self._take(key)
            if uses or spare(key):
                self._put(self._main, key, size, 0 if from_small else max(uses - 1, 0))
                continue
            if from_small:
                self._ghost[key] = None
            while len(self._ghost) > max(len(self._sizes), 1):
                self._ghost.popitem(last=False)
            return key
        return None

    def queues(self) -> Queues:
        used = {f"used {n}": [k for k, u in self._uses.items() if u == n] for n in (1, 2, 3)}
        queues = {"small": self._small, "main": self._main, "ghost": self._ghost}
        return used | {name: list(queue) for name, queue in queues.items()}

    def restore(self, queues: Mapping[str, list[bytes]], sizes: Mapping[bytes, int]) -> set[bytes]:
        uses = {key: n for n in (1, 2, 3) for key in queues.get(f"used {n}", ())}
        for name, queue in (("small", self._small), ("main", self._main)):
            for key in queues.get(name, ()):
                if key in sizes and key not in self._sizes:
                    self._put(queue, key, sizes[key], uses.get(key, 0))
        self._ghost = OrderedDict.fromkeys(queues.get("ghost", ()))
        return set(self._sizes)

    def _put(self, queue: OrderedDict[bytes, None], key: bytes, size: int, uses: int = 0) -> None:
        queue[key] = None
        self._sizes[key], self._uses[key] = size, uses
        self._bytes += size
        self._small_bytes += size if queue is self._small else 0

    def _take(self, key: bytes) -> None:
        size = self._sizes.pop(key)
        self._bytes -= size
        del self._uses[key]
        if key in self._small:
            del self._small[key]
            self._small_bytes -= size
        else:
            del self._main[key]


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": Lru, "s3fifo": S3Fifo}
