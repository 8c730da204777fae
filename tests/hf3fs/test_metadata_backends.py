"""Spec rows H6-H10: every backend keeps the one contract."""

from __future__ import annotations

from pathlib import Path

from kvloom.hf3fs.metadata.base import Limits, MetadataStore
from kvloom.hf3fs.metadata.contract import MetadataContract
from kvloom.hf3fs.metadata.embedded import Embedded


class TestEmbedded(MetadataContract):
    def make_store(self, folder: Path, limits: Limits) -> MetadataStore:
        return Embedded(folder / "metadata.db", limits)


class TestEmbeddedOnDisk(MetadataContract):
    def make_store(self, folder: Path, limits: Limits) -> MetadataStore:
        return Embedded(folder / "metadata.db", limits, durability="disk")
