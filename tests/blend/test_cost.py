"""Spec row B19: reuse must be worth its time, by what loading and computing were seen to cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvloom.blend.cost import CostRule


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rule(load_ms: float, compute_ms: float, min_gain: float = 0.1) -> CostRule:
    """One that has seen a loaded and a computed token take so long."""
    learned = CostRule(min_gain, Clock())
    learned.loaded(1000, 1000 * load_ms)
    learned.computed(1000, 1000 * compute_ms)
    return learned


@given(
    load_ms=st.floats(0.001, 10),
    compute_ms=st.floats(0.001, 10),
    loaded=st.integers(1, 10_000),
    computed=st.integers(0, 10_000),
    min_gain=st.floats(0, 0.9),
)
def test_what_saves_less_than_the_least_gain_is_refused(
    load_ms: float, compute_ms: float, loaded: int, computed: int, min_gain: float
) -> None:
    full = (loaded + computed) * compute_ms
    reuse = loaded * load_ms + computed * compute_ms
    gain = (full - reuse) / full
    verdict = rule(load_ms, compute_ms, min_gain).worth(loaded=loaded, computed=computed)
    if abs(gain - min_gain) > 1e-6:
        assert verdict == (gain > min_gain)


def test_untaught_it_takes_loading_for_cheap() -> None:
    untaught = CostRule(0.1)
    assert untaught.worth(loaded=1000, computed=200)
    assert not untaught.worth(loaded=100, computed=2000)


def test_waiting_in_vain_counts() -> None:
    learned = rule(load_ms=0.1, compute_ms=3)
    assert learned.worth(loaded=1000, computed=100)
    learned.loaded(0, 10_000)
    assert not learned.worth(loaded=1000, computed=100)


def test_a_store_that_was_slow_is_tried_again() -> None:
    clock = Clock()
    learned = CostRule(0.1, clock)
    learned.computed(1000, 1000)
    learned.loaded(1000, 5000)
    assert not learned.worth(loaded=1000, computed=0)
    clock.now += 61
    assert learned.worth(loaded=1000, computed=0)
    learned.loaded(1000, 5000)
    assert not learned.worth(loaded=1000, computed=0)


def test_a_step_of_few_tokens_teaches_nothing() -> None:
    learned = rule(load_ms=0.1, compute_ms=3)
    price = learned.price
    learned.computed(1, 60)
    learned.loaded(8, 60)
    assert learned.price == price


def test_without_a_least_gain_all_is_reused() -> None:
    learned = CostRule(None)
    learned.computed(1000, 1)
    learned.loaded(1000, 5000)
    assert learned.worth(loaded=1, computed=1000)


def test_a_blend_that_computes_slowly_is_seen() -> None:
    """Many small groups of tokens cost more than as many tokens of one prefill."""
    rule = CostRule(0.1)
    rule.computed(8192, 8192 * 0.05)
    assert rule.worth(loaded=512, computed=100)
    for _ in range(4):
        assert rule.worth(loaded=512, computed=100), "one that met a busy machine says little"
        rule.blended(100, 200.0)  # forty times as long
    assert not rule.worth(loaded=512, computed=100)
    assert rule.worth(loaded=512, computed=0), "loads are what they were"


def test_a_blend_never_computes_cheaper_than_prefill() -> None:
    """On a GPU only the time to launch is known, which is next to nothing."""
    rule = CostRule(0.1)
    rule.computed(8192, 8192 * 0.05)
    rule.loaded(512, 1.0)
    for _ in range(9):
        rule.blended(100, 0.001)
    assert not rule.worth(loaded=10, computed=500)
