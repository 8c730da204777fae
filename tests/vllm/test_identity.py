"""Never somebody else's KV: other weights, adapters and a reset are told apart (DESIGN.md)."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvloom.vllm.identity import Scopes, folder_digest, model_identity

from .engines import Engine, prose


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A large one first and last, as embeddings are, and small ones between."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"embed": 600_000, **{f"layer{i}": 3000 + i for i in range(40)}, "head": 600_000}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_training_any_one_tensor_is_seen(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Names, sizes and all other tensors stay: a merged adapter, some layers fine-tuned."""
    seen = {folder_digest(stored(tmp_path / "base", tensors))}
    for name, tensor in tensors.items():
        trained = tensors | {name: tensor + 0.01}
        seen.add(folder_digest(stored(tmp_path / "trained", trained)))
    assert len(seen) == 1 + len(tensors)


@pytest.mark.parametrize("name", ["model.bin", "model.gguf", "model.safetensors"])
def test_other_formats_are_sampled_throughout(tmp_path: Path, name: str) -> None:
    """Also a file that only says that it is safetensors."""
    content = bytearray(b"\x07" * 8 + b"{}" * 500_000)
    (tmp_path / name).write_bytes(content)
    before = folder_digest(tmp_path)
    for first in range(0, len(content) - 70_000, 70_000):
        other = content.copy()
        other[first : first + 70_000] = bytes(70_000)
        (tmp_path / name).write_bytes(other)
        assert folder_digest(tmp_path) != before


def test_the_same_weights_elsewhere_are_the_same(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    here = stored(tmp_path / "here", tensors)
    assert folder_digest(shutil.copytree(here, tmp_path / "there")) == folder_digest(here)


def model_config(model: str, **more: Any) -> SimpleNamespace:
    fields = {"model_weights": "", "revision": None, "hf_config": SimpleNamespace()}
    return SimpleNamespace(model=model, **(fields | more))


def test_weights_in_an_object_store_are_known_by_their_address(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    one, other = (
        model_identity(model_config(str(tmp_path), model_weights=f"s3://models/{name}"))
        for name in ("a", "b")
    )
    assert one != other


def test_a_hub_name_is_known_by_the_commit_it_stood_for() -> None:
    one, other = (
        model_identity(model_config("org/model", hf_config=SimpleNamespace(_commit_hash=commit)))
        for commit in ("aa", "bb")
    )
    assert one != other


def request(lora: Any = None, computed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(lora_request=lora, num_computed_tokens=computed)


def adapter(path: Path, number: int = 1, load_inplace: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        lora_name="sql", lora_int_id=number, lora_path=str(path), load_inplace=load_inplace
    )


def test_an_adapter_is_known_by_its_weights(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    first, second = stored(tmp_path / "v1", tensors), stored(tmp_path / "v2", tensors)
    save_file(tensors | {"layer3": tensors["layer3"] * 2}, second / "model.safetensors")
    scopes = Scopes()
    plain, of_first = (scopes.scope(request(lora), None) for lora in (None, adapter(first)))
    assert plain != of_first
    assert scopes.scope(request(adapter(second)), None) not in (plain, of_first)
    # By another engine, from a copy; with a salt it is somebody else's.
    copy = shutil.copytree(first, tmp_path / "copy")
    assert Scopes().scope(request(adapter(copy, 7)), None) == of_first
    assert Scopes().scope(request(adapter(copy, 7)), "tenant") != of_first
    # vLLM reads an adapter once, or at every request.
    shutil.copytree(second, first, dirs_exist_ok=True)
    assert scopes.scope(request(adapter(first)), None) == of_first
    assert scopes.scope(request(adapter(first, load_inplace=True)), None) != of_first


def test_a_reset_separates_all_that_comes_after(tmp_path: Path) -> None:
    scopes, other = Scopes(), Scopes()
    assert scopes.suffix(request()) == ""
    before = scopes.scope(request(), "salt")
    seen = {before, other.scope(request(), None)}
    for each in (scopes, scopes, other):
        each.reset()
        seen.add(each.scope(request(), "salt"))
    assert len(seen) == 5
    assert scopes.suffix(request()) == scopes.suffix(request()) != other.suffix(request())
    # What began before it is of old weights and new ones: of nobody.
    assert len({scopes.suffix(request(computed=9)), scopes.suffix(request(computed=9))}) == 2


def test_after_a_reset_of_the_engine_nothing_of_before_is_used(engine: Engine) -> None:
    """A trainer resets caches when it has put new weights in; old KV would be wrong then."""
    prompt = prose(engine, 900, 300)
    engine.ask(prompt)
    engine.forget()
    assert engine.ask(prompt).figures["exact"] > 200
    engine.settle()
    try:
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        after = engine.ask(prompt + prose(engine, 901, 100))
        assert (after.figures["exact"], after.figures["reused"]) == (0, 0)
        engine.forget()
        assert engine.ask(prompt).figures["exact"] > 200
    finally:
        engine.scheduler._scopes._epoch = None
