"""The worker side without an engine: loads and saves that fail, and stores that do not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
    """A filler that can't load from a position on, nor compute: with exact prefixes only."""

    def __init__(self, failed_from: int) -> None:
        self._failed_from = failed_from

    def fill(self, plan: LoadPlan, budget: Budget) -> Slices[Filled]:
        yield from ()
        lost = [piece.key for piece in plan.pieces if piece.start >= self._failed_from]
        return Filled(lost=lost, failed_from=self._failed_from)


class Broken:
    def fill(self, plan: LoadPlan, budget: Budget) -> Slices[Filled]:
        yield from ()
        raise RuntimeError("broken on purpose")


class Stuck:
    """A load in slices never ends, and can't be given up."""

    def fill(self, plan: LoadPlan, budget: Budget) -> Slices[Filled]:
        try:
            while budget.limited:
                yield
        finally:
            if budget.limited:
                raise RuntimeError("stuck on purpose")
        return Filled()


class Saves:
    def reap(self) -> None: ...

    def take_lost(self) -> list[bytes]:
        return []


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


@pytest.mark.parametrize("sliced", [True, False])
def test_a_load_that_fails_in_part_is_told_by_its_blocks(sliced: bool) -> None:
    worker = worker_with(NoModel(failed_from=2 * CHUNK))
    worker.load([load_plan("a", sliced=sliced)])
    worker.advance()
    assert worker.take_failed_blocks() == set(range(4 + 2 * CHUNK // BLOCK, 4 + 4 * CHUNK // BLOCK))
    assert worker.take_failed_blocks() == set(), "each failure is told once"
    assert worker.take_arrived() == {"a"}
    assert worker.take_failed_requests() == set()


@pytest.mark.parametrize("sliced", [True, False])
@pytest.mark.parametrize("failure", [NoModel(failed_from=0), Broken()])
def test_a_load_that_fails_as_a_whole_is_told_as_such(failure: Any, sliced: bool) -> None:
    worker = worker_with(failure)
    worker.load([load_plan("a", sliced=sliced)])
    worker.advance()
    assert worker.take_failed_blocks() == set()
    assert worker.take_failed_requests() == {"a"}
    assert worker.take_arrived() == {"a"}


@pytest.mark.parametrize("sliced", [True, False])
def test_a_load_that_breaks_is_reported_as_nothing(sliced: bool) -> None:
    worker = worker_with(Broken())
    worker.load([load_plan("a", sliced=sliced)])
    worker.advance()
    report = worker.take_report().loads["a"]
    assert (report.loaded_tokens, report.failed_tokens, report.failed_exact) == (0, 256, 256)


def test_a_load_that_can_not_be_given_up_holds_up_nothing() -> None:
    """vLLM holds its blocks until it is reported; the other loads of the step go on."""
    worker = worker_with(Stuck())
    worker.load([load_plan("gone", sliced=True)])
    worker.advance()
    worker.cancel(["gone"])
    worker.load([load_plan("other")])
    assert worker.take_arrived() == {"gone", "other"}


class Cache:
    """A cache that swallows what is written."""

    layers = (SimpleNamespace(name="layer"),)
    dtype, device, block_size = torch.float32, torch.device("cpu"), BLOCK

    def payload_shape(self, tokens: int) -> tuple[int, ...]:
        return (1, 2, tokens, 1, 8)

    def part_size(self, tokens: int) -> int:
        return 2 * tokens * 8 * 4

    def scatter(self, *args: Any) -> None: ...


class LateTask(BatchTask):
    """Done when it is looked at for the second time, or waited for."""

    looked = False

    def check(self) -> bool:
        if self.looked:
            self._answer()
        self.looked = True
        return super().check()

    def as_completed(self, deadline_s: float) -> Iterator[tuple[int, bool]]:
        self._answer()
        return super().as_completed(deadline_s)

    def _answer(self) -> None:
        for entry in range(len(self._outcomes)):
            self.settle(entry, True)


class SilentStore:
    """Never answers, but for some keys, a moment later."""

    def __init__(self, answered: str = "") -> None:
        self._answered = answered.encode()

    def load(self, keys: list[bytes], slices: Any, buffers: Any) -> BatchTask:
        answered = self._answered and keys[0].startswith(self._answered)
        return (LateTask if answered else BatchTask)(len(keys))

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


@pytest.mark.parametrize("sliced", [True, False])
def test_requests_that_wait_together_wait_for_one_deadline(sliced: bool) -> None:
    """One after the other, they stop an engine for minutes: longer than it may take to a step."""
    worker = waiting_worker()
    names = {f"request {number}" for number in range(8)}
    began = time.monotonic()
    worker.load([load_plan(name, sliced=sliced) for name in sorted(names)])
    until_arrived(worker, names)
    assert TIMEOUT_S <= time.monotonic() - began < 6 * TIMEOUT_S, "eight would be eight times that"
    reports = worker.take_report().loads
    assert reports.keys() == names
    assert all(report.failed_tokens == 4 * CHUNK for report in reports.values())


@pytest.mark.parametrize("sliced", [True, False])
def test_a_load_behind_one_that_waited_in_vain_is_tried(sliced: bool) -> None:
    """One file on a bad disk is no verdict on the others."""
    worker = waiting_worker(answered="good")
    names = {"bad", "good"}
    worker.load([load_plan(name, sliced=sliced) for name in sorted(names)])
    until_arrived(worker, names)
    reports = worker.take_report().loads
    assert (reports["bad"].failed_tokens, reports["good"].failed_tokens) == (4 * CHUNK, 0)


def test_steps_in_between_are_no_fault_of_the_store() -> None:
    """It answers a moment later; the engine comes back after 30 ms, so often that these are more
    than the deadline."""
    worker = waiting_worker(answered="good")
    worker.load([load_plan("good", chunks=160, sliced=True)])
    steps = 0
    while not worker.take_arrived():
        worker.advance()
        time.sleep(0.03)
        steps += 1
    report = worker.take_report().loads["good"]
    assert report.failed_tokens == 0
    assert report.waited_ms < 1e3 * TIMEOUT_S
    assert steps < 40, "a step goes on with more than one wave"


@pytest.mark.parametrize("sliced", [True, False])
def test_a_store_that_raises_keeps_no_buffer(monkeypatch: pytest.MonkeyPatch, sliced: bool) -> None:
    worker = waiting_worker(answered="good")
    load = SilentStore.load

    def broken(self: SilentStore, keys: list[bytes], *args: Any) -> BatchTask:
        if keys[0].startswith(b"bad"):
            raise OSError("Stale file handle")
        return load(self, keys, *args)

    monkeypatch.setattr(SilentStore, "load", broken)
    names = {f"bad {number}" for number in range(8)}
    worker.load([load_plan(name, sliced=sliced) for name in sorted(names)])
    until_arrived(worker, names)
    worker.load([load_plan("good", sliced=sliced)])
    until_arrived(worker, {"good"})
    assert worker.take_report().loads["good"].failed_tokens == 0


def test_a_later_request_has_a_deadline_of_its_own() -> None:
    worker = waiting_worker()
    worker.load([load_plan("a")])
    began = time.monotonic()
    worker.load([load_plan("b")])
    assert time.monotonic() - began >= TIMEOUT_S


@pytest.mark.parametrize("sliced", [True, False])
def test_what_was_waited_for_in_vain_speaks_against_loading(sliced: bool) -> None:
    """Also where others went on meanwhile: this request's first token was late all the same."""
    worker = waiting_worker()
    worker.load([load_plan("a", sliced=sliced)])
    until_arrived(worker, {"a"})
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
