"""Spec rows H6-H10: every backend keeps the one contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from kvloom.hf3fs.metadata.base import Limits, MetadataStore, StorageError, UnknownNamespaceError
from kvloom.hf3fs.metadata.contract import LONG, NS, MetadataContract, names, save
from kvloom.hf3fs.metadata.embedded import Embedded
from tests.hf3fs.redis_server import RedisServer, needs_redis
from tests.hf3fs.service import running


class TestEmbedded(MetadataContract):
    def make_store(self, folder: Path, limits: Limits) -> MetadataStore:
        return Embedded(folder / "metadata.db", limits)


class TestEmbeddedOnDisk(MetadataContract):
    def make_store(self, folder: Path, limits: Limits) -> MetadataStore:
        return Embedded(folder / "metadata.db", limits, durability="disk")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


def redis_store(url: str, limits: Limits) -> MetadataStore:
    module = pytest.importorskip("kvloom.hf3fs.metadata.redis", reason="needs the redis extra")
    store: MetadataStore = module.RedisStore(url, limits)
    return store


@needs_redis
class TestRedis(MetadataContract):
    @pytest.fixture(autouse=True)
    def _server(self, redis: RedisServer) -> None:
        self.redis = redis

    def make_store(self, folder: Path, limits: Limits) -> MetadataStore:
        return redis_store(self.redis.url, limits)


@needs_redis
def test_a_killed_redis_comes_back_with_all_it_answered(redis: RedisServer) -> None:
    async def scenario() -> None:
        store = redis_store(redis.url, LONG)
        await store.initialize(NS, 0, 64, 1)
        where = await save(store, names(20))
        redis.kill()
        with pytest.raises(StorageError, match="Redis"):
            await store.check()
        with pytest.raises(StorageError, match="Redis"):
            await store.exists(NS, names(20))
        redis.start()
        assert await store.locations(NS, 0, names(20)) == where
        audit = await store.audit(NS)
        assert (audit.confirmed, audit.leaked, audit.twice) == (20, 0, 0)
        await store.close()

    anyio.run(scenario)


@needs_redis
def test_two_services_on_one_redis_are_one(redis: RedisServer, tmp_path: Path) -> None:
    options = "--redis", redis.url
    with running(tmp_path / "a", *options) as a, running(tmp_path / "b", *options) as b:
        path = "/v2/namespaces/ns"
        a.post(f"{path}/ranks/0/initialize", {"num_pages": 8, "world_size": 1}).raise_for_status()
        body = {"rank": 0, "writer": "w", "keys": ["k"]}
        ((status, page, generation),) = a.post(f"{path}/allocate", body).json()["results"]
        assert status == "write"
        other = b.post(f"{path}/allocate", {**body, "writer": "v"}).json()["results"]
        assert other[0][0] == "busy"
        a.kill()
        body = {"rank": 0, "writer": "w", "written": [["k", page, generation]]}
        assert b.post(f"{path}/confirm", body).json() == {"confirmed": [True]}
        found = b.post(f"{path}/locations", {"rank": 0, "keys": ["k", "no"]}).json()
        assert found["locations"] == [[page, generation], None]


def test_after_a_power_cut_no_page_is_given_for_a_lease(tmp_path: Path) -> None:
    """Its last allocations may be forgotten while their writers write on."""

    async def scenario() -> None:
        limits = Limits(write_lease_s=0.3, read_lease_s=0.1)
        store = Embedded(tmp_path / "state.db", limits)
        await store.initialize(NS, 0, 8, 1)
        store._journal.set_fact("boot", "before the power cut")
        await store.close()
        store = Embedded(tmp_path / "state.db", limits)
        assert (await store.allocate(NS, 0, "w", ["k"]))[0].status == "full"
        await anyio.sleep(0.35)
        await save(store, ["k"])
        await store.close()

    anyio.run(scenario)


def test_an_unknown_namespace_is_told_as_such(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = Embedded(tmp_path / "state.db", LONG)
        with pytest.raises(UnknownNamespaceError, match="initialize a rank first"):
            await store.stats("nobody")
        await store.close()

    anyio.run(scenario)
