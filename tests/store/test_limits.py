"""Spec row S7: the disk limit holds at every instant, for all engines, over restarts; TTL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvloom.store.cache import Cache
from kvloom.store.contract import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PART,
    PARTS,
    dump,
    load,
    make_block,
)
from kvloom.store.eviction import POLICIES
from kvloom.store.janitor import Janitor
from kvloom.store.layout import LIMITS, Listing, pages
from kvloom.store.pipeline import Pipeline
from kvloom.store.posix import Posix

from .disks import mounted, used_bytes

SIZE = PART * PARTS
FILE = pages(4096 + SIZE)  # header and payload
OWN = 16384  # the limits' own files

WRITER = """
import sys
from pathlib import Path
from kvloom.store.contract import NAMESPACE, make_block
from kvloom.store.posix import Posix
root, first, last, limit = sys.argv[1:]
store = Posix(NAMESPACE, [Path(root)], "none", 2, limit_bytes=int(limit))
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(first), int(last)):
    header, payload = make_block(number)
    store.dump([header], [payload]).wait(20)
store.close()
"""


def opened(root: Path, namespace: str = NAMESPACE, **options: object) -> Posix:
    return Posix(namespace, [root], "none", 2, **options)  # type: ignore[arg-type]


def there(store: Posix, numbers: range) -> list[int]:
    keys = [make_block(number)[0].key for number in numbers]
    return [n for n, found in zip(numbers, store.lookup(keys), strict=True) if found]


def use(root: Path, number: int, at_s: float, namespace: str = NAMESPACE) -> None:
    """Date the last use of a block, as a load of it at that time would have."""
    key = make_block(number)[0].key.hex()
    path = root / namespace / key[:2] / f"{key}.kv"
    os.utime(path, ns=(int(at_s * 1e9), path.stat().st_mtime_ns))


def write_at(store: Posix, root: Path, number: int, at_s: float) -> None:
    assert dump(store, [make_block(number)]) == [True]
    key = make_block(number)[0].key.hex()
    os.utime(root / NAMESPACE / key[:2] / f"{key}.kv", (at_s, at_s))


def test_the_limit_is_never_exceeded_and_the_newest_blocks_stay(tmp_path: Path) -> None:
    limit = 10 * FILE
    seen = []
    watching = threading.Event()

    def watch() -> None:
        while not watching.is_set():
            seen.append(used_bytes(tmp_path))

    watcher = threading.Thread(target=watch)
    with mounted(tmp_path, "size=64M"):
        store = opened(tmp_path, limit_bytes=limit, eviction="lru")
        watcher.start()
        for number in range(60):
            # Dated, as two written within one tick of the kernel's clock are equally old.
            write_at(store, tmp_path, number, 1e9 + number)
        watching.set()
        watcher.join()
        assert max(seen) <= limit + OWN
        store.close()  # it may be making room in the background
        keys = {make_block(number)[0].key: number for number in range(60)}
        left = sorted(keys[block.key] for block in Listing(tmp_path).blocks)
        assert 8 <= len(left) <= 10
        assert left == list(range(60 - len(left), 60))
        assert store.stats()["posix.evicted"] == 60 - len(left)


def test_three_engines_keep_one_limit_and_a_killed_one_takes_no_room(tmp_path: Path) -> None:
    limit = 20 * FILE
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with mounted(tmp_path, "size=64M"):
        writers = [
            subprocess.Popen(
                [*command, str(first), str(last), str(limit)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first, last in ((0, 40), (40, 80), (100, 100_000))
        ]
        sizes = []
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            print(file=writer.stdin, flush=True)
        while any(writer.poll() is None for writer in writers[:2]):
            sizes.append(used_bytes(tmp_path))
            time.sleep(0.001)
        os.kill(writers[2].pid, signal.SIGKILL)
        writers[2].wait()
        assert [writer.returncode for writer in writers[:2]] == [0, 0]
        assert max(sizes) <= limit + OWN
        assert max(sizes) > 0.8 * limit, "or the limit was not met at all"
        store = opened(tmp_path, limit_bytes=limit)
        for number in range(80, 100):
            assert dump(store, [make_block(number)]) == [True]
        assert 0.8 * limit < Listing(tmp_path).size <= limit
        janitor = Janitor(tmp_path, limit, "s3fifo", None)
        janitor.sweep()
        assert janitor.limit.level().used == Listing(tmp_path).size
        store.close()


def test_usage_counts_what_is_there_after_a_restart_and_without_a_counter(tmp_path: Path) -> None:
    first = opened(tmp_path)  # knows no limit, keeps no counter
    dump(first, [make_block(number) for number in range(10)])
    first.close()
    second = opened(tmp_path, limit_bytes=12 * FILE)
    dump(second, [make_block(number) for number in range(10, 14)])
    assert Listing(tmp_path).size <= 12 * FILE
    second.close()
    (tmp_path / LIMITS / "usage").write_bytes(b"torn")
    third = opened(tmp_path, limit_bytes=12 * FILE)
    dump(third, [make_block(number) for number in range(14, 20)])
    assert Listing(tmp_path).size <= 12 * FILE
    third.close()


def test_the_least_recently_used_file_goes_whoever_used_it(tmp_path: Path) -> None:
    limit = 10 * FILE
    store = opened(tmp_path, limit_bytes=limit, eviction="lru")
    now = time.time()
    for number in range(9):
        write_at(store, tmp_path, number, now - 1000 + number)
    other = opened(tmp_path, limit_bytes=limit, eviction="lru")
    assert load(other, [make_block(0)[0].key], [SIZE], [None])[0] == [True]
    use(tmp_path, 2, now - 10)
    dump(store, [make_block(20), make_block(21)])
    left = there(store, range(9))
    assert 1 not in left
    assert {0, 2} <= set(left), "used by another engine, and later than others were written"
    other.close()
    store.close()


def test_queues_of_s3fifo_outlive_the_engine(tmp_path: Path) -> None:
    """A block that was evicted unused and comes back is then worth more than new ones."""
    limit = 20 * FILE
    now = time.time()
    store = opened(tmp_path, limit_bytes=limit, eviction="s3fifo")
    for number in range(20):
        write_at(store, tmp_path, number, now - 1000 + number)
    dump(store, [make_block(20)])
    assert 0 not in there(store, range(20)), "the oldest that was never used"
    store.close()
    for generation in range(4):
        store = opened(tmp_path, limit_bytes=limit, eviction="s3fifo")
        dump(store, [make_block(0)])
        dump(store, [make_block(100 + 20 * generation + i) for i in range(20)])
        assert there(store, range(1)) == [0], f"generation {generation}"
        store.close()


@pytest.mark.parametrize("garbage", [b"", b"{", b'{"queues": 3}', b'{"queues": {"main": ["xy"]}}'])
def test_queues_that_can_not_be_read_cost_their_memory_only(tmp_path: Path, garbage: bytes) -> None:
    store = opened(tmp_path, limit_bytes=5 * FILE)
    dump(store, [make_block(number) for number in range(10)])
    (tmp_path / LIMITS / "s3fifo.json").write_bytes(garbage)
    assert dump(store, [make_block(number) for number in range(10, 20)]) == [True] * 10
    assert there(store, range(19, 20)) == [19]
    store.close()


def test_the_limits_own_files_are_private(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", limit_bytes=5 * FILE)
    dump(store, [make_block(number) for number in range(10)])
    store.close()
    own = sorted((tmp_path / "store" / LIMITS).iterdir())
    assert [path.name for path in own] == ["lock", "s3fifo.json", "usage"]
    assert {path.stat().st_mode & 0o777 for path in own} == {0o600}
    assert (tmp_path / "store" / LIMITS).stat().st_mode & 0o777 == 0o700


def test_all_namespaces_share_the_limit(tmp_path: Path) -> None:
    """A new model's blocks take the place of an old one's that nobody uses any more."""
    old = opened(tmp_path, limit_bytes=10 * FILE)
    dump(old, [make_block(number) for number in range(9)])
    old.close()
    new = opened(tmp_path, OTHER_NAMESPACE, limit_bytes=10 * FILE)
    blocks = [make_block(number, OTHER_NAMESPACE) for number in range(9)]
    assert dump(new, blocks) == [True] * 9
    assert Listing(tmp_path).size <= 10 * FILE
    assert sum(new.lookup([header.key for header, _ in blocks])) >= 5
    new.close()


def test_a_block_larger_than_the_limit_is_dropped_and_evicts_nothing(tmp_path: Path) -> None:
    """Nor while another process, who counts what is being written, sweeps."""
    store = opened(tmp_path, limit_bytes=3 * FILE)
    dump(store, [make_block(1)])
    done = threading.Event()

    def sweep() -> None:
        janitor = Janitor(tmp_path, 3 * FILE, "s3fifo", None)
        while not done.is_set():
            janitor.sweep()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    assert not any(dump(store, [make_block(2 + i, parts=20) for i in range(50)]))
    done.set()
    sweeper.join()
    assert there(store, range(1, 2)) == [1]
    store.close()


def test_blocks_that_need_most_of_the_limit_are_stored(tmp_path: Path) -> None:
    """What is being written is not counted against itself."""
    parts = 20
    size = pages(4096 + PART * parts)
    store = opened(tmp_path, limit_bytes=size * 3 // 2)
    for number in range(4):
        assert dump(store, [make_block(number, parts=parts)]) == [True]
        assert there(store, range(4)) == [number]
    store.close()


def test_a_block_that_is_open_is_read_to_its_end_though_it_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, limit_bytes=4 * FILE, eviction="lru")
    block = make_block(0)
    dump(store, [block])
    evicted: list[bool] = []
    touch = store._touch

    def evict_meanwhile(*args: object) -> None:
        dump(store, [make_block(number) for number in range(1, 10)])
        evicted.append(there(store, range(1)) == [])
        touch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("kvloom.store.posix.read_header", during(evict_meanwhile, store))
    done, loaded = load(store, [block[0].key], [SIZE], [None])
    assert evicted == [True]
    assert (done, loaded) == ([True], [bytes(block[1])])
    store.close()


def during(work: Callable[..., None], store: Posix) -> Callable[..., object]:
    """``read_header`` with other work done between it and the reading of the payload."""
    from kvloom.store.block_file import read_header

    def read(descriptor: int, namespace: str, key: bytes) -> object:
        stored = read_header(descriptor, namespace, key)
        work(descriptor, os.fstat(descriptor))
        return stored

    return read


def test_what_a_faster_stage_serves_counts_as_used_on_disk(tmp_path: Path) -> None:
    """Else the most used blocks, which memory serves, would be the first to go from the disk."""
    disk = opened(tmp_path, limit_bytes=10 * FILE, eviction="lru")
    store = Pipeline([Cache(NAMESPACE, 100 * SIZE, threads=1), disk])
    now = time.time()
    for number in range(9):
        dump(store, [make_block(number)])
        key = make_block(number)[0].key.hex()
        os.utime(tmp_path / NAMESPACE / key[:2] / f"{key}.kv", (now - 100, now - 100 + number))
    load(store, [make_block(0)[0].key], [SIZE], [None])
    disk._writers.close(10)  # what was queued is done by then
    path = next(tmp_path.rglob(f"{make_block(0)[0].key.hex()}.kv"))
    assert path.stat().st_atime > now - 1
    store.close()


def test_listing_and_indexing_are_no_use(tmp_path: Path) -> None:
    """Else every engine's start would make all blocks look used."""
    store = opened(tmp_path)
    write_at(store, tmp_path, 1, time.time() - 90_000)  # relatime: older than a day
    path = next(tmp_path.rglob("*.kv"))
    before = path.stat().st_atime_ns
    assert len(list(store.headers())) == 1
    assert len(store.watch().poll().added) == 1
    assert path.stat().st_atime_ns == before
    store.close()


