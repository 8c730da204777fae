"""One plan's KV put in place: store -> buffer -> keys rotated -> slots -> RecomputeEngine.

A piece that fails to load is computed like any new token, so the answer is the same and only
later. The work is a generator: with a limited budget it pauses wherever the step has had enough of
it, or where nothing has arrived from the store yet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvloom.blend.correction import samples_and_rest
from kvloom.blend.cost import LOADED_PRICE
from kvloom.blend.rope import PositionCorrector
from kvloom.blend.selection import LookingPolicy, SelectionPolicy
from kvloom.config import KvloomConfig
from kvloom.store.base import Store
from kvloom.vllm.budget import Budget, Slices
from kvloom.vllm.correction import Correction
from kvloom.vllm.grouped_cache import GroupedCache
from kvloom.vllm.metadata import LoadPlan, LoadReport, Piece, failures, positions
from kvloom.vllm.ranks import Ranks
from kvloom.vllm.reader import PieceReader
from kvloom.vllm.recompute import RecomputeEngine
from kvloom.vllm.stored_form import StoredForm

Positions = npt.NDArray[np.int64]
_NOTHING: Positions = np.empty(0, dtype=np.int64)


@dataclass
class Filled:
    """What became of a plan.

    Attributes:
        loaded, lost: keys that were, and could not be, loaded.
        failed_from: tokens from here on are not in place, for the model can't be called; else None.
        computed: tokens that the model was called for.
        report: set when all is done.
    """

    loaded: list[bytes] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)
    failed_from: int | None = None
    computed: int = 0
    report: LoadReport | None = None


@dataclass
class _Loading:
    """What this rank read of a plan."""

    failed: list[Piece] = field(default_factory=list)
    bytes_read: int = 0
    rotate_s: float = 0.0


class Filler:
    """Executes load plans, in the engine's worker thread.

    Args:
        corrector: None where keys are not rotated; then no plan asks for it.
        engine: None where the model's forward can't be called.
        ranks: those that fill their shares of the same plans.
    """

    def __init__(
        self,
        config: KvloomConfig,
        policy: SelectionPolicy,
        store: Store,
        cache: GroupedCache,
        form: StoredForm,
        *,
        corrector: PositionCorrector | None,
        engine: RecomputeEngine | None,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._policy = policy
        self._cache = cache
        self._form = form
        self._corrector = corrector
        self._engine = engine
        # A load at once must find buffers while one in slices holds its own.
        self._at_once = PieceReader(store, form, config, waves=2)
        self._in_slices = PieceReader(store, form, config, waves=4)  # a step may pass meanwhile

    def fill(self, plan: LoadPlan, budget: Budget) -> Slices[Filled]:
        """Put a plan's KV in place.

        Raises:
            OtherRankError: it could not be done elsewhere.
        """
        filled, loading = Filled(), _Loading()
        with self._ranks.together():
            yield from self._load(plan, loading, filled, budget)
            there = np.array([piece not in loading.failed for piece in plan.pieces], np.bool_)
        there = self._ranks.all(there)
        failed = [piece for piece, good in zip(plan.pieces, there, strict=True) if not good]
        loaded_s = budget.worked_s() - loading.rotate_s
        with self._ranks.in_step():
            chosen = yield from self._compute(plan, failed, filled, budget)
        lost = positions(failed)
        if filled.failed_from is not None:
            everything = positions(plan.pieces)
            lost = everything[everything >= (plan.start if plan.whole else filled.failed_from)]
        filled.report = LoadReport(
            loaded_tokens=sum(piece.length for piece in plan.pieces if piece not in failed),
            **failures(plan, lost),
            chosen=chosen,
            computed_tokens=filled.computed,
            bytes_read=loading.bytes_read,
            load_ms=loaded_s * 1e3,
            waited_ms=budget.waited_s * 1e3,
            rotate_ms=loading.rotate_s * 1e3,
            compute_ms=(budget.worked_s() - loaded_s - loading.rotate_s) * 1e3,
        )
        return filled

    def _load(
        self, plan: LoadPlan, loading: _Loading, filled: Filled, budget: Budget
    ) -> Slices[None]:
        reader = self._in_slices if budget.limited else self._at_once
        for found in reader.read(plan.pieces, budget):
            if found is None:
                yield
                continue
            piece, buffer = found
            if buffer is None:
                loading.failed.append(piece)
                filled.lost.append(piece.key)
                continue
            filled.loaded.append(piece.key)
            chunk = self._form.payload(buffer)
            payload = chunk[:, :, piece.offset : piece.offset + piece.length]
            loading.bytes_read += len(buffer.memory)
            if piece.delta:
                rotating = time.perf_counter()
                self._rotate(payload, piece.delta)
                loading.rotate_s += time.perf_counter() - rotating
            self._cache.scatter(payload, plan.tables, piece.start)
            budget.take(piece.length, LOADED_PRICE)
            if budget.spent:
                yield

    def _compute(
        self, plan: LoadPlan, failed: list[Piece], filled: Filled, budget: Budget
    ) -> Slices[int]:
        """Compute what must be, and what the policy chooses; answers how many it chose."""
        wanted = np.union1d(plan.compute, positions(failed))
        chosen = yield from self._choose(plan, wanted, budget)
        wanted = np.union1d(wanted, chosen)
        if not wanted.size:
            return 0
        if self._engine is None:
            filled.failed_from = int(wanted[0])
            return 0
        filled.computed = len(wanted)
        loaded = positions(
            [piece for piece in plan.pieces if piece.start >= plan.exact and piece not in failed]
        )
        correction = Correction(
            self._engine.cache,
            plan.block_ids,
            list(samples_and_rest(plan.runs, loaded, wanted)),
            part=self._policy.correction,
        )
        with self._ranks.together():
            yield from correction.measure(budget)
        # New tokens behind the last run see the corrected KV; those before its end can't.
        before, behind = np.split(wanted, [np.searchsorted(wanted, correction.end)])
        yield from self._run_model(self._engine, plan, before, budget)
        with self._ranks.together():
            yield from correction.apply(budget)
        yield from self._run_model(self._engine, plan, behind, budget)
        return len(chosen)

    def _run_model(
        self, engine: RecomputeEngine, plan: LoadPlan, wanted: Positions, budget: Budget
    ) -> Slices[None]:
        while wanted.size:
            now, wanted = np.split(wanted, [budget.take(len(wanted))])
            engine.compute(plan.block_ids, plan.token_ids[now - plan.start], now)
            if budget.spent:
                yield

    def _choose(self, plan: LoadPlan, wanted: Positions, budget: Budget) -> Slices[Positions]:
        end = plan.start + len(plan.token_ids)
        candidates = np.setdiff1d(np.arange(plan.exact, end), wanted)
        if self._engine is None or not isinstance(self._policy, LookingPolicy):
            return _NOTHING
        if not plan.choose or not candidates.size:
            return _NOTHING
        return (
            yield from self._engine.choose(
                self._policy,
                plan.block_ids,
                plan.token_ids,
                count=plan.choose,
                start=plan.start,
                candidates=candidates,
                positions=wanted,
                budget=budget,
            )
        )

    def _rotate(self, payload: Tensor, delta: int) -> None:
        if self._corrector is None:
            raise RuntimeError(f"a plan moves keys by {delta}, but this model's are not rotated")
        self._corrector.rotate_(payload[:, 0], delta)
