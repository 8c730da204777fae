"""Keeps a store directory within its limits and free of rubbish (spec rows S5, S7, S9).

A sweep lists all files, whoever wrote them: it removes temporary files of dead writers and expired
blocks, puts the count of the bytes right, and evicts down to the limit. One process sweeps at a
time, under a lock file; there is no daemon. What the policy must know is in the files' times
(mtime: written, atime: used, set by each load) and, for queues, in a file that the next sweep takes
up. A block that is open while it is removed can still be read to its end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvloom.store.eviction import POLICIES, EvictionPolicy, Queues
from kvloom.store.layout import LIMITS, BlockFile, Listing, is_stale, make_private, promised_size
from kvloom.store.space import SLACK, DiskLimit, FreeSpace, Level, Quota, free_bytes, lock

QUARANTINE_S = 7 * 86400.0
_LOCK_S = 5.0
_TRIES = 8
_EVERY_S = 60.0


@dataclass
class Swept:
    """What a sweep did.

    Attributes:
        blocks, size: what is left, in bytes with everything else in the directory.
        stale: temporary files of dead writers that were removed; quarantined: bad blocks; expired:
            blocks over their time; evicted: blocks that made room.
        freed: bytes of all of them.
    """

    blocks: int = 0
    size: int = 0
    stale: int = 0
    quarantined: int = 0
    expired: int = 0
    evicted: int = 0
    freed: int = 0


class _Saved(BaseModel):
    """The policy's queues after an eviction, as they lie in the directory."""

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    at_ns: int = 0
    queues: Queues = {}


