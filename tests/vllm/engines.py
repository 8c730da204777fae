"""Real engines for the tests: vLLM with kvloom, in this process, so that a test can look inside."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvloom.blend.cost import CostRule

MODEL_VARIABLE = "KVLOOM_TEST_MODEL"


def transfer_config(store: Path, **extra: Any) -> dict[str, Any]:
    """``kv_transfer_config`` of a BlendConnector over a store directory."""
    return {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "kvloom.vllm.blend_connector",
        "kv_role": extra.pop("kv_role", "kv_both"),
        "kv_connector_extra_config": {"storage_backends": str(store), **extra},
    }


def transfer_config_hf3fs(pages: Path, url: str, **extra: Any) -> dict[str, Any]:
    """``kv_transfer_config`` of an HF3FSKVConnector over a directory and a metadata service."""
    return {
        "kv_connector": "HF3FSKVConnector",
        "kv_connector_module_path": "kvloom.vllm.hf3fs_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "hf3fs_storage_path": str(pages),
            "hf3fs_metadata_server_url": url,
            **extra,
        },
    }


@contextmanager
def idle(scheduler: Any) -> Iterator[None]:
    """A connector's scheduler side that neither loads nor saves: its engine is plain vLLM."""
    loads, saves = scheduler._loads, scheduler._saves
    scheduler._loads = scheduler._saves = False
    try:
        yield
    finally:
        scheduler._loads, scheduler._saves = loads, saves


@dataclass
class Answer:
    """What came back of one request.

    Attributes:
        tokens: generated token ids.
        figures: kvloom's report: exact, reused, recomputed, new, ...
        failed: tokens that should have been loaded and were computed instead.
        kv: float32 [layers, 2, prompt tokens, heads, head_dim], as it lay in the cache at the end;
            0 where a window had left it behind.
        cached: tokens that vLLM counts as found, its own and ours.
    """

    tokens: list[int]
    text: str
    figures: dict[str, Any]
    failed: int
    kv: torch.Tensor
    cached: int
    logprobs: list[dict[int, float]]


