"""Spec row B10: every RoPE kind blends rightly, or is refused in one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .rope_kinds import CHUNK, KINDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def findings(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of all kinds, from one process: most of a tiny engine's start is imports."""
    folder = tmp_path_factory.mktemp("kinds")
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.rope_kinds", str(folder), str(model)],
        # One thread, free to move: two that wait for each other are slower on a busy machine.
        env={
            **os.environ,
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("KIND")]
    found = [json.loads(line.removeprefix("KIND")) for line in lines]
    errors = [one for one in found if "error" in one]
    assert len(found) == len(KINDS), done.stderr[-3000:]
    assert not errors, done.stderr[-3000:]
    return {one.pop("name"): one for one in found}


def kinds(does: str) -> list[str]:
    return [name for name, kind in KINDS.items() if kind.does == does]


@pytest.mark.parametrize("name", kinds("blends"))
def test_kinds_that_blend(findings: dict[str, dict[str, Any]], name: str) -> None:
    found = findings[name]
    half = "bfloat16" in KINDS[name].engine.values()
    assert found["said"] == []
    assert found["exact"] == 150 // CHUNK * CHUNK
    assert found["same_answer"]
    assert found["reused"] > 100
    assert found["in_place"], "keys and values that do not move are the stored ones, bit for bit"
    assert found["prefill"] <= (0.1 if half else 1e-4), "all tokens chosen is full prefill"
    assert found["chosen_answer"] or half
    assert found["moved"] <= (3e-2 if half else 1e-4), "a moved chunk is one computed elsewhere"
    assert found["first_layer"] <= (2e-2 if half else 1e-4)


@pytest.mark.parametrize("name", kinds("exact"))
def test_kinds_that_are_exact_prefixes_only(findings: dict[str, dict[str, Any]], name: str) -> None:
    found = findings[name]
    assert len(found["said"]) == 1
    assert found["said"][0].startswith("kvloom reuses exact prefixes only: ")
    assert KINDS[name].says in found["said"][0]
    assert found["exact"] == 150 // CHUNK * CHUNK
    assert found["same_answer"]
    assert found["reused"] == 0


@pytest.mark.parametrize("name", kinds("off"))
def test_caches_that_are_not_supported(findings: dict[str, dict[str, Any]], name: str) -> None:
    found = findings[name]
    assert len(found["said"]) == 1
    assert found["said"][0].startswith("kvloom is off: ")
    assert KINDS[name].says in found["said"][0]
    assert found["same_answer"]


def test_the_two_sets_of_longrope_share_no_store(findings: dict[str, dict[str, Any]]) -> None:
    """One model, two ``max_model_len``: keys rotated by the one set are no keys of the other."""
    namespaces = [findings[name]["namespace"] for name in ("longrope-long", "longrope-short")]
    assert namespaces[0] != namespaces[1]
