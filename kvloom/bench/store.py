"""``kvloom bench store``: what the stages reach of plain reads, writes, copies (spec row S10)."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvloom.bench.report import Report
from kvloom.store.base import BlockHeader, Store
from kvloom.store.block_format import checksum
from kvloom.store.cache import Cache
from kvloom.store.catalog import IndexFeeder
from kvloom.store.posix import Posix
from kvloom.store.presence import _COARSE_NS
from kvloom.tokens.index import ChunkIndex

_NAMESPACE = "0" * 32
_DEADLINE_S = 60.0
_LOOKUPS = 10_000
_TOKENS = 64
_POLL_S = 1.0
Bytes = npt.NDArray[np.uint8]


class Seconds(NamedTuple):
    """Medians: by the clock, and of all this process's threads on the processor."""

    wall: float
    cpu: float


class Stopwatch:
    """Laps of a repeated piece of work; the first one warms up and is not counted."""

    def __init__(self) -> None:
        self._laps: list[Seconds] = []

    def time(self, work: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self._laps.append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))

    def seconds(self) -> Seconds:
        walls, cpus = zip(*self._laps[1:], strict=True)
        return Seconds(statistics.median(walls), statistics.median(cpus))


def run(
    folder: Path | None,
    *,
    blocks: int,
    parts: int,
    part_bytes: int,
    threads: int,
    repeats: int,
    progress: Callable[[str], None] = lambda phase: None,
) -> Report:
    """Blocks are dumped and loaded in one batch, beside the same bytes in the same sizes without a
    store, by as many threads or by one, whichever is quicker. Files stay in the page cache.

    Args:
        folder: where to write; None: the system's temporary directory.
        blocks, parts, part_bytes: 64 blocks of 30 parts of 98,304 bytes are 4,096 tokens of
            SmolLM2-135M in float32.
        repeats: a figure is the median of so many.
    """
    size = parts * part_bytes
    report = Report(f"{blocks} blocks of {size:,} bytes, {threads} threads")
    random = np.random.default_rng(0)
    source = [random.integers(0, 256, size, dtype=np.uint8) for _ in range(blocks)]
    target = [np.ones(size, dtype=np.uint8) for _ in range(blocks)]
    headers = [_header(number, (part_bytes,) * parts) for number in range(blocks)]
    gigabytes = blocks * size / 1e9
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvloom-bench-") as scratch:
        root = Path(scratch)
        progress("plain writes and reads")
        write = min(_plain(_write, source, root, count, repeats) for count in (1, threads))
        read = min(_plain(_read, target, root, count, repeats) for count in (1, threads))
        progress("Posix")
        store = Posix(_NAMESPACE, [root / "store"], "none", threads)
        dump, load = _stage(store, headers, source, target, repeats)
        store.close()
        _compare(
            report,
            "store.posix.dump",
            dump,
            plain_name="write",
            plain=write,
            gigabytes=gigabytes,
            target=0.8,
        )
        _compare(
            report,
            "store.posix.load",
            load,
            plain_name="read",
            plain=read,
            gigabytes=gigabytes,
            target=0.8,
        )
        progress("Cache")
        copy = min(_copies(source, target, count, repeats) for count in (1, threads))
        cache = Cache(_NAMESPACE, blocks * size, threads)
        dump, load = _stage(cache, headers, source, target, repeats)
        cache.close()
        _compare(
            report,
            "store.cache.dump",
            dump,
            plain_name="copy",
            plain=copy,
            gigabytes=gigabytes,
            target=0.7,
        )
        _compare(
            report,
            "store.cache.load",
            load,
            plain_name="copy",
            plain=copy,
            gigabytes=gigabytes,
            target=0.7,
        )
        progress(f"lookup of {_LOOKUPS:,} keys")
        _lookups(report, root / "lookups", threads, repeats)
        progress("index of the same blocks")
        _index(report, root / "lookups", threads)
    part = memoryview(source[0][:part_bytes].tobytes())
    hash_s = _median(lambda: [checksum(part) for _ in range(256)], repeats)
    speed = 256 * part_bytes / 1e9 / hash_s.cpu
    report.at_least("store.checksum_gb_per_s", speed, "GB/s", 5.0)
    return report


def _header(number: int, part_sizes: tuple[int, ...]) -> BlockHeader:
    return BlockHeader(
        namespace=_NAMESPACE,
        key=np.random.default_rng(number).bytes(16),
        parent=bytes(16),
        scope=bytes(16),
        position=0,
        generation=0,
        token_ids=np.random.default_rng(number).integers(0, 50_000, _TOKENS, dtype=np.int32),
        part_sizes=part_sizes,
        created_ns=time.time_ns(),
    )


def _compare(
    report: Report,
    name: str,
    ours: Seconds,
    *,
    plain_name: str,
    plain: Seconds,
    gigabytes: float,
    target: float,
) -> None:
    report.add(f"{name}_gb_per_s", gigabytes / ours.wall, "GB/s")
    report.add(f"{name}_plain_gb_per_s", gigabytes / plain.wall, "GB/s")
    report.at_least(f"{name}_of_{plain_name}", plain.wall / ours.wall, "x", target)
    report.add(f"{name}_cpu_of_{plain_name}", plain.cpu / ours.cpu, "x")


