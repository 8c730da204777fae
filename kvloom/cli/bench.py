"""``kvloom bench``: measured figures, as a table and, with ``--json``, under stable names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from kvloom.bench.report import Report

app = typer.Typer(no_args_is_help=True, help="Measure on this machine.")

JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Model folder; default: kvloom model's.")
]
LogOption = Annotated[Path, typer.Option("--log", help="Where the engines' own output goes.")]
DEFAULT_LOG = Path("kvloom-bench.log")


@app.command()
def ttft(
    sizes: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "1024,2048,4096",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    model: ModelOption = None,
    json: JsonOption = None,
    log: LogOption = DEFAULT_LOG,
) -> None:
    """Time to first token: cold, vLLM's prefix cache, exact prefix, blend."""
    from kvloom.bench import ttft as bench

    lengths = [int(size) for size in sizes.split(",")]
    _run(lambda show: bench.run(_model(model), lengths, repeats, show), json, log)


@app.command()
def decode(
    tokens: Annotated[int, typer.Option(help="Length of the prompt that arrives.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    model: ModelOption = None,
    json: JsonOption = None,
    log: LogOption = DEFAULT_LOG,
) -> None:
    """Times between tokens of four requests while a long prompt arrives: read, or blended."""
    from kvloom.bench import decode as bench

    _run(lambda show: bench.run(_model(model), tokens, repeats, show), json, log)


@app.command()
def save(
    tokens: Annotated[int, typer.Option(help="Prompt length.")] = 2048,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts for each engine.")] = 7,
    model: ModelOption = None,
    json: JsonOption = None,
    log: LogOption = DEFAULT_LOG,
) -> None:
    """What saving costs a cold prefill."""
    from kvloom.bench import save as bench

    _run(lambda show: bench.run(_model(model), tokens, prompts, show), json, log)


@app.command()
def hf3fs(
    sizes: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "1024,2048",
    model: ModelOption = None,
    json: JsonOption = None,
    log: LogOption = DEFAULT_LOG,
) -> None:
    """Time to first token: cold, and from another engine's pages."""
    from kvloom.bench import hf3fs as bench

    lengths = [int(size) for size in sizes.split(",")]
    _run(lambda show: bench.run(_model(model), lengths, show), json, log)


@app.command()
def match(
    chunks: Annotated[int, typer.Option(help="Chunks in the index.")] = 1_000_000,
    tokens: Annotated[int, typer.Option(help="Prompt length.")] = 32768,
    repeats: Annotated[int, typer.Option(min=1)] = 7,
    json: JsonOption = None,
) -> None:
    """Matching of a long prompt against a large index."""
    from kvloom.bench import match as bench

    _run(lambda show: bench.run(chunks, tokens, repeats, show), json)


@app.command()
def rotate(repeats: Annotated[int, typer.Option(min=1)] = 9, json: JsonOption = None) -> None:
    """Rotation of keys against a plain copy."""
    from kvloom.bench import rotate as bench

    _run(lambda show: bench.run(repeats), json)


@app.command()
def eviction(
    requests: Annotated[int, typer.Option(min=1, help="Length of the trace.")] = 200_000,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks used again and again.")] = 20_000,
    once: Annotated[float, typer.Option(min=0, max=1, help="Part of blocks used once.")] = 0.3,
    json: JsonOption = None,
) -> None:
    """Hit rates of the eviction policies beside the best possible."""
    from kvloom.bench import eviction as bench

    _run(lambda show: bench.run(requests, blocks, once, show), json)


@app.command()
def metadata(
    rounds: Annotated[int, typer.Option(min=1, max=3, help="Figures are medians.")] = 3,
    json: JsonOption = None,
) -> None:
    """The metadata service against vLLM's built-in one."""
    from kvloom.bench import metadata as bench

    _run(lambda show: bench.run(rounds, show), json)


@app.command()
def quality(
    *,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, of three kinds in turn.")] = 42,
    policies: Annotated[str, typer.Option(help="Names, with commas; default: all.")] = "",
    split: Annotated[str, typer.Option(help="`held-out`, or `development`.")] = "held-out",
    model: ModelOption = None,
    json: JsonOption = None,
    log: LogOption = DEFAULT_LOG,
) -> None:
    """How near blends come to full recompute, by recompute policy; FILE is kept up to date."""
    from kvloom.bench import quality as bench

    names = policies.split(",") if policies else list(bench.POLICIES)

    def work(console: Console) -> Report:
        with Progress(*Progress.get_default_columns(), console=console) as bar:
            task = bar.add_task("starting", total=prompts)

            def show(done: int, total: int, what: str) -> None:
                bar.update(task, completed=done, total=total, description=what)

            for report in bench.run(_model(model), prompts, show, policies=names, split=split):
                if json is not None:
                    report.write(json)
            return report

    _run_on(work, json, log)


@app.command()
def store(
    *,
    directory: Annotated[
        Path | None, typer.Option(help="Where to write; default: the temporary directory.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=1)] = 64,
    parts: Annotated[int, typer.Option(min=1, help="Layers of a block.")] = 30,
    part_bytes: Annotated[int, typer.Option(min=1)] = 98304,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: that of `io_threads`.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 7,
    chunks: Annotated[
        int, typer.Option(min=1, help="Chunks to look up and to index, 4 KiB each.")
    ] = 10_000,
    json: JsonOption = None,
) -> None:
    """Dumps, loads and lookups of the store against plain writes, reads and copies."""
    from kvloom.bench import store as bench
    from kvloom.config import StoreConfig

    _run(
        lambda show: bench.run(
            directory,
            blocks=blocks,
            parts=parts,
            part_bytes=part_bytes,
            threads=threads or StoreConfig.from_extra({}).threads,
            repeats=repeats,
            chunks=chunks,
            progress=show,
        ),
        json,
    )


@app.command()
def compression(
    tokens: Annotated[int, typer.Option(min=64, help="Whose KV is compressed.")] = 1024,
    answers: Annotated[int, typer.Option(min=1, help="Tokens predicted over it.")] = 512,
    model: ModelOption = None,
    json: JsonOption = None,
) -> None:
    """Size, speed and error of compressed KV."""
    from kvloom.bench import compression as bench

    _run(lambda show: bench.run(_model(model), tokens - tokens % 64, answers, show), json)


def _model(given: Path | None) -> Path:
    from kvloom.demo.model import DEFAULT_TARGET

    path = (given or DEFAULT_TARGET).expanduser()
    if not (path / "config.json").is_file():
        raise typer.BadParameter(
            f"no model at {path}: make one by `kvloom model`", param_hint="--model"
        )
    return path


def _run(
    work: Callable[[Callable[[str], None]], Report], json: Path | None, log: Path | None = None
) -> None:
    def with_status(console: Console) -> Report:
        with console.status("starting") as status:
            return work(status.update)

    _run_on(with_status, json, log)


def _run_on(work: Callable[[Console], Report], json: Path | None, log: Path | None) -> None:
    from kvloom.demo.engine import quiet_engines

    with _terminal(quiet_engines, log) as terminal:
        console = Console(file=terminal)
        report = work(console)
        report.show(console)
        if json is not None:
            report.write(json)
            console.print(f"figures: {json}")


def _terminal(
    quiet: Callable[[Path], AbstractContextManager[IO[str]]], log: Path | None
) -> AbstractContextManager[IO[str] | None]:
    from contextlib import nullcontext

    return quiet(log) if log is not None else nullcontext(None)
