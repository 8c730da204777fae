"""``kvloom serve-metadata``: the metadata service of HF3FS (spec row H11)."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

TOKEN_VARIABLE = "KVLOOM_METADATA_TOKEN"
DEFAULT_STATE = Path("~/.local/state/kvloom/metadata.db")


class DurabilityChoice(str, Enum):
    process = "process"
    disk = "disk"


def serve_metadata(
    *,
    host: Annotated[str, typer.Option(help="Address; off loopback a token is needed.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535)] = 18000,
    state: Annotated[
        Path, typer.Option(help="State file of the embedded backend.", dir_okay=False)
    ] = DEFAULT_STATE,
    durability: Annotated[
        DurabilityChoice,
        typer.Option(help="What an answered change outlives: the process, or a power cut too."),
    ] = DurabilityChoice.process,
    redis: Annotated[
        str | None,
        typer.Option(help="redis:// URL; the state is kept there, for several services at once."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the bearer token; or set {TOKEN_VARIABLE}.", dir_okay=False),
    ] = None,
    world_size: Annotated[
        int, typer.Option(min=1, help="World size of vLLM's own clients, which don't tell it.")
    ] = 1,
    write_lease: Annotated[
        float, typer.Option(min=0.1, help="Seconds to write an allocated page in.")
    ] = 60.0,
    read_lease: Annotated[
        float, typer.Option(min=0.1, help="Seconds to read a located page in.")
    ] = 30.0,
    max_pages: Annotated[
        int, typer.Option(min=1, help="Pages of all namespaces; about 600 bytes of memory each.")
    ] = 4_000_000,
) -> None:
    """Keep which page of which file holds a key, for engines with HF3FSKVConnector."""
    import logging

    from kvloom.hf3fs.metadata.app import Service, Settings
    from kvloom.hf3fs.metadata.base import Limits, MetadataError, MetadataStore
    from kvloom.hf3fs.metadata.server import UnsafeAddressError, make_server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    limits = Limits(write_lease_s=write_lease, read_lease_s=read_lease, max_pages=max_pages)
    settings = Settings(limits=limits, token=_token(token_file), world_size_v1=world_size)
    store: MetadataStore
    try:
        if redis is not None:
            from kvloom.hf3fs.metadata.redis import RedisStore

            store = RedisStore(redis, limits)
        else:
            from kvloom.hf3fs.metadata.embedded import Embedded

            store = Embedded(state.expanduser(), limits, durability.value)
        server = make_server(Service(store, settings), host, port)
    except (MetadataError, UnsafeAddressError) as error:
        typer.secho(f"kvloom serve-metadata: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    typer.echo(f"metadata service on http://{host}:{port}", err=True)
    server.run()


def _token(file: Path | None) -> str | None:
    """From the file, else from the environment; never from an argument, which all users can see."""
    text = os.environ.get(TOKEN_VARIABLE, "") if file is None else file.read_text()
    return text.strip() or None
