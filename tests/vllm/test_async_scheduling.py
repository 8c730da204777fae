"""vLLM's own asynchronous scheduler over our scheduler side: a load that fails (B15, B21).

It plans a step before it knows what became of the one before, on GPUs by default and on CPUs never:
so without an engine, whose part these tests play.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvloom.vllm.metadata import WorkerReport

from .engines import transfer_config
from .test_scheduler import know

BLOCK, BLOCKS, TOKENS = 64, 100, 330
RIGHT, WRONG = 7, 666


@pytest.fixture
def scheduler(model: Path, tmp_path: Path) -> Any:
    config = EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=4096,
        block_size=BLOCK,
        kv_transfer_config=KVTransferConfig(**transfer_config(tmp_path)),
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.float32)
    caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    init_none_hash(sha256)
    found = AsyncScheduler(config, caches, StructuredOutputManager(config), BLOCK, BLOCK)
    yield found
    found.connector.shutdown()


def test_no_token_of_a_failed_load_is_in_the_answer(scheduler: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    params.update_from_generation_config({}, 0)
    request = Request(
        "a",
        list(range(1000, 1000 + TOKENS)),
        params,
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    scheduler.add_request(request)
    know(scheduler.connector._scheduler, request)
    first = scheduler.schedule()
    (plan,) = first.kv_connector_metadata.loads
    second = scheduler.schedule()  # before anything is known of the first
    lost = WorkerReport(lost=[piece.key for piece in plan.pieces])
    failed = KVConnectorOutput(
        finished_recving={"a"}, failed_recving={"a"}, kv_connector_worker_meta=lost
    )
    scheduler.update_from_output(first, output(first, WRONG, failed))
    third = scheduler.schedule()
    scheduler.update_from_output(second, output(second, WRONG))
    scheduler.schedule()
    scheduler.update_from_output(third, output(third, RIGHT))
    assert third.num_scheduled_tokens == {"a": TOKENS}, "all of it is computed"
    assert list(request.output_token_ids) == [RIGHT]


def output(step: Any, token: int, connector: KVConnectorOutput | None = None) -> ModelRunnerOutput:
    """What the engine's workers would answer to a step: one token for each of its requests."""
    names = list(step.num_scheduled_tokens)
    if not names:
        return ModelRunnerOutput.with_kv_conn_output_only(connector or KVConnectorOutput())
    return ModelRunnerOutput(
        names,
        {name: number for number, name in enumerate(names)},
        [[token] for _ in names],
        kv_connector_output=connector,
    )
