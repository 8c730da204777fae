"""Thousands of requests on a tiny engine: what test_soak runs in a process of its own.

Prints one JSON line: state left, memory growth, wrong answers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

VOCABULARY = 512
DOCUMENTS = 12
WAVE = 100
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}


def make_tiny_model(folder: Path, **sizes: int) -> None:
    """A Llama of two layers with random weights; ``sizes`` replace those of its config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**TINY, "head_dim": 32, **sizes}, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)


def make_windowed_model(folder: Path) -> None:
    """A Gemma 3 of four such layers, of which all but the last see 96 tokens."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    config = Gemma3TextConfig(
        **{**TINY, "head_dim": 32, "num_hidden_layers": len(layers)},
        layer_types=layers,
        sliding_window=96,
        initializer_range=0.2,
        tie_word_embeddings=False,  # tied, it would say its last token for ever
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)


# With so few blocks that requests are preempted.
MODELS: dict[str, tuple[Callable[[Path], None], int]] = {
    "llama": (make_tiny_model, 70),
    "gemma3": (make_windowed_model, 140),
}


class Traffic:
    """Prompts of every kind: new, repeated, of moved documents, of one token."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(1)
        self._documents = [self._text(int(n)) for n in self._random.integers(70, 200, DOCUMENTS)]

    def prompt(self) -> list[int]:
        kind = self._random.integers(0, 4)
        if kind == 0:
            return self._text(int(self._random.integers(1, 60)))
        picked = self._random.permutation(DOCUMENTS)[: 1 + int(self._random.integers(0, 3))]
        body = [token for number in picked for token in self._documents[number]]
        opening = [] if kind == 1 else self._text(int(self._random.integers(0, 50)))
        return opening + body + self._text(3)

    def aborted(self) -> bool:
        return bool(self._random.random() < 0.1)

    def _text(self, count: int) -> list[int]:
        return self._random.integers(2, VOCABULARY, count).tolist()


def main() -> None:
    count, store, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    model = Path(store) / "model"
    make_model, blocks = MODELS[kind]
    make_model(model)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    extra = {
        "storage_backends": f"{store}/blocks",
        "blend_chunk_size": 32,
        "min_blend_tokens": 48,
        "first_k": 8,
        "blend_tokens_per_step": 16,
        "min_gain": None,  # computing is cheaper than anything with this model
        "cache_bytes": "4M",
        # What is stored may fill memory up to its limits: only what goes beyond is growth.
        "index_max_chunks": 2000,
    }
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        block_size=32,
        num_gpu_blocks_override=blocks,
        kv_transfer_config=KVTransferConfig(
            kv_connector="BlendConnector", kv_role="kv_both", kv_connector_extra_config=extra
        ),
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    ours = scheduler.connector._scheduler
    traffic = Traffic()
    seen = {"exact": 0, "blended": 0, "preempted": 0, "sliced": 0}
    finish, load_plan = ours.finish, ours._load_plan
    blended: set[str] = set()

    def finish_and_count(request: Any) -> Any:
        state = ours._states.get(request.request_id)
        if state is not None:
            seen["blended"] += state.generation > 0
            seen["exact"] += state.admitted is not None and state.admitted.exact > 0
            seen["preempted"] += request.num_preemptions > 0
        return finish(request)

    def plan_and_count(state: Any, match: Any) -> Any:
        # Also where it is preempted later and goes on without a blend: its first tokens had one.
        if match.blend is not None:
            blended.add(state.request.request_id.partition("-")[0])
        plan = load_plan(state, match)
        seen["sliced"] += plan.sliced
        return plan

    ours.finish, ours._load_plan = finish_and_count, plan_and_count
    params = SamplingParams(
        temperature=0, max_tokens=6, min_tokens=6, ignore_eos=True, detokenize=False
    )
    memory: list[int] = []
    samples: list[tuple[list[int], list[int]]] = []
    done = 0
    while done < count:
        prompts = {str(number): traffic.prompt() for number in range(done, done + WAVE)}
        for name, prompt in prompts.items():
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                exact = output.request_id not in blended and len(tokens) == params.max_tokens
                if output.finished and exact:
                    samples.append((prompts[output.request_id], tokens))
            if traffic.aborted():
                live = [request.request_id for request in scheduler.running]
                if live:
                    engine.abort_request(live[:1])
        done += WAVE
        memory.append(psutil.Process().memory_info().rss)
    left = {
        "left_states": ours.live_requests,
        "left_admitted": len(ours._admitted),
        "left_promised": len(scheduler.connector._promised),
        # The null block is never free.
        "left_blocks": blocks - 1 - scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "growth_mb": (memory[-1] - memory[len(memory) // 2]) / 1e6,
    }
    ours._loads = ours._saves = False
    llm.reset_prefix_cache()
    alone = llm.generate([{"prompt_token_ids": p} for p, _ in samples], params, use_tqdm=False)
    wrong = sum(
        list(output.outputs[0].token_ids) != tokens
        for output, (_, tokens) in zip(alone, samples, strict=True)
    )
    print(
        "SOAK"
        + json.dumps(
            {
                **seen,
                **left,
                "samples": len(samples),
                "wrong": wrong,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
