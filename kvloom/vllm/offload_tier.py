"""kvloom's store below vLLM's own CPU offloading: a secondary tier of ``OffloadingConnector``.

vLLM moves KV between GPU and its CPU tier. What reaches that tier is stored from there, and what a
prompt needs is loaded back into it: CPU tier -> store, store -> CPU tier, by vLLM's block hashes.
All hooks run in the scheduler, none waits for a disk or raises; what fails, is late or in doubt is
a miss, and KV that can't be stored now is dropped.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig, get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvloom.config import ConfigError, StoreConfig
from kvloom.store.base import BlockHeader, Store, Task
from kvloom.store.posix import Posix
from kvloom.vllm.connector import guarded
from kvloom.vllm.namespace import engine_namespace

logger = init_logger(__name__)

_PART_BYTES = 256 * 1024  # what is checked, compressed and held in memory at once
_NO_DIGEST = bytes(16)
_NO_TOKENS = np.empty(0, dtype=np.int32)
_DRAIN_WARN_S = 10.0
_POLL_S = 0.001


Start = Callable[[list[bytes], list[memoryview]], Task]


class TieredConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, which lets its tiers see the engine's configuration.

    Of itself it tells them the model's name and geometry. Revision, quantization and RoPE are not
    among that, and engines that differ in those must not share KV.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)


@dataclass(frozen=True, slots=True)
class _Job:
    """A transfer under way. ``ends``: when a load is given up; None: a store, which has to end, for
    the CPU tier's memory is read until then."""

    number: int
    keys: list[OffloadKey]
    task: Task
    ends: float | None


class KvloomTier(SecondaryTierManager):
    """A tier on kvloom's ``Posix`` stage.

    Args:
        locality: ``LOCAL`` or ``REMOTE``, for requests that name the tiers they load from.
        config: keys of the store (``StoreConfig``): ``storage_backends``, ``disk_bytes``, ...

    Raises:
        ConfigError: at start, for a configuration that can't be meant.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        **config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._config = StoreConfig.from_extra(config)
        self._memory = primary_kv_view.cast("B")
        self._store: Store = Posix.from_config(tier_namespace(offloading_spec), self._config)
        self._lookups = _Lookups(self._store, tier_type)
        self._jobs: deque[_Job] = deque()
        self._finished: list[JobResult] = []
        self._storing = 0
        # A disk that hangs keeps what it is to write; the CPU tier must stay usable beside it.
        self._most_storing = min(self._config.save_queue_bytes, len(self._memory) // 2)

    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        size = len(job_metadata.keys) * self.block_size_bytes
        if self._storing + size > self._most_storing:
            self._finished.append(JobResult(job_metadata.job_id, success=False))
        elif self._submit(job_metadata, self._dump, ends=None):
            self._storing += size

    def submit_load(self, job_metadata: TransferJob) -> None:
        ends = time.monotonic() + self._config.load_timeout_s
        self._submit(job_metadata, self._load, ends)

    @guarded(list)
    def get_finished_jobs(self) -> Iterable[JobResult]:
        still: deque[_Job] = deque()
        while self._jobs:
            job = self._jobs.popleft()
            if job.task.check() or (job.ends is not None and time.monotonic() >= job.ends):
                self._finished.append(self._result(job))
            else:
                still.append(job)
        self._jobs = still
        finished, self._finished = self._finished, []
        return finished

    @guarded(lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._store.touch([_digest(key) for key in keys])

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    @guarded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait for all transfers, as vLLM demands before it takes back the memory they read."""
        warned = time.monotonic()
        while True:
            self._finished = list(self.get_finished_jobs())
            if not self._jobs:
                return
            if time.monotonic() - warned > _DRAIN_WARN_S:
                warned = time.monotonic()
                logger.warning("kvloom: still writing %d transfers to the store", len(self._jobs))
            time.sleep(_POLL_S)

    @guarded(lambda: None)
    def shutdown(self) -> None:
        self._lookups.close()
        self._store.close()
        self._jobs.clear()
        self._memory.release()

    def _submit(self, job: TransferJob, start: Start, ends: float | None) -> bool:
        keys = list(job.keys)
        try:
            buffers = [self._chunk(int(chunk)) for chunk in job.chunk_ids]
            task = start([_digest(key) for key in keys], buffers)
        except Exception:
            logger.exception("kvloom: a transfer of vLLM's CPU tier could not start")
            self._finished.append(JobResult(job.job_id, success=False))
            return False
        self._jobs.append(_Job(job.job_id, keys, task, ends))
        return True

    def _load(self, keys: list[bytes], buffers: list[memoryview]) -> Task:
        return self._store.load(keys, [None] * len(keys), buffers)

    def _dump(self, keys: list[bytes], buffers: list[memoryview]) -> Task:
        return self._store.dump([self._header(key) for key in keys], buffers)

    def _result(self, job: _Job) -> JobResult:
        outcomes = job.task.wait(0.0)  # a load that is late writes nothing from here on
        size = len(job.keys) * self.block_size_bytes
        if job.ends is None:
            self._storing -= size
            return JobResult(job.number, success=all(outcomes), transfer_bytes=size)
        done = [key for key, loaded in zip(job.keys, outcomes, strict=True) if loaded]
        failed = [key for key, loaded in zip(job.keys, outcomes, strict=True) if not loaded]
        self._lookups.mark_miss(failed)  # or vLLM would ask for them for ever
        return JobResult(
            job.number,
            success=not failed,
            successful_keys=tuple(done) or None,
            transfer_bytes=len(done) * self.block_size_bytes,
        )

    def _chunk(self, number: int) -> memoryview:
        return self._memory[number * self.block_size_bytes : (number + 1) * self.block_size_bytes]

    def _header(self, key: bytes) -> BlockHeader:
        """vLLM tells a tier neither tokens nor positions: its hash stands for them."""
        whole, rest = divmod(self.block_size_bytes, _PART_BYTES)
        return BlockHeader(
            namespace=self._store.namespace,
            key=key,
            parent=_NO_DIGEST,
            scope=_NO_DIGEST,
            position=0,
            generation=0,
            token_ids=_NO_TOKENS,
            part_sizes=(_PART_BYTES,) * whole + ((rest,) if rest else ()),
            created_ns=time.time_ns(),
        )


