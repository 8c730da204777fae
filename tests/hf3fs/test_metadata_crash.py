"""Spec rows H8, H10: killed at any instant, the service loses nothing it answered.

``KVLOOM_TEST_KILLS=50`` runs the campaign at full length (some minutes); 4 kills otherwise.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import threading
import time
from pathlib import Path

import anyio
import pytest

from kvloom.hf3fs.metadata.base import Limits, Location, Status, StorageError, Written
from kvloom.hf3fs.metadata.client import MetadataClient, NoAnswer
from kvloom.hf3fs.metadata.embedded import Embedded
from tests.hf3fs.service import ServiceProcess, running

KILLS = int(os.environ.get("KVLOOM_TEST_KILLS", "4"))
CLIENTS = 16
BATCH = 16
PAGES = 1_000_000  # nothing is evicted
PAUSE_S = 0.01
LEASE_S = 4.0


class Writer(threading.Thread):
    """Writes batches of keys for ever; now and then it "dies" between allocate and confirm."""

    def __init__(self, number: int, url: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.confirmed: dict[str, Location] = {}
        self.granted: list[Location] = []
        self.abandoned = 0
        self._random = random.Random(number)
        self._number = number
        self._stop_ = stop
        self._client = MetadataClient(
            url, "ns", f"writer-{number}", lookup_timeout_s=5.0, probe_interval_s=0.05
        )

    def run(self) -> None:
        batch = 0
        while not self._stop_.is_set():
            batch += 1
            time.sleep(PAUSE_S)
            keys = [f"{self._number}-{batch}-{i}" for i in range(BATCH)]
            grants = self._client.allocate(0, keys)
            while isinstance(grants, NoAnswer) and not self._stop_.is_set():
                time.sleep(0.02)
                grants = self._client.allocate(0, keys)
            if isinstance(grants, NoAnswer):
                break
            assert {grant.status for grant in grants} == {Status.WRITE}
            self.granted += [Location(grant.page, grant.generation) for grant in grants]
            if self._random.random() < 0.05:
                self.abandoned += 1
                continue
            written = [Written(k, g.page, g.generation) for k, g in zip(keys, grants, strict=True)]
            done = self._client.confirm(0, written)
            while isinstance(done, NoAnswer) and not self._stop_.is_set():
                time.sleep(0.02)
                done = self._client.confirm(0, written)
            if isinstance(done, NoAnswer):
                break
            for item, kept in zip(written, done, strict=True):
                if kept:
                    self.confirmed[item.key] = Location(item.page, item.generation)
        self._client.close()


@pytest.mark.timeout(1800)
def test_killed_under_writing_clients(tmp_path: Path) -> None:
    chance = random.Random(KILLS)
    with running(tmp_path / "state.db", "--write-lease", str(LEASE_S)) as service:
        service.post("/v2/namespaces/ns/ranks/0/initialize", {"num_pages": PAGES, "world_size": 1})
        stop = threading.Event()
        writers = [Writer(number, service.url, stop) for number in range(CLIENTS)]
        for writer in writers:
            writer.start()
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.05, 1.0))
            service.kill()
            service.start()
        time.sleep(0.5)
        service.kill()
        stop.set()
        for writer in writers:
            writer.join(30)
            assert not writer.is_alive()
        service.start()
        check(service, writers)


def check(service: ServiceProcess, writers: list[Writer]) -> None:
    confirmed: dict[str, Location] = {}
    for writer in writers:
        confirmed |= writer.confirmed
    granted = [location for writer in writers for location in writer.granted]
    assert len(confirmed) > CLIENTS * BATCH
    assert sum(writer.abandoned for writer in writers) > 0
    # Nothing that was confirmed is lost or moved.
    client = MetadataClient(service.url, "ns", "checker", lookup_timeout_s=30.0, timeout_s=60.0)
    keys = list(confirmed)
    for first in range(0, len(keys), 10_000):
        part = keys[first : first + 10_000]
        assert client.locations(0, part) == [confirmed[key] for key in part]
    # No page is of two keys, no generation was given twice.
    assert len({location.page for location in confirmed.values()}) == len(confirmed)
    generations: dict[int, int] = {}
    for location in granted:
        assert generations.setdefault(location.generation, location.page) == location.page
    # What the dead left is free again when the leases have ended.
    end = time.monotonic() + 3 * LEASE_S
    audit = client.audit()
    while not isinstance(audit, NoAnswer) and audit.allocated and time.monotonic() < end:
        time.sleep(0.2)
        audit = client.audit()
    assert not isinstance(audit, NoAnswer)
    assert (audit.allocated, audit.leaked, audit.twice, audit.cooling) == (0, 0, 0, 0)
    assert audit.free + audit.confirmed == PAGES
    assert audit.confirmed >= len(confirmed)
    print(f"\n{KILLS} kills, {len(granted)} pages given, {len(confirmed)} confirmed: {audit}")


@pytest.mark.parametrize("share", [i / 12 for i in range(13)])
def test_a_journal_cut_anywhere_is_an_earlier_state(tmp_path: Path, share: float) -> None:
    """What a power cut leaves of the last writes: any length of the write-ahead log."""
    limits = Limits(write_lease_s=0.01, read_lease_s=0.01)
    path, copy = tmp_path / "state.db", tmp_path / "copy.db"

    async def write() -> None:
        store = Embedded(path, limits)
        await store.initialize("ns", 0, 64, 1)
        for i in range(60):
            keys = [f"{i}-{j}" for j in range(8)]
            grants = await store.allocate("ns", 0, "w", keys)
            await store.confirm(
                "ns",
                0,
                "w",
                [Written(k, g.page, g.generation) for k, g in zip(keys, grants, strict=True)],
            )
            await store.delete("ns", [f"{i}-0"])
        shutil.copy(path, copy)
        log = Path(f"{path}-wal").read_bytes()
        Path(f"{copy}-wal").write_bytes(log[: int(len(log) * share)])
        await store.close()

    async def check_copy() -> None:
        store = Embedded(copy, limits)
        await store.initialize("ns", 0, 64, 1)
        await anyio.sleep(0.02)
        await store.sweep()
        audit = await store.audit("ns")
        assert (audit.allocated, audit.leaked, audit.twice) == (0, 0, 0)
        assert audit.free + audit.confirmed + audit.cooling == 64
        grants = await store.allocate("ns", 0, "w", [f"new{i}" for i in range(8)])
        assert {grant.status for grant in grants} == {Status.WRITE}
        await store.close()

    anyio.run(write)
    anyio.run(check_copy)


def test_a_journal_stays_short_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written anew bit by bit; whatever is left of it after each bit is the whole state."""
    monkeypatch.setattr("kvloom.hf3fs.metadata.embedded._SLACK_PAGES", 50)
    monkeypatch.setattr("kvloom.hf3fs.metadata.embedded._CHUNK_PAGES", 8)
    limits = Limits(write_lease_s=60.0, read_lease_s=0.0)
    path, copy = tmp_path / "state.db", tmp_path / "copy.db"

    async def write() -> None:
        store = Embedded(path, limits)
        for rank in range(2):
            await store.initialize("ns", rank, 64, 2)
        await store.initialize("other", 0, 16, 1)
        chance = random.Random(7)
        for i in range(400):
            keys = [f"{i}-{j}" for j in range(chance.randint(1, 6))]
            for rank in range(chance.choice((1, 2, 2, 2))):
                grants = await store.allocate("ns", rank, "w", keys)
                items = [
                    Written(k, g.page, g.generation)
                    for k, g in zip(keys, grants, strict=True)
                    if g.status == Status.WRITE
                ]
                await store.confirm("ns", rank, "w", items[: chance.randint(0, 9)])
                await store.release("ns", rank, "w", items)
            await store.delete("ns", [f"{chance.randint(0, i)}-0"])
            if i % 150 == 149:
                await store.clear("other")
                await store.initialize("other", 0, 16, 1)
            if i % 20 == 0:
                await compare(store)
        with sqlite3.connect(f"file:{copy}?mode=ro", uri=True) as db:
            pages, entries = db.execute("select sum(pages), count(*) from entries").fetchone()
        assert pages < 1000
        assert entries < 400
        await store.close()

    async def compare(store: Embedded) -> None:
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
        other = Embedded(copy, limits)
        assert await other.namespaces() == await store.namespaces()
        keys = [f"{i}-{j}" for i in range(400) for j in range(6)]
        for rank in range(2):
            assert await other.locations("ns", rank, keys) == await store.locations(
                "ns", rank, keys
            )
        assert await other.audit("ns") == await store.audit("ns")
        await other.close()

    anyio.run(write)


