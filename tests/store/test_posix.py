"""Spec rows S5, S6, S8, S9, S11, S14: files that others share, harm, fill up and take away."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvloom.store.base import Store
from kvloom.store.block_format import decode_header, verify_parts
from kvloom.store.catalog import IndexFeeder
from kvloom.store.contract import NAMESPACE, PART, PARTS, dump, load, make_block
from kvloom.store.layout import temporary_path
from kvloom.store.posix import Posix
from kvloom.tokens.index import ChunkIndex

from .disks import mounted, put_in_the_way

SIZE = PART * PARTS

WRITER = """
import sys
from pathlib import Path
from kvloom.store.contract import NAMESPACE, make_block
from kvloom.store.posix import Posix
store = Posix(NAMESPACE, [Path(sys.argv[1])], "none", 2)
print("writing", flush=True)
number = int(sys.argv[2])
while number < int(sys.argv[3]):
    blocks = [make_block(number + i) for i in range(4)]
    store.dump([h for h, _ in blocks], [p for _, p in blocks]).wait(10)
    number += 4
store.close()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[Posix]:
    store = Posix(NAMESPACE, [root], "none", threads=2)
    yield store
    store.close()


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


def start_writer(root: Path, first: int, last: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), str(first), str(last)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_files_and_directories_are_private(store: Posix, root: Path) -> None:
    dump(store, [make_block(1)])
    (path,) = files(root)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parents[1], path.parents[2]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert path.relative_to(root).parts[0] == NAMESPACE


def test_every_harm_to_a_file_is_a_miss_and_the_file_is_put_aside(store: Posix, root: Path) -> None:
    harms = {
        "flipped bit in the payload": lambda b: b[:9000] + bytes([b[9000] ^ 1]) + b[9001:],
        "flipped bit in the header": lambda b: b[:40] + bytes([b[40] ^ 1]) + b[41:],
        "cut short": lambda b: b[:-1],
        "too long": lambda b: b + b"x",
        "empty": lambda b: b"",
        "another block": lambda b: other,
    }
    dump(store, [make_block(77)])
    (path,) = files(root)
    other = path.read_bytes()
    path.unlink()
    for number, (harm, change) in enumerate(harms.items()):
        block = make_block(number)
        dump(store, [block])
        (path,) = files(root)
        path.write_bytes(change(path.read_bytes()))
        done, loaded = load(store, [block[0].key], [SIZE], [None])
        assert done == [False], harm
        for got, right in zip(loaded[0], bytes(block[1]), strict=True):
            assert got in {0, right}, f"{harm}: bytes in doubt reached the caller"
        assert store.lookup([block[0].key]) == [False], harm
        assert len(list((root / NAMESPACE / "quarantine").iterdir())) == number + 1
    assert store.stats()["posix.bad"] == len(harms)


def test_a_slice_is_served_from_a_block_that_is_damaged_elsewhere_only(
    store: Posix, root: Path
) -> None:
    from kvloom.store.base import PayloadSlice

    block = make_block(1)
    dump(store, [block])
    (path,) = files(root)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the last part
    path.write_bytes(data)
    done, loaded = load(store, [block[0].key], [PART], [PayloadSlice(0, PART)])
    assert (done, loaded) == ([True], [bytes(block[1][:PART])])
    done, _ = load(store, [block[0].key], [10], [PayloadSlice(SIZE - 10, 10)])
    assert done == [False]


def test_other_numbers_and_orders_of_directories_reach_all_blocks(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("a", "b", "c")]
    blocks = [make_block(i) for i in range(24)]
    keys = [header.key for header, _ in blocks]
    writer = Posix(NAMESPACE, roots, "none", threads=2)
    dump(writer, blocks)
    writer.close()
    assert all(files(root) for root in roots), "blocks are spread"
    for others in (roots[::-1], [*roots, tmp_path / "d"], [tmp_path / "z", *roots]):
        reader = Posix(NAMESPACE, others, "none", threads=2)
        assert reader.lookup(keys) == [True] * 24
        done, _ = load(reader, keys, [SIZE] * 24, [None] * 24)
        assert done == [True] * 24
        reader.close()


def test_two_processes_write_one_store_at_once(root: Path, store: Posix) -> None:
    first, second = start_writer(root, 0, 40), start_writer(root, 0, 40)
    assert (first.wait(60), second.wait(60)) == (0, 0)
    keys = [make_block(i)[0].key for i in range(40)]
    done, loaded = load(store, keys, [SIZE] * 40, [None] * 40)
    assert done == [True] * 40
    assert loaded == [bytes(make_block(i)[1]) for i in range(40)]
    assert len(files(root)) == 40


def test_killed_writers_leave_only_whole_blocks_and_no_temporary_files(root: Path) -> None:
    random = np.random.default_rng(0)
    for life in range(20):
        writer = start_writer(root, 4000 * life, 4000 * (life + 1))
        time.sleep(float(random.uniform(0.0, 0.05)))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    seen = files(root)
    assert len(seen) > 20, "the writers must have come to something"
    for path in seen:
        data = path.read_bytes()
        stored = decode_header(data)
        assert stored.file_size == len(data)
        verify_parts(stored, 0, memoryview(data)[stored.payload_offset :])
    store = Posix(NAMESPACE, [root], "none", threads=1)
    store.close()  # what was queued, the cleaning first, is done by then
    assert not list(root.rglob("*.tmp"))
    assert files(root) == seen


