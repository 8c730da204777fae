"""The one interface of recompute policies."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvloom.blend.plan import BlendPlan, Range
from kvloom.config import KvloomConfig


class SelectionPolicy(ABC):
    """Chooses reused tokens whose KV is computed anew in the context of the new prompt."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: KvloomConfig) -> SelectionPolicy: ...

    @abstractmethod
    def select(self, plan: BlendPlan) -> list[Range]:
        """Ranges of prompt positions; tokens in them that are not reused are left as they are."""
