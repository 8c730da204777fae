"""A real vLLM engine for the demo and the benchmarks, in processes of its own, and timed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

# The engine's own processes read these when they start.
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # By default vLLM leaves cores free, one without a connector and, of two cores, none with one:
    # an engine without kvloom would then compute with half the threads.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Reply:
    """One request's outcome.

    Attributes:
        ttft_ms: time from the request to its first token, as the engine reports it.
        found: prompt tokens that vLLM did not compute itself.
        figures: kvloom's own report; empty on an engine without kvloom.
    """

    ttft_ms: float
    tokens: list[int]
    text: str
    found: int
    figures: dict[str, Any] = field(default_factory=dict)


def blend_over(store: Path, **extra: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` of a BlendConnector over a store directory."""
    return {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "kvloom.vllm.blend_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"storage_backends": str(store), **extra},
    }


class EngineUnderTest:
    """vLLM on this machine.

    Args:
        transfer: its ``--kv-transfer-config``.
        max_step_tokens: of a step at most; default: a whole prompt.
        dtype: of the model.
    """

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any] | None,
        *,
        max_model_len: int = 8192,
        max_step_tokens: int | None = None,
        dtype: str = "float32",
    ) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._llm = LLM(
            str(model),
            dtype=dtype,  # type: ignore[arg-type]
            enforce_eager=True,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_step_tokens or max_model_len,
            disable_log_stats=False,
            # What vLLM chooses with a connector. Without one it would run in one process with
            # half the threads, and every comparison would flatter kvloom.
            distributed_executor_backend="mp",
            kv_transfer_config=KVTransferConfig(**transfer) if transfer is not None else None,
        )
        self.tokenizer = self._llm.get_tokenizer()
        self.ask(list(range(100, 140)), max_tokens=2, salt="warm-up")

    def ask(self, prompt: Sequence[int], max_tokens: int = 1, salt: str | None = None) -> Reply:
        """Greedy answer to a prompt of token ids; ``salt`` separates what may be reused."""
        from vllm import SamplingParams

        request: Any = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            request["cache_salt"] = salt
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            extra_args={"kv_transfer_params": {"kvloom_report": True}},
        )
        output = self._llm.generate([request], params, use_tqdm=False)[0]
        metrics = output.metrics
        if metrics is None:
            raise RuntimeError("this vLLM reports no request statistics: TTFT can't be told")
        return Reply(
            ttft_ms=metrics.first_token_latency * 1e3,
            tokens=list(output.outputs[0].token_ids),
            text=output.outputs[0].text,
            found=output.num_cached_tokens or 0,
            figures=(output.kv_transfer_params or {}).get("kvloom", {}),
        )

    def submit(
        self, name: str, prompt: Sequence[int], max_tokens: int, salt: str | None = None
    ) -> None:
        """Give the engine a request; ``step`` tells what becomes of it."""
        from vllm import SamplingParams

        request: Any = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            request["cache_salt"] = salt
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._llm.llm_engine.add_request(name, request, params)

    def step(self) -> dict[str, int]:
        """Wait for the engine's next step; how many tokens each request that got one now has."""
        outputs: list[Any] = self._llm.llm_engine.step()
        return {output.request_id: len(output.outputs[0].token_ids) for output in outputs}

    def abort(self, names: Sequence[str]) -> None:
        """End requests, and step until the engine has none left."""
        self._llm.llm_engine.abort_request(list(names))
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; kvloom's store stays."""
        self._llm.reset_prefix_cache()

    def stop(self) -> None:
        """End the engine's processes; what was saved is on disk afterwards."""
        self._llm.llm_engine.engine_core.shutdown()


@contextmanager
def quiet_engines(log: Path) -> Iterator[IO[str]]:
    """Send what this process and its engines print to a log file; yields the real terminal."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, number in zip(saved, (1, 2), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        terminal.close()
