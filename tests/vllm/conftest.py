"""The real model and the one in-process engine that the tests of this folder share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .engines import MODEL_VARIABLE, Engine


@pytest.fixture(scope="session")
def model() -> Path:
    path = Path(os.environ.get(MODEL_VARIABLE, ".cache/model"))
    if not (path / "config.json").is_file():
        pytest.fail(f"no model at {path}: run `make test`, or set {MODEL_VARIABLE} to its folder")
    return path.resolve()


@pytest.fixture(scope="session")
def running_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    running = Engine(model, tmp_path_factory.mktemp("store"), min_blend_tokens=64)
    yield running
    running.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def engine(running_engine: Engine) -> Engine:
    """The shared engine with nothing cached and nothing stored."""
    running_engine.clear()
    return running_engine
