"""The one typed, validated configuration: ``kv_connector_extra_config`` (spec row B2)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from typing_extensions import Self


class ConfigError(ValueError):
    """A key or value the engine can't start with; the text names key, value and remedy."""


def _parse_size(value: object) -> object:
    """Bytes as a number, or as text with a binary unit: ``"512M"``, ``"4GiB"``."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().removesuffix("b").removesuffix("i")
    exponent = "kmgt".find(text[-1:]) + 1 if text[-1:] in ("k", "m", "g", "t") else 0
    try:
        return int(float(text[: len(text) - bool(exponent)]) * 1024**exponent)
    except ValueError as error:
        raise ValueError("a size is a number of bytes, or like '512M' or '4GiB'") from error


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_parse_size), Field(gt=0)]


class _ExtraConfig(BaseModel):
    """``kv_connector_extra_config`` of a connector."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> Self:
        """Validate ``kv_connector_extra_config``.

        Raises:
            ConfigError: names every bad key, its value, what is allowed, and for an unknown key
                the nearest known one.
        """
        try:
            return cls.model_validate(dict(extra))
        except ValidationError as error:
            raise ConfigError(_explain(error, cls)) from None


_MOST_THREADS = 4


class StoreConfig(_ExtraConfig):
    """What a store of files can be told, with what it does when told nothing."""

    storage_backends: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        ["~/.cache/kvloom/store"],
        min_length=1,
        description="Directory, or list of directories, of the `Posix` stage.",
    )
    disk_bytes: Size | None = Field(
        None,
        description="The most that each directory of `storage_backends` takes, of all models and "
        "engines together; default: all but a tenth of the file system (at most 4 GiB are left "
        "free).",
    )
    ttl_s: float | None = Field(
        None,
        gt=0,
        description="Blocks are gone this many seconds after they were written, used or not; "
        "default: never.",
    )
    eviction: Literal["s3fifo", "lru"] = Field(
        "s3fifo",
        description="What goes first when memory or disk is full: `lru`, the least recently used; "
        "`s3fifo`, what was never used again, then the least used.",
    )
    durability: Literal["none", "data", "full"] = Field(
        "none",
        description="`none`: the kernel writes when it likes; `data`: fsync the file before it is "
        "published; `full`: fsync its directory too.",
    )
    compression: Literal["none", "zstd"] = Field(
        "none",
        description="`zstd`: blocks are compressed in their files, and loaded bit for bit (`pip "
        "install 'kvloom[zstd]'`); what was written with another setting is read as well.",
    )
    io_threads: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Threads that read blocks, and as many that write them; default: one a core, "
        "at most 4.",
    )
    save_queue_bytes: Size = Field(
        1024**3,
        description="Memory for blocks that wait to be written; when full, saves are dropped.",
    )
    load_timeout_s: float = Field(
        10.0, gt=0, description="What is not loaded after this many seconds is recomputed."
    )
    index_poll_s: float = Field(
        1.0, gt=0, description="How often other engines' writes to the store are looked for."
    )

    @property
    def threads(self) -> int:
        """``io_threads``. In the page cache I/O is work of the processor, and threads beyond its
        cores only take the interpreter's lock from each other."""
        return self.io_threads or min(os.cpu_count() or _MOST_THREADS, _MOST_THREADS)


