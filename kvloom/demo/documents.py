"""Text for the demo and the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def corpus_tokens(tokenizer: Any, count: int) -> Sequence[int]:
    """At least ``count`` tokens of real prose: Python's own documentation, on every machine.

    Args:
        tokenizer: with ``encode(text, add_special_tokens=False)``.
    """
    from pydoc_data.topics import topics

    tokens: list[int] = []
    for name in sorted(topics):
        tokens += tokenizer.encode(topics[name], add_special_tokens=False)
        if len(tokens) >= count:
            return tokens
    raise ValueError(f"the corpus has {len(tokens)} tokens, not {count}")
