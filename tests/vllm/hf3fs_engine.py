"""One engine with HF3FSKVConnector and what befalls it: what test_hf3fs runs in its own process.

Prints a JSON line: for each scenario the answers and figures that the tests judge.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from .engines import transfer_config_hf3fs
from .soak import VOCABULARY, make_tiny_model

ANSWER = 4


class Hf3fsEngine:
    """An in-process engine; ``ask`` empties vLLM's own prefix cache first."""

    def __init__(
        self, model: str, folder: str, url: str, max_model_len: int = 1024, **engine: Any
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(**transfer_config_hf3fs(Path(folder), url))
        self.llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=max_model_len,
            kv_transfer_config=transfer,
            **engine,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.connector = self.core.scheduler.connector
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.worker = get_kv_transfer_group()

    def wait_for_answers(self, seconds: float) -> None:
        """How long a look-up may take."""
        for client in (self.connector._metadata_client, self.worker._metadata_client):
            client._lookup_timeout_s = seconds

    def forget(self) -> None:
        self.worker._transfers.drain(30.0)
        assert self.llm.reset_prefix_cache()

    def ask(self, *prompts: list[int], tokens: int = ANSWER) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        self.forget()
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvloom_report": True}},
        )
        began = time.perf_counter()
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "exact": (output.kv_transfer_params or {}).get("kvloom", {}).get("exact"),
                "seconds": time.perf_counter() - began,
            }
            for output in outputs
        ]

    def cold(self, *prompts: list[int], tokens: int = ANSWER) -> list[dict[str, Any]]:
        scheduler = self.connector._scheduler
        scheduler._loads = scheduler._saves = False
        try:
            return self.ask(*prompts, tokens=tokens)
        finally:
            scheduler._loads = scheduler._saves = True

    @property
    def left(self) -> dict[str, int]:
        """State of requests that are over."""
        transfers = self.worker._transfers
        return {
            "requests": self.connector._scheduler.live_requests,
            "loads": len(transfers._loads),
            "saves": len(transfers._saving),
            "promised": len(self.connector._promised),
        }


def text(seed: int, length: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(100, 40_000) for _ in range(length)]


def scenarios(engine: Hf3fsEngine, service: int, pages: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine.wait_for_answers(10.0)  # a machine is slow now and then, and would open the breaker
    prompt = text(1, 400)
    found["cold"] = engine.cold(prompt)[0]
    found["first"] = engine.ask(prompt)[0]
    found["hit"] = engine.ask(prompt)[0]

    borders = [text(2, length) for length in (1, 127, 128, 129, 256)]
    found["borders_cold"] = [engine.cold(one)[0] for one in borders]
    for one in borders:
        engine.ask(one)
    found["borders_hit"] = [engine.ask(one)[0] for one in borders]

    grow = text(3, 100)
    answer = engine.ask(grow, tokens=40)[0]["tokens"]
    turn = grow + answer + text(4, 20)
    found["turn"] = engine.ask(turn)[0]
    found["turn_cold"] = engine.cold(turn)[0]

    (file,) = pages.rglob("*.pages")
    with file.open("r+b") as opened:
        size = file.stat().st_size
        for at in range(2000, size, 65536):  # a byte in every page
            opened.seek(at)
            byte = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte[0] ^ 1]) if byte != b"\0" else b"\1")
    found["damaged"] = engine.ask(prompt)[0]
    found["saved_anew"] = engine.ask(prompt)[0]

    engine.wait_for_answers(0.05)
    os.kill(service, signal.SIGSTOP)
    slow = []
    match = engine.connector._scheduler.match

    def timed(request: Any, local: int) -> int:
        began = time.perf_counter()
        try:
            return int(match(request, local))
        finally:
            slow.append(time.perf_counter() - began)

    engine.connector._scheduler.match = timed
    found["stopped"] = [engine.ask(prompt)[0] for _ in range(3)]
    engine.connector._scheduler.match = match
    found["stopped_match_s"] = slow
    os.kill(service, signal.SIGCONT)
    ends = time.monotonic() + 20
    engine.wait_for_answers(10.0)
    clients = (engine.connector._metadata_client, engine.worker._metadata_client)
    while not all(client.available for client in clients) and time.monotonic() < ends:
        time.sleep(0.1)
    found["continued"] = engine.ask(prompt)[0]

    transfers = engine.worker._transfers
    read, config = transfers._read, transfers._config
    transfers._config = config.model_copy(update={"load_timeout_s": 0.5})
    transfers._read = lambda *args: (time.sleep(2), read(*args))
    found["late"] = engine.ask(prompt)[0]
    transfers._read = read
    transfers._config = config
    time.sleep(2.5)

    step, scheduler = engine.connector._scheduler.step, engine.connector._scheduler

    def broken(output: Any) -> Any:
        raise RuntimeError("broken on purpose")

    scheduler.step = broken
    found["broken_hook"] = engine.ask(prompt)[0]
    scheduler.step = step
    found["after_broken_hook"] = engine.ask(prompt)[0]

    found["aborted"] = abort_in_every_phase(engine, prompt)
    found["left"] = engine.left
    return found


def abort_in_every_phase(engine: Hf3fsEngine, prompt: list[int]) -> int:
    """Requests that end while they wait for their load, or right after it."""
    from vllm import SamplingParams

    llm_engine = engine.llm.llm_engine
    for steps in range(4):
        engine.forget()
        name = f"abort-{steps}"
        llm_engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=50))
        for _ in range(steps):
            llm_engine.step()
        llm_engine.abort_request([name])
        for _ in range(200):
            llm_engine.step()
            if not engine.worker._transfers._loads:
                break
            time.sleep(0.01)
        llm_engine.step()
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - pool.get_num_free_blocks())


def count_preemptions(engine: Hf3fsEngine) -> list[str]:
    preempted: list[str] = []
    preempt = engine.core.scheduler._preempt_request

    def preempt_and_count(request: Any, *args: Any, **more: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **more)

    engine.core.scheduler._preempt_request = preempt_and_count
    return preempted


def crowd(engine: Hf3fsEngine) -> dict[str, Any]:
    """200 requests of all kinds through a cache so small that they are preempted."""
    chooser = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [chooser.randrange(2, VOCABULARY) for _ in range(count)]

    documents = [tokens(chooser.randrange(40, 200)) for _ in range(6)]
    prompts = [
        (chooser.choice(documents) if chooser.random() < 0.7 else [])
        + tokens(chooser.randrange(1, 60))
        for _ in range(200)
    ]
    preempted = count_preemptions(engine)
    together = engine.ask(*prompts, tokens=40)
    again = engine.ask(*prompts, tokens=40)
    sample = chooser.sample(range(200), 12)
    alone = [engine.cold(prompts[i], tokens=40)[0]["tokens"] for i in sample]
    return {
        "alone": alone,
        "together": [together[i]["tokens"] for i in sample],
        "again": [again[i]["tokens"] for i in sample],
        "hits": sum(answer["exact"] > 0 for answer in again),
        "preempted": len(preempted),
        "left": engine.left,
    }


def main() -> None:
    what, model, folder, url, service = sys.argv[1:]
    if what == "crowd":
        tiny = Path(folder) / "model"
        make_tiny_model(tiny)
        result = crowd(
            Hf3fsEngine(
                str(tiny),
                folder,
                url,
                skip_tokenizer_init=True,
                block_size=32,
                num_gpu_blocks_override=34,
                max_num_seqs=16,
            )
        )
    else:
        result = scenarios(Hf3fsEngine(model, folder, url), int(service), Path(folder))
    print("RESULT" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
