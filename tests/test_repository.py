"""The repository keeps its own promises: layers, commands, documented settings, what it ships."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import kvloom
from kvloom.cli.main import app
from kvloom.config import KvloomConfig

ROOT = Path(__file__).parents[1]


def check_layers(folder: Path) -> subprocess.CompletedProcess[str]:
    lint = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [str(lint), "--no-cache", "--no-logo"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_imports_point_down_only() -> None:
    done = check_layers(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tokens/hashing.py", "import kvloom.store.base"),
        ("blend/plan.py", "import vllm"),
        ("store/base.py", "import torch"),
        ("config.py", "import kvloom.tokens.chunks"),
        ("vllm/compat.py", "import kvloom.demo.documents"),
    ],
)
def test_an_import_that_points_up_is_found(tmp_path: Path, module: str, line: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "kvloom", tmp_path / "kvloom")
    with (tmp_path / "kvloom" / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = check_layers(tmp_path)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout


def commands(group: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for command in group.registered_commands:
        name = command.name or str(command.callback and command.callback.__name__)
        yield (*path, name.replace("_", "-"))
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, (*path, str(inner.name)))


@pytest.mark.parametrize("command", sorted(commands(app)), ids=" ".join)
def test_every_command_says_what_it_does(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0, result.output
    usage, _, text = result.output.partition("Usage:")
    assert not usage.strip()
    assert len(text.split("╭")[0].split()) > 6, "a sentence under the usage line"


def test_the_command_tells_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.output == f"kvloom {kvloom.__version__}\n"
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared[1] == kvloom.__version__


@pytest.mark.parametrize("key", list(KvloomConfig.model_fields))
def test_every_setting_is_explained_in_a_sentence(key: str) -> None:
    text = KvloomConfig.model_fields[key].description
    assert text is not None
    assert text.endswith(".")
    assert len(text.split()) >= 3


def sources() -> list[Path]:
    return sorted((ROOT / "kvloom").rglob("*.py"))


def test_nothing_unpickles_and_no_signal_handler_is_replaced() -> None:
    """Stored bytes must never become code (row S14); Ctrl-C must go on to stop the engine."""
    unpickling = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names) if {n.name.split(".")[0] for n in names} & unpickling:
                    found.append((path, node.lineno))
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] in unpickling:
                    found.append((path, node.lineno))
                case ast.Attribute(value=ast.Name(id="signal"), attr="signal" | "sigaction"):
                    found.append((path, node.lineno))
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                    found.append((path, node.lineno))
    assert not found


def test_the_license_is_the_whole_apache_license() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text.splitlines()[1]
    assert "9. Accepting Warranty or Additional Liability." in text
    assert "END OF TERMS AND CONDITIONS" in text
