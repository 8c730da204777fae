"""The scheduler side: what a request can reuse, and which chunks to save (DESIGN.md).

Path of a request: ``match`` (prefix keys, then the analyzer over the rest; the answer is a prefix
length) -> ``admit`` (blocks are allocated; a blend leaves the engine's prefix cache) -> ``step``
(load and save plans for the workers) -> ``take_report`` (the load has arrived, and the engine goes
on with the request) -> ``finish``. Everything about blocks and computed tokens is read from the
engine when it is needed: nothing of it is kept here, so a preemption that replaces blocks or
rewinds tokens leaves nothing stale.

The engine lets every request wait for its load. Where it counts on a load within the step that
fills it, it enters the blocks in its prefix cache before anyone knows whether they are in place:
others build on garbage, and store it, if the load fails and its request is gone or is slow to
compute it. With asynchronous scheduling a wrong token would be in the answer as well.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

from kvloom.blend.cost import FEW_TOKENS, LOADED_PRICE, CostRule
from kvloom.blend.plan import BlendPlan, Origin, make_plan
from kvloom.blend.selection import SelectionPolicy
from kvloom.config import KvloomConfig
from kvloom.tokens.analyzer import ChunkAnalyzer
from kvloom.tokens.expected import Additions, ExpectedChunks
from kvloom.tokens.hashing import blended_key, prefix_keys
from kvloom.vllm import compat
from kvloom.vllm.grouped_cache import Tables, first_held
from kvloom.vllm.identity import Scopes
from kvloom.vllm.metadata import (
    LoadPlan,
    LoadReport,
    Piece,
    SaveChunk,
    SavePlan,
    StepMetadata,
    WorkerReport,
)
from kvloom.vllm.metrics import Metrics

logger = init_logger(__name__)

_LOST_S = 60.0


@dataclass(frozen=True, slots=True)
class Match:
    """What a request can reuse.

    Attributes:
        local: tokens that the engine has in its own prefix cache.
        exact: tokens covered by an exact prefix, the engine's or the store's.
        total: tokens in place when the load is done; the engine computes the rest.
        blend: the plan over ``[exact, total)``, or None for an exact prefix alone.
        generation: of KV computed on top of it: 0 if all of it is exact, else one more than the
            highest that it reuses.
        match_ms: time it took to find.
        choose: reused tokens that the policy may choose, once they are loaded, to be computed anew.
    """

    local: int
    exact: int
    total: int
    blend: BlendPlan | None
    generation: int
    match_ms: float
    choose: int = 0

    @property
    def cost(self) -> float:
        """Of putting it in place, in tokens computed."""
        loaded, computed = self.total - self.local, 0
        if self.blend is not None:
            computed = self.choose + self.blend.count(Origin.NEW)
            computed += self.blend.count(Origin.RECOMPUTED)
            loaded -= computed - self.choose
        return computed + LOADED_PRICE * loaded


@dataclass
class RequestState:
    """What must be remembered of a live request.

    Attributes:
        request: the engine's request object.
        keys: prefix keys of the whole chunks of its tokens, extended as it generates.
        saved: chunks from the start that are stored or on their way.
        match: of the last lookup.
        pending: a load to be sent with this step.
        generation: of the KV that this admission computes (see ``Match``).
        admitted: the match that this admission uses.
        report: what became of its load.
        waiting: the engine lets it wait for its load, and its KV is not in place.
        sliced: others go on while its load is filled.
        ran: it was in a step since it was admitted. Before, what the engine counts as computed may
            be on its way, through another connector.
        failed: tokens that earlier admissions could not load.
        gave_up: a load of it failed as a whole, and would fail again.
    """

    request: Any
    scope: bytes
    keys: list[bytes] = field(default_factory=list)
    saved: int = 0
    match: Match | None = None
    pending: Match | None = None
    generation: int = 0
    admitted: Match | None = None
    report: LoadReport | None = None
    waiting: bool = False
    sliced: bool = False
    ran: bool = False
    failed: int = 0
    gave_up: bool = False


class BlendScheduler:
    """Decides what to reuse and what to save; runs in the engine's scheduler thread.

    Args:
        saves, loads: what the connector's role allows (spec row B3).
        windows: some layers keep the blocks of a window only. Nothing is blended then, and a load
            is all or nothing: before a part of it there may be no blocks to go on from.
    """

    def __init__(
        self,
        config: KvloomConfig,
        chunks: ExpectedChunks,
        policy: SelectionPolicy,
        metrics: Metrics,
        *,
        block_size: int,
        loads: bool,
        saves: bool,
        windows: bool = False,
    ) -> None:
        self._config = config
        self._chunks = chunks
        self._policy = policy
        self._metrics = metrics
        self._analyzer = ChunkAnalyzer(config.blend_chunk_size, config.min_match_ratio)
        self._block_size = block_size
        self._can_blend = config.blend
        self._windows = windows
        self._loads = loads
        self._saves = saves
        self._scopes = Scopes()
        self._states: dict[str, RequestState] = {}
        self._admitted: dict[str, Any] = {}  # live requests, followed or not
        self._pending: list[RequestState] = []
        self._cost = CostRule(config.min_gain)
        self._timed: tuple[float, int] | None = None  # a step under way: when it began, its tokens
        self._cancelled: list[str] = []
        self._last_saves: list[SavePlan] = []
        self._kv_cache_manager: Any = None

    def bind(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager

    @property
    def live_requests(self) -> int:
        return len(self._states)

    def add(self, request: Any) -> None:
        """Begin to follow a request; those whose KV depends on more than tokens are left alone."""
        if (
            request.sampling_params is None
            or request.prompt_token_ids is None
            or request.prompt_embeds is not None
            or request.mm_features
            or request.resumable
        ):
            return
        scope = self._scopes.scope(request, request.cache_salt)
        self._states[request.request_id] = RequestState(request, scope)

    def reset(self) -> None:
        """The weights may be others from now on."""
        self._scopes.reset()
        for request_id, state in list(self._states.items()):
            try:
                state.scope = self._scopes.scope(state.request, state.request.cache_salt)
            except OSError:  # the adapter's files are gone
                self.drop(request_id)
            state.keys, state.match = [], None

    def match(self, request: Any, local: int) -> tuple[int | None, bool]:
        """What the worker can put in place; nothing counts on it before ``admit``.

        The engine asks again at every step until the request is admitted: an answer is kept for as
        long as the question is the same.

        Returns:
            Tokens beyond the ``local`` ones (None: ask again in the next step), and whether there
            are any: the engine shall let the request wait for them and go on with others.
        """
        state = self._states.get(request.request_id)
        if state is None or not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        if state.gave_up:
            state.match = Match(local, local, local, None, 0, 0.0)
        elif state.match is None or state.match.local != local:
            state.match = self._find(state, local)
        found = state.match.total - local
        if found and (self._is_computing(request, local) or self._is_loading(state, state.match)):
            return None, False
        return found, found > 0

    def admit(self, request: Any, num_external_tokens: int) -> None:
        """Blocks are allocated and the engine takes ``num_external_tokens`` from us."""
        self._admitted[request.request_id] = request
        state = self._states.get(request.request_id)
        if state is None:
            return
        if request.num_computed_tokens:
            # Back from its load: what was admitted before it stands. The engine has
            # just entered the blend in its prefix cache; preempted, the request would find it,
            # count it as an exact prefix and save it as one.
            self._leave_prefix_cache(request, state.admitted)
            return
        match, state.match = state.match, None
        state.generation, state.ran = 0, False
        if state.report is not None:
            state.failed += state.report.failed_tokens
        state.report, state.waiting = None, False
        if match is None or num_external_tokens <= 0:
            local = 0 if match is None else match.local
            state.admitted = Match(local, local, local, None, 0, 0.0)
            return
        state.admitted = match
        state.waiting, state.sliced = True, self._should_slice(state, match)
        state.pending, state.generation = match, match.generation
        self._pending.append(state)
        self._leave_prefix_cache(request, match)

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Plans for the workers: of the requests admitted and scheduled in this step."""
        metadata = StepMetadata()
        pending, self._pending = self._pending, []
        for admitted in pending:
            if admitted.pending is not None:
                metadata.loads.append(self._load_plan(admitted, admitted.pending))
                admitted.pending = None
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is None:
                continue
            state.ran = True
            save = self._save_plan(state, state.request.num_computed_tokens + scheduled)
            if save is not None:
                metadata.saves.append(save)
        self._time(output, metadata)
        # Last, for what fails above must not lose them: vLLM would hold their blocks for ever.
        metadata.saves += self._last_saves
        metadata.cancelled = self._cancelled
        self._last_saves, self._cancelled = [], []
        return metadata

    def take_report(
        self,
        report: WorkerReport,
        arrived: Collection[str] = (),
        failed: Collection[str] = (),
    ) -> None:
        """What the worker found: once what it can't do, and after each load how it went.

        Args:
            arrived: requests whose load has ended; failed: those of them that have nothing of it.
        """
        if report.obstacle is not None:
            self._can_blend = False
            if report.obstacle.everything:
                self._loads = self._saves = False
            what = "is off" if report.obstacle.everything else "reuses exact prefixes only"
            logger.warning("kvloom %s: %s", what, report.obstacle.reason)
        self._learn(report)
        self._chunks.remove(report.lost)
        for request_id, load in report.loads.items():
            self._metrics.moved("load", load.bytes_read, load.failed_tokens)
            self._metrics.took("load", load.load_ms / 1e3)
            self._metrics.took("rotate", load.rotate_ms / 1e3)
            self._metrics.took("recompute", load.compute_ms / 1e3)
            state = self._states.get(request_id)
            if state is not None:
                state.report = load if state.report is None else state.report.with_(load)
        for request_id in self._states.keys() & arrived:
            state = self._states[request_id]
            state.waiting = False
            state.gave_up = state.report is None or request_id in failed
            if not state.gave_up:
                _tell(request_id, self._figures(state))

    def drop(self, request_id: str) -> None:
        """Leave a request alone from now on: something about it went wrong, its KV is vLLM's."""
        self._admitted.pop(request_id, None)
        state = self._states.pop(request_id, None)
        if state is not None:
            state.pending = None  # its blocks are vLLM's: a plan for them must not be sent later

    def finish(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request.

        Returns:
            Whether its blocks must stay until its last chunks are saved, and the figures that the
            client asked for by ``kv_transfer_params: {"kvloom_report": true}``.
        """
        was_admitted = self._admitted.pop(request.request_id, None) is not None
        state = self._states.pop(request.request_id, None)
        if state is None or not was_admitted:
            return False, None
        if state.waiting:
            # The engine counts its tokens as computed, but they are not: nothing of it is saved.
            # Its blocks stay until the worker has let go of them and says so.
            self._cancelled.append(request.request_id)
            return False, None
        asked = bool((request.kv_transfer_params or {}).get("kvloom_report"))
        figures = self._figures(state, detail=asked)
        if state.report is None:  # else that was told when its load arrived
            _tell(request.request_id, figures)
        local = figures.get("local", 0)
        self._metrics.prompt(
            local=local,
            exact=figures["exact"] - local,
            **{origin: figures[origin] for origin in ("reused", "recomputed", "new")},
        )
        save = self._save_plan(state, request.num_computed_tokens, last=True)
        if save is not None:
            self._last_saves.append(save)
        return save is not None, {"kvloom": figures} if asked else None

    def _find(self, state: RequestState, local: int) -> Match:
        began = time.perf_counter()
        tokens = _tokens(state.request, 0, state.request.num_tokens)
        self._extend_keys(state, len(tokens))
        end = len(tokens) - 1  # the engine needs at least one token to compute
        size = self._config.blend_chunk_size
        exact = max(min(self._chunks.prefix_hits(state.keys) * size, end), local)
        if not self._cost.worth(loaded=exact - local, computed=0):
            exact = local
        blend, generation, choose = None, 0, 0
        if self._may_blend(state.request) and end - exact >= self._config.min_blend_tokens:
            chunks = self._analyzer.analyze(tokens, self._chunks.index, state.scope, start=exact)
            found = make_plan(chunks, end)
            plan = found.recompute(self._policy.select(found))
            chosen_later = self._policy.budget(found, plan)
            reused = plan.count(Origin.REUSED)
            if reused >= self._config.min_blend_tokens and self._cost.worth(
                loaded=reused, computed=len(plan.origin) - reused + chosen_later
            ):
                blend, choose = plan, chosen_later
                sources = [load.source_block_id for load in plan.loads()]
                generation = 1 if self._chunks.exact(sources).all() else 2
        total = exact if blend is None else end
        match_ms = (time.perf_counter() - began) * 1e3
        self._metrics.took("match", match_ms / 1e3)
        return Match(local, exact, total, blend, generation, match_ms, choose)

    def _is_computing(self, request: Any, local: int) -> bool:
        """Whether the engine only computes, in the step it plans, what it says it has cached.

        A load is filled before that step's forward: what a blend computes would see garbage.
        """
        return local > 0 and any(
            compat.computes_cached(self._kv_cache_manager, other, request, local)
            for other in self._admitted.values()
        )

    def _is_loading(self, state: RequestState, match: Match) -> bool:
        """Whether a request that waits for its load brings what this one would load too.

        The engine has it in its prefix cache as soon as it has arrived: to load it once more would
        take as many blocks again. What is filled at once does not wait for what takes many steps.
        """
        if not compat.caches_prefixes(self._kv_cache_manager):
            return False
        size = self._config.blend_chunk_size
        at_once = match.cost <= self._config.blend_tokens_per_step
        for other in self._states.values():
            if not other.waiting or other.admitted is None or other is state:
                continue
            if other.sliced and at_once:
                continue
            shared = min(match.exact, other.admitted.exact) // size
            last = slice(shared - 1, shared)  # its key stands for all before; none after a reset
            whole_blocks = shared * size // self._block_size * self._block_size
            if whole_blocks > match.local and state.keys[last] == other.keys[last]:
                return True
        return False

    def _leave_prefix_cache(self, request: Any, match: Match | None) -> None:
        if match is not None and match.blend is not None:
            compat.leave_prefix_cache(
                self._kv_cache_manager, request, self._block_size, match.exact
            )

    def _should_slice(self, state: RequestState, match: Match) -> bool:
        """Whether others would have to wait longer than a slice for this load (spec row B17)."""
        if not self._config.blend_async or match.cost <= self._config.blend_tokens_per_step:
            return False
        return any(other != state.request.request_id for other in self._admitted)

    def _time(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        """Have the worker tell when a step of prefill alone is over: what a token costs it."""
        now, tokens = time.monotonic(), output.total_num_scheduled_tokens
        decoded = sum(count for count in output.num_scheduled_tokens.values() if count < FEW_TOKENS)
        if tokens < FEW_TOKENS or 10 * decoded > tokens:
            return
        if self._timed is not None and now < self._timed[0] + _LOST_S:
            return
        if metadata.loads or any(state.waiting for state in self._states.values()):
            return
        self._timed = (now, tokens)
        metadata.timed = True

    def _learn(self, report: WorkerReport) -> None:
        if report.timed and self._timed is not None:
            began, tokens = self._timed
            self._timed = None
            self._cost.computed(tokens, (time.monotonic() - began) * 1e3)
        for load in report.loads.values():
            self._cost.loaded(load.loaded_tokens, load.load_ms + load.waited_ms + load.rotate_ms)
            self._cost.blended(load.computed_tokens, load.compute_ms)

    def _may_blend(self, request: Any) -> bool:
        # A LoRA request's forward needs the adapter's own token mapping, which a nested forward
        # would not have: its chunks are reused as exact prefixes only.
        return self._can_blend and request.lora_request is None

    def _extend_keys(self, state: RequestState, end: int) -> None:
        """Keys of the whole chunks before ``end``; only tokens without a key yet are read."""
        size = self._config.blend_chunk_size
        parent = state.keys[-1] if state.keys else None
        tokens = _tokens(state.request, len(state.keys) * size, end)
        state.keys += prefix_keys(tokens, size, state.scope, parent=parent)

    def _load_plan(self, state: RequestState, match: Match) -> LoadPlan:
        tokens = _tokens(state.request, match.local, match.total)
        pieces = self._prefix_pieces(state.keys, match.local, match.exact)
        compute = np.empty(0, dtype=np.int64)
        if match.blend is not None:
            compute = match.blend.compute_positions()
            pieces += [
                Piece(
                    load.source_block_id,
                    load.source_offset,
                    load.length,
                    load.target_start,
                    load.delta if self._config.position_correction else 0,
                )
                for load in match.blend.loads()
            ]
        return LoadPlan(
            state.request.request_id,
            compat.block_tables(self._kv_cache_manager, state.request.request_id),
            match.local,
            tokens,
            pieces,
            compute,
            match.exact,
            [(run.start, run.end) for run in match.blend.runs] if match.blend else [],
            match.choose,
            state.sliced,
            self._windows,
        )

    def _prefix_pieces(self, keys: list[bytes], start: int, end: int) -> list[Piece]:
        """Stored chunks over ``[start, end)``; the engine's own hit may end inside a chunk."""
        size = self._config.blend_chunk_size
        pieces = []
        while start < end:
            chunk, offset = divmod(start, size)
            length = min(size - offset, end - start)
            pieces.append(Piece(keys[chunk], offset, length, start, delta=0))
            start += length
        return pieces

    def _save_plan(self, state: RequestState, computed: int, last: bool = False) -> SavePlan | None:
        """Chunks that this step completes.

        ``computed`` may run ahead of the known tokens (asynchronous scheduling) or be rewound
        (preemption, failed loads): only chunks of known tokens that are computed count, and the
        cursor follows a rewind.
        """
        request = state.request
        size = self._config.blend_chunk_size
        known = request.num_tokens if self._config.save_generated else request.num_prompt_tokens
        complete = min(computed, known) // size
        state.saved = min(state.saved, request.num_computed_tokens // size)
        if not self._saves or not state.ran or complete <= state.saved:
            return None
        if state.generation > int(self._config.reuse_blended):
            return None
        self._extend_keys(state, complete * size)
        tables = compat.block_tables(self._kv_cache_manager, request.request_id)
        numbers = [
            number for number in self._computed(state, complete) if self._held(tables, number)
        ]
        state.saved = complete
        chunks = [self._chunk(state, number) for number in numbers]
        known = self._chunks.known([chunk.key for chunk in chunks])
        chunks = [chunk for chunk, there in zip(chunks, known, strict=True) if not there]
        if not chunks:
            return None
        # Counted as stored from now on, so that the next request finds them; what does not come
        # true is reported as lost.
        self._chunks.add(
            Additions(
                [chunk.key for chunk in chunks],
                [chunk.parent for chunk in chunks],
                state.scope,
                np.stack([chunk.token_ids for chunk in chunks]),
                [chunk.position for chunk in chunks],
                state.generation,
                time.time_ns(),
            )
        )
        return SavePlan(
            request.request_id, state.scope, tables, state.generation, chunks, last=last
        )

    def _held(self, tables: Tables, number: int) -> bool:
        """Whether all groups have a chunk: of the engine's own hits they may have let go."""
        start, size = number * self._config.blend_chunk_size, self._config.blend_chunk_size
        return not self._windows or all(
            first_held(table, self._block_size, start, start + size) == start for table in tables
        )

    def _computed(self, state: RequestState, complete: int) -> list[int]:
        """The chunks from ``state.saved`` to ``complete`` that hold no token of a moved chunk.

        A copy of one would be rotated again and again, each time from the copy before (B11).
        """
        numbers = np.arange(state.saved, complete)
        if state.generation == 0 or state.admitted is None or state.admitted.blend is None:
            return cast("list[int]", numbers.tolist())
        blend, size = state.admitted.blend, self._config.blend_chunk_size
        reused = np.flatnonzero(blend.origin == Origin.REUSED) + blend.start
        kept = (numbers * size >= blend.start) & ~np.isin(numbers, reused // size)
        return cast("list[int]", numbers[kept].tolist())

    def _chunk(self, state: RequestState, number: int) -> SaveChunk:
        start = number * self._config.blend_chunk_size
        end = start + self._config.blend_chunk_size
        name = blended_key if state.generation else bytes
        return SaveChunk(
            key=name(state.keys[number]),
            parent=name(state.keys[number - 1]) if number else state.scope,
            position=start,
            token_ids=_tokens(state.request, start, end),
        )

    def _figures(self, state: RequestState, detail: bool = False) -> dict[str, Any]:
        """What was reused for a request, in plain numbers (JSON)."""
        match, report = state.admitted, state.report
        prompt = state.request.num_prompt_tokens
        figures: dict[str, Any] = {"prompt_tokens": prompt}
        if match is None:
            return figures | {"exact": 0, "reused": 0, "recomputed": 0, "new": prompt}
        blend = match.blend
        chosen = match.choose if report is None else report.chosen
        # Of the prompt only: back after a preemption, it finds what it generated too.
        exact, reused, recomputed = min(match.exact, prompt), 0, 0
        if blend is not None:
            reused = blend.count(Origin.REUSED, prompt)
            recomputed = blend.count(Origin.RECOMPUTED, prompt)
            chosen = min(chosen, reused)
            reused, recomputed = reused - chosen, recomputed + chosen
        if report is not None:
            exact = max(exact - report.failed_exact, 0)
            reused = max(reused - report.failed_reused, 0)
        figures |= {
            "exact": exact,
            "reused": reused,
            "recomputed": recomputed,
            "new": prompt - exact - reused - recomputed,
            "local": match.local,
            "match_ms": round(match.match_ms, 3),
        }
        if report is not None:
            figures |= {
                "bytes": report.bytes_read,
                "load_ms": round(report.load_ms, 3),
                "rotate_ms": round(report.rotate_ms, 3),
                "recompute_ms": round(report.compute_ms, 3),
            }
        failed = state.failed + (report.failed_tokens if report is not None else 0)
        if failed or report is not None:
            figures["failed"] = failed
        if detail and blend is not None:
            figures["runs"] = [
                {
                    "start": s.target_start,
                    "length": s.length,
                    "source": s.source_position,
                    "chunk": s.source_block_id.hex(),
                }
                for run in blend.runs
                for s in run.stretches
            ]
            figures["origins"] = [int(Origin.EXACT)] * match.exact + blend.origin.tolist()
        return figures


def _tokens(request: Any, start: int, end: int) -> npt.NDArray[np.int32]:
    return np.asarray(request.all_token_ids[start:end], dtype=np.int32)


def _tell(request_id: str, figures: dict[str, Any]) -> None:
    """A request's one line in the log (spec row B24)."""
    text = (
        f"{figures['prompt_tokens']} prompt tokens: {figures['exact']} exact, "
        f"{figures['reused']} reused, {figures['recomputed']} recomputed, {figures['new']} new"
    )
    if "load_ms" in figures:
        text += (
            f"; {figures['bytes'] / 1e6:.1f} MB; match {figures['match_ms']:.1f} ms, "
            f"load {figures['load_ms']:.1f} ms, rotate {figures['rotate_ms']:.1f} ms, "
            f"recompute {figures['recompute_ms']:.1f} ms"
        )
    if figures.get("failed"):
        text += f"; {figures['failed']} tokens could not be loaded and were computed"
    logger.info("kvloom: %s: %s", request_id, text)