def _stage(
    store: Store,
    headers: Sequence[BlockHeader],
    source: Sequence[Bytes],
    target: Sequence[Bytes],
    repeats: int,
) -> tuple[Seconds, Seconds]:
    """A dump and a load of all blocks; what was loaded is compared."""
    keys = [header.key for header in headers]
    payloads = [_view(array) for array in source]
    buffers = [_view(array) for array in target]
    dumps, loads = Stopwatch(), Stopwatch()
    outcomes: list[bool] = []
    for _ in range(repeats + 1):
        store.delete(keys)
        dumps.time(lambda: outcomes.extend(store.dump(headers, payloads).wait(_DEADLINE_S)))
        loads.time(
            lambda: outcomes.extend(store.load(keys, [None] * len(keys), buffers).wait(_DEADLINE_S))
        )
    assert all(outcomes)
    assert all(np.array_equal(s, t) for s, t in zip(source, target, strict=True))
    return dumps.seconds(), loads.seconds()


def _plain(
    work: Callable[[Path, Bytes], None],
    arrays: Sequence[Bytes],
    root: Path,
    threads: int,
    repeats: int,
) -> Seconds:
    paths = [root / f"{number}.bin" for number in range(len(arrays))]
    watch = Stopwatch()
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + 1):
            if work is _write:
                for path in paths:
                    path.unlink(missing_ok=True)
            watch.time(lambda: list(pool.map(work, paths, arrays)))
    return watch.seconds()


def _view(data: Any) -> memoryview:
    return memoryview(data)


def _write(path: Path, data: Bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    assert os.pwritev(descriptor, [_view(data)], 0) == len(data)
    os.close(descriptor)


def _read(path: Path, data: Bytes) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    assert os.preadv(descriptor, [_view(data)], 0) == len(data)
    os.close(descriptor)


def _copies(
    source: Sequence[Bytes], target: Sequence[Bytes], threads: int, repeats: int
) -> Seconds:
    with ThreadPoolExecutor(threads) as pool:
        return _median(lambda: list(pool.map(np.copyto, target, source)), repeats)


def _lookups(report: Report, root: Path, threads: int, repeats: int) -> None:
    """Of keys in folders that just changed, and of folders that did not for some seconds."""
    headers = [_header(number, (1,)) for number in range(_LOOKUPS)]
    keys = [header.key for header in headers]
    missing = [bytes(reversed(key)) for key in keys]
    store = Posix(_NAMESPACE, [root], "none", threads)
    for first in range(0, _LOOKUPS, 500):
        batch = headers[first : first + 500]
        assert all(store.dump(batch, [memoryview(b"x")] * len(batch)).wait(_DEADLINE_S))
    assert all(store.lookup(keys))
    assert not any(store.lookup(missing))
    for name, wanted in (("changing", keys), ("there", keys), ("missing", missing)):
        if name == "there":
            time.sleep(1.1 * _COARSE_NS / 1e9)
        seconds = _median(lambda wanted=wanted: store.lookup(wanted), repeats)  # type: ignore[misc]
        report.at_most(f"store.lookup_10000_{name}_ms", 1e3 * seconds.wall, "ms", 10.0)
        report.add(f"store.lookup_10000_{name}_cpu_ms", 1e3 * seconds.cpu, "ms")
    store.close()


def _index(report: Report, root: Path, threads: int) -> None:
    """How fast a starting engine's index is filled, and when it knows what another one wrote."""
    store = Posix(_NAMESPACE, [root], "none", threads, scan_every_s=_POLL_S)
    index = ChunkIndex(_TOKENS)
    began, cpu_began = time.perf_counter(), time.process_time()
    feeder = IndexFeeder(store, index, _POLL_S)
    assert feeder.wait_ready(_DEADLINE_S)
    report.add("store.index_chunks_per_s", len(index) / (time.perf_counter() - began), "/s")
    cpu_us = 1e6 * (time.process_time() - cpu_began) / len(index)
    report.add("store.index_cpu_us_a_chunk", cpu_us, "us")
    other = Posix(_NAMESPACE, [root], "none", threads)
    watch = Stopwatch()
    for number in range(_LOOKUPS, _LOOKUPS + 4):
        assert all(other.dump([_header(number, (1,))], [memoryview(b"x")]).wait(_DEADLINE_S))

        def until_known(chunks: int = number + 1) -> None:
            while len(index) < chunks:
                time.sleep(0.002)

        watch.time(until_known)
    report.add("store.index_other_engine_ms", 1e3 * watch.seconds().wall, "ms")
    for each in (feeder, store, other):
        each.close()


def _median(work: Callable[[], object], repeats: int) -> Seconds:
    watch = Stopwatch()
    for _ in range(repeats + 1):
        watch.time(work)
    return watch.seconds()
