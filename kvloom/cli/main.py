"""``kvloom``: the commands. Each one is a few lines over the library that does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvloom.cli import bench, demo

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="KV-cache reuse for vLLM: exact prefixes, and chunks at any position.",
)
app.add_typer(bench.app, name="bench")
app.command("demo")(demo.demo)


@app.command()
def model(
    target: Annotated[
        Path | None, typer.Option(help="Folder to make; default: under ~/.cache/kvloom.")
    ] = None,
) -> None:
    """Make the small real model of the demo and the tests (SmolLM2-135M-Instruct)."""
    from kvloom.demo.model import DEFAULT_TARGET, ModelError, fetch_model

    console = Console()
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("model", total=1.0)

        def show(phase: str, share: float) -> None:
            bar.update(task, description=phase, completed=share)

        try:
            path = fetch_model(target or DEFAULT_TARGET, show)
        except ModelError as error:
            console.print(f"[red]kvloom model:[/] {error}")
            raise typer.Exit(1) from None
    console.print(f"model: {path}")


if __name__ == "__main__":
    app()
