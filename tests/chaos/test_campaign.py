"""Spec rows S8, S9, in small: what ``make chaos`` does to a store at length."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from . import campaign

ROUNDS = {campaign.killed_without_limit: 12, campaign.killed_at_the_limit: 12}
REGIONS = 11


@pytest.mark.parametrize("fault", campaign.FAULTS, ids=lambda fault: fault.__name__)
def test_the_store_survives(fault: Callable[[campaign.Scene], None]) -> None:
    outcome = campaign.run(fault, ROUNDS.get(fault, REGIONS), seed=1, within_s=4.0)
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert (outcome.wrong, outcome.deaths, outcome.lost) == (0, 0, 0)
    assert outcome.rounds > 0
    assert outcome.recovery_s < 10


def test_the_campaign_notices_a_store_that_does_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its zeros would say nothing."""
    monkeypatch.setattr("kvloom.store.block_file.verify_parts", lambda *args: None)
    monkeypatch.setattr("kvloom.store.block_format.checksum", lambda data: 0)
    assert campaign.run(campaign.flipped_bits, REGIONS).wrong > 0


def test_the_campaign_is_a_command() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--help"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, check=False)
    assert done.returncode == 0
