"""The worker side without an engine: loads and saves that fail, and stores that do not answer."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.blend.cost import CostRule
from kvloom.blend.selection import make_policy
from kvloom.config import KvloomConfig
from kvloom.store.tasks import BatchTask
from kvloom.vllm.budget import Budget, Slices
from kvloom.vllm.filler import Filled, Filler
from kvloom.vllm.metadata import LoadPlan, Piece, SaveChunk, SavePlan
from kvloom.vllm.metrics import Metrics
from kvloom.vllm.ranks import Ranks
from kvloom.vllm.saver import Saver
from kvloom.vllm.stored_form import StoredForm
from kvloom.vllm.worker import BlendWorker

BLOCK = 16
CHUNK = 64
TIMEOUT_S = 0.4


class NoModel:
    """A filler that can load nothing and compute nothing: the engine reuses exact prefixes only."""

    def fill(self, plan: LoadPlan, budget: Budget) -> Slices[Filled]:
        yield from ()
        return Filled(lost=[piece.key for piece in plan.pieces], failed_from=plan.start)


class Broken:
    def fill(self, plan: LoadPlan, budget: Budget) -> Slices[Filled]:
        yield from ()
        raise RuntimeError("broken on purpose")


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


def load_plan(name: str, chunks: int = 4, first_block: int = 4, **more: Any) -> LoadPlan:
    """An exact prefix of ``chunks`` chunks."""
    tokens = chunks * CHUNK
    blocks = list(range(first_block, first_block + tokens // BLOCK + 1))
    pieces = [Piece(f"{name}{n}".encode(), 0, CHUNK, n * CHUNK, 0) for n in range(chunks)]
    compute = np.empty(0, np.int64)
    return LoadPlan(name, [blocks], 0, np.zeros(tokens, np.int32), pieces, compute, tokens, **more)


def worker_with(filler: Any, saver: Any = None, store: Any = None, **config: Any) -> BlendWorker:
    cache: Any = SimpleNamespace(block_size=BLOCK)
    return BlendWorker(
        KvloomConfig(storage_backends=["/nowhere"], **config),
        store or SimpleNamespace(prefetch=lambda keys: None),
        cache,
        filler,
        saver or Saves(),
    )


@pytest.mark.parametrize("asked_first", [True, False])
def test_nothing_that_stands_on_a_failed_load_is_stored(asked_first: bool) -> None:
    """Stored, it were an exact hit for ever. With speculative decoding vLLM asks for the failures
    before it lets us save."""
    saver = Saves()
    worker = worker_with(NoModel(), saver)
    worker.load([load_plan("a")])
    failed = worker.take_failed_blocks() if asked_first else set()
    worker.save(save_plan("a", [4, 5, 6, 7], 2 * BLOCK))
    worker.save(save_plan("b", [40, 41], 0))
    worker.end_step()
    if not asked_first:
        failed = worker.take_failed_blocks()
    assert failed == set(range(4, 4 + 4 * CHUNK // BLOCK))
    assert worker.take_report().lost[-1:] == [f"a{2 * BLOCK}".encode()]
    assert saver.positions == [0], "others' are stored"
    # vLLM knows now, and computes what failed.
    worker.save(save_plan("a", [4, 5, 6, 7], 0))
    assert saver.positions == [0, 0]
    assert worker.take_failed_blocks() == set(), "each failure is told once"


@pytest.mark.parametrize("between_steps", [True, False])
@pytest.mark.parametrize("sliced", [True, False])
def test_a_load_that_fails_as_a_whole_is_told_as_such(between_steps: bool, sliced: bool) -> None:
    worker = worker_with(Broken(), blend_async=sliced)
    worker.load([load_plan("a", between_steps=between_steps)])
    worker.advance()
    assert bool(worker.take_failed_blocks()) != between_steps
    assert worker.take_failed_requests() == ({"a"} if between_steps else set())
    assert worker.take_arrived() == ({"a"} if between_steps else set())
    report = worker.take_report().loads["a"]
    assert (report.loaded_tokens, report.failed_tokens, report.failed_exact) == (0, 256, 256)


class Cache:
    """A cache that swallows what is written."""

    layers = (SimpleNamespace(name="layer"),)
    dtype, device, block_size = torch.float32, torch.device("cpu"), BLOCK

    def payload_shape(self, tokens: int) -> tuple[int, ...]:
        return (1, 2, tokens, 1, 8)

    def part_size(self, tokens: int) -> int:
        return 2 * tokens * 8 * 4

    def scatter(self, *args: Any) -> None: ...


class SilentStore:
    """Never answers, but for some keys, a moment later."""

    def __init__(self, answered: str = "") -> None:
        self._answered = answered.encode()

    def load(self, keys: list[bytes], slices: Any, buffers: Any) -> BatchTask:
        task = BatchTask(len(keys))
        for entry, key in enumerate(keys):
            if self._answered and key.startswith(self._answered):
                threading.Timer(0.002, task.settle, (entry, True)).start()
        return task

    def prefetch(self, keys: list[bytes]) -> None: ...


def waiting_worker(answered: str = "") -> BlendWorker:
    config = KvloomConfig(storage_backends=["/nowhere"], load_timeout_s=TIMEOUT_S)
    cache: Any = Cache()
    store: Any = SilentStore(answered)
    model: Any = SimpleNamespace(compute=lambda *args: None, cache=cache)
    filler = Filler(
        config,
        make_policy(config),
        store,
        cache,
        StoredForm(config, cache),
        corrector=None,
        engine=model,
        ranks=Ranks(),
    )
    return worker_with(filler, store=store, load_timeout_s=TIMEOUT_S)


def until_arrived(worker: BlendWorker, names: set[str]) -> None:
    while names:
        worker.advance()
        names = names - worker.take_arrived()


@pytest.mark.parametrize("between_steps", [True, False])
def test_requests_that_wait_together_wait_for_one_deadline(between_steps: bool) -> None:
    """One after the other, they stop an engine for minutes: longer than it may take to a step."""
    worker = waiting_worker()
    names = {f"request {number}" for number in range(8)}
    began = time.monotonic()
    worker.load([load_plan(name, between_steps=between_steps) for name in sorted(names)])
    until_arrived(worker, names if between_steps else set())
    assert TIMEOUT_S <= time.monotonic() - began < 3 * TIMEOUT_S, "eight would be eight times that"
    reports = worker.take_report().loads
    assert reports.keys() == names
    assert all(report.failed_tokens == 4 * CHUNK for report in reports.values())


@pytest.mark.parametrize("between_steps", [True, False])
def test_a_load_behind_one_that_waited_in_vain_is_tried(between_steps: bool) -> None:
    """One file on a bad disk is no verdict on the others."""
    worker = waiting_worker(answered="good")
    names = {"bad", "good"}
    worker.load([load_plan(name, between_steps=between_steps) for name in sorted(names)])
    until_arrived(worker, names if between_steps else set())
    reports = worker.take_report().loads
    assert (reports["bad"].failed_tokens, reports["good"].failed_tokens) == (4 * CHUNK, 0)


def test_steps_in_between_are_no_fault_of_the_store() -> None:
    """It answers in 2 ms; the engine comes back after 30, many times more often than the deadline
    would allow."""
    worker = waiting_worker(answered="good")
    worker.load([load_plan("good", chunks=160, between_steps=True)])
    steps = 0
    while not worker.take_arrived():
        worker.advance()
        time.sleep(0.03)
        steps += 1
    report = worker.take_report().loads["good"]
    assert report.failed_tokens == 0
    assert report.waited_ms < 1e3 * TIMEOUT_S
    assert steps < 40, "a step goes on with more than one wave"


def test_a_later_request_has_a_deadline_of_its_own() -> None:
    worker = waiting_worker()
    worker.load([load_plan("a")])
    began = time.monotonic()
    worker.load([load_plan("b")])
    assert time.monotonic() - began >= TIMEOUT_S


@pytest.mark.parametrize("between_steps", [True, False])
def test_what_was_waited_for_in_vain_speaks_against_loading(between_steps: bool) -> None:
    """Also where others went on meanwhile: this request's first token was late all the same."""
    worker = waiting_worker()
    worker.load([load_plan("a", between_steps=between_steps)])
    until_arrived(worker, {"a"} if between_steps else set())
    report = worker.take_report().loads["a"]
    assert report.load_ms + report.waited_ms >= 0.9e3 * TIMEOUT_S
    rule = CostRule(0.1)
    rule.computed(1000, 0.1e3 * TIMEOUT_S)
    rule.loaded(1000, 1.0)
    assert rule.worth(loaded=1000, computed=0)
    rule.loaded(report.loaded_tokens, report.load_ms + report.waited_ms)
    assert not rule.worth(loaded=1000, computed=0)


def test_a_copy_that_fails_keeps_no_buffer() -> None:
    """A GPU out of memory: else every save after enough of them is dropped."""
    config = KvloomConfig(storage_backends=["/nowhere"], save_queue_bytes=2 * 4096)
    cache: Any = Cache()
    form = StoredForm(config, cache)
    saver = Saver(config, SimpleNamespace(namespace="0" * 32), cache, form, Metrics())  # type: ignore[arg-type]
    copied: list[int] = []

    def gather(tables: Any, start: int, buffer: Any) -> bool:
        copied.append(start)
        if len(copied) % 2 == 0:
            raise torch.OutOfMemoryError("broken on purpose")
        return True

    form.gather = gather  # type: ignore[method-assign]
    chunks = [SaveChunk(bytes(16), bytes(16), n * CHUNK, np.zeros(CHUNK, np.int32)) for n in (0, 1)]
    for _ in range(5):
        with pytest.raises(torch.OutOfMemoryError):
            saver.save(SavePlan("a", b"", [[1] * 8], 0, chunks))
    assert len(copied) == 10, "every attempt found its buffers"
