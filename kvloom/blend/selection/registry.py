"""Policies by name: ours, and third parties' by the entry point group ``kvloom.policies``."""

from __future__ import annotations

from importlib.metadata import entry_points

from kvloom.blend.selection.base import SelectionPolicy
from kvloom.blend.selection.boundary import Boundary
from kvloom.blend.selection.first_k import FirstK
from kvloom.blend.selection.hkvd import Hkvd
from kvloom.blend.selection.hkvd_block import HkvdBlock
from kvloom.blend.selection.mean_shift import MeanShift
from kvloom.blend.selection.nothing import Nothing
from kvloom.blend.selection.query_aware import QueryAware
from kvloom.config import ConfigError, KvloomConfig, known_names

_BUILT_IN: dict[str, type[SelectionPolicy]] = {
    "first_k": FirstK,
    "boundary": Boundary,
    "none": Nothing,
    "hkvd": Hkvd,
    "hkvd_block": HkvdBlock,
    "query_aware": QueryAware,
    "mean_shift": MeanShift,
}


def make_policy(config: KvloomConfig) -> SelectionPolicy:
    """The policy named by ``recompute_policy``.

    Raises:
        ConfigError: no policy has that name, or an entry point names something else.
    """
    name = config.recompute_policy
    if name in _BUILT_IN:
        return _BUILT_IN[name].from_config(config)
    third_party = {entry.name: entry for entry in entry_points(group="kvloom.policies")}
    if name not in third_party:
        names = known_names(name, [*_BUILT_IN, *third_party])
        raise ConfigError(f"recompute_policy = {name!r}: {names}")
    policy = third_party[name].load()
    if not (isinstance(policy, type) and issubclass(policy, SelectionPolicy)):
        raise ConfigError(f"recompute_policy = {name!r}: {policy!r} is no SelectionPolicy class")
    return policy.from_config(config)
