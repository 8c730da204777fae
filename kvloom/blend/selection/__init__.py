"""Recompute policies: which reused tokens to compute anew (spec row B13), one class a file."""

from kvloom.blend.selection.base import LayerView, LookingPolicy, SelectionPolicy
from kvloom.blend.selection.boundary import Boundary
from kvloom.blend.selection.first_k import FirstK
from kvloom.blend.selection.hkvd import Hkvd
from kvloom.blend.selection.hkvd_block import HkvdBlock
from kvloom.blend.selection.mean_shift import MeanShift
from kvloom.blend.selection.nothing import Nothing
from kvloom.blend.selection.query_aware import QueryAware
from kvloom.blend.selection.registry import make_policy

__all__ = [
    "Boundary",
    "FirstK",
    "Hkvd",
    "HkvdBlock",
    "LayerView",
    "LookingPolicy",
    "MeanShift",
    "Nothing",
    "QueryAware",
    "SelectionPolicy",
    "make_policy",
]
