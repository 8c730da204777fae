"""HF3FSKVConnector: exact prefixes in page files on 3FS, found by a metadata service (HF3FS.md).

Every rank of an engine has a page file; with MLA, whose latent is the same on all ranks of tensor
parallelism, every pipeline stage has one. A block's key is the engine's own block hash, and is
complete when its page is confirmed in all files. Engines with the same model and settings share the
namespace, and so each other's blocks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvloom.config import IO_ENTRIES, ConfigError, Hf3fsConfig
from kvloom.hf3fs.client import GeometryError, Hf3fsClient
from kvloom.hf3fs.metadata.client import MetadataClient, NoAnswer
from kvloom.hf3fs.page import page_bytes
from kvloom.vllm import compat
from kvloom.vllm.connector import KvloomConnector, guarded, is_latent, paged_cache, why_off
from kvloom.vllm.hf3fs_plans import BlockPlan, Hf3fsReport, Hf3fsStep
from kvloom.vllm.hf3fs_scheduler import Hf3fsScheduler
from kvloom.vllm.hf3fs_transfers import AsyncOperationManager, Share
from kvloom.vllm.namespace import engine_namespace
from kvloom.vllm.paged_cache import UnknownLayoutError

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

_DRAIN_S = 10.0


class HF3FSKVConnector(KvloomConnector):
    """The connector that ``kv_connector: "HF3FSKVConnector"`` names.

    Raises:
        ConfigError: at start, for a configuration that can't be meant (spec rows H1, H18).
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = Hf3fsConfig.from_extra(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: Hf3fsScheduler | None = None
        self._transfers: AsyncOperationManager | None = None
        self._clients: list[Hf3fsClient] = []
        self._metadata_client: MetadataClient | None = None
        self._report = Hf3fsReport()
        self._finished_saves: set[str] = set()
        self._failed_blocks: set[int] = set()
        reason = why_off(vllm_config, kv_cache_config)
        if reason is not None:
            if role is KVConnectorRole.SCHEDULER:
                logger.warning("kvloom is off: %s", reason)
            return
        _check_hashes(vllm_config)
        spec: Any = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._block_size = spec.block_size
        model, cache = vllm_config.model_config, vllm_config.cache_config
        self._namespace = engine_namespace(
            vllm_config,
            model.get_total_num_hidden_layers(),
            model.get_total_num_kv_heads(),
            spec.head_size,
            connector="hf3fs",
            block_size=spec.block_size,
            hashes=cache.prefix_caching_hash_algo,
            hash_seed=os.environ.get("PYTHONHASHSEED"),
        )
        self._metadata_client = MetadataClient(
            self.config.hf3fs_metadata_server_url,
            self._namespace,
            str(self._kv_transfer_config.engine_id),
            token=self.config.metadata_token,
        )
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Hf3fsScheduler(
                self.config,
                self._metadata_client,
                self._metrics,
                block_size=spec.block_size,
                loads=self._kv_transfer_config.is_kv_consumer,
                saves=self._kv_transfer_config.is_kv_producer,
            )

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._metadata_client is None:
            return
        try:
            self._transfers = self._make_transfers(self._metadata_client, kv_caches)
        except (GeometryError, UnknownLayoutError, compat.EngineMismatchError) as error:
            self._report.obstacle = str(error)
            self._close_clients()
        except Exception as error:
            logger.exception("kvloom: the worker side could not start")
            self._report.obstacle = repr(error)
            self._close_clients()

    def _make_transfers(
        self, metadata: MetadataClient, kv_caches: dict[str, torch.Tensor]
    ) -> AsyncOperationManager:
        config = self.config
        cache, _ = paged_cache(
            self._vllm_config, self._kv_cache_config.kv_cache_groups[0], kv_caches
        )
        share = _share(self._vllm_config, self._kv_cache_config)
        size = page_bytes(cache.part_size(cache.block_size) * len(cache.layers))
        path = Path(config.hf3fs_storage_path, self._namespace, f"rank-{share.file}.pages")
        self._clients += [
            Hf3fsClient(str(path), config.hf3fs_file_size, size, IO_ENTRIES, config.hf3fs_io)
            for _ in range(config.hf3fs_client_numjobs)
        ]
        first = self._clients[0]
        pages = config.hf3fs_file_size // size
        logger.info(
            "kvloom: %s: %d pages of %d bytes by %s (%s)", path, pages, size, first.io, first.why
        )
        answer = metadata.initialize(share.file, pages, share.files)
        if isinstance(answer, NoAnswer) and answer.status:
            raise GeometryError(f"the metadata service refuses this rank: {answer.reason}")
        return AsyncOperationManager(
            config, cache, self._clients, metadata, self._metrics, share=share
        )

    @guarded(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for plan in self._plans().loads:
            try:
                if self._transfers is None:
                    self._fail(plan)
                else:
                    self._transfers.load(plan)
            except Exception:
                # A promised load that is never reported would keep its request waiting for ever.
                logger.exception("kvloom: loading for request %s failed", plan.request_id)
                self._fail(plan)

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        plans = self._plans().saves
        self._finished_saves |= {plan.request_id for plan in plans if plan.last}
        for plan in plans:
            if self._transfers is None or self._failed_blocks.intersection(plan.block_ids):
                self._report.lost += plan.keys
            else:
                self._transfers.save(plan)

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        saves, self._finished_saves = self._finished_saves, set()
        loads = set(self._report.failed_loads)
        for plan, failed in self._transfers.take_finished_loads() if self._transfers else ():
            loads.add(plan.request_id)
            if failed:
                self._failed_blocks |= failed
                self._report.failed_loads.add(plan.request_id)
                pairs = zip(plan.keys, plan.block_ids, strict=False)  # a failed plan has no keys
                self._report.lost += [key for key, block in pairs if block in failed]
        return saves or None, loads or None

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report, self._report = self._report, Hf3fsReport()
        if self._transfers is not None:
            report.lost += self._transfers.take_dropped()
        return report if report.failed_loads or report.lost or report.obstacle else None

    def _fail(self, plan: BlockPlan) -> None:
        self._metrics.failed("load", len(plan.block_ids) * self._block_size)
        self._failed_blocks.update(plan.block_ids)
        self._report.failed_loads.add(plan.request_id)

    def _plans(self) -> Hf3fsStep:
        metadata = self._get_connector_metadata()
        return metadata if isinstance(metadata, Hf3fsStep) else Hf3fsStep()

    # Scheduler side

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.match(request, num_computed_tokens)
        return tokens, tokens > 0

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return Hf3fsStep()
        promised, self._promised = self._promised, {}
        plans = self._step(self._scheduler, scheduler_output)
        # The engine waits for every promised load: one whose plan is missing, because a hook failed
        # in between, must come back as failed, or the request would wait for ever.
        for request_id in promised.keys() - {plan.request_id for plan in plans.loads}:
            self._scheduler.drop(request_id)
            blocks = compat.block_ids(self._kv_cache_manager, request_id)
            plans.loads.append(BlockPlan(request_id, [], blocks))
        return plans

    @guarded(Hf3fsStep)
    def _step(self, scheduler: Hf3fsScheduler, output: SchedulerOutput) -> Hf3fsStep:
        return scheduler.step(output)

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None:
            self._scheduler.take_report(
                report if isinstance(report, Hf3fsReport) else None,
                connector_output.finished_recving or (),
            )

    # Both sides

    def shutdown(self) -> None:
        """Finish saves within a bound and close everything; idempotent."""
        if self._transfers is not None:
            self._transfers.close(_DRAIN_S)
            self._transfers = None
        self._close_clients()
        if self._metadata_client is not None:
            self._metadata_client.close()

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()
        self._clients = []


def _share(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Share:
    """What of the KV this worker's rank holds, and whether it is the one to save it (H19)."""
    parallel = vllm_config.parallel_config
    if not is_latent(kv_cache_config):
        return Share(parallel.rank, parallel.world_size, saves=True)
    stage, tp_rank = divmod(parallel.rank, parallel.tensor_parallel_size)
    return Share(stage, parallel.pipeline_parallel_size, saves=tp_rank == 0)


def _check_hashes(vllm_config: VllmConfig) -> None:
    """Block hashes must be the same in every process, or nothing is ever found again (H18)."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            f"prefix_caching_hash_algo = {algorithm!r} is seeded anew in every process: use "
            "'sha256' (vLLM's default), or set the environment variable PYTHONHASHSEED to one "
            "number for all engines"
        )