def test_blocks_are_gone_after_their_time(tmp_path: Path) -> None:
    now = time.time()
    store = opened(tmp_path)  # keeps them, whatever their time
    write_at(store, tmp_path, 1, now - 1800)
    write_at(store, tmp_path, 2, now - 3610)
    use(tmp_path, 2, now)
    store.close()
    store = opened(tmp_path, ttl_s=3600)
    assert there(store, range(4)) == [1], "used or not"
    keys = [make_block(number)[0].key for number in (1, 2)]
    assert load(store, keys, [SIZE] * 2, [None] * 2)[0] == [True, False]
    assert dump(store, [make_block(2)]) == [True], "it can be stored anew"
    assert there(store, range(4)) == [1, 2]
    store.close()


def test_expired_blocks_are_removed_by_a_store_that_does_nothing_else(tmp_path: Path) -> None:
    store = opened(tmp_path, ttl_s=1)
    dump(store, [make_block(1)])
    ends = time.monotonic() + 20
    while list(tmp_path.rglob("*.kv")) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not list(tmp_path.rglob("*.kv"))
    store.close()  # the sweep is counted when it ends
    assert store.stats()["posix.expired"] == 1


def test_blocks_out_of_the_future_expire_and_are_evicted_too(tmp_path: Path) -> None:
    """A clock that was set back must not make blocks that stay for ever."""
    store = opened(tmp_path)
    write_at(store, tmp_path, 1, time.time() + 1e6)
    use(tmp_path, 1, time.time() + 2e6)
    Janitor(tmp_path, None, "lru", ttl_s=1000).sweep()
    stat = next(tmp_path.rglob("*.kv")).stat()
    assert stat.st_mtime <= time.time()
    assert stat.st_atime <= time.time()
    store.close()


