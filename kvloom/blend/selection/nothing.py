"""``none``: rotate and reuse, recompute nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.blend.plan import BlendPlan, Range
from kvloom.blend.selection.base import SelectionPolicy
from kvloom.config import KvloomConfig


@dataclass(frozen=True)
class Nothing(SelectionPolicy):
    @classmethod
    def from_config(cls, config: KvloomConfig) -> Nothing:
        return cls()

    def select(self, plan: BlendPlan) -> list[Range]:
        return []
