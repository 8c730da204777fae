"""Writes docs/configuration.md from the types of the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr

from kvloom.config import Hf3fsConfig, KvloomConfig, StoreConfig

TARGET = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

Keys of `kv_connector_extra_config`; those of `KvloomTier` stand in an entry of its
`secondary_tiers`. None has to be set. An unknown key or a bad value stops the
engine's start with one line that names it. This page is made by
`python docs/generate_configuration.py`.
"""
TABLE = """
## {connector}

| key | type | default | meaning |
|---|---|---|---|
"""


def type_name(annotation: object) -> str:
    """A field's type as a user writes it: ``float``, ``list[str]``, ``"a"`` or ``"b"``."""
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in get_args(annotation))
    if annotation is SecretStr:
        return "`str`"
    if get_origin(annotation) is Annotated:
        return type_name(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return " or ".join(type_name(part) for part in parts)
    plain = isinstance(annotation, type) and get_origin(annotation) is None
    return f"`{annotation.__name__ if plain else annotation}`"  # type: ignore[attr-defined]


def table(connector: str, config: type[BaseModel]) -> str:
    rows = []
    for name, field in config.model_fields.items():
        default = f"`{json.dumps(field.default)}`"
        cells = f"`{name}`", type_name(field.annotation), default, field.description or ""
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return TABLE.format(connector=connector) + "".join(rows)


def page() -> str:
    tables = [
        ("BlendConnector", KvloomConfig),
        ("HF3FSKVConnector", Hf3fsConfig),
        ("KvloomTier", StoreConfig),
    ]
    return HEAD + "".join(table(connector, config) for connector, config in tables)


if __name__ == "__main__":
    TARGET.write_text(page())
