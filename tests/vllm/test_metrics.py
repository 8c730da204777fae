"""What is counted arrives in the log line and in /metrics (H20, B25)."""

from __future__ import annotations

import json
import pickle
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvloom.vllm.metrics import KvloomPromMetrics, KvloomStats, Metrics
from tests.hf3fs.service import running

from .engines import transfer_config_hf3fs
from .test_serve import STORY, chat, scrape, serving

TOKEN_BYTES = 46_080  # of SmolLM2's KV, float32
AMOUNTS = st.dictionaries(
    st.sampled_from(["tasks", "bytes", "phase_seconds"]),
    st.dictionaries(st.sampled_from(["load", "save"]), st.integers(1, 9), min_size=1),
)


def stats_of(amounts: dict[str, dict[str, int]]) -> KvloomStats:
    stats = KvloomStats()
    for metric, by_value in amounts.items():
        for value, amount in by_value.items():
            stats.add(metric, value, [amount / 1] if metric == "phase_seconds" else amount)
    return stats


def totals(stats: KvloomStats) -> dict[tuple[str, str], Any]:
    return {
        (metric, value): sorted(amount) if isinstance(amount, list) else amount
        for metric, by_value in stats.data.items()
        for value, amount in by_value.items()
    }


@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_workers_add_up_in_any_order_and_beyond_process_borders(
    a: dict[str, dict[str, int]], b: dict[str, dict[str, int]], c: dict[str, dict[str, int]]
) -> None:
    """As vLLM adds them up: pickled by workers, ``to_dict`` and JSON-like by the scheduler."""
    one, two, three = (pickle.loads(pickle.dumps(stats_of(x))) for x in (a, b, c))  # noqa: S301
    left = one.aggregate(two).aggregate(three)
    right = stats_of(c).aggregate(stats_of(a).aggregate(stats_of(b)))
    assert totals(left) == totals(right)
    again = KvloomStats(json.loads(json.dumps(left.to_dict())))
    assert totals(again) == totals(left)
    assert left.is_empty() == (not (a or b or c))
    for metric, by_value in totals(left):
        alone = [x[metric][by_value] for x in (a, b, c) if by_value in x.get(metric, {})]
        found = totals(left)[metric, by_value]
        assert (sum(found) if isinstance(found, list) else found) == sum(alone)


def test_threads_lose_nothing_while_it_is_taken() -> None:
    metrics, taken = Metrics(), KvloomStats()

    def work() -> None:
        for _ in range(2000):
            metrics.moved("save", 3, failed_tokens=1)
            metrics.took("save", 0.25)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.aggregate(metrics.take() or KvloomStats())
    taken.aggregate(metrics.take() or KvloomStats())
    assert metrics.take() is None
    assert taken.data["bytes"] == {"save": 24_000}
    assert taken.data["tasks"] == taken.data["failed_tokens"] == {"save": 8_000}
    assert taken.data["phase_seconds"] == {"save": [0.25] * 8_000}


def test_the_log_line_says_it_in_plain_numbers() -> None:
    metrics = Metrics()
    metrics.prompt(local=16, exact=384, new=10)
    metrics.moved("load", 1000)
    metrics.took("load", 0.002)
    metrics.took("load", 0.004)
    metrics.asked("posix", hits=3, misses=1)
    stats = metrics.take()
    assert stats is not None
    assert stats.reduce() == {
        "local prompt_tokens": 16,
        "exact prompt_tokens": 384,
        "new prompt_tokens": 10,
        "load tasks": 1,
        "load bytes": 1000,
        "loads": 2,
        "load ms mean": 3.0,
        "load ms max": 4.0,
        "posix hit rate": 0.75,
    }


