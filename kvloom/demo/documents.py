"""Text for the demo and the benchmarks: documents with questions on them, and a long corpus."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

SYSTEM_TEXT = "You are a helpful AI assistant. Answer questions about the documents."

# By name, not by listing the folder: what the demo asks and what it was checked with stay the same.
_NAMES = (
    "bakery",
    "bicycles",
    "ferry",
    "flood",
    "museum",
    "nighttrain",
    "observatory",
    "seeds",
)

DOCUMENTS: dict[str, str] = {
    name: resources.files(__package__)
    .joinpath("texts", f"{name}.txt")
    .read_text(encoding="utf-8")
    .strip()
    for name in _NAMES
}
"""Texts by name, about 650 tokens each."""


@dataclass(frozen=True)
class Question:
    """A question that one document answers.

    Attributes:
        document: name of that document.
        answer: a right answer has this text in it, in any case.
        answered: whether the demo's model, reading everything cold, gave that answer to the prompt
            of ``SYSTEM_TEXT``, ``documents_for(question)`` and the question. The model is small:
            a wrong answer to such a question says something about a blend, a wrong answer to
            another one does not.
    """

    document: str
    text: str
    answer: str
    answered: bool

    def answered_by(self, reply: str) -> bool:
        return self.answer.lower() in reply.lower()


QUESTIONS = (
    Question("bakery", "What is the name of the sourdough starter of the bakery?", "Bruno", True),
    Question("bakery", "Who is the head baker of the Lindqvist Bakery?", "Tomas Reyes", True),
    Question("bicycles", "Who is the mechanic on duty at Copperwheel?", "Lucia Ferrante", True),
    Question(
        "bicycles", "How far does the battery of an electric bicycle last?", "70 kilometres", True
    ),
    Question(
        "ferry", "What is the name of the ship that sails between Melby and Skarra?", "Petrel", True
    ),
    Question("ferry", "How many cars does the ferry carry?", "22 cars", True),
    Question("flood", "How high was the great flood of 1953?", "4.6 metres", True),
    Question("flood", "Where do people who must leave their homes go?", "sports hall", True),
    Question(
        "museum",
        "Who is the director of the Museum of Weights and Measures?",
        "Leopold Finch",
        True,
    ),
    Question("museum", "Who is the courier of the museum?", "Pavel Horak", True),
    Question("nighttrain", "At what time does the Aurora leave Vallendorf?", "20:52", True),
    Question("nighttrain", "Who is the chief of the night train?", "Wilhelmina Aster", True),
    Question("observatory", "Who founded the Tarn Hill Observatory?", "Clara Winstead", True),
    Question("observatory", "Who is the warden of the observatory?", "Joan Petty", True),
    Question("seeds", "Who is the head of the guardians?", "Marguerite Olsen", True),
    Question("seeds", "What is the oldest rye in the seed library called?", "Saint Wendel", True),
)


def documents_for(question: Question, count: int = 6) -> list[str]:
    """Names of ``count`` documents in an order of their own, the answering one last.

    Retrieval puts the best hit next to the question, because small models lose sight of what
    stands thousands of tokens before it.
    """
    others = [name for name in DOCUMENTS if name != question.document]
    random.Random(question.document).shuffle(others)
    return [*others[: count - 1], question.document]


def pick_questions(count: int, seed: int = 0) -> list[Question]:
    """``count`` questions, on many documents, those first that the model can answer.

    Raises:
        ValueError: there are not so many.
    """
    if count > len(QUESTIONS):
        raise ValueError(f"there are {len(QUESTIONS)} questions, not {count}")
    shuffled = random.Random(seed).sample(QUESTIONS, len(QUESTIONS))
    asked: dict[str, int] = {}
    turns = {}
    for question in sorted(shuffled, key=lambda q: not q.answered):
        turns[question] = asked[question.document] = asked.get(question.document, -1) + 1
    return sorted(turns, key=lambda q: (not q.answered, turns[q]))[:count]


def corpus_tokens(tokenizer: Any, count: int) -> Sequence[int]:
    """At least ``count`` tokens of real prose: Python's own documentation, on every machine.

    Args:
        tokenizer: with ``encode(text, add_special_tokens=False)``.

    Raises:
        ValueError: the documentation is shorter than that.
    """
    from pydoc_data.topics import topics

    tokens: list[int] = []
    for name in sorted(topics):
        tokens += tokenizer.encode(topics[name], add_special_tokens=False)
        if len(tokens) >= count:
            return tokens
    raise ValueError(f"the corpus has {len(tokens)} tokens, not {count}")