class Engine:
    """One in-process vLLM engine over a store directory.

    Args:
        options: of vLLM, where they are not the usual ones.
        extra: kvloom's configuration.
    """

    def __init__(
        self, model: Path, store: Path, options: dict[str, Any] | None = None, **extra: Any
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.store_path = store
        self.llm = LLM(
            str(model),
            **{"dtype": "float32", "max_model_len": 4096, **(options or {})},
            enforce_eager=True,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(**transfer_config(store, **extra)),
        )
        self.tokenizer = self.llm.get_tokenizer()
        self.core = self.llm.llm_engine.engine_core.engine_core
        self._kv: dict[str, torch.Tensor] = {}
        self._loads: dict[str, Any] = {}
        if self.scheduler is not None:  # None where kvloom is off
            self._listen()

    def _listen(self) -> None:
        finish = self.scheduler.finish

        def finish_and_keep_kv(request: Any) -> Any:
            if request.num_computed_tokens >= request.num_prompt_tokens:
                self._kv[request.request_id] = self._read_kv(request)
            return finish(request)

        self.scheduler.finish = finish_and_keep_kv
        take_report = self.scheduler.take_report

        def keep_and_take_report(report: Any, *ended: Any) -> None:
            self._loads |= report.loads
            take_report(report, *ended)

        self.scheduler.take_report = keep_and_take_report

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    @property
    def scheduler(self) -> Any:
        """kvloom's scheduler side."""
        return self.connector._scheduler

    @property
    def worker(self) -> Any:
        """kvloom's worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def ask(self, tokens: Sequence[int], max_tokens: int = 1, **more: Any) -> Answer:
        return self.ask_all([tokens], max_tokens, **more)[0]

    def ask_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 1, salt: str | None = None
    ) -> list[Answer]:
        """Greedy answers; the requests are in the engine together."""
        from vllm import SamplingParams

        self._kv.clear()
        self._loads.clear()
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=5,
            extra_args={"kv_transfer_params": {"kvloom_report": True}},
        )
        requests = [
            {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
            for prompt in prompts
        ]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        answers = []
        for output in outputs:
            (name,) = [name for name in self._kv if name.startswith(f"{output.request_id}-")]
            load = self._loads.get(name)
            one = output.outputs[0]
            answers.append(
                Answer(
                    list(one.token_ids),
                    one.text,
                    (output.kv_transfer_params or {}).get("kvloom", {}),
                    load.failed_tokens if load is not None else 0,
                    self._kv[name],
                    output.num_cached_tokens or 0,
                    [{t: p.logprob for t, p in step.items()} for step in one.logprobs],
                )
            )
        return answers

    def plain(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy answer alone, also where kvloom is off."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        output = self.llm.generate([{"prompt_token_ids": list(tokens)}], params, use_tqdm=False)
        return list(output[0].outputs[0].token_ids)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, as a fresh engine has it; the store is settled first."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def forget_memory(self) -> None:
        """Drop the Cache stage's blocks too, as a fresh engine has none; the files stay."""
        self.forget()
        cache = self.connector._store._stages[0]
        cache.delete([header.key for header in cache.headers()])

    def settle(self) -> None:
        """Wait until what was saved is in the store and the index knows it."""
        self.worker.drain(30.0)
        assert self.connector._feeder.wait_idle(30.0)
        assert self.scheduler._chunks.wait_written(30.0)

    def clear(self) -> None:
        """Empty the store too, and forget how fast it was."""
        self.forget()
        self.scheduler._cost = CostRule(self.connector.config.min_gain)
        store = self.connector._store
        store.delete([header.key for header in store.headers()])
        self.settle()
        # What vanished behind the store's back (a directory removed, a file system unmounted) is
        # known after the next scan only.
        ends = time.monotonic() + 10 * self.connector.config.index_poll_s
        while len(self.scheduler._chunks.index) and time.monotonic() < ends:
            time.sleep(0.05)
        assert len(self.scheduler._chunks.index) == 0

    @contextmanager
    def without_store(self) -> Iterator[None]:
        """Requests in this block neither load nor save: plain vLLM, from an empty prefix cache."""
        self.forget()
        try:
            with idle(self.scheduler):
                yield
        finally:
            assert self.llm.reset_prefix_cache()

    def cold(self, tokens: Sequence[int], max_tokens: int = 1) -> Answer:
        """The answer of plain vLLM."""
        with self.without_store():
            return self.ask(tokens, max_tokens)

    def _read_kv(self, request: Any) -> torch.Tensor:
        cache = self.worker._cache
        tables = self.core.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        out = torch.zeros(cache.payload_shape(request.num_prompt_tokens), dtype=cache.dtype)
        cache.gather(tables, 0, out)
        return out


def prose(engine: Engine, seed: int, length: int) -> list[int]:
    """``length`` tokens of real text, another stretch of it for every seed."""
    from kvloom.demo.documents import corpus_tokens

    tokens = corpus_tokens(engine.tokenizer, 40_000)
    start = int(np.random.default_rng(seed).integers(0, len(tokens) - length))
    return list(tokens[start : start + length])


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


@contextmanager
def all_tokens_chosen(engine: Engine) -> Iterator[None]:
    """Every prompt is 'blended' with nothing reused: kvloom computes all but the last token."""
    from kvloom.blend.plan import make_plan
    from kvloom.tokens.chunks import Chunk, ChunkType
    from kvloom.vllm.scheduler import Match

    scheduler = engine.scheduler
    find = scheduler._find

    def choose_all(state: Any, local: int) -> Match:
        end = state.request.num_tokens - 1
        chunks = [Chunk(local, end + 1, ChunkType.NO_MATCH)]
        blend = make_plan(chunks, end)
        return Match(local, exact=local, total=end, blend=blend, generation=1, match_ms=0.0)

    scheduler._find = choose_all
    try:
        yield
    finally:
        scheduler._find = find
