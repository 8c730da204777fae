"""Spec row B13: policies by name, from anywhere, or a clear error."""

from importlib.metadata import EntryPoint

import pytest

from kvloom.blend.plan import BlendPlan, Range
from kvloom.blend.selection import Boundary, FirstK, Nothing, SelectionPolicy, make_policy, registry
from kvloom.config import ConfigError, KvloomConfig


class Everything(SelectionPolicy):
    @classmethod
    def from_config(cls, config: KvloomConfig) -> "Everything":
        return cls()

    def select(self, plan: BlendPlan) -> list[Range]:
        return [(plan.start, plan.end)]


def test_policies_by_name_take_their_numbers_from_the_config() -> None:
    config = {"first_k": 7, "recompute_boundary": 3}
    assert make_policy(KvloomConfig.from_extra(config)) == FirstK(k=7, width=3)
    named = KvloomConfig.from_extra(config | {"recompute_policy": "boundary"})
    assert make_policy(named) == Boundary(width=3)
    assert make_policy(KvloomConfig.from_extra({"recompute_policy": "none"})) == Nothing()


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'frist_k'.*first_k, boundary, none.*mean 'first_k'"):
        make_policy(KvloomConfig.from_extra({"recompute_policy": "frist_k"}))


def test_a_third_party_adds_one_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("everything", f"{__name__}:Everything", "kvloom.policies"),
        EntryPoint("broken", "json:dumps", "kvloom.policies"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    config = KvloomConfig.from_extra({"recompute_policy": "everything"})
    assert isinstance(make_policy(config), Everything)
    with pytest.raises(ConfigError, match="no SelectionPolicy"):
        make_policy(KvloomConfig.from_extra({"recompute_policy": "broken"}))