class KvloomConfig(StoreConfig):
    """Everything BlendConnector can be told, with what it does when told nothing."""

    store_pipeline: str = Field(
        "Cache|Posix", description="Stages from fast to slow, split by `|`: `Cache`, `Posix`."
    )
    cache_bytes: Size = Field(
        2 * 1024**3, description="Host memory of the `Cache` stage, in bytes or like `4GiB`."
    )
    store_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="`auto`: KV is stored bit for bit; `int8`: in 8 bits, also in memory, off by "
        "at most 1/254 of the largest number of its token and head, and then a prefix hit is no "
        "longer exact. Engines with different settings do not see each other's blocks.",
    )
    index_max_chunks: int = Field(
        1_000_000, ge=1, description="Chunks the matcher knows; the oldest are forgotten."
    )

    # Matching
    blend_chunk_size: int = Field(
        64, ge=8, le=4096, description="Tokens of a stored chunk; need not fit the block size."
    )
    min_match_ratio: float = Field(
        0.8, gt=0, le=1, description="Least part of an edited chunk that must align to reuse it."
    )
    min_blend_tokens: int = Field(
        256, ge=1, description="Never blend to save fewer tokens than this."
    )
    min_gain: float | None = Field(
        0.1,
        ge=0,
        lt=1,
        description="Part of a prompt's prefill time that loading and recomputing must save, by "
        "rates learned from what runs; else vLLM computes it. `null`: reuse whatever it costs.",
    )

    # Blending
    blend: bool = Field(
        True,
        description="Reuse chunks at any position (approximate); `false`: exact prefixes only.",
    )
    position_correction: bool = Field(
        True, description="Rotate reused keys to their new positions."
    )
    recompute_policy: str = Field(
        "first_k",
        description="Which reused tokens are computed anew: `first_k`, `boundary`, `none`, `hkvd`, "
        "`hkvd_block`, `query_aware`, `mean_shift`, or a third party's.",
    )
    recompute_ratio: float = Field(
        0.15,
        gt=0,
        le=1,
        description="Part of the reused tokens computed anew by the policies that have a budget.",
    )
    recompute_layer: int = Field(
        1, ge=0, description="Layer whose deviation `hkvd`, `hkvd_block`, `query_aware` look at."
    )
    first_k: int = Field(
        32, ge=0, description="Tokens computed anew at the start of every run by `first_k`."
    )
    recompute_boundary: int = Field(
        2, ge=0, description="Tokens computed anew at both ends of partial matches and runs."
    )
    blend_async: bool = Field(
        True,
        description="While other requests run, fill a new one's KV between their steps, in slices, "
        "if it is more than one slice; not under tensor parallelism.",
    )
    blend_tokens_per_step: int = Field(
        512, ge=16, description="Tokens computed in such a slice at most."
    )
    rope_theta: float | None = Field(
        None, gt=0, description="Checked against the model's; default: the model's."
    )
    head_dim: int | None = Field(
        None, gt=0, description="Checked against the model's; default: the model's."
    )

    self_check: bool = Field(
        True,
        description="Try recompute and rotation on this very model before the first request; what "
        "does not hold switches blending off.",
    )

    # Saving
    save_generated: bool = Field(True, description="Store generated text too, not only prompts.")
    reuse_blended: bool = Field(
        False,
        description="Store chunks that were computed on top of a blend too, and blend with them "
        "(once: never what was computed on top of those); they are no exact prefix ever.",
    )


IO_ENTRIES = 8  # pages that one HF3FS client moves at once


class Hf3fsConfig(_ExtraConfig):
    """Everything HF3FSKVConnector can be told (spec row H1)."""

    hf3fs_storage_path: str = Field(
        "/vllm-workspace/mnt/hf3fs", description="Directory of the page files, on a 3FS mount."
    )
    hf3fs_metadata_server_url: str = Field(
        "http://localhost:18000",
        pattern=r"^https?://[^/]+/*$",
        description="The metadata service: `kvloom serve-metadata`.",
    )
    hf3fs_metadata_token: SecretStr | None = Field(
        None,
        description="The service's bearer token; default: the environment variable "
        "`KVLOOM_METADATA_TOKEN`.",
    )
    hf3fs_file_size: Size = Field(
        1024**3, description="Size of a rank's page file, in bytes or like `64GiB`."
    )
    hf3fs_client_numjobs: int = Field(16, ge=1, le=256, description="Clients that move pages.")
    hf3fs_max_device_buffer_count: int = Field(
        128,
        ge=1,
        description=f"Pages in memory for saves, and as many for loads; at least {IO_ENTRIES} a "
        "client. When all are in use, saves are dropped.",
    )
    hf3fs_io: Literal["auto", "usrbio", "posix"] = Field(
        "auto", description="How pages are moved; `auto`: by 3FS's rings where they can be used."
    )
    load_timeout_s: float = Field(
        10.0, gt=0, description="What is not loaded after this many seconds is recomputed."
    )
    save_generated: bool = Field(True, description="Store generated text too, not only prompts.")

    @property
    def buffer_count(self) -> int:
        return max(self.hf3fs_max_device_buffer_count, self.hf3fs_client_numjobs * IO_ENTRIES)

    @property
    def metadata_token(self) -> str | None:
        if self.hf3fs_metadata_token is not None:
            return self.hf3fs_metadata_token.get_secret_value()
        return os.environ.get("KVLOOM_METADATA_TOKEN") or None


def known_names(name: str, known: Sequence[str]) -> str:
    """What a name could have been: the known ones, and the nearest."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"known are {', '.join(known)}.{hint}"


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    known = list(model.model_fields)
    lines = []
    for item in error.errors():
        key = str(item["loc"][0]) if item["loc"] else "?"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            lines.append(f"unknown key {key!r} (value {item['input']!r}): {hint}")
        else:
            description = model.model_fields[key].description if key in known else ""
            why = item["msg"].removeprefix("Value error, ")
            lines.append(f"{key} = {item['input']!r}: {why}. {description}")
    return "kv_connector_extra_config: " + "; ".join(lines)
