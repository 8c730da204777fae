"""kvloom's store as a secondary tier of vLLM's own offloading, by vLLM's own classes."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvloom.config import ConfigError
from kvloom.store.block_file import Scratch
from kvloom.vllm.offload_tier import tier_namespace

from .test_processes import PROMPT, answers

CHUNK = 600 * 1024  # two parts and a rest
CHUNKS = 8
DEADLINE_S = 20.0


def tier_config(store: Path, **more: Any) -> dict[str, Any]:
    return {
        "type": "KvloomTier",
        "module_path": "kvloom.vllm.offload_tier",
        "storage_backends": str(store),
        **more,
    }


def offloading_config(store: Path, **more: Any) -> OffloadingConfig:
    extra = {"cpu_bytes_to_use": CHUNKS * CHUNK, "secondary_tiers": [tier_config(store, **more)]}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("a", "b"), 0),),
        worker_kv_bytes_per_block=CHUNK,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )


@pytest.fixture(scope="module")
def vllm_config(model: Path) -> VllmConfig:
    return EngineArgs(str(model), dtype="float32", enforce_eager=True).create_engine_config()


class Offloading:
    """vLLM's tiering manager over its CPU tier and ours; the test is the GPU."""

    def __init__(self, vllm_config: VllmConfig, store: Path, **more: Any) -> None:
        self.spec = TieringOffloadingSpec(offloading_config(store, **more))
        with set_current_vllm_config(vllm_config):
            self.manager: Any = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self.requests = 0

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def until(self, true: Callable[[], bool]) -> bool:
        ends = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            if true():
                return True
            self.step()
            time.sleep(0.005)
        return False

    def request(self) -> ReqContext:
        self.requests += 1
        context = ReqContext(f"request {self.requests}")
        self.manager.on_new_request(context)
        return context

    def save(self, blocks: dict[OffloadKey, bytes]) -> None:
        context = self.request()
        output = self.manager.prepare_store(list(blocks), context)
        assert output is not None
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.row(chunk)[:] = blocks[key]
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)

    def load(self, key: OffloadKey) -> bytes | None:
        context = self.request()
        result = LookupResult.RETRY

        def settled() -> bool:
            nonlocal result
            result = self.manager.lookup(key, context)
            return result in (LookupResult.HIT, LookupResult.MISS)

        assert self.until(settled)
        found = None
        if result is LookupResult.HIT:
            (chunk,) = self.manager.prepare_load([key], context).chunk_ids
            found = bytes(self.row(chunk))
            self.manager.complete_load([key], context)
        self.manager.on_request_finished(context)
        return found

    def row(self, chunk: int) -> memoryview:
        return self.tier._chunk(int(chunk))

    def idle(self) -> bool:
        return self.until(lambda: not self.manager.has_pending_work())


@pytest.fixture
def start(vllm_config: VllmConfig, tmp_path: Path) -> Iterator[Callable[..., Offloading]]:
    started: list[Offloading] = []

    def make(**more: Any) -> Offloading:
        started.append(Offloading(vllm_config, tmp_path, **more))
        return started[-1]

    yield make
    for each in started:
        each.manager.shutdown()


def blocks(first: int, count: int) -> dict[OffloadKey, bytes]:
    return {
        make_offload_key(number.to_bytes(32, "big"), 0): np.random.default_rng(number).bytes(CHUNK)
        for number in range(first, first + count)
    }


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_restarted_engine_gets_back_what_left_the_cpu_tier(
    start: Callable[..., Offloading], compression: str
) -> None:
    saved = blocks(0, 3)
    first = start(compression=compression)
    first.save(saved)
    assert first.idle()
    second = start()
    assert [second.load(key) for key in saved] == list(saved.values())
    assert second.load(next(iter(blocks(9, 1)))) is None


def test_damaged_blocks_are_misses_and_asked_for_once(
    start: Callable[..., Offloading], tmp_path: Path
) -> None:
    saved = blocks(0, 2)
    first = start()
    first.save(saved)
    assert first.idle()
    for path in tmp_path.rglob("*.kv"):
        with path.open("r+b") as file:
            file.seek(CHUNK)
            file.write(b"harm")
    second = start()
    assert [second.load(key) for key in saved] == [None, None]
    assert second.tier._store.stats()["posix.bad"] == 2
    assert second.idle()


