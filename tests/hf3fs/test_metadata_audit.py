"""``kvloom audit-metadata``: counts by state, of a service or of a state file."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvloom.cli.main import app
from kvloom.hf3fs.metadata.client import MetadataClient, NoAnswer
from tests.hf3fs.service import free_port, running


def audit(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["audit-metadata", *options])
    return result.exit_code, result.output


def test_of_a_service_and_of_its_file(tmp_path: Path) -> None:
    with running(tmp_path / "state.db") as service:
        client = MetadataClient(service.url, "ns", "w", lookup_timeout_s=5.0, timeout_s=10.0)
        client.initialize(0, 100, 1)
        assert not isinstance(client.allocate(0, ["a", "b", "c"]), NoAnswer)
        status, output = audit("--url", service.url, "--json")
        assert status == 0
        counts = json.loads(output)["ns"]
        assert (counts["pages"], counts["free"], counts["allocated"]) == (100, 97, 3)
        assert (counts["leaked"], counts["twice"]) == (0, 0)
        assert audit("--state", str(tmp_path / "state.db"))[0] == 2, "a service uses it"
    status, output = audit("--state", str(tmp_path / "state.db"), "--json")
    assert status == 0
    assert json.loads(output)["ns"] == counts
    assert "allocated" in audit("--state", str(tmp_path / "state.db"))[1]


def test_where_there_is_none(tmp_path: Path) -> None:
    assert audit("--url", f"http://127.0.0.1:{free_port()}")[0] == 2
    status, output = audit("--state", str(tmp_path / "no.db"))
    assert status == 2
    assert "no such file" in output


def test_a_page_that_was_given_twice_is_found(tmp_path: Path) -> None:
    """By an audit of a journal in which two keys claim a page."""
    path = tmp_path / "state.db"
    assert audit("--state", str(path))[0] == 2
    with running(path) as service:
        client = MetadataClient(service.url, "ns", "w", lookup_timeout_s=5.0, timeout_s=10.0)
        client.initialize(0, 10, 1)
        service.terminate()
    wrong = [("ns", ("allocate", 0, "w", ["a", "b"], [3, 3], [1, 2]))]
    with sqlite3.connect(path) as db:
        db.execute("insert into entries values (99, 2, 3, ?)", (msgspec.msgpack.encode(wrong),))
    db.close()
    status, output = audit("--state", str(path), "--json")
    assert status == 1
    assert json.loads(output)["ns"]["twice"] == 1


@pytest.mark.parametrize("option", ["--token-file", "--state"])
def test_options_name_files(tmp_path: Path, option: str) -> None:
    assert audit(option, str(tmp_path))[0] == 2
