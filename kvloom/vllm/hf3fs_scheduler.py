"""The scheduler side of HF3FSKVConnector: which whole blocks are stored, and which to save.

Path of a request: ``match`` (its block hashes, from the first one that the engine lacks on, as far
as all ranks have confirmed them; a read lease keeps them) -> ``admit`` -> ``step`` sends the load;
the engine lets the request wait meanwhile -> ``take_report`` -> ``step`` sends saves as blocks fill
-> ``finish``. Block tables and computed tokens are read from the engine when they are needed, so a
preemption leaves nothing stale.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

from kvloom.config import Hf3fsConfig
from kvloom.hf3fs.metadata.client import MetadataClient, NoAnswer
from kvloom.vllm import compat
from kvloom.vllm.hf3fs_plans import BlockPlan, Hf3fsReport, Hf3fsStep
from kvloom.vllm.identity import Scopes
from kvloom.vllm.metrics import Metrics

logger = init_logger(__name__)

_MATCH_S = 2.0  # how long an answer of the service is believed; read leases are longer
_REMEMBERED = 65_536  # keys that are stored as far as we know
_SAVING_S = 10.0  # how long a key may be on its way, and the service not know it


@dataclass(frozen=True, slots=True)
class BlockMatch:
    """Blocks ``[first, first + count)`` of a request are stored, asked at ``asked`` (monotonic)."""

    first: int
    count: int
    asked: float


@dataclass
class BlockState:
    """What must be remembered of a live request.

    Attributes:
        suffix: of its keys, see ``Scopes``.
        match: of the last look-up; pending: a load to be sent with this step.
        loading: tokens of a load that is under way: their blocks are not in place.
        gave_up: a load of it failed: the rest is computed, or it would be tried for ever.
        saved: blocks from the start that are stored or on their way.
        admitted: it has had blocks; ran: it was in a step since. Before, what the engine counts as
            computed may be on its way, through another connector.
        local, loaded: tokens that it found in the engine's own cache and in the store when it was
            first admitted, for its report.
    """

    request: Any
    suffix: str
    match: BlockMatch | None = None
    pending: BlockMatch | None = None
    loading: int = 0
    gave_up: bool = False
    saved: int = 0
    admitted: bool = False
    ran: bool = False
    local: int = 0
    loaded: int = 0


class Hf3fsScheduler:
    """Runs in the engine's scheduler thread; waits for the service at most its look-up timeout.

    Args:
        loads, saves: what the connector's role allows.
    """

    def __init__(
        self,
        config: Hf3fsConfig,
        metadata: MetadataClient,
        metrics: Metrics,
        *,
        block_size: int,
        loads: bool,
        saves: bool,
    ) -> None:
        self._config = config
        self._metadata = metadata
        self._metrics = metrics
        self._block_size = block_size
        self._loads, self._saves = loads, saves
        self._scopes = Scopes()
        self._states: dict[str, BlockState] = {}
        self._stored: OrderedDict[str, float] = OrderedDict()  # since when (monotonic)
        self._last_saves: list[BlockPlan] = []
        self._kv_cache_manager: Any = None

    def bind(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager

    @property
    def live_requests(self) -> int:
        return len(self._states)

    def add(self, request: Any) -> None:
        """Begin to follow a request, if its block hashes say all that its KV depends on."""
        if (
            request.sampling_params is not None
            and request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and not request.resumable
        ):
            suffix = self._scopes.suffix(request)
            self._states[request.request_id] = BlockState(request, suffix)

    def reset(self) -> None:
        """The weights may be others from now on."""
        self._scopes.reset()
        for request_id, state in list(self._states.items()):
            try:
                state.suffix = self._scopes.suffix(state.request)
            except OSError:  # the adapter's files are gone
                self.drop(request_id)
            state.match = None

    def match(self, request: Any, local: int) -> int:
        """Tokens beyond the ``local`` ones that are stored (H16); no side effects."""
        state = self._states.get(request.request_id)
        if state is None:
            return 0
        if not request.num_preemptions:
            state.local = local
        if not self._loads or state.gave_up or request.skip_reading_prefix_cache:
            return 0
        first, rest = divmod(local, self._block_size)
        # At least one token is always left to the engine.
        last = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        if rest or first >= last:
            return 0
        known = state.match
        if known is None or known.first != first or time.monotonic() - known.asked > _MATCH_S:
            state.match = known = self._find(state, first, last)
        return known.count * self._block_size

    def admit(self, request: Any, num_external_tokens: int) -> None:
        """Blocks are allocated and the engine waits for ``num_external_tokens`` from us."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        state.admitted, state.ran = True, False
        if num_external_tokens <= 0:
            return
        state.pending, state.match = state.match, None
        state.loading = num_external_tokens
        if not request.num_preemptions:
            state.loaded = num_external_tokens

    def step(self, output: SchedulerOutput) -> Hf3fsStep:
        """Plans for the workers."""
        plans = Hf3fsStep(saves=self._last_saves)
        self._last_saves = []
        for request_id, state in self._states.items():
            if state.pending is not None:
                plans.loads.append(self._load_plan(state, state.pending))
                state.pending = None
            scheduled = output.num_scheduled_tokens.get(request_id)
            if scheduled is not None:
                state.ran = True
                save = self._save_plan(state, state.request.num_computed_tokens + scheduled)
                if save is not None:
                    plans.saves.append(save)
        return plans

    def take_report(self, report: Hf3fsReport | None, finished_loads: Iterable[str]) -> None:
        """What became of loads and saves."""
        if report is not None:
            if report.obstacle is not None and (self._loads or self._saves):
                self._loads = self._saves = False
                logger.warning("kvloom is off: %s", report.obstacle)
            for key in report.lost:
                self._stored.pop(key, None)
            for request_id in report.failed_loads & self._states.keys():
                self._states[request_id].gave_up = True
        for request_id in finished_loads:
            state = self._states.get(request_id)
            if state is not None:
                what = "could not all be loaded" if state.gave_up else "loaded"
                logger.info("kvloom: %s: %d tokens %s", request_id, state.loading, what)
                state.loading = 0

    def drop(self, request_id: str) -> None:
        """Leave a request alone from now on: something about it went wrong."""
        self._states.pop(request_id, None)

    def finish(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request.

        Returns:
            Whether its blocks must stay until its last ones are saved, and the figures that the
            client asked for by ``kv_transfer_params: {"kvloom_report": true}``.
        """
        state = self._states.pop(request.request_id, None)
        if state is None or not state.admitted:
            return False, None
        prompt, exact = request.num_prompt_tokens, 0 if state.gave_up else state.loaded
        self._metrics.prompt(local=state.local, exact=exact, new=prompt - state.local - exact)
        figures = None
        if (request.kv_transfer_params or {}).get("kvloom_report"):
            found = {"exact": state.local + exact, "local": state.local}
            figures = {"kvloom": {"prompt_tokens": prompt, **found, "new": prompt - found["exact"]}}
        save = self._save_plan(state, request.num_computed_tokens, last=True)
        if save is not None:
            self._last_saves.append(save)
        return save is not None, figures

    def _find(self, state: BlockState, first: int, last: int) -> BlockMatch:
        """Blocks that the engine has count as used too: the service would evict those first that
        every prompt begins with."""
        began = time.monotonic()
        keys = self._keys(state, 0, last)
        found = self._metadata.exists(keys, lease=True)
        asked = time.monotonic()
        self._metrics.took("match", asked - began)
        count = 0
        if not isinstance(found, NoAnswer):
            for key, there in zip(keys, found, strict=True):
                if not there and self._stored.get(key, asked) < asked - _SAVING_S:
                    del self._stored[key]  # evicted: it is saved again
            wanted = found[first:]
            count = next((i for i, there in enumerate(wanted) if not there), len(wanted))
            self._metrics.asked("hf3fs", hits=count, misses=len(wanted) - count)
        return BlockMatch(first, count, asked)

    def _load_plan(self, state: BlockState, match: BlockMatch) -> BlockPlan:
        request_id, end = state.request.request_id, match.first + match.count
        keys = self._keys(state, match.first, end)
        self._remember(keys)
        blocks = compat.block_ids(self._kv_cache_manager, request_id)
        return BlockPlan(request_id, keys, blocks[match.first : end])

    def _save_plan(self, state: BlockState, computed: int, last: bool = False) -> BlockPlan | None:
        """Whole blocks that this step completes.

        ``computed`` may run ahead of the known tokens (asynchronous scheduling) or be rewound
        (preemption, failed loads): only blocks of known tokens count, and the cursor follows.
        """
        request, size = state.request, self._block_size
        known = request.num_tokens if self._config.save_generated else request.num_prompt_tokens
        complete = min(min(computed, known) // size, len(request.block_hashes))
        state.saved = min(state.saved, request.num_computed_tokens // size)
        if not self._saves or not state.ran or state.loading or complete <= state.saved:
            return None
        keys = self._keys(state, state.saved, complete)
        blocks = compat.block_ids(self._kv_cache_manager, request.request_id)
        pairs = [
            (key, block)
            for key, block in zip(keys, blocks[state.saved : complete], strict=True)
            if key not in self._stored
        ]
        state.saved = complete
        if not pairs:
            return None
        self._remember([key for key, _ in pairs])
        return BlockPlan(
            request.request_id, [key for key, _ in pairs], [block for _, block in pairs], last
        )

    def _keys(self, state: BlockState, first: int, last: int) -> list[str]:
        """The engine's own block hashes: salt, LoRA and images are in them (H18)."""
        hashes = state.request.block_hashes[first:last]
        return [block_hash.hex() + state.suffix for block_hash in hashes]

    def _remember(self, keys: list[str]) -> None:
        """So that a prompt's blocks are not copied out again at each of its requests."""
        now = time.monotonic()
        for key in keys:
            self._stored[key] = now
            self._stored.move_to_end(key)
        while len(self._stored) > _REMEMBERED:
            self._stored.popitem(last=False)
