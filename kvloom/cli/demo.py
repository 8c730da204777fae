"""``kvloom demo``: real model, real engines; times, answers and a picture (spec row B23)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvloom.demo.model import DEFAULT_TARGET, ModelError, fetch_model

if TYPE_CHECKING:
    from kvloom.demo.run import Round

_LEGEND = """
[dim]exact: loaded as stored. reused: loaded and moved to a new place. anew: known, computed anew \
in its new context. new: never seen. as cold: leading answer tokens equal to the cold answer's.
An exact prefix answers as cold does. A blend is an approximation: quick, close, not the same.[/]
"""
_KINDS = ("exact", "reused", "recomputed", "new")


def demo(
    model: Annotated[
        Path, typer.Option(help="Model folder; made when it is not there.")
    ] = DEFAULT_TARGET,
    questions: Annotated[int, typer.Option(min=1, max=8, help="Questions to ask.")] = 3,
    picture: Annotated[Path, typer.Option(help="Picture of a blend to write.")] = Path(
        "kvloom-demo.html"
    ),
    log: Annotated[Path, typer.Option(help="Where the engines' own output goes.")] = Path(
        "kvloom-demo.log"
    ),
) -> None:
    """Answer questions over documents: cold, from prefix caches, and blended."""
    from kvloom.bench.report import command, machine, versions
    from kvloom.demo import run
    from kvloom.demo.engine import quiet_engines

    try:
        folder = fetch_model(model, lambda phase, done: None)
    except ModelError as error:
        typer.secho(f"kvloom demo: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    began = time.monotonic()
    with quiet_engines(log) as terminal:
        console = Console(file=terminal)
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting")
            rounds = run.run(folder, questions, lambda phase: bar.update(task, description=phase))
        facts = {"machine": machine(), "versions": versions(), "command": command()}
        run.draw(picture, rounds[0], folder, facts)
        for answered in rounds:
            _show(console, answered)
        console.print(_LEGEND, highlight=False)
        console.print(f"[dim]{machine()}\n{versions()}\n{command()}[/]", highlight=False)
        console.print(
            f"\nPicture of the first blend: [bold]{picture.resolve()}[/]"
            f"\nThe engines' own words: {log.resolve()}"
            f"\nDone in {time.monotonic() - began:.0f} s.",
            highlight=False,
        )


def _show(console: Console, answered: Round) -> None:
    from kvloom.demo.run import COLD, WAYS

    question, replies = answered.prompt.question, answered.replies
    console.print(f"\n[bold]{question.text}[/]", highlight=False)
    table = Table()
    table.add_column(f"{len(answered.prompt.tokens):,} tokens")
    for heading in ("TTFT", "", "exact", "reused", "anew", "new", "as cold"):
        table.add_column(heading, justify="right")
    for way in WAYS:
        same, total = answered.agreement(way)
        table.add_row(
            way,
            f"{replies[way].ttft_ms:,.0f} ms",
            f"{replies[COLD].ttft_ms / replies[way].ttft_ms:.1f}x",
            *(f"{replies[way].figures[kind]:,}" for kind in _KINDS),
            f"{same} of {total}",
        )
    console.print(table)
    console.print(f"[dim]A right answer holds {question.answer!r}:[/]", highlight=False)
    told: dict[str, str] = {}
    for way in WAYS:
        text = replies[way].text.strip()
        mark = "[green]right[/]" if answered.right(way) else "[red]wrong[/]"
        same_as = told.setdefault(text, way)
        words = escape(text) if same_as == way else f"[dim]the same as {same_as}[/]"
        console.print(f"  {way} ({mark}): {words}", highlight=False)
