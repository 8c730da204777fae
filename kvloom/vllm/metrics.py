"""What both connectors count and time, on its way to vLLM's log line and /metrics (H20, B25).

    threads of scheduler or worker -> Metrics -> KvloomStats, once a step
        -> added up over workers and scheduler by vLLM -> log line; KvloomPromMetrics -> /metrics

Names begin with ``vllm:`` because vLLM drops only those from the registry when it makes an engine
anew in one process; others would then be registered twice, which is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, cast

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

Direction = Literal["load", "save"]
Phase = Literal["match", "load", "rotate", "recompute", "save"]

_DIRECTIONS = ("load", "save")
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class _Metric:
    """A counter, or with ``buckets`` a histogram; ``values`` of its label are shown from start."""

    text: str
    label: str
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_METRICS = {
    "prompt_tokens": _Metric(
        "Prompt tokens by where their KV came from: the engine's own prefix cache (local), kvloom "
        "as an exact prefix (exact) or from any position (reused), computed although stored "
        "(recomputed), computed as nobody had it (new).",
        "origin",
        ("local", "exact", "reused", "recomputed", "new"),
    ),
    "tasks": _Metric("Batches of blocks loaded or saved.", "direction", _DIRECTIONS),
    "bytes": _Metric("Bytes of KV loaded or saved.", "direction", _DIRECTIONS),
    "failed_tokens": _Metric(
        "Tokens whose KV could not be loaded, and was computed, or not be saved.",
        "direction",
        _DIRECTIONS,
    ),
    "store_hits": _Metric("Blocks asked of a stage of the store that it had.", "stage"),
    "store_misses": _Metric("Blocks asked of a stage of the store that it had not.", "stage"),
    "phase_seconds": _Metric(
        "Time of one request's match, load, rotation and recomputing, and of one batch's save.",
        "phase",
        ("match", "load", "rotate", "recompute", "save"),
        _SECONDS,
    ),
}


class KvloomStats(KVConnectorStats):
    """What happened since the last step; plain data that passes process borders.

    ``data[metric][label value]`` is a sum for a counter, a list of seconds for a histogram.
    """

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def add(self, metric: str, value: str, amount: float | list[float]) -> None:
        """Add to a sum, or to the observations of a histogram."""
        by_value = self.data.setdefault(metric, {})
        by_value[value] = by_value[value] + amount if value in by_value else amount

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for metric, by_value in other.data.items():
            for value, amount in by_value.items():
                self.add(metric, value, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Sums, hit rates, and of durations their number, mean and maximum in milliseconds."""
        line: dict[str, int | float] = {}
        for metric, by_value in self.data.items():
            for value, amount in by_value.items():
                if isinstance(amount, list):
                    line[f"{value}s"] = len(amount)
                    line[f"{value} ms mean"] = round(fmean(amount) * 1e3, 3)
                    line[f"{value} ms max"] = round(max(amount) * 1e3, 3)
                elif not metric.startswith("store_"):
                    line[f"{value} {metric}"] = amount
        hits, misses = self.data.get("store_hits", {}), self.data.get("store_misses", {})
        for stage in sorted(hits.keys() | misses.keys()):
            asked = hits.get(stage, 0) + misses.get(stage, 0)
            if asked:
                line[f"{stage} hit rate"] = round(hits.get(stage, 0) / asked, 4)
        return line


class Metrics:
    """What one side of a connector has seen since the last step; thread-safe.

    vLLM takes it every step, on both sides, also where nobody logs: it does not grow.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = KvloomStats()
        self._totals: dict[str, tuple[int, int]] = {}

    def take(self) -> KvloomStats | None:
        with self._lock:
            stats, self._stats = self._stats, KvloomStats()
        return None if stats.is_empty() else stats

    def prompt(
        self, *, local: int, exact: int, new: int, reused: int = 0, recomputed: int = 0
    ) -> None:
        """A request's prompt tokens by origin; once a request."""
        self._add(
            ("prompt_tokens", "local", local),
            ("prompt_tokens", "exact", exact),
            ("prompt_tokens", "reused", reused),
            ("prompt_tokens", "recomputed", recomputed),
            ("prompt_tokens", "new", new),
        )

    def moved(self, direction: Direction, size: int, failed_tokens: int = 0) -> None:
        """A batch was loaded or saved: ``size`` bytes of it, without what failed."""
        self._add(
            ("tasks", direction, 1),
            ("bytes", direction, size),
            ("failed_tokens", direction, failed_tokens),
        )

    def failed(self, direction: Direction, tokens: int) -> None:
        """Tokens that were not even tried."""
        self._add(("failed_tokens", direction, tokens))

    def asked(self, stage: str, *, hits: int, misses: int) -> None:
        """Blocks that a stage of the store was asked for."""
        self._add(("store_hits", stage, hits), ("store_misses", stage, misses))

    def store_totals(self, counts: Mapping[str, int]) -> None:
        """``Store.stats()``: ``<stage>.hits`` and ``.misses`` since the store was opened."""
        for stage in sorted({name.rpartition(".")[0] for name in counts}):
            hits, misses = (counts.get(f"{stage}.{what}", 0) for what in ("hits", "misses"))
            before = self._totals.get(stage, (0, 0))
            self._totals[stage] = hits, misses
            self.asked(stage, hits=hits - before[0], misses=misses - before[1])

    def took(self, phase: Phase, seconds: float) -> None:
        with self._lock:
            self._stats.add("phase_seconds", phase, [seconds])

    def _add(self, *amounts: tuple[str, str, int]) -> None:
        with self._lock:
            for metric, value, amount in amounts:
                if amount > 0:  # a counter that is told to go down raises, in vLLM's front end
                    self._stats.add(metric, value, amount)


class KvloomPromMetrics(KVConnectorPromMetrics):
    """The metrics in the registry of the process that serves /metrics; args as vLLM gives them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for name, metric in _METRICS.items():
            kind = self._histogram_cls if metric.buckets else self._counter_cls
            more: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            self._metrics[name] = cast("Any", kind)(
                name=f"vllm:kvloom_{name}",
                documentation=metric.text,
                labelnames=[*labelnames, metric.label],
                **more,
            )
            for engine in per_engine_labelvalues:
                for value in metric.values:
                    self._child(name, engine, value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, by_value in transfer_stats_data.items():
            for value, amount in by_value.items():
                child = self._child(name, engine_idx, value)
                if isinstance(amount, list):
                    for seconds in amount:
                        child.observe(seconds)
                else:
                    child.inc(amount)

    def _child(self, name: str, engine: int, value: str) -> Any:
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine], value)
