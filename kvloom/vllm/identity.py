"""Whose KV it is: weights known by their bytes, requests by all that sets them apart (DESIGN.md).

Names and paths are not enough. A folder's weights are replaced by a fine-tuned copy of the same
names and sizes, an adapter's name is pointed at another one, and a trainer puts new weights into a
running engine: old KV would be served as exact.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from vllm.logger import init_logger

from kvloom.tokens.hashing import scope_id

logger = init_logger(__name__)

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "config.json", "adapter_config.json")
_SAMPLE_BYTES = 4096
_STRIDE = 64 * 1024
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
_ADAPTERS = 1024  # remembered


def folder_digest(folder: Path) -> str:
    """Hex digest of the weights in a folder: names and sizes of files, and samples of their bytes.

    Of every tensor of a safetensors file, since training may change only some; of other files at
    every 64 KiB. The same weights in another place have the same digest.

    Raises:
        OSError: a file can't be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({file for pattern in _WEIGHT_FILES for file in folder.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            tensors = list(_tensors(file, size)) if path.suffix == ".safetensors" else []
            for offset in _samples(tensors) if tensors else range(0, size, _STRIDE):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _tensors(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Where the tensors of a safetensors file begin and end; none where it is not one."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, _LONGEST_HEADER):
        return
    try:
        header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                first, last = tensor["data_offsets"]
                yield 8 + length + int(first), 8 + length + int(last)
    except (ValueError, TypeError, KeyError, AttributeError):
        return


def _samples(tensors: list[tuple[int, int]]) -> Iterator[int]:
    """The header, and of each tensor its start and its middle."""
    yield 0
    for first, last in tensors:
        yield first
        yield (first + last) // 2


def model_identity(model: Any) -> dict[str, str | None]:
    """What tells an engine's weights from all others, of vLLM's ``ModelConfig``.

    A hub name's weights are those of the commit that it stood for. Of weights in an object store
    vLLM has a folder with all files but these: their address counts too.
    """
    folder = Path(model.model)
    named = not folder.is_dir()
    return {
        "model": model.model if named else folder_digest(folder),
        "weights": model.model_weights or None,
        "revision": model.revision,
        "commit": getattr(model.hf_config, "_commit_hash", None) if named else None,
    }


class Scopes:
    """What separates the requests of one engine, beside their tokens and salt.

    For one thread; a request is asked about when it comes, and again after a reset. After ``reset``
    nothing of before is found any more, and what is stored from then on is found by this engine
    alone, until it ends: what its weights are nobody knows.
    """

    def __init__(self) -> None:
        self._adapters: dict[tuple[int, str], str] = {}
        self._epoch: str | None = None

    def scope(self, request: Any, cache_salt: str | None) -> bytes:
        """16 bytes.

        Raises:
            OSError: an adapter's files can't be read.
        """
        return scope_id(cache_salt=cache_salt, **self._fields(request))

    def suffix(self, request: Any) -> str:
        """The same for keys that know salts, and adapters by their names; mostly empty.

        Raises:
            OSError: an adapter's files can't be read.
        """
        fields = self._fields(request)
        return f"-{scope_id(**fields).hex()}" if any(fields.values()) else ""

    def reset(self) -> None:
        """The weights may be others from now on."""
        self._epoch = uuid.uuid4().hex
        logger.info(
            "kvloom: cache reset: what is stored is not used any more, and what is stored from now "
            "on only until this engine ends"
        )

    def _fields(self, request: Any) -> dict[str, str | None]:
        lora = request.lora_request
        # Half of it computed before a reset: what is stored of it is to be found by nobody.
        begun = request.num_computed_tokens > 0
        return {
            "lora": self._adapter(lora) if lora is not None else None,
            "epoch": uuid.uuid4().hex if begun else self._epoch,
        }

    def _adapter(self, lora: Any) -> str:
        """An adapter by its weights. vLLM reads them once, or at every request (``load_inplace``).

        A name that is no folder is one of the hub; vLLM gets what it stands for by itself.
        """
        known = self._adapters.get((lora.lora_int_id, lora.lora_path))
        if known is None or lora.load_inplace:
            folder = Path(lora.lora_path).expanduser()
            known = folder_digest(folder) if folder.is_dir() else lora.lora_path
            self._adapters[lora.lora_int_id, lora.lora_path] = known
            if len(self._adapters) > _ADAPTERS:
                del self._adapters[next(iter(self._adapters))]
        return known
