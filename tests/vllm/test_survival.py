"""Store trouble costs speed only (spec rows B21, S8): each ends as a slower right answer."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvloom.store.base import Changes

from ..store.disks import put_in_the_way, remove
from .engines import Answer, Engine, prose

LENGTH = 320


def blocks(store: Path) -> list[Path]:
    found = sorted(store.rglob("*.kv"))
    assert found, "the trouble must meet stored blocks"
    return found


def flip_bits(store: Path) -> None:
    for path in blocks(store):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x10]))


def truncate(store: Path) -> None:
    for path in blocks(store):
        os.truncate(path, path.stat().st_size - 4096)


def empty_files(store: Path) -> None:
    for path in blocks(store):
        os.truncate(path, 0)


def other_blocks_content(store: Path) -> None:
    """Every file whole and right, but another block's."""
    paths = blocks(store)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


def remove_files(store: Path) -> None:
    for path in blocks(store):
        path.unlink()


TROUBLES = [
    flip_bits,
    truncate,
    empty_files,
    other_blocks_content,
    remove_files,
    remove,
    put_in_the_way,
]


@pytest.fixture
def store(engine: Engine) -> Iterator[Path]:
    """The store directory, usable again afterwards; blocks live on disk only."""
    yield engine.store_path
    if engine.store_path.is_file():
        engine.store_path.unlink()
    engine.store_path.mkdir(exist_ok=True)


