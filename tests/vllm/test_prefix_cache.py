"""The engine's own prefix cache beside ours (invariants of DESIGN.md)."""

from __future__ import annotations

import pytest

from .engines import Engine, largest_difference, prose


def test_a_blend_is_not_computed_on_blocks_of_the_same_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that arrive together share a new system prompt: the second blends behind it."""
    document = prose(engine, 500, 400)
    engine.ask(prose(engine, 501, 70) + document)
    engine.forget()
    system = prose(engine, 502, 200)
    cold, prompt = system + prose(engine, 503, 50), system + document + prose(engine, 504, 40)
    monkeypatch.setattr(engine.scheduler, "_saves", False)  # else the second finds what it saved
    alone_first = engine.ask(cold, max_tokens=2)
    alone = engine.ask(prompt, max_tokens=2)
    assert alone.figures["local"] > 0
    assert alone.figures["reused"] > 200
    engine.forget()
    first, second = engine.ask_all([cold, prompt], max_tokens=2)
    assert second.figures["local"] == alone.figures["local"]
    assert second.figures["reused"] == alone.figures["reused"]
    assert largest_difference(second.kv, alone.kv) <= 1e-4
    assert (first.tokens, second.tokens) == (alone_first.tokens, alone.tokens)
