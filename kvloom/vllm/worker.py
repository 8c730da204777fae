"""The worker side: KV in place for requests that wait for it, exact chunks out after a forward
(DESIGN.md).

A load is filled at once or, where other requests must not wait for it, in slices, a few in each
step (spec row B17): one after the other, for the first to be done is then done earliest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm.logger import init_logger

from kvloom.config import KvloomConfig
from kvloom.store.base import Store
from kvloom.vllm.budget import Budget, Slices
from kvloom.vllm.filler import Filled, Filler
from kvloom.vllm.grouped_cache import GroupedCache
from kvloom.vllm.metadata import LoadPlan, LoadReport, SavePlan, WorkerReport
from kvloom.vllm.saver import Saver

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Load:
    plan: LoadPlan
    budget: Budget
    slices: Slices[Filled]


class BlendWorker:
    """Executes load and save plans in the engine's worker thread.

    What the filler can't put in place is reported to vLLM, which computes those blocks itself.
    """

    def __init__(
        self,
        config: KvloomConfig,
        store: Store,
        cache: GroupedCache,
        filler: Filler,
        saver: Saver,
    ) -> None:
        self._config = config
        self._store = store
        self._cache = cache
        self._filler = filler
        self._saver = saver
        self._sliced: deque[_Load] = deque()
        self._arrived: set[str] = set()
        self._failed_blocks: set[int] = set()  # not yet reported
        self._failed_requests: set[str] = set()
        self._finished_saves: set[str] = set()
        self._report = WorkerReport()
        self._loaded_keys: list[bytes] = []

    def load(self, plans: Sequence[LoadPlan]) -> None:
        """Put the KV of a step's plans in place, or report it as failed; never raises.

        A plan that is filled in slices is only begun by ``advance``.
        """
        asked = time.monotonic()
        for plan in plans:
            budget = Budget(limited=plan.sliced, asked=asked)
            load = _Load(plan, budget, self._fill(plan, budget))
            if plan.sliced:
                self._sliced.append(load)
            else:
                self._go_on(load, 0.0)
                self._arrived.add(plan.request_id)

    def advance(self) -> None:
        """Go on with the loads in slices, as far as one step may be held up; never raises."""
        left = float(self._config.blend_tokens_per_step)
        while self._sliced and left >= 1:
            load = self._sliced[0]
            done = self._go_on(load, left)
            left = load.budget.left
            if done:
                self._arrived.add(self._sliced.popleft().plan.request_id)
            elif not load.budget.spent:
                return  # nothing has arrived

    def cancel(self, request_ids: Collection[str]) -> None:
        """Give up loads whose requests are gone; their blocks become free. Never raises."""
        for load in [load for load in self._sliced if load.plan.request_id in request_ids]:
            self._sliced.remove(load)
            self._arrived.add(load.plan.request_id)
            try:
                load.slices.close()
            except Exception:
                logger.exception("kvloom: giving up the load of %s failed", load.plan.request_id)

    def save(self, plan: SavePlan) -> None:
        """Copy a plan's chunks out and hand them to the store; never raises."""
        keys = [chunk.key for chunk in plan.chunks]
        try:
            self._saver.save(plan)
        except Exception:
            logger.exception("kvloom: saving chunks of request %s failed", plan.request_id)
            self._report.lost += keys
        if plan.last:
            self._finished_saves.add(plan.request_id)

    def end_step(self) -> None:
        """After the forward: what was loaded moves up in the store, for it may be asked for again.

        Not earlier, so that it takes nothing from the time to the first token.
        """
        self._saver.reap()
        keys, self._loaded_keys = self._loaded_keys, []
        if keys:
            self._store.prefetch(keys)

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests whose load came to nothing, since the last time."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_finished_saves(self) -> set[str]:
        finished, self._finished_saves = self._finished_saves, set()
        return finished

    def take_arrived(self) -> set[str]:
        """Requests whose load has ended, well or not, since the last time."""
        arrived, self._arrived = self._arrived, set()
        return arrived

    @property
    def has_loaded(self) -> bool:
        """Whether a load has ended that is not yet reported."""
        return bool(self._report.loads)

    def take_report(self) -> WorkerReport:
        report, self._report = self._report, WorkerReport()
        report.lost += self._saver.take_lost()
        return report

    def close(self, deadline_s: float) -> None:
        """Give up loads, and finish saves within ``deadline_s`` seconds."""
        self.cancel([load.plan.request_id for load in self._sliced])
        self.drain(deadline_s)

    def drain(self, deadline_s: float) -> None:
        """Wait until what was handed to the store is stored, at most ``deadline_s`` seconds."""
        self._saver.drain(deadline_s)

    def _fill(self, plan: LoadPlan, budget: Budget) -> Slices[Filled]:
        # Not the filler's own generator: whatever goes wrong then goes wrong in `_go_on`.
        return (yield from self._filler.fill(plan, budget))

    def _go_on(self, load: _Load, tokens: float) -> bool:
        """Whether the load is over."""
        plan = load.plan
        try:
            with load.budget.step(tokens):
                next(load.slices)
            return False
        except StopIteration as end:
            self._take(plan, end.value)
        except Exception:
            logger.exception(
                "kvloom: filling the cache of request %s failed; vLLM computes it instead",
                plan.request_id,
            )
            self._fail(plan)
        return True

    def _take(self, plan: LoadPlan, filled: Filled) -> None:
        self._loaded_keys += filled.loaded
        self._report.lost += filled.lost
        if filled.report is not None:
            self._report.loads[plan.request_id] = filled.report
        if filled.failed_from is not None:
            self._fail_from(plan, filled.failed_from)

    def _fail(self, plan: LoadPlan) -> None:
        """Nothing of a plan is in place."""
        self._report.loads[plan.request_id] = LoadReport.of_nothing(plan)
        self._fail_from(plan, plan.start)

    def _fail_from(self, plan: LoadPlan, position: int) -> None:
        if plan.whole or position == plan.start:
            self._failed_requests.add(plan.request_id)
            return
        end = plan.start + len(plan.token_ids)
        first = position // self._cache.block_size
        self._failed_blocks.update(plan.block_ids[first : -(-end // self._cache.block_size)])