@contextmanager
def unnoticed(engine: Engine) -> Iterator[None]:
    """What changes in the store's directory is not scanned yet: requests meet it first."""
    feeder, over = engine.connector._feeder, threading.Event()
    carry = feeder._carry

    def wait_and_carry(changes: Changes) -> None:
        over.wait(60)
        carry(changes)

    feeder._carry = wait_and_carry
    try:
        yield
    finally:
        feeder._carry = carry
        over.set()


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_damaged_store_is_a_slower_right_answer(
    engine: Engine, store: Path, trouble: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prose(engine, 200, LENGTH)
    cold = engine.cold(prompt, max_tokens=8)
    engine.ask(prompt)
    engine.forget_memory()
    with unnoticed(engine), caplog.at_level(logging.WARNING):
        trouble(store)
        after = engine.ask(prompt, max_tokens=8)
    assert after.tokens == cold.tokens
    assert after.failed > 0, "the trouble must have been met on the way"
    assert after.figures["exact"] + after.figures["reused"] + after.failed <= len(prompt)
    origins = ("exact", "reused", "recomputed", "new")
    assert sum(after.figures[origin] for origin in origins) == len(prompt)
    assert no_traceback(caplog)
    engine.settle()
    assert engine.ask(prompt, max_tokens=8).tokens == cold.tokens


def test_nothing_is_left_of_a_load_that_failed_when_its_client_has_gone(
    engine: Engine, store: Path
) -> None:
    """vLLM keeps in its prefix cache what a request was counted to have, also if nobody computes
    it any more; others would take garbage from there, and we would store it."""
    from vllm import SamplingParams

    document = prose(engine, 230, LENGTH)
    prompts = [document + prose(engine, seed, 150) for seed in (231, 232)]
    cold = [engine.cold(prompt, max_tokens=8).tokens for prompt in prompts]
    engine.ask(document)
    engine.forget_memory()
    core = engine.llm.llm_engine
    with unnoticed(engine):
        flip_bits(store)
        for layer in engine.worker._cache.layers:
            layer.cache.normal_()
        for steps in (1, 2):
            core.add_request("gone", {"prompt_token_ids": prompts[0]}, SamplingParams())
            for _ in range(steps):
                core.step()
            core.abort_request(["gone"])
            while core.has_unfinished_requests():
                core.step()
        assert [engine.plain(prompt, 8) for prompt in prompts] == cold
    engine.forget_memory()
    assert [engine.ask(prompt, max_tokens=8).tokens for prompt in prompts] == cold


@pytest.mark.parametrize("trouble", [flip_bits, remove])
def test_a_blend_over_a_damaged_store_computes_what_it_can_not_load(
    engine: Engine, store: Path, trouble: Callable[[Path], None]
) -> None:
    document = prose(engine, 210, 400)
    prompt = prose(engine, 211, 90) + document + prose(engine, 212, 20)
    cold = engine.cold(prompt, max_tokens=8)
    engine.ask(prose(engine, 213, 40) + document)
    engine.forget_memory()
    with unnoticed(engine):
        trouble(store)
        after = engine.ask(prompt, max_tokens=8)
    assert after.failed > 200
    assert after.figures["reused"] + after.failed <= len(document)
    assert after.figures["new"] >= len(prompt) - len(document) + 64, "what failed was computed"
    assert after.tokens == cold.tokens, "nothing could be loaded: all of it was computed"


def test_saving_goes_on_when_the_directory_is_back(engine: Engine, store: Path) -> None:
    """S8: recovery by itself when the cause is gone."""
    put_in_the_way(store)
    engine.ask(prose(engine, 220, LENGTH))
    engine.settle()
    store.unlink()
    prompt = prose(engine, 221, LENGTH)
    first = engine.ask(prompt, max_tokens=4)
    engine.forget_memory()
    assert blocks(store)
    again = engine.ask(prompt, max_tokens=4)
    assert again.figures["exact"] >= LENGTH - 64
    assert again.failed == 0
    assert again.tokens == first.tokens


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_file_system_drops_saves_and_nothing_else(
    engine: Engine, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S8: a real, small file system that others filled; not even a block of ours can go."""
    engine.settle()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", str(store)], check=False
    )
    if mounted.returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        (store / "others").write_bytes(bytes(7 * 1024**2))
        prompt = prose(engine, 230, 700)
        cold = engine.cold(prompt, max_tokens=4)
        with caplog.at_level(logging.WARNING):
            assert engine.ask(prompt, max_tokens=4).tokens == cold.tokens
            engine.forget_memory()
            after = engine.ask(prompt, max_tokens=4)
        assert after.tokens == cold.tokens
        assert not list(store.rglob("*.kv"))
        assert not list(store.rglob("*.tmp"))
        assert warnings_of(caplog, "could not write") == 1, "one warning, not one a block"
        assert no_traceback(caplog)
    finally:
        subprocess.run(["umount", str(store)], check=True)


def test_an_exception_in_a_hook_is_a_cold_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hook raises into vLLM, whatever breaks in it."""
    prompt = prose(engine, 240, LENGTH)
    cold = engine.cold(prompt, max_tokens=4)
    engine.ask(prompt)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("broken on purpose")

    for side, hook in [
        (engine.scheduler, "match"),
        (engine.scheduler, "step"),
        (engine.scheduler, "add"),
        (engine.scheduler, "admit"),
        (engine.scheduler, "_load_plan"),
        (engine.scheduler, "finish"),
        (engine.worker._filler, "fill"),
        (engine.worker._saver, "save"),
    ]:
        engine.forget()
        with monkeypatch.context() as patch:
            patch.setattr(side, hook, broken)
            answer = plain_tokens(engine, prompt)
        assert answer == cold.tokens, f"a failing {hook} broke the answer"
        assert engine.scheduler.live_requests == 0, f"a failing {hook} left something behind"
    engine.settle()
    again = engine.ask(prompt, max_tokens=4)
    assert again.tokens == cold.tokens, "something wrong was stored meanwhile"


def plain_tokens(engine: Engine, prompt: list[int]) -> list[int]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    output = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    return list(output.outputs[0].token_ids)


def test_a_store_that_hangs_is_given_up_within_the_deadline(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that never returns: load_timeout_s, then the tokens are computed."""
    prompt = prose(engine, 250, LENGTH)
    cold = engine.cold(prompt, max_tokens=4)
    engine.ask(prompt)
    engine.forget_memory()
    posix = engine.connector._store._stages[1]
    released = threading.Event()
    monkeypatch.setattr(posix, "_read_file", lambda *args: released.wait(60) and False)
    monkeypatch.setattr(
        engine.worker._filler._at_once,
        "_config",
        engine.worker._config.model_copy(update={"load_timeout_s": 0.5}),
    )
    try:
        after: Answer = engine.ask(prompt, max_tokens=4)
    finally:
        released.set()
    assert after.failed > 0
    assert after.tokens == cold.tokens


def test_a_store_slower_than_computing_is_left_alone_for_a_while(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B19: it would be waited for at every request otherwise; and it is tried again later."""
    prompts = [prose(engine, 260 + n, LENGTH) for n in range(2)]
    for prompt in prompts:
        engine.ask(prompt)
    load = engine.connector._store.load

    def slow(*args: Any) -> Any:
        time.sleep(3.0)
        return load(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine.connector._store, "load", slow)
        engine.forget()
        assert engine.ask(prompts[0]).figures["exact"] > 0
        engine.forget()
        assert engine.ask(prompts[1]).figures["exact"] == 0
    engine.forget()
    rule = engine.scheduler._cost
    later = time.monotonic() + 61
    monkeypatch.setattr(rule, "_clock", lambda: later)
    assert engine.ask(prompts[1]).figures["exact"] > 0


def no_traceback(caplog: pytest.LogCaptureFixture) -> bool:
    return not [record for record in caplog.records if record.exc_info]


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)
