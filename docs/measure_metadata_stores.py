"""What a change of 128 pages costs in LMDB and in SQLite, as rows and as one journal entry.

pip install lmdb && python docs/measure_metadata_stores.py [directory on the disk to measure]
"""

from __future__ import annotations

import sqlite3
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgspec

BATCH = 128
REPEATS = 200
ROUNDS = 3

Row = tuple[int, int, str]  # page, generation, key
Write = Callable[[int, list[Row]], None]


def lmdb_store(path: Path, sync: bool, journal: bool) -> Write:
    path.mkdir()
    environment = lmdb.open(str(path), map_size=1 << 30, sync=sync)

    def write(number: int, rows: list[Row]) -> None:
        with environment.begin(write=True) as transaction:
            if journal:
                transaction.put(struct.pack(">Q", number), msgspec.msgpack.encode(rows))
                return
            packed = [
                (struct.pack(">Q", page), struct.pack("<Q", generation) + key.encode())
                for page, generation, key in rows
            ]
            transaction.cursor().putmulti(packed)

    return write


def sqlite_store(path: Path, sync: bool, journal: bool) -> Write:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("pragma journal_mode = wal")
    db.execute("pragma locking_mode = exclusive")
    db.execute(f"pragma synchronous = {'full' if sync else 'normal'}")
    db.execute("create table pages (page integer primary key, generation integer, key text)")
    db.execute("create table entries (number integer primary key, operations blob)")

    def write(number: int, rows: list[Row]) -> None:
        db.execute("begin immediate")
        if journal:
            blob = msgspec.msgpack.encode(rows)
            db.execute("insert into entries values (?, ?)", (number, blob))
        else:
            db.executemany("insert or replace into pages values (?, ?, ?)", rows)
        db.execute("commit")

    return write


def main(folder: Path) -> None:
    stores: dict[tuple[str, bool, bool], Write] = {}
    times: dict[tuple[str, bool, bool], list[tuple[float, float]]] = {}
    for name, make in (("LMDB", lmdb_store), ("SQLite", sqlite_store)):
        for sync in (False, True):
            for journal in (False, True):
                path = folder / f"{name}-{sync}-{journal}"
                stores[name, sync, journal] = make(path, sync, journal)
    number = 0
    for _ in range(ROUNDS):  # in turn, so that what else the machine does hits all
        for which, write in stores.items():
            for _ in range(REPEATS):
                number += 1
                rows = [
                    (number * BATCH + i, number, f"{number:032x}{i:032x}") for i in range(BATCH)
                ]
                began, cpu = time.perf_counter(), time.thread_time()
                write(number, rows)
                spent = time.perf_counter() - began, time.thread_time() - cpu
                times.setdefault(which, []).append(spent)
    print(f"lmdb {lmdb.__version__}, SQLite {sqlite3.sqlite_version}: {BATCH} pages, medians")
    for (name, sync, journal), spent in times.items():
        wall, cpu = (statistics.median(each) * 1e6 for each in zip(*spent, strict=True))
        kind = "one entry" if journal else "a row each"
        flushed = "flushed to disk" if sync else "not flushed"
        print(f"{name:6} {kind:10} {flushed:15} {wall:8,.0f} us, {cpu:6,.0f} us of a core")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(Path(folder))
