"""``kvloom demo``: the main job, seen: documents read yesterday, a new prompt answered today.

A first engine reads documents in earlier prompts; it also answers the new prompt cold, and again
out of vLLM's own prefix cache. A second engine, fresh, knows nothing but the store on disk: it
answers the same prompt as an exact prefix hit and as a blend. Cache salts keep the ways apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.demo.documents import DOCUMENTS, SYSTEM_TEXT, Question, pick_questions
from kvloom.demo.engine import EngineUnderTest, Reply

WAYS = ("cold", "vllm prefix cache", "exact prefix", "blend")
_ANSWER_TOKENS = 40
_DOCUMENTS_A_PROMPT = 2


@dataclass(frozen=True)
class Prompt:
    """A RAG prompt: system text, documents in some order, a question.

    Attributes:
        tokens: of the whole prompt.
        labels: for each token the name of what it belongs to.
    """

    tokens: list[int]
    labels: list[str]
    question: Question


@dataclass(frozen=True)
class Round:
    """One question, answered in all ways; ``replies`` in the order of ``WAYS``."""

    prompt: Prompt
    replies: dict[str, Reply]

    def agreement(self, way: str) -> tuple[int, int]:
        """Leading answer tokens equal to the cold answer's, and how many that has."""
        cold, other = self.replies["cold"].tokens, self.replies[way].tokens
        same = next((i for i, (a, b) in enumerate(zip(cold, other, strict=False)) if a != b), None)
        return min(len(cold), len(other)) if same is None else same, len(cold)

    def right(self, way: str) -> bool:
        """Whether the answer holds the fact that was asked for."""
        return self.prompt.question.answer.lower() in self.replies[way].text.lower()


def run(model: Path, store: Path, questions: int, progress: Callable[[str], None]) -> list[Round]:
    """Read, stop, start afresh, answer.

    Args:
        store: an empty directory.
        questions: how many to ask; each has its own order of the documents.
    """
    progress("starting the first engine (about 20 s)")
    first = EngineUnderTest(model, store)
    write = PromptWriter(first.tokenizer)
    names = list(DOCUMENTS)
    for start in range(0, len(names), _DOCUMENTS_A_PROMPT):
        pair = names[start : start + _DOCUMENTS_A_PROMPT]
        progress(f"first engine: reading {' and '.join(pair)}")
        first.ask(write.prompt(pair, pick_questions(1, seed=start)[0]).tokens, salt="shop")
    random = np.random.default_rng(7)
    rounds: list[Round] = []
    for number, question in enumerate(pick_questions(questions, seed=0), 1):
        order = [names[i] for i in random.permutation(len(names))]
        prompt = write.prompt(order, question)
        replies = {}
        for way in WAYS[:2]:
            progress(f"first engine: question {number} of {questions}, {way}")
            replies[way] = first.ask(prompt.tokens, _ANSWER_TOKENS, salt=f"exact {number}")
        rounds.append(Round(prompt, replies))
    first.stop()
    progress("starting a fresh engine on the same store (about 20 s)")
    fresh = EngineUnderTest(model, store)
    for number, item in enumerate(rounds, 1):
        for way, salt in zip(WAYS[2:], (f"exact {number}", "shop"), strict=True):
            progress(f"fresh engine: question {number} of {questions}, {way}")
            item.replies[way] = fresh.ask(item.prompt.tokens, _ANSWER_TOKENS, salt=salt)
    fresh.stop()
    return rounds


class PromptWriter:
    """Writes chat prompts out of documents; the pieces are tokenised one by one, as RAG does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, documents: Sequence[str], question: Question) -> Prompt:
        pieces = [("system", f"<|im_start|>system\n{SYSTEM_TEXT}<|im_end|>\n<|im_start|>user\n")]
        pieces += [(name, f"{DOCUMENTS[name]}\n\n") for name in documents]
        asked = f"Question: {question.text} Answer in one short sentence."
        pieces.append(("question", f"{asked}<|im_end|>\n<|im_start|>assistant\n"))
        tokens: list[int] = []
        labels: list[str] = []
        for label, text in pieces:
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            tokens += encoded
            labels += [label] * len(encoded)
        return Prompt(tokens, labels, question)
