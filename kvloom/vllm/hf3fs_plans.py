"""What the two sides of HF3FSKVConnector tell each other in a step. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Load or save blocks of one request; key i is of block i.

    Attributes:
        keys: none in a load whose request counts on blocks that nothing can fill: they failed.
        last: of a save: the request is finished and its blocks are held until this is done.
    """

    request_id: str
    keys: list[str]
    block_ids: list[int]
    last: bool = False


@dataclass
class Hf3fsStep(KVConnectorMetadata):
    loads: list[BlockPlan] = field(default_factory=list)
    saves: list[BlockPlan] = field(default_factory=list)


@dataclass
class Hf3fsReport(KVConnectorWorkerMetadata):
    """What happened on the workers since the last step.

    Attributes:
        failed_loads: requests of which a block did not come.
        lost: keys that were not saved, or could not be loaded: they may be saved anew.
        obstacle: why nothing can be stored or loaded here.
    """

    failed_loads: set[str] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    obstacle: str | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if not isinstance(other, Hf3fsReport):
            return self
        return Hf3fsReport(
            self.failed_loads | other.failed_loads,
            self.lost + other.lost,
            self.obstacle or other.obstacle,
        )
