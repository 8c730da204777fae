"""Spec row B26: ``kvloom doctor`` says what will work, by exit code, table and JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvloom.cli.main import app
from kvloom.demo import checks
from kvloom.demo.checks import Status

from .hf3fs.service import free_port, running
from .vllm.engines import MODEL_VARIABLE
from .vllm.rope_kinds import KINDS, make_model

COMMAND = [sys.executable, "-m", "kvloom.cli.main", "doctor", "--json"]


def by_name(found: Any) -> dict[str, Any]:
    return {check.name: check for check in found}


def test_a_store_that_is_a_file_or_can_not_be_written_is_bad(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for directory in (file, file / "below"):
        (check,) = checks.store(directory)
        assert check.status is Status.BAD
        assert str(file) in check.text
    (check,) = checks.store(Path("/proc/kvloom"))
    assert check.status is Status.BAD
    assert "can't be written" in check.text


def test_a_store_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "store"
    found = by_name(checks.store(directory))
    assert not (tmp_path / "new").exists()
    assert {check.status for check in found.values()} == {Status.OK}
    directory.mkdir(parents=True, mode=0o755)
    assert by_name(checks.store(directory))["permissions"].status is Status.LIMITED
    directory.chmod(0o700)
    assert by_name(checks.store(directory))["permissions"].status is Status.OK
    assert list(directory.iterdir()) == []


def test_little_space_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert by_name(checks.store(tmp_path))["space"].status is Status.LIMITED


def test_what_hf3fs_needs_is_looked_at(tmp_path: Path) -> None:
    with running(tmp_path / "state.db") as service:
        found = by_name(checks.hf3fs(tmp_path / "pages", service.url))
        assert found["pages"].status is Status.OK
        assert found["usrbio"].status is Status.LIMITED, "it can't be installed here"
        assert found["metadata"].status is Status.OK
    found = by_name(checks.hf3fs(tmp_path / "pages", service.url))
    assert found["metadata"].status is Status.BAD
    assert service.url in found["metadata"].text
    assert "kvloom serve-metadata" in found["metadata"].text


def test_a_service_that_wants_its_token_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVLOOM_METADATA_TOKEN", raising=False)
    with running(tmp_path / "state.db", token="s3cret") as service:
        check = by_name(checks.hf3fs(tmp_path, service.url))["metadata"]
        assert check.status is Status.BAD
        assert "token" in check.text
        monkeypatch.setenv("KVLOOM_METADATA_TOKEN", "s3cret")
        assert by_name(checks.hf3fs(tmp_path, service.url))["metadata"].status is Status.OK


def test_the_command_looks_at_hf3fs_instead_of_a_store(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run(
        [*COMMAND, "--hf3fs-storage-path", str(tmp_path), "--hf3fs-metadata-server-url", url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    found = {check["name"]: check["status"] for check in json.loads(done.stdout)}
    assert done.returncode == 1
    assert found["pages"] == "ok"
    assert found["metadata"] == "bad"
    assert "store" not in found


def test_a_plugin_that_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    found = by_name(checks.installation())
    assert found["vllm"].status is Status.OK
    assert found["plugin"].status is Status.LIMITED


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--model", str(tmp_path)])
    assert result.exit_code == 2


@pytest.mark.parametrize(("kind", "code"), [("qwen3", 0), ("gemma2", 3), ("deepseek-v2", 1)])
def test_a_model_is_tried_in_an_engine(tmp_path: Path, kind: str, code: int) -> None:
    model = tmp_path / "model"
    make_model(KINDS[kind], model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(os.environ.get(MODEL_VARIABLE, ".cache/model")) / name, model)
    done = subprocess.run(
        [*COMMAND, "--model", str(model), "--store", str(tmp_path), "--log", str(tmp_path / "log")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    log = (tmp_path / "log").read_text()
    assert done.returncode == code, done.stdout + done.stderr + log[-2000:]
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert found["exact"]["status"] == ("bad" if code == 1 else "ok")
    if code == 3:
        assert found["blend"]["status"] == "limited"
        assert KINDS[kind].says in found["blend"]["text"]
    if code == 1:
        assert KINDS[kind].says in found["exact"]["text"]
        assert "blend" not in found
