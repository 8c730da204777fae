"""``kvloom serve-metadata`` and ``audit-metadata``: the metadata service (spec rows H10, H11)."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvloom.hf3fs.metadata.base import AuditReport

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
        Path | None,
        typer.Option(help=f"State file of the embedded backend; {DEFAULT_STATE}.", dir_okay=False),
    ] = None,
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
        int, typer.Option(min=1, help="Pages of all namespaces; about 350 bytes of memory each.")
    ] = 4_000_000,
) -> None:
    """Keep which page of which file holds a key, for engines with HF3FSKVConnector."""
    import gc
    import logging

    from kvloom.hf3fs.metadata.app import Service, Settings
    from kvloom.hf3fs.metadata.base import Limits, MetadataError, MetadataStore
    from kvloom.hf3fs.metadata.server import UnsafeAddressError, make_server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    limits = Limits(write_lease_s=write_lease, read_lease_s=read_lease, max_pages=max_pages)
    settings = Settings(limits=limits, token=_token(token_file), world_size_v1=world_size)
    store: MetadataStore
    try:
        if redis is not None and state is not None:
            raise MetadataError("--state and --redis: the state is kept in one of them")
        if redis is not None:
            from kvloom.hf3fs.metadata.redis import RedisStore

            store = RedisStore(redis, limits)
        else:
            from kvloom.hf3fs.metadata.embedded import Embedded

            store = Embedded((state or DEFAULT_STATE).expanduser(), limits, durability.value)
        server = make_server(Service(store, settings), host, port)
    except (MetadataError, UnsafeAddressError) as error:
        typer.secho(f"kvloom serve-metadata: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    gc.freeze()  # what the journal brought lives for long: nothing to collect in it
    typer.echo(f"metadata service on http://{host}:{port}", err=True)
    server.run()


def _token(file: Path | None) -> str | None:
    """From the file, else from the environment; never from an argument, which all users can see."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip() or None
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--token-file {file}: {error}") from None
    if not text:
        raise typer.BadParameter(f"--token-file {file} is empty")
    return text


def audit_metadata(
    url: Annotated[str, typer.Option(help="The service.")] = "http://127.0.0.1:18000",
    state: Annotated[
        Path | None,
        typer.Option(help="A state file instead, while no service uses it.", dir_okay=False),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the bearer token; or set {TOKEN_VARIABLE}.", dir_okay=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count every page of the metadata service by state; exit 1 if any is leaked or given twice."""
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from kvloom.hf3fs.metadata.base import MetadataError

    try:
        reports = _audit_file(state) if state else _audit_service(url, _token(token_file))
    except MetadataError as error:
        typer.secho(f"kvloom audit-metadata: {error}", err=True, fg="red")
        raise typer.Exit(2) from None
    rows = {name: msgspec.structs.asdict(report) for name, report in reports.items()}
    if json:
        typer.echo(msgspec.json.encode(rows).decode())
    else:
        columns = "pages", "free", "allocated", "confirmed", "cooling", "leaked", "twice"
        table = Table("namespace", *columns)
        for name, row in rows.items():
            table.add_row(name, *(f"{row[column]:,}" for column in columns))
        Console().print(table)
    if any(row["leaked"] or row["twice"] for row in rows.values()):
        raise typer.Exit(1)


def _audit_service(url: str, token: str | None) -> dict[str, AuditReport]:
    from kvloom.hf3fs.metadata.base import MetadataError
    from kvloom.hf3fs.metadata.client import MetadataClient, NoAnswer

    def client(namespace: str) -> MetadataClient:
        return MetadataClient(url, namespace, "audit", token=token, timeout_s=120.0)

    names = client("default").namespaces()
    if isinstance(names, NoAnswer):
        raise MetadataError(f"{url}: {names.reason}")
    reports = {}
    for name in names:
        report = client(name).audit()
        if isinstance(report, NoAnswer):
            raise MetadataError(f"{url}: {report.reason}")
        reports[name] = report
    return reports


def _audit_file(state: Path) -> dict[str, AuditReport]:
    import asyncio

    from kvloom.hf3fs.metadata.base import Limits, MetadataError
    from kvloom.hf3fs.metadata.embedded import Embedded

    async def audit() -> dict[str, AuditReport]:
        store = Embedded(state, Limits())
        try:
            return {name: await store.audit(name) for name in await store.namespaces()}
        finally:
            await store.close()

    if not state.is_file():
        raise MetadataError(f"{state}: no such file")
    return asyncio.run(audit())
