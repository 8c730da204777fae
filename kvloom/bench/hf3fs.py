"""``kvloom bench hf3fs``: a prompt cold, and from another engine's pages (spec rows H23, H24)."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvloom.bench.prompts import PromptMaker
from kvloom.bench.report import Report
from kvloom.bench.services import running_service, serve_metadata
from kvloom.bench.ttft import Progress
from kvloom.demo.engine import EngineUnderTest

_PAST_BORDER = 16
HIT_SPEEDUP = {2048: 10.0}


def run(model: Path, sizes: Sequence[int], progress: Progress) -> Report:
    """One engine computes and saves prompts of real text; a second, cold one answers them.

    Pages lie in a directory (``hf3fs_io`` is ``posix``), the service is a process of its own.

    Args:
        sizes: prompt lengths in tokens, but for the 16 that each is longer.
    """
    report = Report(f"HF3FSKVConnector, {model.name}, float32")
    with contextlib.ExitStack() as up:
        folder = Path(up.enter_context(tempfile.TemporaryDirectory(prefix="kvloom-bench-")))
        state, log = folder / "metadata.db", folder / "metadata.log"
        port, _ = up.enter_context(running_service(lambda port: serve_metadata(state, port), log))
        transfer = {
            "kv_connector": "HF3FSKVConnector",
            "kv_connector_module_path": "kvloom.vllm.hf3fs_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "hf3fs_storage_path": str(folder),
                "hf3fs_metadata_server_url": f"http://127.0.0.1:{port}",
                "hf3fs_io": "posix",
            },
        }
        longest = max(sizes) + 256
        progress("starting the first engine")
        first = EngineUnderTest(model, transfer, max_model_len=longest)
        maker = PromptMaker(first.tokenizer, budget=2 * sum(sizes))
        prompts = {size: maker.take(size + _PAST_BORDER) for size in sizes}
        progress("cold answers")
        cold = {size: first.ask(prompt, max_tokens=8) for size, prompt in prompts.items()}
        first.stop()  # waits for its saves
        progress("starting a fresh engine")
        fresh = EngineUnderTest(model, transfer, max_model_len=longest)
        for size, prompt in prompts.items():
            progress(f"{size} tokens from pages")
            hit = fresh.ask(prompt, max_tokens=8)
            name = f"hf3fs.{size}"
            report.add(f"{name}.cold_ms", cold[size].ttft_ms, "ms")
            report.add(f"{name}.hit_ms", hit.ttft_ms, "ms")
            report.add(f"{name}.tokens_exact", hit.figures["exact"], "tokens")
            report.at_least(f"{name}.same_tokens", float(hit.tokens == cold[size].tokens), "", 1.0)
            speedup = cold[size].ttft_ms / hit.ttft_ms
            report.at_least(f"{name}.speedup", speedup, "x", HIT_SPEEDUP.get(size))
        fresh.stop()
    return report
