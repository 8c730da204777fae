"""What scheduler and worker sides tell each other in a step. Plain data, small, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens to load from one stored chunk: ``[offset, offset + length)`` of it.

    Attributes:
        start: position of its first token in the prompt.
        delta: how far its keys are rotated.
    """

    key: bytes
    offset: int
    length: int
    start: int
    delta: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Put the KV of prompt positions ``[start, start + len(token_ids))`` in place.

    Attributes:
        tables: the request's block tables, one a KV cache group.
        token_ids: int32, the tokens of that range; what can't be loaded is computed from them.
        pieces: what to load, by position.
        compute: int64 positions to compute, ascending; with the pieces they cover the range.
        exact: tokens before this position are exact, and none of them is computed anew.
        runs: positions ``[first, end)`` of the runs that the pieces belong to.
        choose: loaded tokens that a policy may choose, once it saw them, to be computed too.
        sliced: filled in slices, each as long as a step may be held up; else at once.
        whole: vLLM can't go on from a part of it.
    """

    request_id: str
    tables: list[list[int]]
    start: int
    token_ids: npt.NDArray[np.int32]
    pieces: list[Piece]
    compute: npt.NDArray[np.int64]
    exact: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    choose: int = 0
    sliced: bool = False
    whole: bool = False

    @property
    def block_ids(self) -> list[int]:
        """The block table, where there is one group."""
        (table,) = self.tables
        return table


@dataclass(frozen=True, slots=True)
class SaveChunk:
    key: bytes
    parent: bytes
    position: int
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Store chunks of one request whose KV is in place after this step's forward.

    Attributes:
        tables: the request's block tables, one a KV cache group.
        generation: 0, or 1 where the KV was computed on top of a blend.
        last: the request is finished and its blocks are held for this save; report it when done.
    """

    request_id: str
    scope: bytes
    tables: list[list[int]]
    generation: int
    chunks: list[SaveChunk]
    last: bool = False


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Attributes:
    unplanned: requests that wait for a load that no plan describes: our side failed after its
        promise.
    cancelled: requests that are gone, whose loads may be under way.
    timed: the worker shall report when the step is over.
    """

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    unplanned: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    timed: bool = False


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of a LoadPlan.

    Attributes:
        loaded_tokens: tokens that were loaded.
        failed_tokens: tokens that should have been loaded and were computed instead; of these
            failed_exact of the exact prefix, and failed_reused that no policy would have computed.
        chosen: tokens that were loaded and, by the policy's choice, computed anew.
        computed_tokens: tokens that the model was called for.
        bytes_read: payload bytes read from the store.
        load_ms, rotate_ms, compute_ms: time in the engine's steps for reading and writing to the
            cache, for rotating, and for the model.
        waited_ms: time between the steps in which the store was late.
    """

    loaded_tokens: int
    failed_tokens: int
    failed_exact: int
    failed_reused: int
    chosen: int = 0
    computed_tokens: int = 0
    bytes_read: int = 0
    load_ms: float = 0.0
    waited_ms: float = 0.0
    rotate_ms: float = 0.0
    compute_ms: float = 0.0

    @classmethod
    def of_nothing(cls, plan: LoadPlan) -> LoadReport:
        """Of a plan that came to nothing."""
        return cls(0, **failures(plan, positions(plan.pieces)))

    def with_(self, other: LoadReport) -> LoadReport:
        """Of two ranks: their bytes, the times of the slower one, and what failed on either."""
        return replace(
            self,
            loaded_tokens=min(self.loaded_tokens, other.loaded_tokens),
            failed_tokens=max(self.failed_tokens, other.failed_tokens),
            failed_exact=max(self.failed_exact, other.failed_exact),
            failed_reused=max(self.failed_reused, other.failed_reused),
            bytes_read=self.bytes_read + other.bytes_read,
            load_ms=max(self.load_ms, other.load_ms),
            waited_ms=max(self.waited_ms, other.waited_ms),
            rotate_ms=max(self.rotate_ms, other.rotate_ms),
            compute_ms=max(self.compute_ms, other.compute_ms),
        )


def positions(pieces: Sequence[Piece]) -> npt.NDArray[np.int64]:
    """Of the prompt, that pieces are loaded to."""
    ranges = [np.arange(piece.start, piece.start + piece.length) for piece in pieces]
    return np.concatenate([*ranges, np.empty(0, dtype=np.int64)])


def failures(plan: LoadPlan, lost: npt.NDArray[np.int64]) -> dict[str, int]:
    """What a report says of positions that should have been loaded."""
    return {
        "failed_tokens": len(lost),
        "failed_exact": int((lost < plan.exact).sum()),
        "failed_reused": len(np.setdiff1d(lost[lost >= plan.exact], plan.compute)),
    }


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why this engine and model can't be served, found when the worker saw them.

    Attributes:
        everything: nothing can be stored or loaded; otherwise only blending is impossible.
    """

    reason: str
    everything: bool


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What happened in a step, on one rank or on all of them.

    Attributes:
        loads: by request id.
        lost: keys that could not be loaded or saved: they are not in the store.
        obstacle: reported once.
        timed: the step was to be reported as over.
    """

    loads: dict[str, LoadReport] = field(default_factory=dict)
    lost: list[bytes] = field(default_factory=list)
    obstacle: Obstacle | None = None
    timed: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """With another rank's: it has done the same with its share of the heads."""
        if not isinstance(other, WorkerReport):
            return self
        both = self.loads.keys() & other.loads.keys()
        return WorkerReport(
            {**self.loads, **other.loads, **{i: self.loads[i].with_(other.loads[i]) for i in both}},
            list(dict.fromkeys([*self.lost, *other.lost])),
            max(
                (report.obstacle for report in (self, other) if report.obstacle is not None),
                key=lambda obstacle: obstacle.everything,
                default=None,
            ),
            self.timed or other.timed,
        )
