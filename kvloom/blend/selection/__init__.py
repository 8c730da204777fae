"""Recompute policies: which reused tokens to compute anew (spec row B13), one class a file."""

from kvloom.blend.selection.base import SelectionPolicy
from kvloom.blend.selection.boundary import Boundary
from kvloom.blend.selection.first_k import FirstK
from kvloom.blend.selection.nothing import Nothing
from kvloom.blend.selection.registry import make_policy

__all__ = ["Boundary", "FirstK", "Nothing", "SelectionPolicy", "make_policy"]
