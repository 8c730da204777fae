"""One engine of two ranks with HF3FSKVConnector: what test_ranks runs in a process of its own.

Prints a JSON line with the answers and figures that the tests judge.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from kvloom.hf3fs.metadata.base import NamespaceStats
from kvloom.hf3fs.metadata.client import MetadataClient

from .engines import idle, transfer_config_hf3fs
from .soak import VOCABULARY, make_tiny_model

BLOCKS = 6
BLOCK_SIZE = 32


# Heads that divide by two ranks either way.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class RanksEngine:
    """The scheduler side in this process, the workers in their own."""

    def __init__(self, folder: Path, url: str, tp: int, pp: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        cores = sorted(os.sched_getaffinity(0))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
        # vLLM's CPU runner makes the buffer between pipeline stages only where it warms up a
        # compiled model; so one is traced, with nothing generated from it.
        more: dict[str, Any] = {"compilation_config": {"backend": "eager"}} if pp > 1 else {}
        from vllm import LLM
        from vllm.config import KVTransferConfig

        make_tiny_model(folder / "model", **SIZES)
        self.llm = LLM(
            str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=pp == 1,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            max_model_len=512,
            block_size=BLOCK_SIZE,
            kv_transfer_config=KVTransferConfig(
                **transfer_config_hf3fs(folder / "pages", url, hf3fs_file_size="16M")
            ),
            **more,
        )
        core: Any = self.llm.llm_engine.engine_core
        self.scheduler = core.engine_core.scheduler
        self.connector = self.scheduler.connector
        self.ours = self.connector._scheduler
        self.invalid: list[int] = []
        self.hashes: list[str] = []
        self.answers: set[tuple[int, ...]] = set()
        handle, add = self.scheduler._handle_invalid_blocks, self.ours.add

        def handle_and_keep(blocks: set[int], *more: Any) -> Any:
            self.invalid += sorted(blocks)
            return handle(blocks, *more)

        def add_and_keep(request: Any) -> None:
            self.hashes = [block_hash.hex() for block_hash in request.block_hashes]
            add(request)

        self.scheduler._handle_invalid_blocks = handle_and_keep
        self.ours.add = add_and_keep
        self.client = MetadataClient(url, self.connector._namespace, "test", lookup_timeout_s=10)

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        self.invalid.clear()
        params = SamplingParams(
            temperature=0,
            max_tokens=8,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvloom_report": True}},
        )
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        self.answers.add(tuple(output.outputs[0].token_ids))
        return {
            "tokens": list(output.outputs[0].token_ids),
            "exact": (output.kv_transfer_params or {}).get("kvloom", {}).get("exact"),
            "invalid": len(self.invalid),
        }

    def ask_for_a_hit(self, prompt: list[int]) -> dict[str, Any]:
        """On a busy machine a look-up may be late, and the answer a cold one: asked again then."""
        for _ in range(5):
            answer = self.ask(prompt)
            if answer["exact"]:
                break
            time.sleep(1)
        return answer

    def cold(self, prompt: list[int]) -> dict[str, Any]:
        with idle(self.ours):
            return self.ask(prompt)

    def wait_complete(self, count: int) -> int:
        """How many keys all ranks have confirmed, once they are ``count`` or it takes too long."""
        ends = time.monotonic() + 30
        while True:
            stats = self.client.stats()
            complete = stats.complete if isinstance(stats, NamespaceStats) else -1
            if complete == count or time.monotonic() > ends:
                return complete
            time.sleep(0.05)


def damage(pages: Path, engine: RanksEngine, file: int, block: int, at: int) -> None:
    """Flip a byte of one block's page in one file."""
    (path,) = pages.rglob(f"rank-{file}.pages")
    size = json.loads(path.with_name(path.name + ".geometry").read_text())["bytes_per_page"]
    places: Any = engine.client.locations(file, [engine.hashes[block]])
    with path.open("r+b") as opened:
        opened.seek(places[0].page * size + at)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))


def ask_with_damage(engine: RanksEngine, pages: Path, prompt: list[int]) -> dict[str, Any]:
    """The answer where one rank's page of one block is damaged, and was looked at."""
    for at in range(1000, 1005):
        engine.ask_for_a_hit(prompt)
        damage(pages, engine, file=1, block=3, at=at)
        answer = engine.ask(prompt)
        engine.wait_complete(BLOCKS)
        if answer["invalid"] == 1:
            break
    return answer


def main() -> None:
    folder, url, tp, pp = sys.argv[1:]
    engine = RanksEngine(Path(folder), url, int(tp), int(pp))
    chooser = random.Random(5)
    prompt = [chooser.randrange(2, VOCABULARY) for _ in range(BLOCKS * BLOCK_SIZE + 5)]
    found: dict[str, Any] = {"cold": engine.cold(prompt)}
    found["first"] = engine.ask(prompt)
    found["complete"] = engine.wait_complete(BLOCKS)
    found["hit"] = engine.ask_for_a_hit(prompt)
    pages = Path(folder) / "pages"
    found["files"] = sorted(path.name for path in pages.rglob("*.pages"))
    found["damaged"] = ask_with_damage(engine, pages, prompt)
    found["complete_again"] = engine.wait_complete(BLOCKS)
    found["saved_anew"] = engine.ask_for_a_hit(prompt)
    found["answers"] = sorted(engine.answers)
    audit: Any = engine.client.audit()
    found["audit"] = {"leaked": audit.leaked, "twice": audit.twice, "confirmed": audit.confirmed}
    print("RESULT" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