def test_a_load_that_hangs_is_a_miss_and_the_slot_is_not_written_any_more(
    start: Callable[..., Offloading], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = blocks(0, 1)
    (key,) = saved
    first = start()
    first.save(saved)
    assert first.idle()
    second = start(load_timeout_s=0.2)
    let = threading.Event()
    take = Scratch.take
    monkeypatch.setattr(Scratch, "take", lambda *given: (let.wait(DEADLINE_S), take(*given))[1])
    assert second.load(key) is None
    before = bytes(second.tier._memory)
    let.set()
    time.sleep(0.1)
    assert bytes(second.tier._memory) == before
    assert second.load(key) == saved[key], "it is asked for again by the next request"


def test_a_disk_that_hangs_takes_half_of_the_cpu_tier_at_most(
    start: Callable[..., Offloading], monkeypatch: pytest.MonkeyPatch
) -> None:
    let = threading.Event()
    monkeypatch.setattr("kvloom.store.posix.make_private", lambda path: let.wait(DEADLINE_S))
    running = start()
    for number in range(CHUNKS):
        running.save(blocks(number, 1))
        running.step()
    assert len(running.tier._jobs) == CHUNKS // 2
    running.save(blocks(CHUNKS, 2))
    let.set()
    assert running.idle()


def test_a_reset_waits_for_what_reads_the_cpu_tier(start: Callable[..., Offloading]) -> None:
    saved = blocks(0, 3)
    running = start()
    running.save(saved)
    running.manager.reset_cache()
    assert not running.manager.has_pending_work()
    assert [running.load(key) for key in saved] == list(saved.values())


def test_trouble_in_the_store_never_reaches_vllm(
    start: Callable[..., Offloading], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()

    def broken(*given: object) -> None:
        raise RuntimeError("broken")

    for name in ("lookup", "load", "dump", "touch"):
        monkeypatch.setattr(running.tier._store, name, broken)
    saved = blocks(0, 2)
    running.save(saved)
    running.manager.touch(list(saved), running.request())
    assert running.load(next(iter(blocks(5, 1)))) is None
    assert running.idle()


def test_everything_that_changes_bytes_is_in_the_namespace(
    vllm_config: VllmConfig, tmp_path: Path
) -> None:
    config = offloading_config(tmp_path)
    changed = [
        replace(config, kv_cache_layout="NHD"),
        replace(config, canonical_layout=True),
        replace(config, groups=(replace(config.groups[0], tokens_per_block=32),)),
        replace(config, worker_kv_bytes_per_block=2 * CHUNK),
        replace(config, parallel=replace(config.parallel, world_size=2)),
        replace(config, cache=replace(config.cache, tokens_per_hash=8)),
    ]
    with set_current_vllm_config(vllm_config):
        names = [tier_namespace(TieringOffloadingSpec(each)) for each in (config, *changed)]
        for attribute in ("revision", "quantization", "dtype"):
            model = vllm_config.model_config
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model, attribute, "another")
                names.append(tier_namespace(TieringOffloadingSpec(config)))
    assert len(set(names)) == len(names)


def test_the_plain_connector_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TieredConnector"):
        TieringOffloadingSpec(offloading_config(tmp_path)).get_manager()


def test_a_bad_key_is_refused_at_start(vllm_config: VllmConfig, tmp_path: Path) -> None:
    spec = TieringOffloadingSpec(offloading_config(tmp_path, disk_byte="1G"))
    with set_current_vllm_config(vllm_config), pytest.raises(ConfigError, match="disk_bytes"):
        spec.get_manager()


def test_a_real_engine_is_served_after_a_restart(model: Path, tmp_path: Path) -> None:
    """All of vLLM's but its copies between GPU and CPU, which the CPU platform does not have."""
    transfer = {
        "kv_connector": "TieredConnector",
        "kv_connector_module_path": "kvloom.vllm.offload_tier",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "OffloadingOnCpu",
            "spec_module_path": "tests.vllm.offload_on_cpu",
            "cpu_bytes_to_use": 256 << 20,
            "secondary_tiers": [tier_config(tmp_path)],
        },
    }
    (cold,) = answers(model, transfer, [PROMPT])
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.kv")}
    assert len(files) == len(PROMPT) // 128
    (warm,) = answers(model, transfer, [PROMPT])
    assert warm["tokens"] == cold["tokens"]
    assert warm["cached"] == 128 * (len(PROMPT) // 128)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.kv")} == files
