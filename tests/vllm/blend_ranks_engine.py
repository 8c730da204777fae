"""One engine of some ranks with BlendConnector: what test_blend_ranks runs in a process of its own.

Prints a JSON line with the answers and figures that the tests judge.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.blend.selection import make_policy
from kvloom.config import KvloomConfig
from kvloom.tokens.hashing import prefix_keys, scope_id

from .engines import idle, transfer_config
from .ranks_engine import SIZES
from .soak import VOCABULARY, make_tiny_model

CHUNK = 32
DOCUMENT = 4 * CHUNK
CONFIG: dict[str, Any] = {
    # What was deleted is neither found in memory nor missed before it is asked for.
    "store_pipeline": "Posix",
    "index_poll_s": 3600.0,
    "blend_chunk_size": CHUNK,
    "min_blend_tokens": 48,
    "min_gain": None,  # computing is cheaper than anything with this model
    "recompute_policy": "hkvd",
    "recompute_ratio": 0.25,
}


class Asked:
    """An engine and how to ask it; the scheduler side is in this process.

    Args:
        folder: of the model, in ``model``, and of the store.
        options: of vLLM.
    """

    def __init__(self, folder: Path, ranks: int, config: dict[str, Any], **options: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        if ranks > 1:
            cores = sorted(os.sched_getaffinity(0))
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.store = folder / "store"
        self.llm = LLM(
            str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            tensor_parallel_size=ranks,
            max_model_len=1024,
            kv_transfer_config=KVTransferConfig(**transfer_config(self.store, **config)),
            **options,
        )
        core: Any = self.llm.llm_engine.engine_core
        connector = core.engine_core.scheduler.connector
        self.ours, self.namespace = connector._scheduler, connector._store.namespace
        self.ranks = ranks

    def ask(self, prompt: list[int], max_tokens: int = 8, *, fresh: bool = True) -> dict[str, Any]:
        """Args:
        fresh: vLLM's own prefix cache is emptied first.
        """
        from vllm import SamplingParams

        if fresh:
            self.llm.reset_prefix_cache()
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            logprobs=1,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvloom_report": True}},
        )
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        answer, report = output.outputs[0], (output.kv_transfer_params or {}).get("kvloom", {})
        return {
            "tokens": list(answer.token_ids),
            "logprobs": [
                step[token].logprob
                for step, token in zip(answer.logprobs or [], answer.token_ids, strict=True)
            ],
            "figures": {
                name: report.get(name)
                for name in ("exact", "local", "reused", "recomputed", "new", "failed")
            },
        }

    def cold(self, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
        with idle(self.ours):
            return self.ask(prompt, max_tokens)

    def choose(self, share: float) -> None:
        """Recompute this share of what is reused; the workers are told how many tokens that is."""
        config = KvloomConfig.from_extra({**CONFIG, "recompute_ratio": share})
        self.ours._policy = make_policy(config)

    def stored(self) -> list[list[str]]:
        """Names of the blocks of each rank."""
        folders = sorted(path for path in self.store.iterdir() if len(path.name) == 32)
        return [sorted(path.name for path in folder.rglob("*.kv")) for folder in folders]

    def wait_stored(self, count: int) -> list[list[str]]:
        ends = time.monotonic() + 30
        while time.monotonic() < ends:
            stored = self.stored()
            if len(stored) == self.ranks and all(len(names) == count for names in stored):
                break
            time.sleep(0.05)
        return stored

    def lose(self, chunk: bytes) -> None:
        """Delete a block of one rank: of two, that which the scheduler does not see."""
        paths = sorted(
            self.store.rglob(f"{chunk.hex()}.kv"), key=lambda path: self.namespace in path.parts
        )
        paths[0].unlink()


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    # A first pass up to layer 1 would leave nothing to differ in a model of two layers.
    make_tiny_model(folder / "model", **SIZES, num_hidden_layers=4)
    asked = Asked(folder, ranks, CONFIG)
    random = np.random.default_rng(3)

    def text(count: int) -> list[int]:
        found: list[int] = random.integers(2, VOCABULARY, count).tolist()
        return found

    documents = [text(DOCUMENT) for _ in range(3)]
    openings = [text(2 * CHUNK) for _ in documents]

    def question() -> list[int]:
        return text(45) + documents[2] + documents[0] + documents[1] + text(7)

    for opening, document in zip(openings, documents, strict=True):
        asked.ask(opening + document)
    found: dict[str, Any] = {"stored": asked.wait_stored(3 * 6)}
    exact = openings[1] + documents[1] + text(5)
    found["exact"] = [asked.cold(exact), asked.ask(exact)]
    some, everything, without, after = (question() for _ in range(4))
    found["some"] = [asked.cold(some), asked.ask(some)]
    asked.choose(1.0)
    found["all"] = [asked.cold(everything), asked.ask(everything)]
    asked.choose(0.25)
    scope = scope_id(cache_salt=None, lora_name=None)
    keys = prefix_keys(np.array(openings[0] + documents[0], np.int32), CHUNK, scope)
    asked.lose(keys[3])
    found["without"] = [asked.cold(without), asked.ask(without)]
    found["after"] = [asked.cold(after), asked.ask(after)]
    print("RESULT" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
