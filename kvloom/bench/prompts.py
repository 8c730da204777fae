"""Prompts of real text for the benchmarks: documents in one order, then in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.demo.documents import corpus_tokens

_DOCUMENT_TOKENS = 500
_DOCUMENTS_A_PROMPT = 3
_QUESTION_TOKENS = 40


@dataclass(frozen=True)
class RagCase:
    """Documents read in earlier prompts, and a prompt that holds all of them in another order.

    Attributes:
        earlier: prompts of a few documents each, with openings and questions of their own.
        prompt: an opening, the documents in another order, a question; ``tokens`` long.
    """

    earlier: list[list[int]]
    prompt: list[int]


class PromptMaker:
    """Cuts cases out of the corpus; no two share text."""

    def __init__(self, tokenizer: Any, budget: int) -> None:
        self._corpus = list(corpus_tokens(tokenizer, budget))
        self._at = 0
        self._random = np.random.default_rng(0)

    def take(self, count: int) -> list[int]:
        """The next ``count`` tokens of the corpus."""
        self._at += count
        if self._at > len(self._corpus):
            raise ValueError(f"the benchmark needs more than {len(self._corpus)} tokens of text")
        return self._corpus[self._at - count : self._at]

    def rag(self, tokens: int) -> RagCase:
        opening, question = self.take(60), self.take(_QUESTION_TOKENS)
        room = tokens - len(opening) - len(question)
        documents = [
            self.take(min(_DOCUMENT_TOKENS, room - at)) for at in range(0, room, _DOCUMENT_TOKENS)
        ]
        earlier = [
            self.take(70)
            + [t for d in documents[i : i + _DOCUMENTS_A_PROMPT] for t in d]
            + self.take(_QUESTION_TOKENS)
            for i in range(0, len(documents), _DOCUMENTS_A_PROMPT)
        ]
        order = self._random.permutation(len(documents))
        body = [token for number in order for token in documents[number]]
        return RagCase(earlier, opening + body + question)
