"""Spec row S12: inspect, verify, gc, export and import, also while engines write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
from io import BytesIO
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvloom.cli.main import app
from kvloom.store.contract import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PART,
    PARTS,
    dump,
    load,
    make_block,
)
from kvloom.store.posix import Posix

SIZE = PART * PARTS


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def filled(root: Path, count: int, namespace: str = NAMESPACE) -> list[Path]:
    """Block files of a store of ``count`` blocks."""
    store = Posix(namespace, [root], "none", threads=1)
    assert all(dump(store, [make_block(number, namespace) for number in range(count)]))
    store.close()
    return sorted(root.glob(f"{namespace}/*/*.kv"))


def harm(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def loadable(root: Path, count: int, namespace: str = NAMESPACE) -> int:
    """How many blocks a store serves, each of them right."""
    store = Posix(namespace, [root], "none", threads=1)
    blocks = [make_block(number, namespace) for number in range(count)]
    done, loaded = load(store, [h.key for h, _ in blocks], [SIZE] * count, [None] * count)
    store.close()
    for found, got, (_, payload) in zip(done, loaded, blocks, strict=True):
        assert not found or got == bytes(payload)
    return sum(done)


def test_inspect_counts_by_namespace(tmp_path: Path) -> None:
    paths = filled(tmp_path, 5)
    filled(tmp_path, 3, OTHER_NAMESPACE)
    harm(paths[0], 50)
    told = json.loads(run("inspect", tmp_path, "--json").stdout)
    first, second = told["namespaces"][NAMESPACE], told["namespaces"][OTHER_NAMESPACE]
    assert (first["blocks"], first["tokens"], first["unreadable"]) == (5, 4 * 64, 1)
    assert (second["blocks"], second["tokens"], second["unreadable"]) == (3, 3 * 64, 0)
    assert told["size"] == 8 * 20480
    assert "5" in run("inspect", tmp_path).output


@pytest.mark.parametrize("at", [3, 100, 400, 4096 + 10, -1])
def test_verify_names_every_bad_block_and_leaves_it(tmp_path: Path, at: int) -> None:
    paths = filled(tmp_path, 4)
    assert run("verify", tmp_path).exit_code == 0
    harm(paths[2], at)
    result = run("verify", tmp_path, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["blocks"] == 4
    assert [bad["path"] for bad in told["bad"]] == [str(paths[2])]
    assert paths[2].exists()
    assert str(paths[2]) in run("verify", tmp_path).output


@pytest.mark.parametrize("command", ["inspect", "verify", "gc"])
def test_a_directory_that_is_not_there_is_a_wrong_use(tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "does not exist" in " ".join(result.output.replace("│", "").split())


@pytest.mark.parametrize(
    "option", [("--disk-bytes", "lots"), ("--eviction", "random"), ("--ttl-s", "0")]
)
def test_a_limit_that_can_not_be_meant_is_a_wrong_use(
    tmp_path: Path, option: tuple[str, str]
) -> None:
    result = run("gc", tmp_path, *option)
    assert result.exit_code == 2
    assert option[1] in result.output


def test_gc_removes_halves_bad_blocks_the_old_and_what_is_too_much(tmp_path: Path) -> None:
    paths = filled(tmp_path, 10)
    os.utime(paths[0], (1, 1))
    (tmp_path / NAMESPACE / "quarantine").mkdir()
    (tmp_path / NAMESPACE / "quarantine" / f"{'0' * 32}.1").write_bytes(b"bad")
    half = paths[1].with_name(f"{paths[1].stem}.0badbeef.1.5.0.tmp")
    half.write_bytes(b"half")
    os.utime(half, (1, 1))
    told = json.loads(run("gc", tmp_path, "--ttl-s", "1000", "--quarantined", "--json").stdout)
    assert (told["expired"], told["stale"], told["quarantined"]) == (1, 1, 1)
    assert told["blocks"] == 9
    told = json.loads(run("gc", tmp_path, "--disk-bytes", 5 * 20480, "--json").stdout)
    assert told["evicted"] == 10 - 1 - told["blocks"]
    assert 4 <= told["blocks"] <= 5
    assert loadable(tmp_path, 10) == told["blocks"]


@pytest.mark.parametrize("name", ["store.tar", "store.tar.zst"])
def test_what_is_exported_is_imported_elsewhere_namespaces_apart(tmp_path: Path, name: str) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    paths = filled(old, 6)
    os.utime(paths[0], (1000, 1000))
    filled(old, 4, OTHER_NAMESPACE)
    assert run("export", old, tmp_path / name).exit_code == 0
    result = run("import", tmp_path / name, new, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["blocks"] == 10
    assert (loadable(new, 6), loadable(new, 4, OTHER_NAMESPACE)) == (6, 4)
    copy = new / paths[0].relative_to(old)
    assert copy.stat().st_mtime == 1000, "its age, by which it expires, is kept"
    assert (new.stat().st_mode & 0o777, copy.stat().st_mode & 0o777) == (0o700, 0o600)
    again = json.loads(run("import", tmp_path / name, new, "--json").stdout)
    assert (again["blocks"], again["known"]) == (0, 10)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["old", "new", name])


def test_one_namespace_can_be_chosen(tmp_path: Path) -> None:
    filled(tmp_path / "old", 3)
    filled(tmp_path / "old", 2, OTHER_NAMESPACE)
    run("export", tmp_path / "old", tmp_path / "all.tar")
    run("export", tmp_path / "old", tmp_path / "one.tar", "--namespace", NAMESPACE)
    for archive in ("all.tar", "one.tar"):
        target = tmp_path / archive.removesuffix(".tar")
        run("import", tmp_path / archive, target, "--namespace", NAMESPACE)
        assert [folder.name for folder in target.iterdir() if folder.name[0] != "."] == [NAMESPACE]
        assert loadable(target, 3) == 3


def test_the_digits_that_inspect_shows_name_a_namespace(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    filled(tmp_path, 2, OTHER_NAMESPACE)
    words = run("inspect", tmp_path).output.split()
    (shown,) = [word for word in words if len(word) > 8 and NAMESPACE.startswith(word)]
    assert json.loads(run("verify", tmp_path, "--namespace", shown, "--json").stdout)["blocks"] == 3
    for unclear in ("nope", ""):
        assert run("verify", tmp_path, "--namespace", unclear).exit_code == 2


@pytest.mark.parametrize("command", ["inspect", "verify", "gc"])
def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path, command: str) -> None:
    """A mistyped path would read as "all well", and a lock be left in somebody's directory."""
    (tmp_path / "ssl").mkdir()
    (tmp_path / "ssl" / "cert.pem").write_text("")
    result = run(command, tmp_path / "ssl")
    assert result.exit_code == 2
    assert "no store" in " ".join(result.output.replace("│", " ").split())
    assert [path.name for path in (tmp_path / "ssl").iterdir()] == ["cert.pem"]
    (tmp_path / "new").mkdir()
    assert run(command, tmp_path / "new").exit_code == 0, "an engine may just have made it"


