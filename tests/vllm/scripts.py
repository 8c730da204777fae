"""Engines in processes of their own: scripts of this folder, and what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]


def found_by(
    module: str, *arguments: object, timeout_s: float, **environment: str
) -> dict[str, Any]:
    """What a script prints behind ``RESULT``, as JSON; the test fails with its output if nothing.

    Args:
        module: of ``tests.vllm``.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"tests.vllm.{module}", *map(str, arguments)],
        cwd=_ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
            return result
    pytest.fail(done.stdout[-4000:] + done.stderr[-4000:])
