"""Engines as users start them: in processes of their own, by configuration alone (B1-B3)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

def main():
    model, transfer, prompts, more = json.loads(sys.argv[1])
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=2048,
              kv_transfer_config=KVTransferConfig(**transfer), **more)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True,
                            extra_args={"kv_transfer_params": {"kvloom_report": True}})
    answers = []
    for prompt in prompts:
        output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        figures = (output.kv_transfer_params or {}).get("kvloom", {})
        answers.append({"tokens": list(output.outputs[0].token_ids),
                        "cached": output.num_cached_tokens,
                        **{k: v for k, v in figures.items() if isinstance(v, (int, float))}})
    print("ANSWERS" + json.dumps(answers), flush=True)
    llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    main()
"""

PROMPT = [(i * i * 31 + 7 * i) % 40_000 + 100 for i in range(400)]
MOVED = [99] * 150 + PROMPT[20:] + [5, 6, 7]


def start(
    model: Path, transfer: dict[str, Any], prompts: list[list[int]], **more: Any
) -> subprocess.CompletedProcess[str]:
    argument = json.dumps([str(model), transfer, prompts, more])
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, argument],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def answers(
    model: Path, transfer: dict[str, Any], prompts: list[list[int]], **more: Any
) -> list[dict[str, Any]]:
    done = start(model, transfer, prompts, **more)
    for line in done.stdout.splitlines():
        if "ANSWERS" in line:
            found: list[dict[str, Any]] = json.loads(line.partition("ANSWERS")[2])
            return found
    pytest.fail(f"the engine gave no answers: {done.stderr[-3000:]}")


def transfer(store: Path, role: str = "kv_both", **more: Any) -> dict[str, Any]:
    extra = {"storage_backends": str(store), "min_blend_tokens": 64, **more.pop("extra", {})}
    return {
        "kv_connector": "BlendConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
        **more,
    }


def test_a_fresh_engine_finds_what_another_stored(model: Path, tmp_path: Path) -> None:
    """By module path, then by the bare name that the plug-in registers; exact, then blended."""
    by_path = transfer(tmp_path, kv_connector_module_path="kvloom.vllm.blend_connector")
    (first,) = answers(model, by_path, [PROMPT])
    again, moved = answers(model, transfer(tmp_path), [PROMPT, MOVED])
    assert first["exact"] == 0
    assert again["exact"] == 384
    assert again["tokens"] == first["tokens"]
    assert moved["reused"] > 200


def test_the_older_module_path_loads_it_too_and_roles_are_kept(model: Path, tmp_path: Path) -> None:
    """B1's alias; B3: a producer only saves, a consumer only loads."""
    older = {"kv_connector_module_path": "ucm.integration.vllm.blend_connector"}
    produced = answers(
        model,
        transfer(tmp_path, "kv_producer", **older),
        [PROMPT, MOVED],
        enable_prefix_caching=False,
    )
    assert [(p["exact"], p["reused"]) for p in produced] == [(0, 0), (0, 0)]
    stored = sorted(tmp_path.rglob("*.kv"))
    assert len(stored) == 400 // 64 + len(MOVED) // 64
    consumed = answers(model, transfer(tmp_path, "kv_consumer", **older), [PROMPT, PROMPT[::-1]])
    assert [c["exact"] for c in consumed] == [384, 0]
    assert sorted(tmp_path.rglob("*.kv")) == stored


def test_a_mistake_in_the_configuration_stops_the_start_and_says_what_to_do(
    model: Path, tmp_path: Path
) -> None:
    """B2, as a user meets it."""
    wrong = transfer(tmp_path, extra={"blend_chunksize": 128})
    done = start(model, wrong, [PROMPT])
    assert done.returncode != 0
    assert "unknown key 'blend_chunksize' (value 128): did you mean 'blend_chunk_size'?" in (
        done.stderr + done.stdout
    )


@pytest.mark.parametrize(
    ("key", "value", "models"), [("head_dim", 128, "64"), ("rope_theta", 10000.0, "100000")]
)
def test_values_that_contradict_the_model_are_named_with_the_models(
    model: Path, key: str, value: float, models: str
) -> None:
    """B2: both values; checked without a start, on the engine's own configuration."""
    from vllm.engine.arg_utils import EngineArgs

    from kvloom.config import ConfigError, KvloomConfig
    from kvloom.vllm.blend_connector import _check_model

    vllm_config = EngineArgs(str(model), dtype="float32").create_engine_config()
    config = KvloomConfig.from_extra({key: value})
    with pytest.raises(ConfigError, match=f"{key} = {value}.*{models}"):
        _check_model(config, vllm_config, head_dim=64)
    _check_model(KvloomConfig.from_extra({"head_dim": 64, "rope_theta": 1e5}), vllm_config, 64)
