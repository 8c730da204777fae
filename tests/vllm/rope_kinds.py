"""Tiny models of every RoPE kind, each in an engine: what test_rope_kinds runs in one process.

Prints one JSON line a kind: what kvloom said of it, and what was measured.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .soak import TINY, VOCABULARY

CHUNK = 32
SIZES = {
    **TINY,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
HEADS_OF_32 = {"head_dim": 32}
# Models that know no shared KV heads; vLLM would believe the number all the same, and write past
# its cache.
EACH_ITS_OWN = {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Kind:
    """A model, and what kvloom must do with it.

    Attributes:
        config: of the transformers library: ``model_type`` and what differs from ``SIZES``.
        does: "blends", "exact" (exact prefixes only) or "off".
        says: part of kvloom's one line about it.
        engine: options of vLLM.
    """

    config: dict[str, Any]
    does: str = "blends"
    says: str = ""
    engine: dict[str, Any] = field(default_factory=dict)


def llama(**rope: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    return {"model_type": "llama", **HEADS_OF_32, "rope_parameters": parameters}


LONGROPE = llama(
    rope_type="longrope",
    factor=4.0,
    original_max_position_embeddings=512,
    short_factor=[1.0 + 0.01 * i for i in range(16)],
    long_factor=[1.0 + 0.5 * i for i in range(16)],
)
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"]
WINDOWS = {"sliding_window": 96, **HEADS_OF_32}

KINDS = {
    "llama": Kind(llama()),
    "llama-bf16": Kind(llama(), engine={"dtype": "bfloat16"}),
    "linear": Kind(llama(rope_type="linear", factor=4.0)),
    "llama3": Kind(
        llama(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        )
    ),
    "yarn": Kind(llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)),
    "longrope-long": Kind(LONGROPE),
    "longrope-short": Kind(LONGROPE, engine={"max_model_len": 512}),
    "dynamic": Kind(
        llama(rope_type="dynamic", factor=2.0), "exact", "DynamicNTKScalingRotaryEmbedding"
    ),
    "qwen2": Kind({"model_type": "qwen2"}),
    "qwen3": Kind({"model_type": "qwen3", **HEADS_OF_32}),
    "mistral": Kind({"model_type": "mistral", "sliding_window": None, **HEADS_OF_32}),
    "mistral-window": Kind({"model_type": "mistral", **WINDOWS}, "exact", "a window of the tokens"),
    "gemma2": Kind({"model_type": "gemma2", **WINDOWS}, "exact", "a window of the tokens"),
    "gemma3": Kind(
        {"model_type": "gemma3_text", **WINDOWS, "layer_types": LOCAL_AND_GLOBAL},
        "exact",
        "a window of the tokens",
    ),
    "phi3-partial": Kind({"model_type": "phi3", "partial_rotary_factor": 0.5}),
    "gpt-neox": Kind({"model_type": "gpt_neox", **EACH_ITS_OWN}),
    "gpt-j": Kind({"model_type": "gptj", **EACH_ITS_OWN, "rotary_dim": 16}),
    # Weighted norms behind the rotation: what the model's rotary embedding says is not the whole.
    "hunyuan": Kind(
        {"model_type": "hunyuan_v1_dense", "use_qk_norm": True, **HEADS_OF_32},
        "exact",
        "self-check: keys of",
    ),
    "smollm3": Kind({"model_type": "smollm3", "no_rope_layers": [1, 0]}),
    "opt": Kind(
        {"model_type": "opt", **EACH_ITS_OWN, "ffn_dim": 128, "word_embed_proj_dim": 64},
        "exact",
        "no rotary",
    ),
    "gpt2": Kind({"model_type": "gpt2", **EACH_ITS_OWN}, "exact", "no rotary"),
    "bloom": Kind({"model_type": "bloom", **EACH_ITS_OWN}, "exact", "no rotary"),
    "deepseek-v2": Kind(
        {
            "model_type": "deepseek_v2",
            "num_key_value_heads": 2,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "first_k_dense_replace": 2,
            "n_routed_experts": 2,
        },
        "off",
        "MLA",
    ),
}


def make_model(kind: Kind, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    own = dict(kind.config)
    config = AutoConfig.for_model(own.pop("model_type"), **{**SIZES, **own})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name:  # all ones otherwise, as no trained model's are
                weights.add_(0.3 * torch.randn_like(weights))
    model.save_pretrained(folder)


@dataclass
class Findings:
    """What was measured of one kind; differences are relative to the largest value there.

    Attributes:
        said: what kvloom logged as a warning.
        namespace: of the store.
        exact, reused: tokens, of a prompt asked twice and of one with a moved document.
        same_answer: the prompt asked again is answered as before.
        prefill: largest difference of choosing all tokens from vLLM's own prefill.
        chosen_answer: choosing all tokens is answered as vLLM does.
        in_place: reused keys and values that do not move are the stored ones, bit for bit.
        moved: largest difference of a lone chunk, moved, from the same computed elsewhere.
        first_layer: largest difference of the first layer's reused keys from those computed.
    """

    said: list[str]
    namespace: str = ""
    exact: int = 0
    reused: int = 0
    same_answer: bool = False
    prefill: float | None = None
    chosen_answer: bool | None = None
    in_place: bool | None = None
    moved: float | None = None
    first_layer: float | None = None


def examine(kind: Kind, folder: Path, tokenizer: Path) -> Findings:
    import numpy as np

    from .engines import Engine

    make_model(kind, folder / "model")
    said = _Sayings()
    logging.getLogger("kvloom").addHandler(said)
    options = {"max_model_len": 1024, "block_size": 32, "num_gpu_blocks_override": 70}
    engine = Engine(
        folder / "model",
        folder / "store",
        {**options, "tokenizer": str(tokenizer), **kind.engine},
        blend_chunk_size=CHUNK,
        min_blend_tokens=48,
        min_gain=None,
        first_k=8,
    )
    random = np.random.default_rng(5)

    def text(count: int) -> list[int]:
        return random.integers(2, VOCABULARY, count).tolist()

    findings = Findings(said.lines)
    try:
        if engine.scheduler is None:
            prompt = text(150)
            answers = [engine.plain(prompt, max_tokens=8) for _ in range(2)]
            findings.same_answer = answers[0] == answers[1]
            return findings
        findings.namespace = engine.connector._store.namespace
        _ask(engine, text, findings)
        if engine.scheduler._can_blend:
            _measure(engine, text, findings)
        return findings
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
        logging.getLogger("kvloom").removeHandler(said)


def _ask(engine: Any, text: Callable[[int], list[int]], findings: Findings) -> None:
    """The life of requests: asked, asked again, a document moved, one kept in place."""
    import numpy as np
    import torch

    from .engines import largest_difference

    prompt = text(150)
    first = engine.ask(prompt, max_tokens=8)
    engine.forget()
    again = engine.ask(prompt, max_tokens=8)
    findings.exact = again.figures["exact"]
    kept = slice(0, findings.exact)
    findings.same_answer = again.tokens == first.tokens and torch.equal(
        again.kv[:, :, kept], first.kv[:, :, kept]
    )

    document = text(160)
    source = engine.ask(text(48) + document)
    engine.forget()
    moved = text(85) + document + text(9)
    blend = engine.ask(moved)
    reused = _reused(blend)
    findings.reused = len(reused)
    if not findings.reused:
        return
    cold = engine.cold(moved)
    findings.first_layer = largest_difference(
        blend.kv[0, 0, reused], cold.kv[0, 0, reused]
    ) / float(cold.kv[0, 0].abs().max())

    engine.forget()
    in_place = engine.ask(text(48) + document + text(9))
    reused = _reused(in_place)
    findings.in_place = len(reused) > 0 and torch.equal(
        in_place.kv[:, :, reused], source.kv[:, :, reused]
    )
    assert np.isfinite(in_place.kv.float().numpy()).all()


def _measure(engine: Any, text: Callable[[int], list[int]], findings: Findings) -> None:
    """Recompute against prefill, and rotation against recompute."""
    import numpy as np
    import torch

    from .engines import all_tokens_chosen, largest_difference

    prompt = text(200)
    cold = engine.cold(prompt, max_tokens=16)
    engine.forget()
    with all_tokens_chosen(engine):
        chosen = engine.ask(prompt, max_tokens=16)
    findings.prefill = largest_difference(chosen.kv, cold.kv)
    findings.chosen_answer = chosen.tokens == cold.tokens

    worker = engine.worker
    (cache,), count = worker._cache.groups, 100
    tokens, positions = np.asarray(text(count), dtype=np.int32), np.arange(count)
    blocks = list(range(3, 3 + -(-count // cache.block_size)))
    slots = cache.slots(blocks, torch.arange(count))

    def computed(shift: int) -> torch.Tensor:
        worker._filler._engine.compute(blocks, tokens, positions, shift)
        out = torch.empty(cache.payload_shape(count), dtype=cache.dtype)
        cache.gather(slots, out)
        return out

    here = computed(0)
    shifts = [1, 37, 400]
    differences = []
    for shift in shifts:
        there = computed(shift)
        moved = here.clone()
        worker._filler._corrector.rotate_(moved[:, 0], shift)
        scale = there.abs().amax(dim=(2, 3, 4), keepdim=True)
        differences.append(float(((moved - there).abs() / scale).max()))
    findings.moved = max(differences)


def _reused(answer: Any) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.flatnonzero(np.array(answer.figures.get("origins", [])) == 1))


class _Sayings(logging.Handler):
    """kvloom's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    folder, tokenizer, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(KINDS)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name in names:
        try:
            outcome = asdict(examine(KINDS[name], folder / name, tokenizer))
        except Exception as error:
            outcome = {"error": repr(error)}
            logging.getLogger(__name__).exception(name)
        print("KIND" + json.dumps({"name": name, **outcome}), flush=True)


if __name__ == "__main__":
    main()
