"""Prompts of the quality benchmark, out of text that every Python brings along.

A case is a prompt of four chunks of a document behind an opening, with a short tail of the same
document, and the earlier prompts in which its chunks were read: there each stood at another place
behind another text. Pass codes are written into the document, some in the middle of a chunk, some
in a sentence that straddles the border of two. They are asked for after the prompt, so no policy
can prepare for the question.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.demo.documents import DOCUMENTS

KINDS = ("prose", "code", "records")
SPLITS = ("development", "held-out")

_CHUNKS = 4
_SHORTEST, _LONGEST = 190, 260  # tokens of a chunk, but for the pass codes
_OPENING = 40
_TAIL = 40
_TRUE_TEXT = 64
_DOCUMENT = 1250  # tokens: what the longest case needs
_FILLER = (70, 260)  # tokens before a chunk in an earlier prompt, least and most
_ADJECTIVES = [
    "copper",
    "northern",
    "silver",
    "broken",
    "yellow",
    "hidden",
    "narrow",
    "ancient",
    "crooked",
    "velvet",
]
_NOUNS = [
    "gate",
    "lantern",
    "harbour",
    "orchard",
    "chapel",
    "tower",
    "bridge",
    "cellar",
    "engine",
    "garden",
]
_CODES_A_CASE = 4
_PACKAGES = (".", "asyncio", "email", "http", "logging", "unittest")  # of the standard library


@dataclass(frozen=True)
class Question:
    """A question that follows a prompt, and its only right answer; token ids."""

    text: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Case:
    """One prompt and how its chunks came to be known.

    Attributes:
        earlier: prompts that were computed before.
        prompt: about 1,000 tokens.
        bare: the prompt without its chunks.
        truth: how the document goes on.
        seams: questions on codes that straddle a border.
        middles: questions on codes inside a chunk.
    """

    kind: str
    earlier: list[list[int]]
    prompt: list[int]
    bare: list[int]
    truth: list[int]
    seams: list[Question]
    middles: list[Question]


def make_cases(tokenizer: Any, split: str, count: int) -> list[Case]:
    """``count`` cases, the kinds in turn.

    No two cases are of one document. What stood around a chunk in an earlier prompt is of a
    document of the other split.

    Raises:
        ValueError: there is not so much text.
    """
    first = SPLITS.index(split)
    needed = len(SPLITS) * -(-count // len(KINDS))
    documents = {kind: _documents(kind, tokenizer, needed) for kind in KINDS}
    cases = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        index = number // len(KINDS) * len(SPLITS) + first
        if len(documents[kind]) < needed:
            raise ValueError(f"there is too little text for {count} prompts")
        text, other = documents[kind][index], documents[kind][index ^ 1]
        rng = random.Random(f"{kind} {index}")
        cases.append(_case(kind, text, other, tokenizer, rng))
    return cases


def _case(kind: str, text: list[int], other: list[int], tokenizer: Any, rng: random.Random) -> Case:
    at = 0

    def take(count: int) -> list[int]:
        nonlocal at
        at += count
        return text[at - count : at]

    opening = take(_OPENING)
    chunks = [take(rng.randint(_SHORTEST, _LONGEST)) for _ in range(_CHUNKS)]
    tail, truth = take(_TAIL), take(_TRUE_TEXT)
    names = rng.sample([f"{a} {n}" for a in _ADJECTIVES for n in _NOUNS], _CODES_A_CASE)
    seams, middles = [], []
    for number, name in enumerate(names):
        statement = _tokens(tokenizer, f"\nThe pass code of the {name} is")
        code = _tokens(tokenizer, f" {rng.randint(100, 999)}")
        question = Question(_tokens(tokenizer, f"\n\nThe pass code of the {name} is"), code)
        sentence = [*statement, *code, *_tokens(tokenizer, ".\n")]
        if number % 2:
            here = chunks[number]
            middle = len(here) // 2 + rng.randint(-30, 30)
            here[middle:middle] = sentence
            middles.append(question)
        else:
            # Behind the first token of the name at the earliest, before the code at the latest.
            cut = rng.randint(len(statement) - 2, len(statement))
            chunks[number] += sentence[:cut]
            chunks[number + 1][:0] = sentence[cut:]
            seams.append(question)

    def filler() -> list[int]:
        length = rng.randint(*_FILLER)
        start = rng.randint(0, len(other) - length)
        return other[start : start + length]

    earlier = [
        [*filler(), *chunks[second], *filler(), *chunks[first], *other[-100:]]
        for first, second in ((0, 2), (1, 3))
    ]
    prompt = opening + [token for chunk in chunks for token in chunk] + tail
    return Case(kind, earlier, prompt, opening + tail, truth, seams, middles)


def _documents(kind: str, tokenizer: Any, most: int) -> list[list[int]]:
    """Token ids of the first documents of one kind, each ``_DOCUMENT`` long."""
    texts = {"prose": _prose, "code": _code, "records": _records}[kind]()
    documents = []
    for text in texts:
        tokens = _tokens(tokenizer, text[: 16 * _DOCUMENT])
        if len(tokens) >= _DOCUMENT:
            documents.append(tokens[:_DOCUMENT])
        if len(documents) == most:
            break
    return documents


def _prose() -> Iterator[str]:
    from pydoc_data.topics import topics

    texts = list(DOCUMENTS.values())
    for first, second in zip(texts[0::2], texts[1::2], strict=True):
        yield f"{first}\n\n{second}"
    piece = ""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    for paragraph in dict.fromkeys(paragraphs):  # some topics repeat others
        piece += paragraph + "\n\n"
        if len(piece) > 5.2 * _DOCUMENT:
            yield piece
            piece = ""


def _code() -> Iterator[str]:
    for path in _library():
        source = path.read_text(encoding="utf-8", errors="replace")
        yield source[len(source) // 3 :].partition("\n\n")[2]


def _records() -> Iterator[str]:
    """A catalogue of the library's functions, one JSON object a line."""
    lines: list[str] = []
    for path in _library():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                record = {
                    "module": path.stem,
                    "function": node.name,
                    "arguments": ast.unparse(node.args),
                    "line": node.lineno,
                    "summary": text.partition("\n\n")[0].replace("\n", " "),
                }
                lines.append(json.dumps(record))
        if sum(map(len, lines)) > 4 * _DOCUMENT:
            yield "\n".join(lines)
            lines = []


def _library() -> list[Path]:
    library = Path(ast.__file__).parent
    return [path for part in _PACKAGES for path in sorted((library / part).glob("*.py"))]


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
