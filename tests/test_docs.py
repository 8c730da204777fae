"""Docs are what the code says, and their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.config import Hf3fsConfig, KvloomConfig, StoreConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_page_is_made_from_the_types(tmp_path: Path) -> None:
    copy = tmp_path / "generate_configuration.py"
    copy.write_text((ROOT / "docs" / "generate_configuration.py").read_text())
    subprocess.run([sys.executable, str(copy)], check=True, cwd=ROOT)
    made = (tmp_path / "configuration.md").read_text()
    assert (ROOT / "docs" / "configuration.md").read_text() == made
    for name, field in [*KvloomConfig.model_fields.items(), *Hf3fsConfig.model_fields.items()]:
        assert f"`{name}`" in made
        assert field.description, f"{name} has no description"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_named_in_the_docs_exist(page: Path) -> None:
    """A renamed key must not live on in the docs' examples."""
    known = set(KvloomConfig.model_fields) | set(Hf3fsConfig.model_fields)
    for example in re.findall(r'"kv_connector_extra_config": \{([^}]*)\}', page.read_text()):
        if "TieringOffloadingSpec" not in example:  # that one is vLLM's
            assert set(re.findall(r'"(\w+)":', example)) <= known
    for example in re.findall(r'\{("type": "KvloomTier"[^}]*)\}', page.read_text()):
        keys = set(re.findall(r'"(\w+)":', example)) - {"type", "module_path"}
        assert keys <= set(StoreConfig.model_fields)
