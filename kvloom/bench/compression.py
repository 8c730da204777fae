"""``kvloom bench compression``: what smaller blocks save, take and cost (spec row S13).

KV is that of the real model over real text. Speeds are by processor time of one thread, without the
disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kvloom.bench.prompts import PromptMaker
from kvloom.bench.quality_model import CacheModel
from kvloom.bench.report import Report
from kvloom.blend.int8 import Int8Form
from kvloom.store.compression import compress, decompress

_CHUNK = 64
T = TypeVar("T")


def run(model: Path, tokens: int, answers: int, progress: Callable[[str], None]) -> Report:
    """Ratio to the payload, speeds in bytes of payload, and for 8 bits the error.

    Args:
        tokens: whose KV is compressed; whole chunks.
        answers: tokens of the same text behind them, predicted over that KV as it was and as it is
            read back. KL is of the distributions of the next token, in nats; bfloat16, to compare
            with, is the same KV rounded to it.
    """
    report = Report(f"Compression of the KV of {tokens} tokens, {model.name}")
    progress("loading the model")
    causal = CacheModel(model)
    text = PromptMaker(causal.tokenizer, budget=tokens + answers).take(tokens + answers)
    progress("computing KV")
    kv = causal.prefill(text[:tokens])
    chunks = [chunk.contiguous() for chunk in torch.split(kv, _CHUNK, dim=2)]
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        progress(f"zstd, {name}")
        payloads = [chunk.to(dtype) for chunk in chunks]
        _zstd(report, f"compression.{name}.zstd", [_parts(each) for each in payloads])
        progress(f"int8, {name}")
        stored, decoded = _int8(report, f"compression.{name}.int8", payloads)
        _zstd(report, f"compression.{name}.int8_then_zstd", [_parts(each) for each in stored])
        if dtype is torch.float32:
            rounded = torch.cat(decoded, dim=2)
    _error(report, kv, rounded)
    progress("predicting over it")
    exact = _predict(causal, kv, text, tokens)
    for name, other in (("int8", rounded), ("bfloat16", kv.bfloat16().float())):
        predicted = _predict(causal, other, text, tokens)
        kl = (exact.exp() * (exact - predicted)).sum(-1)
        report.add(f"compression.kl.{name}", float(kl.mean()), "nats")
        same = (exact.argmax(-1) == predicted.argmax(-1)).double().mean()
        report.add(f"compression.top1.{name}", float(100 * same), "%")
    return report


def _parts(payload: Tensor) -> list[memoryview]:
    """The bytes of each layer."""
    return [memoryview(layer.contiguous().view(torch.uint8).numpy()).cast("B") for layer in payload]


def _zstd(report: Report, name: str, blocks: list[list[memoryview]]) -> None:
    compress(blocks[0])
    save_s, stored = _timed(lambda: [compress(parts)[1] for parts in blocks])
    load_s, _ = _timed(
        lambda: [
            decompress(small, len(part))
            for made, parts in zip(stored, blocks, strict=True)
            for small, part in zip(made, parts, strict=True)
        ]
    )
    size = sum(len(part) for parts in blocks for part in parts)
    small = sum(len(part) for parts in stored for part in parts)
    _figures(report, name, size, small, save_s=save_s, load_s=load_s)


def _int8(report: Report, name: str, payloads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    form = Int8Form(payloads[0].shape)
    stored = [torch.zeros(form.stored_shape, dtype=torch.uint8) for _ in payloads]
    form.encode(payloads[0], stored[0])
    decoded = [torch.zeros_like(payload) for payload in payloads]
    save_s, done = _timed(lambda: list(map(form.encode, payloads, stored)))
    assert all(done)
    load_s, _ = _timed(lambda: list(map(form.decode, stored, decoded)))
    size = sum(payload.nbytes for payload in payloads)
    small = sum(each.nbytes for each in stored)
    _figures(report, name, size, small, save_s=save_s, load_s=load_s)
    return stored, decoded


def _figures(
    report: Report, name: str, size: int, small: int, *, save_s: float, load_s: float
) -> None:
    report.add(f"{name}_ratio", size / small, "x")
    report.add(f"{name}_save_mb_per_s", size / 1e6 / save_s, "MB/s")
    report.add(f"{name}_load_mb_per_s", size / 1e6 / load_s, "MB/s")


def _error(report: Report, kv: Tensor, rounded: Tensor) -> None:
    """Of 8 bits: the largest, in parts of its group's largest number, and the typical one."""
    off = (rounded - kv).abs()
    largest = kv.abs().amax(-1, keepdim=True)
    worst = float((off / largest).max())
    report.at_most("compression.int8_worst_error", worst, "of the largest", round(1.001 / 254, 5))
    for number, name in enumerate(("k", "v")):
        error = (rounded[:, number] - kv[:, number]).norm() / kv[:, number].norm()
        report.add(f"compression.int8_relative_error_{name}", float(error), "")


def _predict(causal: CacheModel, kv: Tensor, text: list[int], tokens: int) -> Tensor:
    """Log-probabilities of what follows each token behind the first ``tokens``."""
    cache = causal.empty_cache(len(text))
    cache[:, :, :tokens] = kv
    slots = torch.arange(tokens, len(text))
    hidden = causal.compute(cache, torch.tensor(text[tokens:]), slots)
    return causal.log_probabilities(hidden).double()


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.thread_time()
    done = work()
    return time.thread_time() - began, done
