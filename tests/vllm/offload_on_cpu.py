"""vLLM's offloading where its own copies need a GPU: the same spec, with a worker that copies rows.

Everything else is vLLM's: connector, scheduler side, tiering manager, the shared CPU region.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Blocks of one group, one to a chunk, copied when they are asked for."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = [
            (cache.tensor, region.create_next_worker_view(cache.page_size_bytes))
            for cache in caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for engine, offloaded in self._pairs:
            offloaded[torch.from_numpy(dst_spec.block_ids).long()] = engine[
                torch.from_numpy(src_spec.block_ids).long()
            ]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for engine, offloaded in self._pairs:
            engine[torch.from_numpy(dst_spec.block_ids).long()] = offloaded[
                torch.from_numpy(src_spec.block_ids).long()
            ]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: each copy ended when it was asked for."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class OffloadingOnCpu(TieringOffloadingSpec):
    """``spec_name`` of the tests."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker
