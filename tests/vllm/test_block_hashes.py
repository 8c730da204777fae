"""Keys are vLLM's own block hashes, the same in every process, or the start fails (H18)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom.config import ConfigError
from kvloom.vllm.hf3fs_connector import _check_hashes

from .engines import transfer_config_hf3fs
from .test_processes import PROMPT, start

HASHES = """
import sys
from types import SimpleNamespace
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

algorithm = get_hash_fn_by_name(sys.argv[1])
init_none_hash(algorithm)
hasher = get_request_block_hasher(16, algorithm)
lora = SimpleNamespace(lora_name="adapter", lora_path="/adapter")
for salt, adapter in ((None, None), ("tenant", None), (None, lora)):
    request = SimpleNamespace(
        all_token_ids=list(range(64)), block_hashes=[], num_tokens=64, cache_salt=salt,
        lora_request=adapter, mm_features=[], prompt_embeds=None,
    )
    print(*(block_hash.hex() for block_hash in hasher(request)))
"""


def hashes(algorithm: str, seed: str | None) -> list[list[str]]:
    """Block hashes of a plain, a salted and an adapter's request, computed in a new process."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, "-c", HASHES, algorithm],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split() for line in done.stdout.splitlines()[-3:]]


@pytest.mark.parametrize(
    ("algorithm", "seed"), [("sha256", None), ("sha256_cbor", None), ("xxhash", "1")]
)
def test_keys_are_equal_in_two_processes(algorithm: str, seed: str | None) -> None:
    first = hashes(algorithm, seed)
    assert hashes(algorithm, seed) == first
    plain, salted, adapted = first
    assert len(plain) == 4
    assert len({*plain, *salted, *adapted}) == 12, "salt and adapter are in every block's key"


def test_what_the_start_refuses_is_really_seeded_anew() -> None:
    assert hashes("xxhash", None) != hashes("xxhash", None)


@pytest.mark.parametrize("seed", [None, "7"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_only_keys_that_are_the_same_everywhere_are_taken(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None
) -> None:
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    cache_config = SimpleNamespace(prefix_caching_hash_algo=algorithm)
    vllm_config: Any = SimpleNamespace(cache_config=cache_config)
    if algorithm.startswith("xxhash") and seed is None:
        with pytest.raises(ConfigError, match=f"'{algorithm}'.*'sha256'.*PYTHONHASHSEED"):
            _check_hashes(vllm_config)
    else:
        _check_hashes(vllm_config)


def test_the_start_fails_with_the_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user meets it."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = transfer_config_hf3fs(tmp_path, "http://127.0.0.1:9")
    done = start(model, config, [PROMPT], prefix_caching_hash_algo="xxhash")
    assert done.returncode != 0
    assert "prefix_caching_hash_algo = 'xxhash' is seeded anew in every process" in (
        done.stderr + done.stdout
    )
    assert not list(tmp_path.iterdir()), "nothing was created"
