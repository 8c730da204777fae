"""``kvloom``: the commands. Each one is a few lines over the library that does the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvloom import __version__
from kvloom.cli import bench, demo, doctor, serve_metadata, store
from kvloom.demo.model import DEFAULT_TARGET, ModelError, fetch_model

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="KV-cache reuse for vLLM: exact prefixes, and blended chunks at any position.",
)
app.add_typer(bench.app, name="bench")
app.command()(demo.demo)
app.command()(doctor.doctor)
app.command()(serve_metadata.serve_metadata)
store.register(app)
app.command()(serve_metadata.audit_metadata)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvloom {__version__}")
        raise typer.Exit


@app.callback()
def kvloom(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def model(
    target: Annotated[
        Path, typer.Option(file_okay=False, help="Folder that the model goes to.")
    ] = DEFAULT_TARGET,
) -> None:
    """Get the demo's model (SmolLM2-135M-Instruct, 0.5 GB) and print its folder."""
    phases = {
        "download": "Download SmolLM2-135M-Instruct (93 MB)",
        "unpack": "Unpack and check",
        "convert": "Convert to float32 (about 20 s)",
    }
    # Progress goes to stderr, so that $(kvloom model) is the folder and nothing else.
    display = Progress(
        TextColumn("{task.description:<40}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
    )
    tasks = {}

    def show(phase: str, done: float) -> None:
        if phase not in tasks:
            tasks[phase] = display.add_task(phases[phase], total=1.0)
        display.update(tasks[phase], completed=done)

    try:
        with display:
            folder = fetch_model(target, show)
    except ModelError as error:
        typer.secho(f"kvloom model: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    typer.echo(folder)


if __name__ == "__main__":
    app()