def test_a_stores_totals_count_once() -> None:
    metrics = Metrics()
    metrics.store_totals({"cache.hits": 2, "cache.misses": 1, "cache.blocks": 7, "posix.hits": 0})
    metrics.store_totals({"cache.hits": 5, "cache.misses": 1, "cache.blocks": 7, "posix.hits": 1})
    stats = metrics.take()
    assert stats is not None
    assert stats.data == {
        "store_hits": {"cache": 5, "posix": 1},
        "store_misses": {"cache": 1},
    }


def test_every_metric_is_there_from_the_start_and_none_goes_down() -> None:
    """A front end whose counter is told to go down fails for all requests."""
    registry = CollectorRegistry()
    metrics = Metrics()
    metrics.prompt(local=500, exact=0, new=-100)  # preempted and admitted with what it generated
    metrics.took("recompute", 0.3)
    stats = metrics.take()
    assert stats is not None

    def in_registry(kind: type) -> Any:
        return lambda **more: kind(registry=registry, **more)

    prom = KvloomPromMetrics(
        SimpleNamespace(kv_transfer_config=None),  # type: ignore[arg-type]
        {kind: in_registry(kind) for kind in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    prom.observe(stats.to_dict(), 1)

    def value(name: str, engine: str, **labels: str) -> float | None:
        labels |= {"model_name": "m", "engine": engine}
        return registry.get_sample_value(f"vllm:kvloom_{name}", labels)

    assert value("prompt_tokens_total", "1", origin="local") == 500
    assert value("prompt_tokens_total", "0", origin="local") == 0
    assert value("prompt_tokens_total", "1", origin="new") == 0
    assert value("phase_seconds_count", "1", phase="recompute") == 1
    assert value("bytes_total", "0", direction="save") == 0


def test_a_servers_counters_move_as_they_should(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vllm serve` with HF3FSKVConnector: cold, from the store, from the engine's own cache."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # offers to empty the engine's own cache
    messages = [{"role": "user", "content": STORY * 2 + "Who gives permits?"}]
    log, found = tmp_path / "serve.log", []
    with running(tmp_path / "state") as service:
        transfer = transfer_config_hf3fs(tmp_path / "pages", service.url)
        with serving(model, transfer, log) as client:
            for fresh in (False, True, False):
                if fresh:
                    httpx.post(f"{client.base_url.copy_with(path='/reset_prefix_cache')}")
                _, figures = chat(client, messages)
                # What was counted after the last step comes with the next one.
                client.completions.create(model="smollm2", prompt="A", max_tokens=1)
                found.append(scrape(client))
            prompt = figures["prompt_tokens"]
            stored = (prompt - 1) // 128 * 128
            ends = time.monotonic() + 30
            while f"exact prompt_tokens={stored}" not in log.read_text():
                assert time.monotonic() < ends, "the log line"
                time.sleep(0.2)
    cold, hit, again = found
    assert stored >= 256
    assert cold["prompt_tokens_total", "new"] == prompt + 1
    assert cold["prompt_tokens_total", "exact"] == cold["prompt_tokens_total", "local"] == 0
    assert cold["store_misses_total", "hf3fs"] == stored // 128
    assert cold["bytes_total", "save"] >= stored * TOKEN_BYTES
    assert cold["phase_seconds_count", "save"] == cold["tasks_total", "save"] >= 1
    assert cold["bytes_total", "load"] == cold["failed_tokens_total", "save"] == 0
    assert hit["prompt_tokens_total", "exact"] == stored
    assert hit["prompt_tokens_total", "new"] == cold["prompt_tokens_total", "new"] + (
        prompt - stored + 1
    )
    assert hit["store_hits_total", "hf3fs"] == stored // 128
    assert hit["bytes_total", "load"] == stored * TOKEN_BYTES
    assert hit["phase_seconds_count", "load"] == hit["tasks_total", "load"] == 1
    assert hit["phase_seconds_sum", "load"] > 0
    assert again["prompt_tokens_total", "local"] == stored
    assert again["bytes_total", "load"] == hit["bytes_total", "load"]
    assert again["failed_tokens_total", "load"] == 0
