"""Spec row S10: lookups from listings are what the files are, whoever changed them and when."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.store.layout import block_path
from kvloom.store.presence import Presence

# Keys of two folders, enough for listings to be worth making.
KEYS = [bytes([part]) + bytes([number]) * 15 for part in (0, 7) for number in range(12)]
steps = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "look", "few", "age"]), st.sampled_from(KEYS)),
    max_size=25,
)


@settings(max_examples=60)
@given(steps)
def test_presence_is_what_the_files_are(todo: list[tuple[str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        presence = Presence(folder)
        there: set[bytes] = set()
        for step, key in [*todo, ("look", KEYS[0])]:
            path = block_path(folder, key)
            if step == "add":
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"x")
                there.add(key)
            elif step == "remove":
                path.unlink(missing_ok=True)
                there.discard(key)
            elif step == "look":
                assert presence.present(KEYS) == [key in there for key in KEYS]
            elif step == "few":
                assert presence.present([key]) == [key in there]
            elif path.parent.is_dir():  # as if nothing had happened for some seconds
                past = time.time() - 10
                os.utime(path.parent, (past, past + KEYS.index(key) / 100 + len(there)))


def test_a_folder_that_did_not_change_is_not_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = block_path(tmp_path, KEYS[0])
    path.parent.mkdir()
    path.write_bytes(b"x")
    os.utime(path.parent, (1000, 1000))
    presence = Presence(tmp_path)
    here = KEYS[:12]
    assert presence.present(here) == [True] + [False] * 11
    monkeypatch.setattr(os, "listdir", lambda folder: pytest.fail("listed again"))
    assert presence.present(here) == [True] + [False] * 11


def test_what_is_no_block_is_not_present(tmp_path: Path) -> None:
    path = block_path(tmp_path, KEYS[0])
    path.parent.mkdir()
    for name in (f"{path.stem}.1.2.3.4.tmp", "README.kv", f"{path.stem}.kvx"):
        (path.parent / name).write_bytes(b"x")
    assert not any(Presence(tmp_path).present(KEYS))
