"""The test suite that every stage and pipeline passes, third-party ones too (spec row S3).

    class TestMyStage(StoreContract):
        def make_store(self, folder: Path, namespace: str) -> Store:
            return MyStage(namespace, ...)

Needs pytest, which the ``dev`` extra brings.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvloom.store.base import BlockHeader, PayloadSlice, Store

NAMESPACE = hashlib.blake2b(b"contract", digest_size=16).hexdigest()
OTHER_NAMESPACE = hashlib.blake2b(b"other", digest_size=16).hexdigest()
DEADLINE_S = 30.0
PART = 5000
PARTS = 3

Block = tuple[BlockHeader, memoryview]


def make_block(number: int, namespace: str = NAMESPACE, parts: int = PARTS) -> Block:
    """A block of its own content; ``number`` decides all of it.

    The second part is one that a compressor makes smaller, the others are noise.
    """
    random = np.random.default_rng(number)
    digest = [hashlib.blake2b(b"%d %d" % (number, i), digest_size=16).digest() for i in range(3)]
    header = BlockHeader(
        namespace=namespace,
        key=digest[0],
        parent=digest[1],
        scope=digest[2],
        position=64 * number,
        generation=0,
        token_ids=random.integers(0, 50_000, 64, dtype=np.int32),
        part_sizes=(PART,) * parts,
        created_ns=1_000 + number,
    )
    payload = random.integers(0, 256, header.payload_size, dtype=np.uint8)
    payload[PART : 2 * PART] &= 3
    return header, memoryview(payload.tobytes())


def assert_same_header(left: BlockHeader, right: BlockHeader) -> None:
    assert np.array_equal(left.token_ids, right.token_ids)
    for name in ("namespace", "key", "parent", "scope", "position", "generation", "part_sizes"):
        assert getattr(left, name) == getattr(right, name)


def dump(store: Store, blocks: list[Block]) -> list[bool]:
    return store.dump([h for h, _ in blocks], [p for _, p in blocks]).wait(DEADLINE_S)


def load(
    store: Store, keys: list[bytes], sizes: list[int], slices: list[PayloadSlice | None]
) -> tuple[list[bool], list[bytes]]:
    buffers = [memoryview(bytearray(size)) for size in sizes]
    done = store.load(keys, slices, buffers).wait(DEADLINE_S)
    return done, [bytes(buffer) for buffer in buffers]


class StoreContract:
    """Override ``make_store``."""

    def make_store(self, folder: Path, namespace: str) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = self.make_store(tmp_path, NAMESPACE)
        yield store
        store.close()

    def test_what_was_dumped_is_loaded_byte_for_byte(self, store: Store) -> None:
        blocks = [make_block(i) for i in range(5)]
        assert dump(store, blocks) == [True] * 5
        keys = [header.key for header, _ in blocks]
        done, loaded = load(store, keys, [len(p) for _, p in blocks], [None] * 5)
        assert done == [True] * 5
        assert loaded == [bytes(payload) for _, payload in blocks]

    def test_any_slice_is_that_part_of_the_payload(self, store: Store) -> None:
        header, payload = make_block(1)
        dump(store, [(header, payload)])
        spans = [(0, 1), (PART - 1, 2), (PART, PART), (17, 2 * PART), (3 * PART - 1, 1)]
        for offset, length in spans:
            done, loaded = load(store, [header.key], [length], [PayloadSlice(offset, length)])
            assert done == [True]
            assert loaded == [bytes(payload[offset : offset + length])]

    def test_a_missing_block_is_a_miss_beside_others_that_are_there(self, store: Store) -> None:
        there, missing = make_block(1), make_block(2)
        dump(store, [there])
        keys = [missing[0].key, there[0].key, missing[0].key]
        done, loaded = load(store, keys, [len(there[1])] * 3, [None] * 3)
        assert done == [False, True, False]
        assert loaded[1] == bytes(there[1])

    def test_a_buffer_of_the_wrong_size_is_a_miss(self, store: Store) -> None:
        block = make_block(1)
        dump(store, [block])
        done, _ = load(store, [block[0].key], [len(block[1]) - 1], [None])
        assert done == [False]

    def test_a_slice_past_the_end_is_a_miss(self, store: Store) -> None:
        block = make_block(1)
        dump(store, [block])
        done, _ = load(store, [block[0].key], [10], [PayloadSlice(len(block[1]) - 5, 10)])
        assert done == [False]

    def test_lookup_tells_each_and_lookup_prefix_stops_at_the_first_gap(self, store: Store) -> None:
        blocks = [make_block(i) for i in range(4)]
        dump(store, [blocks[0], blocks[1], blocks[3]])
        keys = [header.key for header, _ in blocks]
        assert store.lookup(keys) == [True, True, False, True]
        assert store.lookup_prefix(keys) == 2
        assert store.lookup_prefix(keys[:2]) == 2
        assert store.lookup([]) == []

    def test_a_second_dump_of_a_key_is_done_and_changes_nothing(self, store: Store) -> None:
        header, payload = make_block(1)
        assert dump(store, [(header, payload)]) == [True]
        assert dump(store, [(header, payload)]) == [True]
        done, loaded = load(store, [header.key], [len(payload)], [None])
        assert (done, loaded) == ([True], [bytes(payload)])
        assert len(list(store.headers())) == 1

    def test_threads_that_dump_one_key_at_once_leave_one_whole_block(self, store: Store) -> None:
        block = make_block(1)
        outcomes: list[bool] = []
        threads = [
            threading.Thread(target=lambda: outcomes.extend(dump(store, [block]))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == [True] * 8
        done, loaded = load(store, [block[0].key], [len(block[1])], [None])
        assert (done, loaded) == ([True], [bytes(block[1])])

    def test_blocks_come_as_they_are_done_each_once(self, store: Store) -> None:
        blocks = [make_block(i) for i in range(20)]
        dump(store, blocks)
        keys = [header.key for header, _ in blocks] + [make_block(99)[0].key]
        buffers = [memoryview(bytearray(PARTS * PART)) for _ in keys]
        seen = dict(store.load(keys, [None] * len(keys), buffers).as_completed(DEADLINE_S))
        assert seen == {**dict.fromkeys(range(20), True), 20: False}
        assert [bytes(b) for b in buffers[:20]] == [bytes(payload) for _, payload in blocks]

    def test_blocks_are_reported_also_where_check_saw_them_first(self, store: Store) -> None:
        """A caller that must not wait asks ``check`` first, then for the entries."""
        blocks = [make_block(i) for i in range(5)]
        dump(store, blocks)
        keys = [header.key for header, _ in blocks] + [make_block(99)[0].key]
        buffers = [memoryview(bytearray(PARTS * PART)) for _ in keys]
        task = store.load(keys, [None] * len(keys), buffers)
        ends = time.monotonic() + DEADLINE_S
        while not task.check() and time.monotonic() < ends:
            time.sleep(0.001)
        assert dict(task.as_completed(0.0)) == {**dict.fromkeys(range(5), True), 5: False}

    def test_check_becomes_true_and_wait_agrees(self, store: Store) -> None:
        block = make_block(1)
        dump(store, [block])
        task = store.load([block[0].key], [None], [memoryview(bytearray(len(block[1])))])
        assert task.wait(DEADLINE_S) == [True]
        assert task.check()
        assert task.wait(0.0) == [True], "a second wait tells the same"

    def test_after_the_deadline_nobody_writes_into_the_buffers(self, store: Store) -> None:
        blocks = [make_block(i) for i in range(30)]
        dump(store, blocks)
        buffers = [memoryview(bytearray(PARTS * PART)) for _ in blocks]
        task = store.load([h.key for h, _ in blocks], [None] * 30, buffers)
        done = task.wait(0.0)
        for buffer in buffers:
            buffer[:] = b"\x55" * len(buffer)
        assert task.wait(1.0) == done
        assert all(bytes(buffer) == b"\x55" * len(buffer) for buffer in buffers)

    def test_deleted_blocks_are_gone(self, store: Store) -> None:
        blocks = [make_block(i) for i in range(3)]
        dump(store, blocks)
        keys = [header.key for header, _ in blocks]
        assert store.delete([keys[0], keys[2], make_block(9)[0].key]) == 2
        assert store.lookup(keys) == [False, True, False]
        done, _ = load(store, keys[:1], [PARTS * PART], [None])
        assert done == [False]

    def test_headers_say_everything(self, store: Store) -> None:
        blocks = {header.key: header for header, _ in (make_block(i) for i in range(4))}
        dump(store, [make_block(i) for i in range(4)])
        found = {header.key: header for header in store.headers()}
        assert found.keys() == blocks.keys()
        for key, header in found.items():
            assert_same_header(header, blocks[key])
            one = store.header(key)
            assert one is not None
            assert_same_header(one, header)
        assert store.header(make_block(9)[0].key) is None

    def test_a_watcher_sees_what_is_there_what_comes_and_what_goes(self, store: Store) -> None:
        first, second = make_block(1), make_block(2)
        dump(store, [first])
        watcher = store.watch()
        known: set[bytes] = set()

        def follow_until(goal: set[bytes]) -> None:
            for _ in range(200):
                changes = watcher.poll(timeout_s=0.05)
                known.update(header.key for header in changes.added)
                known.difference_update(changes.removed)
                if known == goal:
                    return
            pytest.fail(f"{len(known)} blocks known, {len(goal)} there")

        follow_until({first[0].key})
        dump(store, [second])
        follow_until({first[0].key, second[0].key})
        store.delete([first[0].key])
        follow_until({second[0].key})

    def test_a_block_of_another_namespace_is_not_taken(self, store: Store) -> None:
        header, payload = make_block(1, namespace=OTHER_NAMESPACE)
        assert dump(store, [(header, payload)]) == [False]
        assert store.lookup([header.key]) == [False]

    def test_namespaces_do_not_see_each_other(self, store: Store, tmp_path: Path) -> None:
        block = make_block(1)
        dump(store, [block])
        other = self.make_store(tmp_path, OTHER_NAMESPACE)
        try:
            assert other.lookup([block[0].key]) == [False]
            assert list(other.headers()) == []
        finally:
            other.close()

    def test_a_payload_that_is_not_its_parts_is_dropped(self, store: Store) -> None:
        header, payload = make_block(1)
        assert dump(store, [(header, payload[:-1])]) == [False]
        assert store.lookup([header.key]) == [False]

    def test_prefetch_of_anything_is_harmless(self, store: Store) -> None:
        block = make_block(1)
        dump(store, [block])
        store.prefetch([block[0].key, make_block(2)[0].key])
        done, loaded = load(store, [block[0].key], [len(block[1])], [None])
        assert (done, loaded) == ([True], [bytes(block[1])])

    def test_stats_are_numbers_by_stage(self, store: Store) -> None:
        dump(store, [make_block(1)])
        stats = store.stats()
        assert stats
        assert all("." in name and value >= 0 for name, value in stats.items())

    def test_a_closed_store_only_misses(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path, NAMESPACE)
        block = make_block(1)
        dump(store, [block])
        store.close()
        store.close()
        assert dump(store, [make_block(2)]) == [False]
        done, _ = load(store, [block[0].key], [len(block[1])], [None])
        assert done == [False]