def test_a_state_file_has_one_service(tmp_path: Path) -> None:
    with running(tmp_path / "state.db"), pytest.raises(StorageError, match="is one running"):
        Embedded(tmp_path / "state.db", Limits())


def test_a_file_that_is_no_journal_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"precious" * 1000)
    with pytest.raises(StorageError, match=r"state\.db"):
        Embedded(path, Limits())
    assert path.read_bytes() == b"precious" * 1000


def test_while_changes_can_not_be_stored_lookups_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = Embedded(tmp_path / "state.db", Limits())
        await store.initialize("ns", 0, 64, 1)
        (grant,) = await store.allocate("ns", 0, "w", ["k"])
        item = Written("k", grant.page, grant.generation)
        assert await store.confirm("ns", 0, "w", [item]) == [True]
        append, failing = store._journal.append, True

        def sometimes(*entry: int | bytes) -> None:
            if failing:
                raise sqlite3.OperationalError("disk full")
            append(*entry)  # type: ignore[arg-type]

        store._journal.append = sometimes  # type: ignore[method-assign,assignment]
        with pytest.raises(StorageError, match="disk full"):
            await store.allocate("ns", 0, "w", ["a"])
        with pytest.raises(StorageError, match="disk full"):
            await store.check()
        assert await store.exists("ns", ["k"]) == [True]
        failing = False
        with anyio.fail_after(10):
            while True:
                try:
                    await store.check()
                    break
                except StorageError:
                    await anyio.sleep(0.05)
        (again,) = await store.allocate("ns", 0, "w", ["a"])
        assert again.status == Status.WRITE
        await store.close()
        store = Embedded(tmp_path / "state.db", Limits())
        assert await store.exists("ns", ["k"]) == [True]
        assert (await store.audit("ns")).allocated == 1
        await store.close()

    anyio.run(scenario)
