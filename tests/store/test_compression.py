"""Spec row S13: compressed files give back every byte, part by part, under any setting."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvloom.config import ConfigError, KvloomConfig
from kvloom.store.block_format import decode_header
from kvloom.store.compression import Encoding, UndecodableError, compress, decompress
from kvloom.store.contract import NAMESPACE, PART, PARTS, Block, dump, load, make_block
from kvloom.store.posix import Posix
from kvloom.store.registry import open_store

from .test_commands import SIZE, loadable, run

noise = st.binary(max_size=300)
repeated = st.builds(bytes.__mul__, st.binary(min_size=1, max_size=3), st.integers(0, 200))


def views(parts: list[bytes]) -> list[memoryview]:
    return [memoryview(part) for part in parts]


@given(st.lists(noise | repeated, max_size=6))
def test_parts_come_back_and_none_grows(parts: list[bytes]) -> None:
    encoding, stored = compress(views(parts))
    assert all(len(small) <= len(part) for small, part in zip(stored, parts, strict=True))
    assert (encoding is Encoding.RAW) == (sum(map(len, stored)) == sum(map(len, parts)))
    back = [bytes(decompress(s, len(part))) for s, part in zip(stored, parts, strict=True)]
    assert back == parts


@given(noise, st.integers(0, 400))
def test_garbage_is_undecodable_and_never_something_else(garbage: bytes, size: int) -> None:
    if len(garbage) == size:
        return
    with pytest.raises(UndecodableError):
        decompress(memoryview(garbage), size)


def test_a_frame_that_says_another_size_is_not_unpacked() -> None:
    """A few kilobytes of an imported archive could ask for any memory."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(UndecodableError, match="100 bytes"):
        decompress(memoryview(bomb), 100)


def compressing(root: Path, setting: str = "zstd") -> Posix:
    return Posix(NAMESPACE, [root], "none", threads=1, compression=setting)


@pytest.fixture
def block() -> Block:
    return make_block(1)


@pytest.fixture
def file(tmp_path: Path, block: Block) -> Path:
    store = compressing(tmp_path)
    assert dump(store, [block]) == [True]
    store.close()
    (path,) = tmp_path.rglob("*.kv")
    return path


def test_the_file_says_how_its_parts_are_stored(file: Path) -> None:
    stored = decode_header(file.read_bytes())
    assert stored.encoding is Encoding.ZSTD
    assert stored.sizes[::2] == (PART, PART), "noise stays as it is"
    assert stored.sizes[1] < PART / 2
    assert stored.block.part_sizes == (PART,) * PARTS
    assert file.stat().st_size == stored.file_size


@pytest.mark.parametrize(("written", "read"), [("zstd", "none"), ("none", "zstd")])
def test_a_store_is_read_under_any_setting(
    tmp_path: Path, block: Block, written: str, read: str
) -> None:
    store = compressing(tmp_path, written)
    dump(store, [block])
    store.close()
    store = compressing(tmp_path, read)
    done, loaded = load(store, [block[0].key], [SIZE], [None])
    assert (done, loaded) == ([True], [bytes(block[1])])
    store.close()


def test_a_block_of_noise_is_a_plain_one(tmp_path: Path) -> None:
    store = compressing(tmp_path)
    dump(store, [make_block(1, parts=1)])
    store.close()
    (path,) = tmp_path.rglob("*.kv")
    assert decode_header(path.read_bytes()).encoding is Encoding.RAW


def test_any_flipped_byte_is_a_miss(tmp_path: Path, file: Path, block: Block) -> None:
    whole = file.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(whole), 40):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert loadable(tmp_path, 2) == 0


def test_a_part_that_does_not_unpack_is_a_miss_though_its_checksum_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block: Block
) -> None:
    def truncating(parts: list[memoryview]) -> tuple[Encoding, list[memoryview]]:
        return Encoding.ZSTD, [compress(parts)[1][1][:-3] for _ in parts]

    monkeypatch.setattr("kvloom.store.block_file.compress", truncating)
    store = compressing(tmp_path)
    assert dump(store, [block]) == [True]
    done, _ = load(store, [block[0].key], [SIZE], [None])
    assert done == [False]
    assert store.stats()["posix.bad"] == 1
    store.close()


def test_commands_on_compressed_blocks(tmp_path: Path) -> None:
    root, other, archive = tmp_path / "a", tmp_path / "b", tmp_path / "blocks.tar"
    store = compressing(root)
    dump(store, [make_block(number) for number in range(4)])
    store.close()
    contents = json.loads(run("inspect", root, "--json").stdout)["namespaces"][NAMESPACE]
    assert contents["payload"] == 4 * SIZE
    assert run("verify", root).exit_code == 0
    assert run("export", root, archive).exit_code == 0
    assert run("import", archive, other).exit_code == 0
    names = [path.relative_to(root) for path in root.rglob("*.kv")]
    assert len(names) == 4
    assert all((root / name).read_bytes() == (other / name).read_bytes() for name in names)
    assert loadable(other, 4) == 4


def test_disk_bytes_count_what_files_take(tmp_path: Path) -> None:
    """Two pages each, of which five would be needed uncompressed."""
    zeros = [(make_block(number)[0], memoryview(bytes(SIZE))) for number in range(8)]
    limit = 12 * 2 * 4096  # beyond nine tenths of it room is made
    store = Posix(NAMESPACE, [tmp_path], "none", 1, limit_bytes=limit, compression="zstd")
    assert dump(store, zeros) == [True] * 8
    assert store.lookup([header.key for header, _ in zeros]) == [True] * 8
    store.close()


def test_without_the_package_a_start_is_refused_and_a_load_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    extra = {"storage_backends": str(tmp_path), "compression": "zstd"}
    with pytest.raises(ConfigError, match=r"compression = 'zstd'.*pip install 'kvloom\[zstd\]'"):
        open_store(NAMESPACE, KvloomConfig.from_extra(extra))
    assert loadable(tmp_path, 2) == 0
    assert "pip install 'kvloom[zstd]'" in caplog.text
    assert file.exists(), "it is no bad block"
    assert run("verify", tmp_path).exit_code == 0
