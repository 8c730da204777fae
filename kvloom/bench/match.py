"""``kvloom bench match``: matching a long prompt against an index of a million chunks (row B8)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvloom.bench.report import Report
from kvloom.bench.ttft import Progress
from kvloom.tokens.analyzer import ChunkAnalyzer
from kvloom.tokens.hashing import prefix_keys, scope_id
from kvloom.tokens.index import ChunkIndex

MOST_MS = 10.0
MOST_BYTES = 100.0
_CHUNK = 64
_VOCABULARY = 49152
_DOCUMENT_CHUNKS = 16

Tokens = npt.NDArray[np.int32]


def run(chunks: int, prompt_tokens: int, repeats: int, progress: Progress) -> Report:
    """Documents of random tokens, 16 chunks each, fill the index; prompts are made of them.

    Args:
        chunks: size of the index.
        prompt_tokens: length of the prompts.
    """
    report = Report(f"Matching {prompt_tokens:,} tokens against {chunks:,} chunks, one core")
    random = np.random.default_rng(0)
    index = ChunkIndex(_CHUNK, max_chunks=chunks)
    scope = scope_id()
    documents: list[Tokens] = []
    began = time.perf_counter()
    for number in range(chunks // _DOCUMENT_CHUNKS):
        if number % 4096 == 0:
            progress(f"building the index: {number * _DOCUMENT_CHUNKS:,} of {chunks:,} chunks")
        document = _text(random, _DOCUMENT_CHUNKS * _CHUNK)
        _add(index, document, scope)
        if len(documents) * len(document) < 2 * prompt_tokens:
            documents.append(document)
    report.add("match.build_s", time.perf_counter() - began, "s")
    report.at_most("match.bytes_a_chunk", index.nbytes / len(index), "B", MOST_BYTES)
    analyzer = ChunkAnalyzer(_CHUNK, 0.8)
    for name, prompt in _prompts(random, documents, prompt_tokens).items():
        progress(f"matching: {name}")
        times = _times_ms(lambda p=prompt: analyzer.analyze(p, index, scope), repeats)
        report.at_most(f"match.{name}_ms", statistics.median(times), "ms", MOST_MS)
        report.add(f"match.{name}_worst_ms", max(times), "ms")
    return report


def _prompts(random: np.random.Generator, documents: list[Tokens], size: int) -> dict[str, Tokens]:
    """Nothing known; half and all known, moved by some tokens; known with an edit in each chunk."""
    order = random.permutation(len(documents))
    opening = _text(random, 37)
    known = np.concatenate([opening, *(documents[i] for i in order)])[:size]
    half = np.concatenate(
        [piece for i in order for piece in (documents[i], _text(random, len(documents[i])))]
    )[5 : size + 5]
    edited = known.copy()
    edited[random.integers(0, _CHUNK, size // _CHUNK) + np.arange(0, size, _CHUNK)] = 1
    return {"new": _text(random, size), "half": half, "moved": known, "edited": edited}


def _add(index: ChunkIndex, document: Tokens, scope: bytes) -> None:
    parent = scope
    for number, key in enumerate(prefix_keys(document, _CHUNK, scope)):
        start = number * _CHUNK
        index.add(
            key=key,
            parent=parent,
            scope=scope,
            token_ids=document[start : start + _CHUNK],
            position=start,
        )
        parent = key


def _text(random: np.random.Generator, size: int) -> Tokens:
    return random.integers(0, _VOCABULARY, size, dtype=np.int32)


def _times_ms(work: Callable[[], object], repeats: int) -> list[float]:
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return times
