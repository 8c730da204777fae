"""``kvloom bench rotate``: rotation of stored keys against a copy of the same bytes.

A chunk's keys are turned where they were loaded, between its values: the bytes are those of the
keys alone, read once and written once, by the copy into another place, by the rotation into the
same. One thread, and its CPU time, so that a busy machine changes both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from kvloom.bench.report import Report
from kvloom.blend.rope import PositionCorrector, RopeSpec

_CHUNK = (30, 2, 64, 3, 64)  # layers, K and V, tokens, heads, head_dim: one of SmolLM2-135M
_CHUNKS = 64
_OF_COPY = 0.5


def run(repeats: int) -> Report:
    """GB/s of keys rotated chunk by chunk, as a load does, and of a plain copy of them."""
    report = Report("Rotation of keys, float32, one thread")
    keys = [torch.randn(_CHUNK)[:, 0] for _ in range(_CHUNKS)]
    target = [torch.empty(one.shape) for one in keys]
    size = sum(one.nbytes for one in keys) / 1e9

    def rotate(spec: RopeSpec) -> Callable[[], None]:
        corrector = PositionCorrector(spec)

        def work() -> None:
            for one in keys:
                corrector.rotate_(one, 1234)

        return work

    def copy() -> None:
        for source, to in zip(keys, target, strict=True):
            to.copy_(source)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copy_s, halves_s, neighbours_s = _medians_s(
            [
                copy,
                rotate(RopeSpec.default(100000.0, 64)),
                rotate(RopeSpec.default(100000.0, 64, interleaved=True)),
            ],
            repeats,
        )
    finally:
        torch.set_num_threads(threads)
    report.add("rotate.gb_per_s", size / halves_s, "GB/s")
    report.add("rotate.copy_gb_per_s", size / copy_s, "GB/s")
    report.at_least("rotate.of_copy", copy_s / halves_s, "x", _OF_COPY)
    report.at_least("rotate.interleaved_of_copy", copy_s / neighbours_s, "x", _OF_COPY)
    report.add("rotate.4096_tokens_ms", halves_s * 1e3, "ms")
    return report


def _medians_s(works: list[Callable[[], None]], repeats: int) -> list[float]:
    """CPU seconds of each, taken in turn."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for work, taken in zip(works, times, strict=True):
            began = time.process_time()
            work()
            taken.append(time.process_time() - began)
    return [statistics.median(taken[1:]) for taken in times]
