"""Spec row B22: what requests of all kinds leave behind; `make soak` sends 10,000 of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REQUESTS = int(os.environ.get("KVLOOM_TEST_REQUESTS", "2000"))


def soaked(count: int, folder: Path, model: str) -> dict[str, Any]:
    """What ``count`` requests left behind; all that must hold whatever the model does."""
    script = Path(__file__).with_name("soak.py")
    done = subprocess.run(
        [sys.executable, str(script), str(count), str(folder), model],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=60 + count,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SOAK")]
    if not lines:
        pytest.fail(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(lines[0].removeprefix("SOAK"))
    assert not [name for name in found if name.startswith("left_") and found[name]]
    assert found["exact"] > count // 100
    assert found["preempted"] > count // 200
    assert found["sliced"] > count // 100
    assert found["samples"] > count // 200
    assert found["wrong"] == 0
    assert "Traceback" not in done.stderr
    return found


@pytest.mark.timeout(120 + REQUESTS)
def test_mixed_requests_leave_nothing_and_are_answered_right(tmp_path: Path) -> None:
    """Short, long, repeated, blended, aborted and preempted, on a tiny model and a tiny cache."""
    found = soaked(REQUESTS, tmp_path, "llama")
    assert found["blended"] > REQUESTS // 10
    # Resident memory is noisy: without any loads and saves the same traffic grows by 15 MB.
    assert found["growth_mb"] < 64, "later requests must not need more memory than those before"


@pytest.mark.timeout(120 + REQUESTS)
def test_a_model_with_windows_is_never_blended(tmp_path: Path) -> None:
    """B10: exact prefixes, whose blocks outside a layer's window are there no more."""
    assert soaked(REQUESTS // 5, tmp_path, "gemma3")["blended"] == 0
