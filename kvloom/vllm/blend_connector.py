"""BlendConnector: exact prefixes and blended chunks from a kvloom store (spec rows B1-B3).

vLLM makes one connector for its scheduler and one for each worker. This class reads the engine's
configuration, decides what is possible with it, and hands each hook to the side it belongs to
(``BlendScheduler``, ``BlendWorker``). No hook raises into the engine: what can't be done is done
without us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvloom.blend.int8 import DTYPES
from kvloom.blend.rope import PositionCorrector, Rotations
from kvloom.blend.selection import make_policy
from kvloom.config import ConfigError, KvloomConfig
from kvloom.store.base import Store
from kvloom.store.catalog import IndexFeeder
from kvloom.store.registry import acquire_store, release_store
from kvloom.tokens.expected import ExpectedChunks
from kvloom.tokens.index import ChunkIndex
from kvloom.vllm import compat
from kvloom.vllm.connector import (
    KvloomConnector,
    guarded,
    has_windows,
    is_latent,
    paged_cache,
    why_off,
)
from kvloom.vllm.filler import Filler
from kvloom.vllm.grouped_cache import GroupedCache
from kvloom.vllm.metadata import Obstacle, StepMetadata, WorkerReport
from kvloom.vllm.metrics import KvloomStats
from kvloom.vllm.namespace import engine_namespace, rope_parameters
from kvloom.vllm.paged_cache import PagedCache, UnknownLayoutError
from kvloom.vllm.ranks import OtherRankError, Ranks
from kvloom.vllm.recompute import RecomputeEngine
from kvloom.vllm.rope import layer_rotations
from kvloom.vllm.saver import Saver
from kvloom.vllm.scheduler import BlendScheduler
from kvloom.vllm.self_check import SelfCheck
from kvloom.vllm.stored_form import StoredForm
from kvloom.vllm.worker import BlendWorker

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

# Where the package lies on the path but is not installed, no entry point has done this.
compat.keep_loaded_models()

_DRAIN_S = 10.0
_INDEX_WAIT_S = 5.0


class BlendConnector(KvloomConnector):
    """The connector that ``kv_connector: "BlendConnector"`` names.

    Raises:
        ConfigError: at start, for a configuration that can't be meant (spec row B2).
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = KvloomConfig.from_extra(self._kv_transfer_config.kv_connector_extra_config)
        self._policy = make_policy(self.config)
        self._scheduler: BlendScheduler | None = None
        self._worker: BlendWorker | None = None
        self._store: Store | None = None
        self._feeder: IndexFeeder | None = None
        self._chunks: ExpectedChunks | None = None
        self._obstacle: Obstacle | None = None
        self._unserved: set[str] = set()  # requests that wait for what nobody will load
        self._unsaved: set[str] = set()  # whose blocks are held for what nobody will save
        reason = _why_off(vllm_config, kv_cache_config)
        if reason is not None:
            if role is KVConnectorRole.SCHEDULER:
                logger.warning("kvloom is off: %s", reason)
            return
        groups = kv_cache_config.kv_cache_groups
        spec: Any = groups[0].kv_cache_spec
        _check_model(self.config, vllm_config, spec.head_size)
        special: dict[str, str | int] = {}  # what else tells the bytes of this engine apart
        if self.config.store_dtype == "int8":
            special["store_dtype"] = "int8"
        if vllm_config.parallel_config.world_size > 1:
            special["rank"] = vllm_config.parallel_config.rank
            # A load between steps goes on when its bytes have arrived: not everywhere at once.
            self.config = self.config.model_copy(update={"blend_async": False})
        if has_windows(kv_cache_config):
            special["groups"] = repr(
                [(type(g.kv_cache_spec).__name__, g.layer_names) for g in groups]
            )
        only = _exact_only(kv_cache_config)
        if only is not None and self.config.blend:
            self.config = self.config.model_copy(update={"blend": False})
            if role is KVConnectorRole.SCHEDULER:
                logger.warning("kvloom reuses exact prefixes only: %s", only)
        namespace = engine_namespace(
            vllm_config,
            sum(len(group.layer_names) for group in groups),
            spec.num_kv_heads,
            spec.head_size,
            **special,
        )
        self._store = acquire_store(namespace, self.config)
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler_side(self._store, spec.block_size)

    def _start_scheduler_side(self, store: Store, block_size: int) -> None:
        index = ChunkIndex(self.config.blend_chunk_size, self.config.index_max_chunks)
        self._chunks = ExpectedChunks(index)
        self._feeder = IndexFeeder(
            store, index, self.config.index_poll_s, generation=int(self.config.reuse_blended)
        )
        if not self._feeder.wait_ready(_INDEX_WAIT_S):
            logger.info("kvloom: still reading the store; hits grow until that is done")
        self._scheduler = BlendScheduler(
            self.config,
            self._chunks,
            self._policy,
            self._metrics,
            block_size=block_size,
            loads=self._kv_transfer_config.is_kv_consumer,
            saves=self._kv_transfer_config.is_kv_producer,
            windows=has_windows(self._kv_cache_config),
        )
        logger.info(
            "kvloom: %d chunks of %d tokens known in %s (%s)",
            len(index),
            self.config.blend_chunk_size,
            self.config.store_pipeline,
            ", ".join(self.config.storage_backends),
        )

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._store is None:
            return
        # Those that call the model together; with exact prefixes alone, each goes its own way.
        ranks = Ranks(
            compat.tensor_parallel_group(self._vllm_config) if self.config.blend else None
        )
        try:
            self._worker = self._make_worker(self._store, kv_caches, ranks)
        except OtherRankError:
            self._obstacle = None  # the other one reports why
        except (UnknownLayoutError, compat.EngineMismatchError) as error:
            self._obstacle = Obstacle(str(error), everything=True)
        except Exception as error:
            logger.exception("kvloom: the worker side could not start")
            self._obstacle = Obstacle(repr(error), everything=True)

    def _make_worker(
        self, store: Store, kv_caches: dict[str, torch.Tensor], ranks: Ranks
    ) -> BlendWorker:
        config = self._vllm_config
        with ranks.together():
            groups, layers = zip(
                *(
                    paged_cache(config, group, kv_caches)
                    for group in self._kv_cache_config.kv_cache_groups
                ),
                strict=True,
            )
            cache = GroupedCache(groups)
            if self.config.store_dtype == "int8" and (
                cache.dtype not in DTYPES or cache.parts != 2
            ):
                kind = f"KV in {cache.dtype}" if cache.parts == 2 else "MLA's latents"
                raise UnknownLayoutError(
                    f"store_dtype = 'int8' is not for {kind}: leave the key out"
                )
        engine, corrector = None, None
        if self.config.blend:
            engine, corrector = self._make_blending(groups[0], layers[0], ranks)
        with ranks.together():
            form = StoredForm(self.config, cache)
            filler = Filler(
                self.config,
                self._policy,
                store,
                cache,
                form,
                corrector=corrector,
                engine=engine,
                ranks=ranks,
            )
            saver = Saver(self.config, store, cache, form, self._metrics)
        return BlendWorker(self.config, store, cache, filler, saver)

    def _make_blending(
        self, cache: PagedCache, layers: dict[str, Any], ranks: Ranks
    ) -> tuple[RecomputeEngine | None, PositionCorrector | None]:
        """What computes and what moves keys, as far as this model allows it."""
        config, group = self._vllm_config, self._kv_cache_config.kv_cache_groups[0]
        engine: RecomputeEngine | None = None
        corrector: PositionCorrector | None = None
        try:
            with ranks.together():
                compat.check_nested_forward(config)
                model = compat.loaded_model(config)
                spec = group.kv_cache_spec
                able = RecomputeEngine(config, model, spec, layers, cache, ranks=ranks)
                check = SelfCheck(config, able, cache, ranks) if self.config.self_check else None
            if check is not None:
                check.recompute()
            engine = able
            with ranks.together():
                last = config.model_config.max_model_len - 1
                names = group.layer_names
                rotations: Rotations = layer_rotations(model, names, cache.head_dim, last)
            if check is not None:
                rotations = check.rotations(rotations)
            corrector = PositionCorrector(rotations)
        except compat.EngineMismatchError as error:
            self._obstacle = Obstacle(str(error), everything=False)
        except OtherRankError:
            pass  # the other one reports why
        return engine, corrector

    @guarded(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._metadata()
        self._unserved.update(metadata.unplanned)
        if self._worker is None:
            self._unserved.update(plan.request_id for plan in metadata.loads)
            return
        self._worker.cancel(metadata.cancelled)
        self._worker.load(metadata.loads)
        self._worker.advance()

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        saves = self._metadata().saves
        if self._worker is None:
            self._unsaved.update(plan.request_id for plan in saves if plan.last)
            return
        for plan in saves:
            self._worker.save(plan)
        self._worker.end_step()

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        arrived, self._unserved = self._unserved, set()
        if self._worker is None:
            finished, self._unsaved = self._unsaved, set()
            return finished or None, arrived or None
        arrived |= self._worker.take_arrived()
        return self._worker.take_finished_saves() or None, arrived or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failed = set(self._unserved)  # taken with the others that have arrived
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            failed |= self._worker.take_failed_requests()
        results.failed_recving = failed
        return results

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        obstacle, self._obstacle = self._obstacle, None
        report = self._worker.take_report() if self._worker else WorkerReport()
        report.obstacle = obstacle
        report.timed = self._metadata().timed
        return report if report.loads or report.lost or obstacle or report.timed else None

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> KvloomStats | None:
        # Where blocks were loaded, and only then: a store may take long to say what it has done.
        if self._worker is not None and self._store is not None and self._worker.has_loaded:
            self._metrics.store_totals(self._store.stats())
        return super().get_kv_connector_stats()

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        return metadata if isinstance(metadata, StepMetadata) else StepMetadata()

    # Scheduler side

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMetadata()
        promised, self._promised = self._promised, {}
        metadata = self._plans(self._scheduler, scheduler_output)
        # Where a plan is missing because a hook failed after our promise, vLLM would wait for ever.
        for request_id in promised.keys() - {plan.request_id for plan in metadata.loads}:
            self._scheduler.drop(request_id)
            metadata.saves = [plan for plan in metadata.saves if plan.request_id != request_id]
            metadata.unplanned.append(request_id)
        return metadata

    @guarded(StepMetadata)
    def _plans(self, scheduler: BlendScheduler, output: SchedulerOutput) -> StepMetadata:
        return scheduler.step(output)

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            report = connector_output.kv_connector_worker_meta
            self._scheduler.take_report(
                report if isinstance(report, WorkerReport) else WorkerReport(),
                connector_output.finished_recving or (),
                connector_output.failed_recving or (),
            )

    # Both sides

    def shutdown(self) -> None:
        """Finish saves within a bound and release the store; idempotent."""
        if self._worker is not None:
            self._worker.close(_DRAIN_S)
        if self._feeder is not None:
            self._feeder.close()
        if self._chunks is not None:
            self._chunks.close()
        if self._store is not None:
            release_store(self._store)
        self._worker = self._feeder = self._chunks = self._store = None


def _why_off(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported yet"
    if parallel.world_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        return "ranks with a scheduler each (external_launcher) may decide differently"
    return why_off(vllm_config, kv_cache_config, windows=True)


def _exact_only(kv_cache_config: KVCacheConfig) -> str | None:
    """Why this KV cache is not blended (spec row B10)."""
    if is_latent(kv_cache_config):
        return "MLA's latents are not moved"
    if has_windows(kv_cache_config):
        return "this model has layers that see a window of the tokens before only"
    return None


def _check_model(config: KvloomConfig, vllm_config: VllmConfig, head_dim: int) -> None:
    """Settings that restate the model's must agree with it."""
    if config.head_dim is not None and config.head_dim != head_dim:
        raise ConfigError(
            f"head_dim = {config.head_dim}, but the model's is {head_dim}: leave the key out"
        )
    theta = rope_parameters(vllm_config).get("rope_theta")
    if config.rope_theta is not None and theta is not None and config.rope_theta != theta:
        raise ConfigError(
            f"rope_theta = {config.rope_theta}, but the model's is {theta}: leave the key out"
        )