def test_temporary_files_of_living_writers_are_left_alone(root: Path, store: Posix) -> None:
    dump(store, [make_block(1)])
    (path,) = files(root)
    mine = Path(temporary_path(str(path), 5))
    elsewhere = path.with_name(f"{path.stem}.0badbeef.1.5.0.tmp")
    abandoned = path.with_name(f"{path.stem}.0badbeef.2.5.0.tmp")
    for temporary in (mine, elsewhere, abandoned):
        temporary.write_bytes(b"half")
    os.utime(abandoned, (1, 1))
    Posix(NAMESPACE, [root], "none", threads=1).close()
    assert mine.exists()
    assert elsewhere.exists()
    assert not abandoned.exists()


def test_a_directory_that_goes_and_comes_back_costs_saves_only(
    root: Path, store: Posix, caplog: pytest.LogCaptureFixture
) -> None:
    dump(store, [make_block(1)])
    put_in_the_way(root)
    with caplog.at_level(logging.WARNING):
        assert dump(store, [make_block(i) for i in range(2, 12)]) == [False] * 10
        assert load(store, [make_block(1)[0].key], [SIZE], [None])[0] == [False]
    told = [r.getMessage() for r in caplog.records if "could not write" in r.getMessage()]
    assert len(told) == 1, "one warning, not one a block"
    assert str(root) in told[0]
    assert "storage_backends" in told[0]
    root.unlink()
    assert dump(store, [make_block(2)]) == [True]
    assert store.stats()["posix.dropped"] == 10


def test_a_read_only_file_system_drops_saves(root: Path, store: Store) -> None:
    with mounted(root, "size=256k,ro"):
        assert dump(store, [make_block(i) for i in range(4)]) == [False] * 4
    assert dump(store, [make_block(1)]) == [True], "recovers by itself"


def test_a_file_system_that_others_filled_drops_saves(root: Path, store: Posix) -> None:
    with mounted(root, "size=256k"):
        (root / "others").write_bytes(bytes(240 * 1024))
        assert not any(dump(store, [make_block(i) for i in range(4)]))
        assert not list(root.rglob("*.tmp")), "space is lost to halves"
        (root / "others").unlink()
        assert dump(store, [make_block(1)]) == [True], "recovers by itself"


@pytest.mark.parametrize("limit_bytes", [None, 1 << 30], ids=["default", "a limit beyond the disk"])
def test_a_file_system_that_the_store_filled_goes_on_taking_blocks(
    root: Path, limit_bytes: int | None
) -> None:
    """Or nothing new would ever be saved again. What is there is right, what is not is a miss."""
    with mounted(root, "size=512k"):
        store = Posix(NAMESPACE, [root], "none", threads=1, limit_bytes=limit_bytes)
        blocks = [make_block(i) for i in range(60)]
        outcomes = dump(store, blocks)
        assert sum(outcomes) > 30
        assert any(outcomes[-3:])
        assert not list(root.rglob("*.tmp"))
        keys = [header.key for header, _ in blocks]
        done, loaded = load(store, keys, [SIZE] * 60, [None] * 60)
        assert 10 < sum(done) < 26
        assert all(
            not d or got == bytes(p) for d, got, (_, p) in zip(done, loaded, blocks, strict=True)
        )
        store.close()


def test_a_feeder_follows_another_process(root: Path, store: Posix) -> None:
    """S11: built at the start, current for other engines' writes, gone blocks forgotten."""
    dump(store, [make_block(i) for i in range(8)])
    index = ChunkIndex(chunk_size=64)
    reader = Posix(NAMESPACE, [root], "none", threads=1)
    feeder = IndexFeeder(reader, index, poll_s=0.1)
    assert feeder.wait_ready(20)
    assert len(index) == 8
    assert start_writer(root, 8, 16).wait(60) == 0
    assert eventually(lambda: len(index) == 16)
    files(root)[0].unlink()
    assert eventually(lambda: len(index) == 15)
    feeder.close()
    feeder.close()
    reader.close()


def test_a_feeder_outlives_a_store_that_fails(root: Path, store: Posix) -> None:
    watcher = store.watch()
    poll = watcher.poll
    calls = iter([OSError("gone"), ValueError("odd")])

    def failing(limit: int = 4096, timeout_s: float = 0.0) -> object:
        error = next(calls, None)
        if error is not None:
            raise error
        return poll(limit, timeout_s)

    watcher.poll = failing  # type: ignore[method-assign,assignment]
    store.watch = lambda: watcher  # type: ignore[method-assign]
    dump(store, [make_block(1)])
    index = ChunkIndex(chunk_size=64)
    feeder = IndexFeeder(store, index, poll_s=0.05)
    assert eventually(lambda: len(index) == 1)
    feeder.close()


def eventually(condition: object, within_s: float = 15.0) -> bool:
    assert callable(condition)
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_the_scan_interval_is_the_configured_one(root: Path) -> None:
    """`index_poll_s`: other processes' writes are not looked for before it is over."""
    reader = Posix(NAMESPACE, [root], "none", threads=1, scan_every_s=3600.0)
    watcher = reader.watch()
    assert watcher.poll().added == ()
    other = Posix(NAMESPACE, [root], "none", threads=1)
    dump(other, [make_block(1)])
    assert watcher.poll().added == ()
    watcher._next_scan = 0.0  # type: ignore[attr-defined]
    assert [header.key for header in watcher.poll().added] == [make_block(1)[0].key]
    other.close()
    reader.close()