def test_damaged_blocks_are_neither_exported_nor_imported(tmp_path: Path) -> None:
    paths = filled(tmp_path / "old", 5)
    archive = tmp_path / "store.tar"
    run("export", tmp_path / "old", archive)
    data = archive.read_bytes()
    payload = bytes(make_block(2)[1])
    assert data.count(payload) == 1
    archive.write_bytes(data.replace(payload, payload[:-1] + bytes([payload[-1] ^ 1])))
    result = run("import", archive, tmp_path / "new")
    assert result.exit_code == 1
    assert make_block(2)[0].key.hex() in result.output
    assert loadable(tmp_path / "new", 5) == 4
    harm(paths[0], 5000)
    result = run("export", tmp_path / "old", archive)
    assert result.exit_code == 1
    assert run("import", archive, tmp_path / "newer").exit_code == 0
    assert loadable(tmp_path / "newer", 5) == 4


@pytest.mark.parametrize("part", [0, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("name", ["store.tar", "store.tar.zst"])
def test_an_archive_that_ends_early_leaves_whole_blocks_only(
    tmp_path: Path, name: str, part: float
) -> None:
    filled(tmp_path / "old", 5)
    run("export", tmp_path / "old", tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * part)])
    result = run("import", tmp_path / name, tmp_path / "new")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert loadable(tmp_path / "new", 5) < 5
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_name_in_an_archive_decides_nothing(tmp_path: Path) -> None:
    (path,) = filled(tmp_path / "old", 1)
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        for name in ("../../evil.kv", "/tmp/kvloom-evil.kv", "a/b/c.kv"):
            member = tarfile.TarInfo(name)
            member.size = path.stat().st_size
            archive.addfile(member, BytesIO(path.read_bytes()))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    result = run("import", tmp_path / "evil.tar", tmp_path / "deep" / "new")
    assert result.exit_code == 1, "the link is no block"
    found = [p.relative_to(tmp_path / "deep") for p in (tmp_path / "deep").rglob("*.kv")]
    assert found == [Path("new") / path.relative_to(tmp_path / "old")]
    assert not list(tmp_path.glob("*.kv"))
    assert not Path("/tmp/kvloom-evil.kv").exists()


def test_through_a_pipe(tmp_path: Path) -> None:
    filled(tmp_path / "old", 3)
    kvloom = f"{sys.executable} -m kvloom.cli.main"
    line = f"{kvloom} export {tmp_path}/old - | {kvloom} import - {tmp_path}/new"
    subprocess.run(["bash", "-o", "pipefail", "-c", line], check=True, capture_output=True)
    assert loadable(tmp_path / "new", 3) == 3


def test_all_of_them_are_right_while_an_engine_writes_and_evicts(tmp_path: Path) -> None:
    store = Posix(NAMESPACE, [tmp_path / "store"], "none", threads=2, limit_bytes=20 * 20480)
    dump(store, [make_block(0)])
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            dump(store, [make_block(number)])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            archive = tmp_path / f"{number}.tar"
            for command in (("inspect",), ("verify",), ("export", archive)):
                result = run(command[0], tmp_path / "store", *command[1:])
                assert result.exit_code == 0, result.output
            assert run("import", archive, tmp_path / f"{number}").exit_code == 0
            assert run("gc", tmp_path / "store").exit_code == 0
    finally:
        done.set()
        writer.join()
        store.close()
    assert store.stats()["posix.bad"] == 0
