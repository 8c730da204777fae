"""What both connectors share: hooks that never raise, and those that are the same in both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvloom.vllm import compat
from kvloom.vllm.metrics import KvloomPromMetrics, KvloomStats, Metrics
from kvloom.vllm.paged_cache import PagedCache

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

logger = init_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def guarded(fallback: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A hook that fails answers ``fallback()``: reuse is lost for a request, never the engine."""

    def decorate(hook: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(hook)
        def safe(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(*args, **kwargs)
            except Exception:
                logger.exception("kvloom: %s failed; going on without", hook.__name__)
                return cast("R", fallback())

        return safe

    return decorate


class SchedulerSide(Protocol):
    """What a connector's scheduler side does for the life of a request."""

    def bind(self, kv_cache_manager: Any) -> None: ...

    def add(self, request: Any) -> None: ...

    def admit(self, request: Any, num_external_tokens: int) -> None: ...

    def finish(self, request: Any) -> tuple[bool, dict[str, Any] | None]: ...

    def drop(self, request_id: str) -> None: ...

    def reset(self) -> None: ...


class KvloomConnector(KVConnectorBase_V1, SupportsHMA):
    """The base of the connectors.

    Attributes:
        _scheduler: set on the engine's scheduler, if kvloom is not off.
        _promised: requests that count on tokens from us, by id.
        _metrics: what this side counts; vLLM takes it every step.
    """

    _scheduler: SchedulerSide | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Loads that fail and can't be computed in place must become a recompute: vLLM's default
        # answers the user with an error instead.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._promised: dict[str, Request] = {}
        self._metrics = Metrics()

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss and no lost hand-off: a preempted request may finish."""
        return False

    # Worker side

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no layer is loaded while the forward runs."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing: all layers are saved after the forward."""

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)

    @guarded(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.add(request)

    @guarded(lambda: None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is None:
            return
        if num_external_tokens > 0:
            self._promised[request.request_id] = request
        self._scheduler.admit(request, num_external_tokens)

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        try:
            return self._scheduler.finish(request)
        except Exception:
            self._scheduler.drop(request.request_id)  # or its state would stay for ever
            raise

    @guarded(lambda: False)
    def reset_cache(self) -> bool:
        """The weights are others now, or a cold cache is wanted: what is stored is not used."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # Metrics, of both sides

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> KvloomStats | None:
        return self._metrics.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvloomStats:
        return KvloomStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvloomPromMetrics:
        return KvloomPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def why_off(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, windows: bool = False
) -> str | None:
    """What of the engine and its KV cache rules kvloom out; both sides come to the same answer.

    Args:
        windows: layers that keep the blocks of a window only can be served, beside full ones.
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is not supported yet"
    groups = kv_cache_config.kv_cache_groups
    if not groups or (len(groups) > 1 and not windows):
        return f"models with {len(groups)} KV cache groups are not supported yet"
    # vLLM's CPU backend for MLA switches chunked prefill off, and computes wrong tokens behind a
    # prefix that is in the cache, also where that is bit for bit what it computed itself.
    if is_latent(kv_cache_config) and not vllm_config.scheduler_config.enable_chunked_prefill:
        return "with MLA this engine can't go on from a prefix (its chunked prefill is off)"
    kinds = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
    for group in groups:
        spec: Any = group.kv_cache_spec
        known = type(spec) in kinds if windows else type(spec) is FullAttentionSpec
        if not known and (type(spec) is not MLAAttentionSpec or len(groups) > 1):
            return f"layers of {type(spec).__name__} are not supported yet"
        if getattr(spec, "non_causal", False):
            return "tokens of this model's prompts attend to later ones: no prefix is exact"
        if is_windowed(spec) and not windows:
            return f"only full attention is supported yet, not {type(spec).__name__} of a window"
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            kind = vllm_config.cache_config.cache_dtype
            return f"a quantized KV cache (kv_cache_dtype = {kind!r}) is not supported yet"
    return None


def is_latent(kv_cache_config: KVCacheConfig) -> bool:
    """Whether the cache holds MLA's latents."""
    groups = kv_cache_config.kv_cache_groups
    return any(isinstance(group.kv_cache_spec, MLAAttentionSpec) for group in groups)


def has_windows(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some layers see no more than a window of the tokens before."""
    return any(is_windowed(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


def is_windowed(spec: Any) -> bool:
    # Full attention's spec has a window where the user has switched the hybrid manager off.
    return bool(
        getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    )


def paged_cache(
    vllm_config: VllmConfig, group: KVCacheGroupSpec, kv_caches: dict[str, torch.Tensor]
) -> tuple[PagedCache, dict[str, Any]]:
    """A group's registered caches as one, and its attention modules by layer name.

    Raises:
        UnknownLayoutError, EngineMismatchError: they can't be read and written.
    """
    names = group.layer_names
    layers = compat.attention_layers(vllm_config, names)
    return PagedCache([compat.cache_layer(n, layers[n], kv_caches[n]) for n in names]), layers
