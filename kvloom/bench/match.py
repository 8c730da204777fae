"""``kvloom bench match``: matching a long prompt against an index of a million chunks (row B8)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvloom.bench.report import Report
from kvloom.bench.ttft import Progress
from kvloom.tokens.analyzer import ChunkAnalyzer
from kvloom.tokens.hashing import prefix_keys, scope_id
from kvloom.tokens.index import ChunkIndex

MOST_MS = 10.0
MOST_EQUAL_MS = 100.0
MOST_BYTES = 100.0
_CHUNK = 64
_VOCABULARY = 49152
_DOCUMENT_CHUNKS = 16
_BATCH = 256  # documents added at once, and that a prompt is made of
_FEW_EDITS = 1 / 200  # for each token
_PROMPTS_SEED = 2**40  # no stored document's

Tokens = npt.NDArray[np.int32]


def run(
    chunks: int = 1_000_000,
    prompt_tokens: int = 32768,
    repeats: int = 7,
    progress: Progress = lambda phase: None,
) -> Report:
    """Documents of random tokens, 16 chunks each, fill the index; prompts are made of them.

    Every prompt is seen once, so that its chunks are not in the processor's caches already. A
    figure is the median time, ``_cpu_ms`` of it what this thread had of a core: the one to read
    where others share the machine.

    Args:
        chunks: size of the index.
        prompt_tokens: length of the prompts.
        repeats: prompts of each kind.
    """
    report = Report(f"Matching {prompt_tokens:,} tokens against {chunks:,} chunks, one core")
    scope = scope_id()
    before = _anonymous_bytes()
    index = ChunkIndex(_CHUNK, max_chunks=chunks)
    seeds = range(-(-chunks // (_BATCH * _DOCUMENT_CHUNKS)))
    spent = 0.0
    for seed in seeds:
        progress(f"building the index: {len(index):,} of {chunks:,} chunks")
        spent += _add(index, _documents(seed), scope)
    _add(index, _equal(prompt_tokens // _CHUNK * _CHUNK)[None], scope)
    report.add("match.build_s", spent, "s")
    report.at_most("match.bytes_a_chunk", index.nbytes / len(index), "B", MOST_BYTES)
    report.add("match.process_bytes_a_chunk", (_anonymous_bytes() - before) / len(index), "B")
    report.add("match.file_bytes_a_chunk", index.token_bytes / len(index), "B")
    analyzer = ChunkAnalyzer(_CHUNK, 0.8)
    for name, make in _prompts(seeds, prompt_tokens).items():
        progress(f"matching: {name}")
        times, cpu_times, matched = [], [], 0
        for _ in range(repeats):
            prompt = make()
            began, cpu_began = time.perf_counter(), time.thread_time()
            tiles = analyzer.analyze(prompt, index, scope)
            cpu_times.append((time.thread_time() - cpu_began) * 1e3)
            times.append((time.perf_counter() - began) * 1e3)
            matched += sum(stretch.length for tile in tiles for stretch in tile.stretches)
        most = MOST_EQUAL_MS if name == "equal" else MOST_MS
        report.at_most(f"match.{name}_ms", statistics.median(times), "ms", most)
        report.add(f"match.{name}_worst_ms", max(times), "ms")
        report.add(f"match.{name}_cpu_ms", statistics.median(cpu_times), "ms")
        report.add(f"match.{name}_reused", 100 * matched / (repeats * prompt_tokens), "%")
    return report


def _prompts(seeds: range, size: int) -> dict[str, Callable[[], Tokens]]:
    """Nothing known; half and all known, moved by some tokens; known with an edit in each chunk,
    and with an edit every 200 tokens or so (another token, one more, one less); and one token again
    and again, of which every stored chunk of such a text stands everywhere."""
    random = np.random.default_rng(_PROMPTS_SEED)

    def known() -> Tokens:
        documents = _documents(int(random.choice(seeds)))
        pieces: list[Tokens] = [_text(random, 37), *random.permutation(documents)]
        return np.concatenate(pieces)[:size]

    def half() -> Tokens:
        documents = random.permutation(_documents(int(random.choice(seeds))))
        pieces: list[Tokens] = [
            piece for each in documents for piece in (each, _text(random, len(each)))
        ]
        return np.concatenate(pieces)[5 : size + 5]

    def edited() -> Tokens:
        prompt = known()
        starts = np.arange(0, len(prompt) - _CHUNK + 1, _CHUNK)
        prompt[random.integers(0, _CHUNK, len(starts)) + starts] = _VOCABULARY
        return prompt

    def few_edits() -> Tokens:
        prompt = known()
        places = np.flatnonzero(random.random(len(prompt)) < _FEW_EDITS)
        kinds = random.integers(0, 3, len(places))
        prompt[places[kinds == 0]] = _VOCABULARY
        longer = np.insert(prompt, places[kinds == 1], _VOCABULARY)
        return np.delete(longer, places[kinds == 2])[:size]

    return {
        "new": lambda: _text(random, size),
        "half": half,
        "moved": known,
        "few_edits": few_edits,
        "edited": edited,
        "equal": lambda: _equal(size),
    }


def _documents(seed: int) -> Tokens:
    shape = (_BATCH, _DOCUMENT_CHUNKS * _CHUNK)
    return np.random.default_rng(seed).integers(0, _VOCABULARY, shape, dtype=np.int32)


def _add(index: ChunkIndex, documents: Tokens, scope: bytes) -> float:
    """Add documents' chunks; seconds that the index took, without making keys."""
    keys: list[bytes] = []
    parents: list[bytes] = []
    for document in documents:
        names = prefix_keys(document, _CHUNK, scope)
        keys += names
        parents += [scope, *names[:-1]]
    began = time.perf_counter()
    index.add_many(
        keys=keys,
        parents=parents,
        scopes=[scope] * len(keys),
        token_ids=documents.reshape(-1, _CHUNK),
        positions=np.tile(np.arange(0, documents.shape[1], _CHUNK), len(documents)),
    )
    return time.perf_counter() - began


def _equal(size: int) -> Tokens:
    return np.full(size, 7, dtype=np.int32)


def _text(random: np.random.Generator, size: int) -> Tokens:
    return random.integers(0, _VOCABULARY, size, dtype=np.int32)


def _anonymous_bytes() -> int:
    """Anonymous memory of this process; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
