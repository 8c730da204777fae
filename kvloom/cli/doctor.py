"""``kvloom doctor``: what will work here, and what to do about the rest (spec row B26).

Exit codes: 0 exact prefixes and blends work, 1 something does not work at all, 2 the command can't
be meant, 3 all works but blends.
"""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from kvloom.demo.checks import Check

_COLOURS = {"ok": "green", "limited": "yellow", "bad": "red"}
_EXACT_ONLY = 3


def doctor(
    *,
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder to try in an engine; default: only look at the machine."),
    ] = None,
    store: Annotated[
        Path, typer.Option(file_okay=True, help="A directory of storage_backends.")
    ] = Path("~/.cache/kvloom/store"),
    hf3fs_storage_path: Annotated[
        Path | None, typer.Option(help="HF3FSKVConnector's directory, to look at instead.")
    ] = None,
    hf3fs_metadata_server_url: Annotated[
        str, typer.Option(help="Its metadata service.")
    ] = "http://localhost:18000",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    log: Annotated[Path, typer.Option(help="Where the engine's own output goes.")] = Path(
        "kvloom-doctor.log"
    ),
) -> None:
    """Check vLLM, the store and a model; try exact prefixes and blends; say what will work."""
    from kvloom.demo import checks
    from kvloom.demo.engine import quiet_engines

    if model is not None and not (model.expanduser() / "config.json").is_file():
        raise typer.BadParameter(f"no config.json in {model}", param_hint="--model")
    with quiet_engines(log) as terminal:
        console = Console(file=terminal)
        with console.status("looking") as status:
            place = checks.store(store.expanduser())
            if hf3fs_storage_path is not None:
                place = checks.hf3fs(hf3fs_storage_path, hf3fs_metadata_server_url)
            steps = [checks.installation(), place]
            if model is not None:
                steps.append(checks.engine(model.expanduser().resolve(), status.update))
            found = list(chain.from_iterable(steps))
        if json:
            terminal.write(json_format.dumps([asdict(check) for check in found], indent=2) + "\n")
        else:
            _show(console, found)
    raise typer.Exit(_code(found))


def _show(console: Console, found: list[Check]) -> None:
    table = Table()
    for heading in ("check", "", "found"):
        table.add_column(heading)
    for check in found:
        colour = _COLOURS[check.status.value]
        table.add_row(check.name, f"[{colour}]{check.status.value}[/]", escape(check.text))
    console.print(table)


def _code(found: list[Check]) -> int:
    from kvloom.demo.checks import Status

    if any(check.status is Status.BAD for check in found):
        return 1
    blends = {check.name: check.status for check in found}.get("blend", Status.OK)
    return 0 if blends is Status.OK else _EXACT_ONLY
