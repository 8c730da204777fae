"""Several ranks, one store (H19): on real engines of two ranks, and their parts alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvloom.vllm.connector import why_off
from kvloom.vllm.hf3fs_connector import _share
from kvloom.vllm.hf3fs_transfers import Share
from tests.hf3fs.service import running

from .ranks_engine import BLOCK_SIZE, BLOCKS
from .scripts import found_by


def engine(folder: Path, tp: int, pp: int) -> dict[str, Any]:
    (folder / "model").mkdir()
    with running(folder / "state") as service:
        return found_by(
            "ranks_engine", folder, service.url, tp, pp, timeout_s=600, OMP_NUM_THREADS="1"
        )


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_two_ranks_share_a_store(tmp_path: Path, tp: int, pp: int) -> None:
    """Tensor and pipeline parallelism have a page file a rank.

    A damaged page of the last file: that block is reported by the rank that met it, both compute,
    and the answer is the cold one; then both save it anew.
    """
    found = engine(tmp_path, tp, pp)
    assert found["files"] == ["rank-0.pages", "rank-1.pages"]
    cold, stored = found["cold"]["tokens"], BLOCKS * BLOCK_SIZE
    assert found["first"] == {"tokens": cold, "exact": 0, "invalid": 0}
    assert found["complete"] == BLOCKS, "complete when all ranks have confirmed"
    assert found["hit"] == {"tokens": cold, "exact": stored, "invalid": 0}
    assert found["damaged"] == {"tokens": cold, "exact": 0, "invalid": 1}
    assert found["complete_again"] == BLOCKS
    assert found["saved_anew"] == {"tokens": cold, "exact": stored, "invalid": 0}
    assert found["answers"] == [cold], "also where something came too late"
    assert found["audit"] == {"leaked": 0, "twice": 0, "confirmed": 2 * BLOCKS}


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)


def share(spec: Any, rank: int, tp: int, pp: int) -> Share:
    parallel = SimpleNamespace(
        rank=rank, world_size=tp * pp, tensor_parallel_size=tp, pipeline_parallel_size=pp
    )
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    return _share(
        SimpleNamespace(parallel_config=parallel),  # type: ignore[arg-type]
        SimpleNamespace(kv_cache_groups=groups),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 3)])
def test_every_part_of_the_kv_is_saved_by_one_rank(tp: int, pp: int) -> None:
    full = [share(FULL, rank, tp, pp) for rank in range(tp * pp)]
    assert [one.file for one in full] == list(range(tp * pp))
    assert all(one.files == tp * pp and one.saves for one in full)
    latent = [share(LATENT, rank, tp, pp) for rank in range(tp * pp)]
    assert [one.file for one in latent] == [rank // tp for rank in range(tp * pp)]
    assert all(one.files == pp for one in latent)
    assert sorted(one.file for one in latent if one.saves) == list(range(pp))


def test_ranks_that_hold_parts_of_a_blocks_tokens_are_refused() -> None:
    parallel = SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=1)
    scheduler = SimpleNamespace(enable_chunked_prefill=True)
    vllm_config: Any = SimpleNamespace(parallel_config=parallel, scheduler_config=scheduler)
    caches: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=LATENT)])
    assert why_off(vllm_config, caches) == "context parallelism is not supported yet"
    parallel.decode_context_parallel_size = 1
    assert why_off(vllm_config, caches) is None


def test_latents_are_left_alone_where_the_engine_can_not_go_on_from_a_prefix() -> None:
    """vLLM's CPU backend for MLA gave wrong tokens behind one that was loaded bit for bit."""
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
    )
    caches: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=LATENT)])
    assert "chunked prefill is off" in (why_off(vllm_config, caches) or "")
    caches.kv_cache_groups[0].kv_cache_spec = FULL
    assert why_off(vllm_config, caches) is None
