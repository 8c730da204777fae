"""IndexFeeder: keeps a chunk index current with a store, in the background (spec row S11)."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np

from kvloom.store.base import Changes, Store
from kvloom.tokens.index import ChunkIndex

logger = logging.getLogger(__name__)

_BATCH = 1024
_CLOSE_S = 2.0
_LOG_EVERY_S = 30.0


class IndexFeeder:
    """A daemon thread that carries a store's changes into an index.

    Args:
        poll_s: longest time between two looks at the store; this process's own writes come at once.
        generation: chunks of later ones are left out.
    """

    def __init__(self, store: Store, index: ChunkIndex, poll_s: float, generation: int = 0) -> None:
        self._index = index
        self._poll_s = poll_s
        self._generation = generation
        self._watcher = store.watch()
        self._ready = threading.Event()
        self._idle = threading.Condition()
        self._idle_polls = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloom-index", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether all that was in the store at the start is in the index, waiting for it."""
        return self._ready.wait(timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether nothing was left to carry at some time after this call."""
        with self._idle:
            # The poll under way may have begun before the caller's last write.
            goal = self._idle_polls + 2
            return self._idle.wait_for(lambda: self._idle_polls >= goal, timeout_s)

    def close(self) -> None:
        """Stop within a bound; idempotent."""
        self._stop.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        logged = -_LOG_EVERY_S
        while not self._stop.is_set():
            try:
                changes = self._watcher.poll(_BATCH, timeout_s=min(self._poll_s, 0.2))
                self._carry(changes)
            except Exception:
                # The feeder outlives whatever a store does: without it new chunks are never found.
                if time.monotonic() - logged >= _LOG_EVERY_S:
                    logged = time.monotonic()
                    logger.exception("kvloom: the chunk index could not follow the store")
                self._stop.wait(self._poll_s)
                continue
            if not changes.added and not changes.removed:
                self._ready.set()
                with self._idle:
                    self._idle_polls += 1
                    self._idle.notify_all()

    def _carry(self, changes: Changes) -> None:
        size = self._index.chunk_size
        headers = [
            header
            for header in changes.added
            if len(header.token_ids) == size and header.generation <= self._generation
        ]
        if headers:
            self._index.add_many(
                keys=[header.key for header in headers],
                parents=[header.parent for header in headers],
                scopes=[header.scope for header in headers],
                token_ids=np.stack([header.token_ids for header in headers]),
                positions=[header.position for header in headers],
                generations=[header.generation for header in headers],
                created_ns=[header.created_ns for header in headers],
            )
        for key in changes.removed:
            self._index.remove(key)
