"""``kvloom bench store``: what the stages reach of plain reads, writes, copies (spec row S10).

Laps with and without a store alternate, and the best of each count: what else the machine does
meanwhile harms both alike.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.bench import chunks as chunks_bench
from kvloom.bench.chunks import NAMESPACE, TOKENS, Seconds, timed
from kvloom.bench.report import Report
from kvloom.store.base import BlockHeader, Store
from kvloom.store.block_format import checksum
from kvloom.store.cache import Cache
from kvloom.store.posix import Posix

_DEADLINE_S = 60.0
Bytes = npt.NDArray[np.uint8]


class Laps:
    """Kinds of work, done in turn; the first lap of each warms up and is not counted."""

    def __init__(self) -> None:
        self._laps: dict[str, list[Seconds]] = {}

    def time(self, name: str, work: Callable[[], object]) -> None:
        self._laps.setdefault(name, []).append(timed(work))

    def best(self, *names: str) -> Seconds:
        """The shortest lap of these kinds of work, by the clock and by the processor's time."""
        laps = [lap for name in names for lap in self._laps[name][1:]]
        return Seconds(min(lap.wall for lap in laps), min(lap.cpu for lap in laps))


def run(
    folder: Path | None,
    *,
    blocks: int,
    parts: int,
    part_bytes: int,
    threads: int,
    repeats: int,
    chunks: int = 10_000,
    progress: Callable[[str], None] = lambda phase: None,
) -> Report:
    """Blocks are dumped and loaded in one batch, beside the same bytes in the same sizes without a
    store, by as many threads or by one, whichever is quicker. Files stay in the page cache.

    Args:
        folder: where to write; None: the system's temporary directory.
        blocks, parts, part_bytes: 64 blocks of 30 parts of 98,304 bytes are 4,096 tokens of
            SmolLM2-135M in float32.
        repeats: a figure is the best of so many.
        chunks: size of the store that is looked up in and indexed.
    """
    size = parts * part_bytes
    report = Report(f"{blocks} blocks of {size:,} bytes, {threads} threads")
    random = np.random.default_rng(0)
    source = [random.integers(0, 256, size, dtype=np.uint8) for _ in range(blocks)]
    target = [np.ones(size, dtype=np.uint8) for _ in range(blocks)]
    headers = [_header(number, (part_bytes,) * parts) for number in range(blocks)]
    laps = Laps()
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="kvloom-bench-") as scratch,
        ThreadPoolExecutor(threads) as many,
        ThreadPoolExecutor(1) as one,
    ):
        root = Path(scratch)
        posix = Posix(NAMESPACE, [root / "store"], "none", threads)
        cache = Cache(NAMESPACE, blocks * size, threads)
        for number in range(repeats + 1):
            progress(f"dumps and loads: {number} of {repeats + 1}")
            for pool, name in ((one, "one"), (many, "many")):
                _plain(laps, name, pool, root=root, source=source, target=target)
            _stage(laps, "posix", posix, headers=headers, source=source, target=target)
            _stage(laps, "cache", cache, headers=headers, source=source, target=target)
        posix.close()
        cache.close()
        for name, plain, least in (
            ("posix.dump", "write", 0.8),
            ("posix.load", "read", 0.8),
            ("cache.dump", "copy", 0.7),
            ("cache.load", "copy", 0.7),
        ):
            ours = laps.best(name)
            theirs = laps.best(f"{plain}.one", f"{plain}.many")
            _compare(
                report,
                f"store.{name}",
                plain,
                ours=ours,
                theirs=theirs,
                gigabytes=blocks * size / 1e9,
                least=least,
            )
        chunks_bench.measure(report, root / "chunks", chunks, repeats, progress)
    part = memoryview(source[0][:part_bytes].tobytes())
    hash_s = min(timed(lambda: [checksum(part) for _ in range(256)]).cpu for _ in range(repeats))
    report.at_least("store.checksum_gb_per_s", 256 * part_bytes / 1e9 / hash_s, "GB/s", 5.0)
    return report


def _header(number: int, part_sizes: tuple[int, ...]) -> BlockHeader:
    return BlockHeader(
        namespace=NAMESPACE,
        key=np.random.default_rng(number).bytes(16),
        parent=bytes(16),
        scope=bytes(16),
        position=0,
        generation=0,
        token_ids=np.random.default_rng(number).integers(0, 50_000, TOKENS, dtype=np.int32),
        part_sizes=part_sizes,
        created_ns=time.time_ns(),
    )


def _compare(
    report: Report,
    name: str,
    plain: str,
    *,
    ours: Seconds,
    theirs: Seconds,
    gigabytes: float,
    least: float,
) -> None:
    report.add(f"{name}_gb_per_s", gigabytes / ours.wall, "GB/s")
    report.add(f"{name}_plain_gb_per_s", gigabytes / theirs.wall, "GB/s")
    report.at_least(f"{name}_of_{plain}", theirs.wall / ours.wall, "x", least)
    report.add(f"{name}_cpu_of_{plain}", theirs.cpu / ours.cpu, "x")


def _stage(
    laps: Laps,
    name: str,
    store: Store,
    *,
    headers: Sequence[BlockHeader],
    source: Sequence[Bytes],
    target: Sequence[Bytes],
) -> None:
    """A dump and a load of all blocks; what was loaded is compared."""
    keys = [header.key for header in headers]
    payloads = [_view(array) for array in source]
    buffers = [_view(array) for array in target]
    outcomes: list[bool] = []
    store.delete(keys)
    laps.time(
        f"{name}.dump", lambda: outcomes.extend(store.dump(headers, payloads).wait(_DEADLINE_S))
    )
    laps.time(
        f"{name}.load",
        lambda: outcomes.extend(store.load(keys, [None] * len(keys), buffers).wait(_DEADLINE_S)),
    )
    assert all(outcomes)
    assert all(np.array_equal(s, t) for s, t in zip(source, target, strict=True))


def _plain(
    laps: Laps,
    name: str,
    pool: ThreadPoolExecutor,
    *,
    root: Path,
    source: Sequence[Bytes],
    target: Sequence[Bytes],
) -> None:
    """The same bytes in as many files of one folder, one call each; and copied in memory."""
    paths = [root / f"{number}.bin" for number in range(len(source))]
    for path in paths:
        path.unlink(missing_ok=True)
    laps.time(f"write.{name}", lambda: list(pool.map(_write, paths, source)))
    laps.time(f"read.{name}", lambda: list(pool.map(_read, paths, target)))
    laps.time(f"copy.{name}", lambda: list(pool.map(np.copyto, target, source)))


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
