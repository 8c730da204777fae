"""``kvloom bench rotate``: rotation of stored keys against a copy of the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from kvloom.bench.report import Report
from kvloom.blend.rope import PositionCorrector, RopeSpec

_CHUNK = (30, 64, 3, 64)  # layers, tokens, heads, head_dim: one chunk of SmolLM2-135M
_CHUNKS = 64


def run(repeats: int) -> Report:
    """GB/s of keys rotated chunk by chunk, as a load does, and of a plain copy of them."""
    report = Report("Rotation of keys, float32")
    corrector = PositionCorrector(RopeSpec(base=100000.0, rotary_dim=64))
    chunks = [torch.randn(_CHUNK) for _ in range(_CHUNKS)]
    target = [torch.empty_like(chunk) for chunk in chunks]
    size = sum(chunk.nbytes for chunk in chunks) / 1e9

    def rotate() -> None:
        for chunk in chunks:
            corrector.rotate_(chunk, 1234)

    def copy() -> None:
        for source, to in zip(chunks, target, strict=True):
            to.copy_(source)

    rotate_s, copy_s = _median_s(rotate, repeats), _median_s(copy, repeats)
    report.add("rotate.gb_per_s", size / rotate_s, "GB/s")
    report.add("rotate.copy_gb_per_s", size / copy_s, "GB/s")
    report.add("rotate.of_copy", copy_s / rotate_s, "x")
    report.add("rotate.4096_tokens_ms", rotate_s * 1e3, "ms")
    return report


def _median_s(work: Callable[[], None], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