def test_memory_forgets_after_the_time_too() -> None:
    cache = Cache(NAMESPACE, limit_bytes=10 * SIZE, threads=1, ttl_s=3600)
    old = make_block(1)  # made in 1970
    dump(cache, [old])
    assert cache.lookup([old[0].key]) == [False]
    assert load(cache, [old[0].key], [SIZE], [None])[0] == [False]
    assert cache.stats()["cache.bytes"] == 0
    cache.close()


def test_a_held_lock_costs_a_save_not_the_engine(tmp_path: Path) -> None:
    """An engine that is stopped in the middle of a count must not stop the others."""
    import fcntl

    store = opened(tmp_path, limit_bytes=10 * FILE)
    dump(store, [make_block(1)])
    with (tmp_path / LIMITS / "usage").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        assert dump(store, [make_block(2)]) == [False]
        assert time.monotonic() - began < 10
        assert load(store, [make_block(1)[0].key], [SIZE], [None])[0] == [True]
    assert dump(store, [make_block(2)]) == [True]
    store.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_rubbish_goes_before_blocks(tmp_path: Path, policy: str) -> None:
    # Without a limit: a first sweep that counts a block twice would make room by evicting another.
    store = opened(tmp_path)
    assert all(dump(store, [make_block(number) for number in range(9)]))
    store.close()  # nobody else sweeps
    aside = tmp_path / NAMESPACE / "quarantine"
    aside.mkdir()
    (aside / f"{'0' * 32}.1").write_bytes(bytes(FILE))
    abandoned = tmp_path / NAMESPACE / "00"
    abandoned.mkdir(exist_ok=True)
    name = f"{'0' * 32}.0badbeef.1.{FILE}.0.tmp"
    (abandoned / name).write_bytes(b"half")
    os.utime(abandoned / name, (1, 1))
    swept = Janitor(tmp_path, 10 * FILE, policy, None).sweep()
    assert (swept.stale, swept.quarantined) == (1, 1)
    assert swept.blocks == len(list(tmp_path.rglob("*.kv")))
    assert swept.size == Listing(tmp_path).size
