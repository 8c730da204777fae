"""Spec row B2: a configuration that can't be meant stops the start with one clear error."""

import pytest

from kvloom.config import ConfigError, KvloomConfig


def test_defaults_are_those_of_the_spec() -> None:
    config = KvloomConfig.from_extra({})
    assert config.store_pipeline == "Cache|Posix"
    assert config.blend_chunk_size == 64
    assert config.min_match_ratio == 0.8
    assert config.position_correction is True
    assert config.recompute_boundary == 2
    assert config.recompute_policy == "first_k"
    assert config.first_k == 32
    assert config.rope_theta is None
    assert config.head_dim is None


def test_one_path_or_a_list_of_paths() -> None:
    assert KvloomConfig.from_extra({"storage_backends": "/a"}).storage_backends == ["/a"]
    assert KvloomConfig.from_extra({"storage_backends": ["/a", "/b"]}).storage_backends == [
        "/a",
        "/b",
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [(4096, 4096), ("4096", 4096), ("512M", 512 << 20), ("4GiB", 4 << 30), ("1.5k", 1536)],
)
def test_sizes_in_bytes_or_with_a_unit(text: object, size: int) -> None:
    assert KvloomConfig.from_extra({"cache_bytes": text}).cache_bytes == size


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("blend_chunksize", "blend_chunk_size"),
        ("recompute_bounds", "recompute_boundary"),
        ("storage_backend", "storage_backends"),
    ],
)
def test_an_unknown_key_is_answered_with_key_value_and_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError) as error:
        KvloomConfig.from_extra({key: "17"})
    assert f"'{key}'" in str(error.value)
    assert "'17'" in str(error.value)
    assert f"'{near}'" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("blend_chunk_size", 0),
        ("blend_chunk_size", "many"),
        ("min_match_ratio", 1.5),
        ("cache_bytes", "lots"),
        ("cache_bytes", -1),
        ("storage_backends", []),
        ("durability", "maybe"),
        ("load_timeout_s", 0),
        ("position_correction", "perhaps"),
    ],
)
def test_a_bad_value_is_answered_with_key_and_value(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        KvloomConfig.from_extra({key: value})
    assert f"{key} = {value!r}" in str(error.value)
    assert "Value error" not in str(error.value), "the library's own words"


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        KvloomConfig.from_extra({"blend_chunk_size": 1, "first_K": 3})
    assert "blend_chunk_size" in str(error.value)
    assert "first_K" in str(error.value)
