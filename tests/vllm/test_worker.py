"""The worker side without an engine: steps that vLLM plans before it knows of a failed load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvloom.config import KvloomConfig
from kvloom.vllm.budget import Budget, Slices
from kvloom.vllm.filler import Filled
from kvloom.vllm.metadata import LoadPlan, SaveChunk, SavePlan
from kvloom.vllm.worker import BlendWorker

BLOCK = 16


class NoModel:
    """A filler that can load nothing and compute nothing: the engine reuses exact prefixes only."""

    def fill(self, plan: LoadPlan, budget: Budget) -> Slices[Filled]:
        yield from ()
        return Filled(lost=[piece.key for piece in plan.pieces], failed_from=plan.start)


class Saves:
    def __init__(self) -> None:
        self.positions: list[int] = []

    def save(self, plan: SavePlan) -> None:
        self.positions += [chunk.position for chunk in plan.chunks]

    def reap(self) -> None: ...

    def take_lost(self) -> list[bytes]:
        return []


def save_plan(name: str, blocks: list[int], position: int) -> SavePlan:
    tokens = np.zeros(BLOCK, np.int32)
    chunk = SaveChunk(f"{name}{position}".encode(), b"", position, tokens)
    return SavePlan(name, b"", [blocks], 0, [chunk])


@pytest.mark.parametrize("overlap", [0, 1])
def test_nothing_that_stands_on_a_failed_load_is_stored(overlap: int) -> None:
    """The step planned meanwhile computes on top of garbage: stored, that were an exact hit for
    ever. With asynchronous scheduling it is one step more."""
    saver: Any = Saves()
    filler: Any = NoModel()
    cache: Any = SimpleNamespace(block_size=BLOCK)
    store: Any = SimpleNamespace(prefetch=lambda keys: None)
    config = KvloomConfig(storage_backends=["/nowhere"])
    worker = BlendWorker(config, store, cache, filler, saver, overlap=overlap)
    blocks = [4, 5, 6, 7]
    tokens = np.zeros(2 * BLOCK, np.int32)
    worker.load(LoadPlan("a", [blocks], 0, tokens, [], np.empty(0, np.int64)))
    for step in range(overlap + 1):
        worker.save(save_plan("a", blocks, (2 + step) * BLOCK))
        worker.save(save_plan("b", [8, 9], step * BLOCK))
        worker.end_step()
        assert worker.take_failed_blocks() == ({4, 5} if step == 0 else set())
        assert worker.take_report().lost == [f"a{(2 + step) * BLOCK}".encode()]
    assert saver.positions == [step * BLOCK for step in range(overlap + 1)], "others' are stored"
    # vLLM knows now, and computes what failed.
    worker.save(save_plan("a", blocks, 0))
    assert saver.positions[-1] == 0
