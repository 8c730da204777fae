"""A journal of operations in SQLite: appended in groups, read once at the start.

An operation that changes 128 pages is one row of a few kilobytes, not 128 rows: writing it costs a
tenth (docs/metadata-service.md has the figures). SQLite's write-ahead log makes a group whole or
absent, whenever the process is killed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kvloom.hf3fs.metadata.base import StorageError

Durability = Literal["process", "disk"]

_FORMAT = 1
_SCHEMA = """
create table if not exists facts (name text primary key, value text) without rowid;
create table if not exists entries (
    number integer primary key, pages integer not null, generation integer not null,
    operations blob not null
);
"""
_INSERT = "insert into entries values (?, ?, ?, ?)"


class Journal:
    """The file ``path``; one process at a time.

    Args:
        durability: ``process``: what was appended outlives the process, however it ends; a power
            cut may cost the last moments. ``disk``: it outlives that too, at a disk flush a group.

    Raises:
        StorageError: the file can't be opened, is not a journal, or is in use.
    """

    def __init__(self, path: Path, durability: Durability = "process") -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=1.0
            )
            # Exclusive: two services on one file would give the same pages twice.
            self._db.execute("pragma locking_mode = exclusive")
            self._db.execute("pragma journal_mode = wal")
            # What a killed process left counts, else a log would grow from kill to kill.
            log = Path(f"{path}-wal")
            self.log_bytes = log.stat().st_size if log.exists() else 0
            if durability == "process":
                # Folding the log into the file waits for the disk: ``checkpoint`` says when.
                self._db.execute("pragma wal_autocheckpoint = 0")
            synchronous = "full" if durability == "disk" else "normal"
            self._db.execute(f"pragma synchronous = {synchronous}")
            self._db.execute("begin exclusive")
            self._db.execute("commit")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(
                f"{path}: {error}. One service at a time can use a state file; is one running?"
            ) from None
        if self.fact("format", str(_FORMAT)) != str(_FORMAT):
            raise StorageError(f"{path}: written by another version of kvloom")

    def fact(self, name: str, default: str) -> str:
        """A lasting fact about the file; set to the default where there is none."""
        self._db.execute("insert or ignore into facts values (?, ?)", (name, default))
        row = self._db.execute("select value from facts where name = ?", (name,)).fetchone()
        return str(row[0])

    def set_fact(self, name: str, value: str) -> None:
        self._db.execute("insert or replace into facts values (?, ?)", (name, value))

    def read(self) -> Iterator[tuple[int, int, int, bytes]]:
        """(number, pages it changed, next generation, operations) of all entries in order."""
        yield from self._db.execute(
            "select number, pages, generation, operations from entries order by number"
        )

    def append(
        self, number: int, pages: int, generation: int, operations: bytes, drop_before: int
    ) -> None:
        """One entry more, and those numbered below ``drop_before`` fewer: both or neither.

        Raises:
            sqlite3.Error: neither.
        """
        entry = number, pages, generation, operations
        if not drop_before:
            self._db.execute(_INSERT, entry)
        else:
            self._db.execute("begin immediate")
            try:
                self._db.execute(_INSERT, entry)
                self._db.execute("delete from entries where number < ?", (drop_before,))
                self._db.execute("commit")
            except sqlite3.Error:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise
        self.log_bytes += len(operations)

    def checkpoint(self) -> None:
        """Fold the log into the file; waits for the disk.

        Raises:
            sqlite3.Error: it was not; nothing is lost.
        """
        self._db.execute("pragma wal_checkpoint(restart)")
        self.log_bytes = 0

    def close(self) -> None:
        self._db.close()
