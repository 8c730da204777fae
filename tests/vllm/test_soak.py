"""Spec row B22: what requests of all kinds leave behind; `make soak` sends 10,000 of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REQUESTS = int(os.environ.get("KVLOOM_TEST_REQUESTS", "2000"))


@pytest.mark.timeout(120 + REQUESTS)
def test_mixed_requests_leave_nothing_and_are_answered_right(tmp_path: Path) -> None:
    """Short, long, repeated, blended, aborted and preempted, on a tiny model and a tiny cache."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("soak.py")), str(REQUESTS), str(tmp_path)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=60 + REQUESTS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SOAK")]
    if not lines:
        pytest.fail(done.stderr[-3000:])
    found = json.loads(lines[0].removeprefix("SOAK"))
    assert found["blended"] > REQUESTS // 10
    assert found["exact"] > REQUESTS // 100
    assert found["preempted"] > REQUESTS // 200
    assert found["between_steps"] > REQUESTS // 100
    assert not [name for name in found if name.startswith("left_") and found[name]]
    assert found["free_blocks"] == 69, "all blocks but the null block are free again"
    # Resident memory is noisy: without any loads and saves the same traffic grows by 15 MB.
    assert found["growth_mb"] < 64, "later requests must not need more memory than those before"
    assert found["samples"] > REQUESTS // 200
    assert found["wrong"] == 0
    assert "Traceback" not in done.stderr
