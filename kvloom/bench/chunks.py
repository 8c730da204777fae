"""Part of ``kvloom bench store``: lookups in a store of many chunks, and its index (rows S10, S11).

The chunks have whole headers and no payload: neither lookups nor the index read payloads.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvloom.bench.report import Report
from kvloom.store.base import BlockHeader
from kvloom.store.block_file import pack, write_block
from kvloom.store.catalog import IndexFeeder
from kvloom.store.layout import block_path, make_private
from kvloom.store.posix import Posix
from kvloom.tokens.index import ChunkIndex

NAMESPACE = "0" * 32
TOKENS = 64
LOOKUPS = 10_000
_PARTS = 30
_POLL_S = 1.0
_PROMPT = 64  # chunks of a prompt of 4,096 tokens
_DEADLINE_S = 60.0
_BUILD_S = 3600.0
_BATCH = 1000


class Seconds(NamedTuple):
    """By the clock, and of all this process's threads on the processor."""

    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def measure(
    report: Report, root: Path, chunks: int, repeats: int, progress: Callable[[str], None]
) -> None:
    """Write a store of ``chunks`` chunks and add its figures to a report."""
    seconds = timed(lambda: _write(root, chunks, progress))
    report.add("store.chunks", chunks, "")
    report.add("store.chunks_written_s", seconds.wall, "s")
    progress(f"lookup of {LOOKUPS:,} of {chunks:,} keys")
    _lookups(report, root, chunks, repeats)
    progress(f"index of {chunks:,} chunks")
    _index(report, root, chunks)


def _headers(first: int, last: int) -> Iterator[BlockHeader]:
    tokens = np.random.default_rng(first).integers(0, 50_000, (last - first, TOKENS), np.int32)
    for number in range(first, last):
        yield BlockHeader(
            namespace=NAMESPACE,
            key=_key(number),
            parent=_key(number - 1),
            scope=bytes(16),
            position=TOKENS * (number % _PROMPT),
            generation=0,
            token_ids=tokens[number - first],
            part_sizes=(0,) * _PARTS,
            created_ns=time.time_ns(),
        )


def _key(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def _write(root: Path, chunks: int, progress: Callable[[str], None]) -> None:
    folder = root / NAMESPACE
    for part in range(256):
        make_private(block_path(folder, bytes([part])).parent)
    for first in range(0, chunks, _BATCH):
        progress(f"writing chunks: {first:,} of {chunks:,}")
        for header in _headers(first, min(first + _BATCH, chunks)):
            path = block_path(folder, header.key)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            write_block(descriptor, pack(header, memoryview(b""), compressed=False))
            os.close(descriptor)


def _dump(store: Posix, first: int) -> None:
    headers = list(_headers(first, first + _PROMPT))
    assert all(store.dump(headers, [memoryview(b"")] * _PROMPT).wait(_DEADLINE_S))


def _lookups(report: Report, root: Path, chunks: int, repeats: int) -> None:
    """In folders that did not change for some seconds, and while prompts are saved."""
    store = Posix(NAMESPACE, [root], "none", 4, lookup_timeout_s=_DEADLINE_S)
    keys = [_key(number) for number in range(min(LOOKUPS, chunks))]
    missing = [bytes(reversed(key)) for key in keys]
    time.sleep(0.5)
    assert all(store.lookup(keys))
    assert not any(store.lookup(missing))
    new = chunks
    for name, wanted in (("there", keys), ("missing", missing), ("saving", keys)):
        laps = []
        for _ in range(repeats):
            if name == "saving":
                _dump(store, new)
                new += _PROMPT
            laps.append(timed(lambda wanted=wanted: store.lookup(wanted)))  # type: ignore[misc]
        _, cpu = _medians(laps)
        wall = min(lap.wall for lap in laps)
        report.at_most(f"store.lookup_10000_{name}_ms", 1e3 * wall, "ms", 10.0)
        report.add(f"store.lookup_10000_{name}_cpu_ms", 1e3 * cpu, "ms")
    store.delete([_key(number) for number in range(chunks, new)])
    store.close()


def _medians(laps: Sequence[Seconds]) -> Seconds:
    walls, cpus = zip(*laps, strict=True)
    return Seconds(statistics.median(walls), statistics.median(cpus))


def _index(report: Report, root: Path, chunks: int) -> None:
    """How fast a starting engine's index is filled, and when it knows what another one wrote."""
    store = Posix(NAMESPACE, [root], "none", 1, scan_every_s=_POLL_S)
    other = Posix(NAMESPACE, [root], "none", 1)
    index = ChunkIndex(TOKENS, max_chunks=chunks + _PROMPT * 4)
    before = _resident_bytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    feeder = IndexFeeder(store, index, _POLL_S)
    assert feeder.wait_ready(_BUILD_S)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    assert len(index) == chunks
    report.add("store.index_s", wall, "s")
    report.add("store.index_chunks_per_s", chunks / wall, "/s")
    report.add("store.index_cpu_us_a_chunk", 1e6 * cpu / chunks, "us")
    report.add("store.index_memory_bytes_a_chunk", index.nbytes / chunks, "B")
    report.add("store.index_file_bytes_a_chunk", index.token_bytes / chunks, "B")
    report.add("store.index_process_bytes_a_chunk", (_resident_bytes() - before) / chunks, "B")
    delays = []
    for first in range(chunks, chunks + 4 * _PROMPT, _PROMPT):
        _dump(other, first)
        goal = first + _PROMPT
        delays.append(timed(lambda goal=goal: _wait_for(index, goal)))  # type: ignore[misc]
    report.add("store.index_other_engine_ms", 1e3 * max(delay.wall for delay in delays), "ms")
    cpu_s = time.process_time()
    time.sleep(3 * _POLL_S)
    report.add("store.index_idle_cpu", 100 * (time.process_time() - cpu_s) / (3 * _POLL_S), "%")
    for each in (feeder, store, other):
        each.close()


def _wait_for(index: ChunkIndex, chunks: int) -> None:
    while len(index) < chunks:
        time.sleep(0.002)


def _resident_bytes() -> int:
    """Anonymous memory of this process: what the kernel can't drop."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0