class _Lookups(AsyncLookupManager):
    """Asks the store from a thread of its own."""

    def __init__(self, store: Store, tier_type: str) -> None:
        super().__init__(tier_type)
        self._store = store

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        return self._store.lookup([_digest(key) for key in keys])

    def close(self) -> None:
        """vLLM's own waits for a lookup under way for ever, even in a dead file system."""
        self._lookup_queue.put(None)
        self._thread.join(_DRAIN_WARN_S)


def tier_namespace(spec: OffloadingSpec) -> str:
    """Hex digest over all that changes the bytes of a chunk in the CPU tier.

    Those are pages of the engine's own cache, in whatever layout its version, platform and
    attention backend use: these count too.

    Raises:
        ConfigError: the engine's configuration can't be seen.
    """
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        raise ConfigError(
            "kv_connector = 'OffloadingConnector' hides the model's revision and quantization from "
            "its tiers, and KV of others could be served: set kv_connector = 'TieredConnector', "
            "kv_connector_module_path = 'kvloom.vllm.offload_tier'"
        )
    config, model = spec.config, vllm_config.model_config
    parallel = config.parallel
    return engine_namespace(
        vllm_config,
        sum(len(group.layer_names) for group in config.groups),
        model.get_total_num_kv_heads(),
        model.get_head_size(),
        kind="offload tier",
        vllm=vllm_version,
        device=current_platform.get_device_name(),
        attention=repr(vllm_config.attention_config.backend),
        layout=repr((config.kv_cache_layout, config.canonical_layout, config.replicated_layout)),
        groups=repr(config.groups),
        chunk=repr((config.cache, config.worker_kv_bytes_per_block)),
        ranks=repr((parallel.world_size, parallel.pcp_size, parallel.dcp_size)),
        hashes=vllm_config.cache_config.prefix_caching_hash_algo,
    )


def _digest(key: OffloadKey) -> bytes:
    """The store's key of a block: 16 bytes of vLLM's hash and group."""
    return hashlib.blake2b(key, digest_size=16, person=b"offload tier").digest()
