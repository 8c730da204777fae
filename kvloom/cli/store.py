"""``kvloom inspect | verify | gc | export | import`` on a store directory (spec row S12).

Exit codes: 0 all is well, 1 bad blocks were found, 2 the command can't be meant.
"""

from __future__ import annotations

import json as json_format
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.progress import track
from rich.table import Table

if TYPE_CHECKING:
    from kvloom.store.archive import Moved
    from kvloom.store.layout import BlockFile
    from kvloom.store.survey import Bad

Item = TypeVar("Item")
_SHOWN = 12  # digits of a namespace: all 32 leave the other columns no room


def _store(directory: Path) -> Path:
    """A mistyped path must not read as "all well", nor be written to."""
    from kvloom.store.layout import LIMITS, namespaces

    if not namespaces(directory) and not (directory / LIMITS).exists() and any(directory.iterdir()):
        raise typer.BadParameter(f"{directory} is no store: it has neither namespaces nor {LIMITS}")
    return directory


Directory = Annotated[
    Path,
    typer.Argument(
        exists=True,
        file_okay=False,
        callback=_store,
        help="A directory of storage_backends.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
NamespaceOption = Annotated[
    str | None, typer.Option(help="Only blocks of this namespace; its first digits will do.")
]


def inspect(directory: Directory, json: JsonOption = False) -> None:
    """Show what lies in a store directory: blocks, tokens and bytes by namespace."""
    from kvloom.store.layout import Listing
    from kvloom.store.survey import survey

    listing = Listing(directory)
    found = survey(_progress(listing.blocks, "Reading headers", json))
    rubbish = {"temporary": len(listing.temporary), "quarantined": len(listing.quarantined)}
    if json:
        namespaces = {namespace: asdict(contents) for namespace, contents in found.items()}
        _print_json({"size": listing.size, **rubbish, "namespaces": namespaces})
        return
    table = Table(title=f"{directory}: {decimal(listing.size)}", box=SIMPLE_HEAD, padding=0)
    table.add_column("namespace", min_width=_SHOWN, no_wrap=True)
    for heading in ("blocks", "tokens", "bytes", "KV", "blended", "bad", "written", "used"):
        table.add_column(heading, justify="right")
    for namespace, contents in found.items():
        table.add_row(
            namespace[:_SHOWN],
            f"{contents.blocks:,}",
            f"{contents.tokens:,}",
            decimal(contents.size),
            decimal(contents.payload),
            f"{contents.blended:,}",
            f"{contents.unreadable:,}",
            f"{_ago(contents.oldest_ns)} .. {_ago(contents.newest_ns)}",
            _ago(contents.used_ns),
        )
    console = Console()
    console.print(table)
    console.print("  ".join(f"{name}: {count:,}" for name, count in rubbish.items()))


def verify(
    directory: Directory, namespace: NamespaceOption = None, json: JsonOption = False
) -> None:
    """Read every block of a store directory from end to end, and name those that are damaged."""
    from kvloom.store import survey

    blocks = _blocks(directory, namespace)
    verified = survey.verify(_progress(blocks, "Verifying", json))
    if json:
        _print_json(asdict(verified))
    else:
        _print_bad(verified.bad)
        typer.echo(
            f"{verified.blocks:,} blocks, {decimal(verified.size)}: {len(verified.bad):,} bad"
        )
    raise typer.Exit(bool(verified.bad))


def gc(
    directory: Directory,
    *,
    disk_bytes: Annotated[
        str | None, typer.Option(help="Evict down to so many bytes, like 100GiB.")
    ] = None,
    ttl_s: Annotated[
        float | None, typer.Option(min=0, help="Remove blocks written longer ago than this.")
    ] = None,
    eviction: Annotated[str, typer.Option(help="What goes first: s3fifo or lru.")] = "s3fifo",
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Remove bad blocks put aside, of any age.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove what killed writers left, old bad blocks, and blocks beyond a limit or an age."""
    from kvloom.config import ConfigError, KvloomConfig
    from kvloom.store.janitor import QUARANTINE_S, Janitor

    given = {"disk_bytes": disk_bytes, "ttl_s": ttl_s, "eviction": eviction}
    try:
        config = KvloomConfig.from_extra({k: v for k, v in given.items() if v is not None})
    except ConfigError as error:
        raise typer.BadParameter(str(error).removeprefix("kv_connector_extra_config: ")) from None
    janitor = Janitor(directory, config.disk_bytes, config.eviction, config.ttl_s)
    try:
        swept = janitor.sweep(quarantine_s=0 if quarantined else QUARANTINE_S)
    except OSError as error:
        _fail(f"kvloom gc: {directory}: {error}")
    if json:
        _print_json(asdict(swept))
    else:
        typer.echo(
            f"removed {swept.evicted + swept.expired:,} blocks, {swept.quarantined:,} bad ones and "
            f"{swept.stale:,} half-written ones ({decimal(swept.freed)}); "
            f"{swept.blocks:,} blocks, {decimal(swept.size)} left"
        )


def export(
    directory: Directory,
    target: Annotated[
        Path,
        typer.Argument(help="File to write: a tar, compressed where it ends in .zst; - : stdout"),
    ],
    namespace: NamespaceOption = None,
    json: JsonOption = False,
) -> None:
    """Write the blocks of a store directory, each verified, into one file."""
    from kvloom.store import archive

    blocks = _progress(_blocks(directory, namespace), "Exporting", json)
    to_stdout = str(target) == "-"
    try:
        if to_stdout:
            moved = archive.export_blocks(blocks, sys.stdout.buffer)
        else:
            with archive.written(target) as file:
                moved = archive.export_blocks(blocks, file)
    except ImportError:
        _fail("kvloom export: .zst needs the package zstandard: pip install 'kvloom[zstd]'")
    except OSError as error:
        _fail(f"kvloom export: {target}: {error}")
    _report("exported", moved, json, stderr=to_stdout)


def import_(
    source: Annotated[Path, typer.Argument(help="File that export wrote; - : stdin")],
    directory: Annotated[
        Path, typer.Argument(file_okay=False, help="Store directory; made if missing.")
    ],
    namespace: NamespaceOption = None,
    json: JsonOption = False,
) -> None:
    """Take up the blocks of an exported file into a store directory, each verified."""
    from kvloom.store import archive

    moved = archive.Moved()
    console = Console(stderr=True, quiet=json)
    try:
        with console.status("Importing") as status:

            def follow(sums: Iterator[Moved]) -> None:
                nonlocal moved
                for moved in sums:
                    status.update(f"Importing: {moved.blocks:,} blocks, {decimal(moved.size)}")

            if str(source) == "-":
                follow(archive.import_blocks(sys.stdin.buffer, directory, namespace))
            else:
                with archive.read(source) as file:
                    follow(archive.import_blocks(file, directory, namespace))
    except ImportError:
        _fail("kvloom import: .zst needs the package zstandard: pip install 'kvloom[zstd]'")
    except (archive.ArchiveError, OSError) as error:
        _report("imported", moved, json, stderr=False, leave=False)
        _fail(f"kvloom import: {source}: {error}", code=1)
    _report("imported", moved, json, stderr=False)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (inspect, verify, gc, export):
        app.command()(command)
    app.command("import")(import_)


def _blocks(directory: Path, namespace: str | None) -> list[BlockFile]:
    from kvloom.store.layout import namespaces
    from kvloom.store.survey import listed

    if namespace is not None:
        known = [path.name for path in namespaces(directory) if path.name.startswith(namespace)]
        if len(known) != 1:
            raise typer.BadParameter(
                f"{len(known)} namespaces of {directory} begin with {namespace}: inspect shows them"
            )
        (namespace,) = known
    return list(listed(directory, namespace))


def _progress(items: Sequence[Item], what: str, quiet: bool) -> Iterable[Item]:
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return items
    return track(items, what, console=console, transient=True)


def _report(what: str, moved: Moved, json: bool, stderr: bool, leave: bool = True) -> None:
    if json:
        typer.echo(json_format.dumps(asdict(moved), indent=2), err=stderr)
    else:
        _print_bad(moved.bad)
        typer.echo(
            f"{what} {moved.blocks:,} blocks, {decimal(moved.size)}; {moved.known:,} were there, "
            f"{moved.no_room:,} found no room, {len(moved.bad):,} bad",
            err=stderr,
        )
    if leave:
        raise typer.Exit(bool(moved.bad))


def _print_bad(bad: list[Bad]) -> None:
    for each in bad:
        typer.echo(f"{each.path}: {each.problem}", err=True)


def _print_json(data: Any) -> None:
    typer.echo(json_format.dumps(data, indent=2))


def _fail(text: str, code: int = 2) -> NoReturn:
    typer.secho(text, err=True, fg="red")
    raise typer.Exit(code)


def _ago(at_ns: int) -> str:
    """A time as the distance from now, in one unit."""
    seconds = max(time.time() - at_ns / 1e9, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
