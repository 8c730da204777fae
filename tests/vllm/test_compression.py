"""Spec row S13 with real engines, one after another on one store: what is stored small is served
after a restart, and only to those who may have it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys
from pathlib import Path
from tests.vllm.engines import Engine, prose
from vllm.distributed import cleanup_dist_env_and_memory

model, store = Path(sys.argv[1]), Path(sys.argv[2])
for extra in json.loads(sys.argv[3]):
    engine = Engine(model, store, **extra)
    answer = engine.ask(prose(engine, 1, 400), max_tokens=8)
    engine.settle()
    print("ANSWER" + json.dumps([answer.figures["exact"], answer.tokens]), flush=True)
    engine.llm.llm_engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory()
"""

SETTINGS: list[dict[str, Any]] = [
    {"compression": "zstd"},
    {},
    {"store_dtype": "int8"},
    {"store_dtype": "int8", "compression": "zstd"},
]


def test_restarted_engines_are_served_from_what_was_made_small(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(tmp_path), json.dumps(SETTINGS)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    lines = [line.partition("ANSWER")[2] for line in done.stdout.splitlines() if "ANSWER" in line]
    assert len(lines) == len(SETTINGS), done.stderr[-3000:]
    exact, answers = zip(*map(json.loads, lines), strict=True)
    assert exact == (0, 384, 0, 384), "8-bit KV is another namespace's"
    assert all(answer == answers[0] for answer in answers)
    told = json.loads(
        subprocess.run(
            [sys.executable, "-m", "kvloom.cli.main", "inspect", str(tmp_path), "--json"],
            capture_output=True,
            check=True,
        ).stdout
    )
    eighth, full = sorted(told["namespaces"].values(), key=lambda found: found["payload"])
    assert full["size"] < full["payload"], "zstd"
    assert 3.7 < full["payload"] / eighth["payload"] < 3.8, "32 bits are 8, and a scale for 64"