class Janitor:
    """The sweeps of one store directory.

    Args:
        limit_bytes: the most that the directory takes, ``disk_bytes``; None: all but what
            ``FreeSpace`` leaves to others.
        policy: name of the eviction policy.
        ttl_s: seconds after which a block is removed; None: never.
        removed: told namespace and key of every block that was removed.

    Attributes:
        evicted, expired: blocks that this process removed so far.
    """

    def __init__(
        self,
        root: Path,
        limit_bytes: int | None,
        policy: str,
        ttl_s: float | None,
        removed: Callable[[str, bytes], None] = lambda namespace, key: None,
    ) -> None:
        self.root = root
        self.evicted = 0
        self.expired = 0
        self._lock = root / LIMITS / "lock"
        self._state = root / LIMITS / f"{policy}.json"
        self._policy = policy
        self._ttl_ns = None if ttl_s is None else int(ttl_s * 1e9)
        self._removed = removed
        self.limit: DiskLimit = (
            FreeSpace(root)
            if limit_bytes is None
            else Quota(root, limit_bytes, lambda: Listing(root).size)
        )

    def is_over(self, written_ns: int) -> bool:
        """Whether a block of that age is to be treated as gone."""
        return self._ttl_ns is not None and time.time_ns() - written_ns > self._ttl_ns

    def make_room(self, size: int) -> Level | None:
        """Reserve room for a block whose temporary file is there, evicting others for it where
        needed; None: there is none."""
        for _ in range(_TRIES):
            level = self.limit.reserve(size)
            if level is not None:
                return level
            self.sweep(need=size)  # and another writer may take the room
        return self.limit.reserve(size)

    def sweep(
        self,
        need: int = 0,
        at_least: int = 0,
        within_s: float = _LOCK_S,
        quarantine_s: float = QUARANTINE_S,
    ) -> Swept:
        """One round; nothing is done where there is no directory.

        Args:
            need: bytes of a temporary file of the caller's, which the limit must leave room for.
            at_least: bytes that must be free in the file system, whatever the limit is.
            within_s: how long to wait for another process's sweep.
            quarantine_s: age from which bad blocks are removed.

        Raises:
            OSError: the directory can't be written, or (TimeoutError) others sweep all the time.
        """
        swept = Swept()
        if not self.root.is_dir():
            return swept
        with self._alone(within_s):
            if (need or at_least) and not self._excess(need, at_least):
                return swept  # while this one waited for the lock, another made room
            began = time.time_ns()
            with self.limit.recounting() as settle:
                found = Listing(self.root)
                settle(max(found.size - need, 0))
            now = time.time_ns()  # after the listing: what was written meanwhile is no future
            found.blocks = [self._dated(block, now) for block in found.blocks]
            self._clear(found, now - int(quarantine_s * 1e9), swept)
            self._expire(found, swept)
            self.limit.release(swept.freed)
            excess = self._excess(need, at_least, found.size)
            if excess:
                before = swept.freed
                self._evict(found, excess, began, swept)
                self.limit.release(swept.freed - before)
        swept.blocks = len(found.blocks) - swept.evicted
        swept.size = found.size - swept.freed
        return swept

    def _excess(self, need: int, at_least: int, taken: int = 0) -> int:
        """Bytes that have to go; ``taken`` by the directory."""
        excess = self.limit.level().excess(need)
        if at_least and free_bytes(self.root) < at_least:
            excess = max(excess, at_least, taken // SLACK)
        return excess

    def due(self, every_s: float) -> bool:
        """Whether no process has swept for so long."""
        try:
            return abs(time.time() - self._lock.stat().st_mtime) >= every_s
        except OSError:
            return True

    @contextmanager
    def _alone(self, within_s: float) -> Iterator[None]:
        make_private(self._lock.parent)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            lock(descriptor, within_s)
            yield
            os.utime(descriptor)
        finally:
            os.close(descriptor)

    def _dated(self, block: BlockFile, now: int) -> BlockFile:
        """A block out of the future, which a clock that was set back leaves behind, is dated now:
        it would never expire, and never be the least recently used."""
        if block.used_ns <= now:
            return block
        written = min(block.written_ns, now)
        with suppress(OSError):
            os.utime(block.path, ns=(now, written))
        return block._replace(written_ns=written, used_ns=now)

    def _clear(self, found: Listing, before_ns: int, swept: Swept) -> None:
        for path in found.temporary:
            with suppress(OSError, ValueError):
                if is_stale(path):
                    swept.stale += self._unlink(path, promised_size(path), swept)
        for path, size, written_ns in found.quarantined:
            if written_ns <= before_ns:
                swept.quarantined += self._unlink(path, size, swept)

    def _expire(self, found: Listing, swept: Swept) -> None:
        expired = [block for block in found.blocks if self.is_over(block.written_ns)]
        if expired:
            found.blocks = [block for block in found.blocks if not self.is_over(block.written_ns)]
        for block in expired:
            swept.expired += self._remove(block, swept)
        self.expired += swept.expired

    def _evict(self, found: Listing, excess: int, began: int, swept: Swept) -> None:
        """Free ``excess`` bytes: bad blocks first, then blocks in the policy's order."""
        goal = swept.freed + excess
        for path, size, _ in found.quarantined:
            swept.quarantined += self._unlink(path, size, swept)
        by_name = {bytes.fromhex(block.namespace) + block.key: block for block in found.blocks}
        policy = POLICIES[self._policy]()
        self._replay(policy, by_name)
        while swept.freed < goal and (name := policy.evict()) is not None:
            swept.evicted += self._remove(by_name[name], swept)
        self.evicted += swept.evicted
        self._save(policy, began)

    def _replay(self, policy: EvictionPolicy, blocks: dict[bytes, BlockFile]) -> None:
        """Tell the policy what happened since the last eviction, in the order in which it did."""
        saved = self._saved()
        sizes = {name: block.size for name, block in blocks.items()}
        known = policy.restore(saved.queues, sizes)
        # A stable sort: a block that was used in the instant it came, came first.
        events = [(block.written_ns, name, False) for name, block in blocks.items()]
        events += [
            (block.used_ns, name, True)
            for name, block in blocks.items()
            if block.used_ns > (saved.at_ns if name in known else block.written_ns)
        ]
        events.sort(key=lambda event: event[0])
        for _, name, used in events:
            if used:
                policy.touch(name)
            else:
                policy.add(name, sizes[name])

    def _saved(self) -> _Saved:
        """What the last eviction left, whoever made it; nothing where it can't be understood."""
        try:
            return _Saved.model_validate_json(self._state.read_bytes())
        except (OSError, ValueError):
            return _Saved()

    def _save(self, policy: EvictionPolicy, at_ns: int) -> None:
        queues = policy.queues()
        if queues:
            temporary = self._state.with_suffix(".tmp")  # under the lock: nobody else writes it
            with open(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w"
            ) as file:
                file.write(_Saved(at_ns=at_ns, queues=queues).model_dump_json())
            temporary.rename(self._state)

    def _remove(self, block: BlockFile, swept: Swept) -> bool:
        done = self._unlink(block.path, block.size, swept)
        if done:
            self._removed(block.namespace, block.key)
        return done

    @staticmethod
    def _unlink(path: str, size: int, swept: Swept) -> bool:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        except IsADirectoryError:  # somebody put it in a block's place, and it was put aside
            with suppress(OSError):
                os.rmdir(path)
        swept.freed += size
        return True


class Sweeper:
    """A daemon thread that sweeps at the start, when woken, and where blocks expire.

    Args:
        failed: told of each sweep that could not be made; the next one tries again.
    """

    def __init__(
        self,
        janitors: Sequence[Janitor],
        ttl_s: float | None,
        failed: Callable[[Path, OSError], None],
    ) -> None:
        self._janitors = janitors
        self._every_s = None if ttl_s is None else min(ttl_s / 4, _EVERY_S)
        self._failed = failed
        self._wanted = threading.Event()
        self._wanted.set()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvloom-sweep", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wanted.set()

    def close(self, within_s: float) -> None:
        """Let the sweep under way end, at most ``within_s`` seconds; idempotent."""
        self._stop = True
        self._wanted.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        while True:
            wanted = self._wanted.wait(self._every_s)
            self._wanted.clear()
            for janitor in self._janitors:
                if wanted or (self._every_s is not None and janitor.due(self._every_s)):
                    try:
                        janitor.sweep()
                    except TimeoutError:
                        continue  # somebody else sweeps: all the same
                    except OSError as error:
                        self._failed(janitor.root, error)
            if self._stop:
                return
