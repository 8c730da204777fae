"""``kvloom demo``: the main job, seen: documents read earlier, a new prompt answered now (row B23).

A first engine reads documents in earlier prompts; it also answers each new prompt cold, and again
out of vLLM's own prefix cache. A second engine, fresh, knows nothing but the store on disk: it
answers the same prompts as exact prefix hits and as blends. Cache salts keep the ways apart: what
was read under one salt is never reused under another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.demo.documents import (
    DOCUMENTS,
    SYSTEM_TEXT,
    Question,
    documents_for,
    pick_questions,
)
from kvloom.demo.engine import EngineUnderTest, Reply, blend_over
from kvloom.demo.picture import render_blend

COLD, VLLM, EXACT, BLEND = "cold", "vLLM prefix cache", "exact prefix", "blend"
WAYS = (COLD, VLLM, EXACT, BLEND)
_READERS = "readers"  # the salt of the earlier prompts, and so of the blends
_ANSWER_TOKENS = 40
_DOCUMENTS_A_PROMPT = 2
_ORIGINS = ("exact", "reused", "recomputed", "new")  # by kvloom.blend.plan.Origin


@dataclass(frozen=True)
class Prompt:
    """A RAG prompt: system text, documents, a question.

    Attributes:
        tokens: of the whole prompt.
        labels: for each token the name of the piece that it belongs to.
    """

    tokens: list[int]
    labels: list[str]
    question: Question


@dataclass(frozen=True)
class Round:
    """One question, answered in all ways."""

    prompt: Prompt
    replies: dict[str, Reply]

    def agreement(self, way: str) -> tuple[int, int]:
        """Leading answer tokens equal to the cold answer's, and how many that one has."""
        cold, other = self.replies[COLD].tokens, self.replies[way].tokens
        pairs = zip(cold, other, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(cold), len(other)))
        return first, len(cold)

    def right(self, way: str) -> bool:
        """Whether the answer holds the fact that was asked for."""
        return self.prompt.question.answered_by(self.replies[way].text)


def run(model: Path, questions: int, progress: Callable[[str], None]) -> list[Round]:
    """Read, stop, start afresh, answer.

    Args:
        questions: how many to ask; each has its own order of the documents.
        progress: called with what is being done.
    """
    with tempfile.TemporaryDirectory(prefix="kvloom-demo-") as store:
        progress("starting the first engine (20 s)")
        first = EngineUnderTest(model, blend_over(Path(store)))
        writer = PromptWriter(first.tokenizer)
        _read(first, writer, progress)
        rounds = []
        for number, question in enumerate(pick_questions(questions), 1):
            prompt = writer.prompt(documents_for(question), question)
            replies = {}
            for way in (COLD, VLLM):
                progress(f"first engine, question {number} of {questions}: {way}")
                replies[way] = first.ask(prompt.tokens, _ANSWER_TOKENS, salt=f"question {number}")
            rounds.append(Round(prompt, replies))
        first.stop()
        progress("starting a fresh engine on the same store (20 s)")
        fresh = EngineUnderTest(model, blend_over(Path(store)))
        for number, answered in enumerate(rounds, 1):
            for way, salt in ((EXACT, f"question {number}"), (BLEND, _READERS)):
                progress(f"fresh engine, question {number} of {questions}: {way}")
                reply = fresh.ask(answered.prompt.tokens, _ANSWER_TOKENS, salt=salt)
                answered.replies[way] = reply
        fresh.stop()
    return rounds


def draw(path: Path, answered: Round, tokenizer_of: Path, facts: dict[str, str]) -> None:
    """Write the picture of a round's blend: where each token of the prompt came from."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    prompt, figures = answered.prompt, answered.replies[BLEND].figures
    count = len(prompt.tokens)
    origins = [_ORIGINS[number] for number in figures["origins"]]
    origins += ["last"] * (count - len(origins))
    sources: list[str | None] = [None] * count
    deltas: list[int | None] = [None] * count
    for at in range(figures["exact"]):
        sources[at], deltas[at] = prompt.labels[at], 0
    for run_ in figures["runs"]:
        for at in range(run_["start"], run_["start"] + run_["length"]):
            sources[at] = f"{prompt.labels[at]}, chunk {run_['chunk'][:8]}"
            deltas[at] = run_["start"] - run_["source"]
    render_blend(
        path,
        title=f"A blended prompt of {count:,} tokens",
        tokens=[str(tokenizer.decode([token])) for token in prompt.tokens],
        origins=origins,
        sources=sources,
        deltas=deltas,
        figures={
            "ttft_ms": {way: answered.replies[way].ttft_ms for way in WAYS},
            "answers": {way: answered.replies[way].text.strip() for way in WAYS},
            "facts": {"question": prompt.question.text, **facts},
        },
    )


class PromptWriter:
    """Writes chat prompts out of documents; pieces are tokenised one by one, as RAG servers do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, documents: Sequence[str], question: Question) -> Prompt:
        asked = f"{question.text}<|im_end|>\n<|im_start|>assistant\n"
        pieces = [
            ("system text", f"<|im_start|>system\n{SYSTEM_TEXT}<|im_end|>\n<|im_start|>user\n"),
            *((name, f"{DOCUMENTS[name]}\n\n") for name in documents),
            ("question", asked),
        ]
        tokens: list[int] = []
        labels: list[str] = []
        for label, text in pieces:
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            tokens += encoded
            labels += [label] * len(encoded)
        return Prompt(tokens, labels, question)


def _read(engine: EngineUnderTest, writer: PromptWriter, progress: Callable[[str], None]) -> None:
    names = sorted(DOCUMENTS)
    for start in range(0, len(names), _DOCUMENTS_A_PROMPT):
        pair = names[start : start + _DOCUMENTS_A_PROMPT]
        progress(f"first engine: an earlier prompt with {' and '.join(pair)}")
        question = Question(pair[0], "What are these documents about?", "", answered=False)
        engine.ask(writer.prompt(pair, question).tokens, salt=_READERS)
