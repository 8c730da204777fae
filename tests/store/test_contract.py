"""Spec rows S1-S3: every stage and pipeline keeps the one contract, a third party's stage too."""

from __future__ import annotations

import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvloom.config import ConfigError, KvloomConfig
from kvloom.store import registry
from kvloom.store.base import Store
from kvloom.store.cache import Cache
from kvloom.store.contract import NAMESPACE, Block, StoreContract, dump, load, make_block
from kvloom.store.pipeline import Pipeline
from kvloom.store.posix import Posix


class ThirdParty(Cache):
    """A stage that somebody else brings."""


def third_party(namespace: str, config: KvloomConfig) -> Store:
    return ThirdParty(namespace, config.cache_bytes, threads=1)


class TestCache(StoreContract):
    def make_store(self, folder: Path, namespace: str) -> Store:
        return Cache(namespace, limit_bytes=1 << 24, threads=2)


class TestPosix(StoreContract):
    def make_store(self, folder: Path, namespace: str) -> Store:
        return Posix(namespace, [folder / "store"], "none", threads=2)


class TestPosixOnThreeDirectories(StoreContract):
    def make_store(self, folder: Path, namespace: str) -> Store:
        return Posix(namespace, [folder / name for name in "abc"], "full", threads=2)


class TestCompressedPosix(StoreContract):
    def make_store(self, folder: Path, namespace: str) -> Store:
        return Posix(namespace, [folder / "store"], "none", threads=2, compression="zstd")


class TestPipeline(StoreContract):
    def make_store(self, folder: Path, namespace: str) -> Store:
        config = KvloomConfig.from_extra({"storage_backends": str(folder)})
        return registry.open_store(namespace, config)


class TestPipelineWithTinyCache(StoreContract):
    """The fast stage holds next to nothing: everything falls through or is evicted."""

    def make_store(self, folder: Path, namespace: str) -> Store:
        config = KvloomConfig.from_extra({"storage_backends": str(folder), "cache_bytes": 20_000})
        return registry.open_store(namespace, config)


class TestThirdPartyStage(StoreContract):
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = EntryPoint("Theirs", f"{__name__}:third_party", "kvloom.stages")
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry])

    def make_store(self, folder: Path, namespace: str) -> Store:
        extra = {"store_pipeline": "Theirs|Posix", "storage_backends": str(folder)}
        return registry.open_store(namespace, KvloomConfig.from_extra(extra))


@pytest.mark.parametrize(
    ("text", "kind"), [("Cache", Cache), ("Posix", Posix), ("Cache | Posix", Pipeline)]
)
def test_pipelines_by_text(tmp_path: Path, text: str, kind: type[Store]) -> None:
    extra = {"store_pipeline": text, "storage_backends": str(tmp_path)}
    store = registry.open_store(NAMESPACE, KvloomConfig.from_extra(extra))
    assert type(store) is kind
    store.close()


@pytest.mark.parametrize(("text", "near"), [("Cash|Posix", "Cache"), ("Cache|posix", "Posix")])
def test_an_unknown_stage_is_answered_with_the_known_ones(text: str, near: str) -> None:
    config = KvloomConfig.from_extra({"store_pipeline": text})
    with pytest.raises(ConfigError, match=f"known are Cache, Posix.*{near}"):
        registry.open_store(NAMESPACE, config)


def test_one_process_shares_a_store_until_its_last_user_gives_it_up(tmp_path: Path) -> None:
    config = KvloomConfig.from_extra({"storage_backends": str(tmp_path)})
    first = registry.acquire_store(NAMESPACE, config)
    second = registry.acquire_store(NAMESPACE, config)
    assert first is second
    registry.release_store(first)
    block = make_block(1)
    assert dump(second, [block]) == [True]
    registry.release_store(second)
    assert dump(second, [block]) == [False]
    assert registry.acquire_store(NAMESPACE, config) is not second


def opened_over(folder: Path, block: Block) -> Pipeline:
    """A pipeline that has a block in its files only, by another one."""
    config = KvloomConfig.from_extra({"storage_backends": str(folder)})
    writer = registry.open_store(NAMESPACE, config)
    dump(writer, [block])
    writer.close()
    store = registry.open_store(NAMESPACE, config)
    assert isinstance(store, Pipeline)
    return store


def test_prefetch_brings_a_block_up_and_loads_do_not_need_the_file_then(tmp_path: Path) -> None:
    block = make_block(1)
    store = opened_over(tmp_path, block)
    fast = store._stages[0]
    assert fast.lookup([block[0].key]) == [False]
    store.prefetch([block[0].key])
    store._promotions.close(10)
    assert fast.lookup([block[0].key]) == [True]
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    done, loaded = load(store, [block[0].key], [len(block[1])], [None])
    assert (done, loaded) == ([True], [bytes(block[1])])


@pytest.mark.parametrize("stage", [0, 1], ids=["written", "read"])
def test_what_is_deleted_while_it_is_brought_up_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    block = make_block(1)
    store = opened_over(tmp_path, block)
    hook = ("dump", "load")[stage]
    real = getattr(store._stages[stage], hook)

    def late(*args: object) -> object:
        if stage == 0:
            assert store.delete([block[0].key]) == 1
            return real(*args)
        task = real(*args)
        task.wait(10)
        assert store.delete([block[0].key]) == 1
        return task

    monkeypatch.setattr(store._stages[stage], hook, late)
    store.prefetch([block[0].key])
    store._promotions.close(10)
    assert store.lookup([block[0].key]) == [False]
    store.close()


def test_a_stage_that_fails_is_followed_by_the_next_also_where_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = KvloomConfig.from_extra({"storage_backends": str(tmp_path)})
    store = registry.open_store(NAMESPACE, config)
    assert isinstance(store, Pipeline)
    block = make_block(1)
    dump(store, [block])
    fast = store._stages[0]
    fast.delete([block[0].key])
    monkeypatch.setattr(fast, "lookup", lambda keys: [True] * len(keys))
    buffer = memoryview(bytearray(len(block[1])))
    task = store.load([block[0].key], [None], [buffer])
    ends = time.monotonic() + 10
    while not task.check():
        assert time.monotonic() < ends
        time.sleep(0.001)
    assert list(task.as_completed(0.0)) == [(0, True)]
    assert bytes(buffer) == bytes(block[1])
    store.close()
