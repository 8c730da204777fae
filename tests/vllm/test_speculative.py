"""B18, B21: with speculative decoding vLLM saves after it has asked what failed to load."""

from __future__ import annotations

from pathlib import Path

from .scripts import found_by
from .speculative_engine import DOCUMENT, LENGTH


def test_what_was_computed_on_a_failed_load_is_not_served_later(
    model: Path, tmp_path: Path
) -> None:
    found = found_by("speculative_engine", model, tmp_path, timeout_s=300)
    assert found["failed"] == DOCUMENT // 64 * 64
    assert found["damaged"] == found["cold"]
    assert found["later"] == [found["cold"]] * 2
    assert found["exact"] == LENGTH // 64 * 64
