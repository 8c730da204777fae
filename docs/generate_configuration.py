"""Writes docs/configuration.md from the types of the configuration."""

from __future__ import annotations

import json
from pathlib import Path

from kvloom.config import KvloomConfig

TARGET = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

Keys of `kv_connector_extra_config`. None has to be set. An unknown key or a bad value stops the
engine's start with one line that names it. This page is made by
`python docs/generate_configuration.py`.

| key | default | meaning |
|---|---|---|
"""


def page() -> str:
    rows = []
    for name, field in KvloomConfig.model_fields.items():
        default = "the model's" if field.default is None else f"`{json.dumps(field.default)}`"
        cells = f"`{name}`", default, field.description or ""
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    TARGET.write_text(page())
