"""A picture of a blend: one HTML file that shows where each token's KV came from (row B23)."""

from __future__ import annotations

import html
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypedDict

_MINUS, _TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"

MEANING = {
    "exact": "loaded as stored, bit for bit",
    "reused": "loaded and moved to its new position",
    "recomputed": "known, computed anew in its new context",
    "new": "never seen before, computed",
    "last": "left to vLLM, as always",
}
"""The origins a token can have, in the order of the legend, each with what it says."""


class Figures(TypedDict, total=False):
    """What is told around the picture; every part may be missing.

    Attributes:
        ttft_ms: milliseconds to the first token for each way of answering. The first one is what
            the others are compared with.
        answers: the answer that each of these ways gave.
        facts: what makes the figures repeatable: machine, versions, command (row B30).
    """

    ttft_ms: Mapping[str, float]
    answers: Mapping[str, str]
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring tokens ``[start, end)`` of one origin, source and delta."""

    start: int
    end: int
    origin: str
    source: str | None
    delta: int | None

    @property
    def length(self) -> int:
        return self.end - self.start


def render_blend(
    path: Path,
    *,
    title: str,
    tokens: Sequence[str],
    origins: Sequence[str],
    sources: Sequence[str | None],
    deltas: Sequence[int | None],
    figures: Figures | Mapping[str, Any],
) -> None:
    """Write the picture of one prompt to ``path``, self-contained.

    Args:
        tokens: text of every token of the prompt.
        origins: a key of ``MEANING`` for each.
        sources: name of the document or chunk that each token's KV was stored with, if any.
        deltas: target minus source position of each token, if it has a source.
        figures: see ``Figures``.

    Raises:
        ValueError: no tokens, lists of different lengths, an unknown origin, an unknown figure.
    """
    lengths = {len(tokens), len(origins), len(sources), len(deltas)}
    if len(lengths) != 1 or not tokens:
        raise ValueError(
            f"{len(tokens)} tokens, {len(origins)} origins, {len(sources)} sources and "
            f"{len(deltas)} deltas: they must be as many, and at least one"
        )
    if unknown := set(origins) - MEANING.keys():
        raise ValueError(f"unknown origins {sorted(unknown)}; known: {list(MEANING)}")
    if unknown := set(figures) - Figures.__annotations__.keys():
        raise ValueError(
            f"unknown figures {sorted(unknown)}; known: {list(Figures.__annotations__)}"
        )

    runs = list(_runs(origins, sources, deltas))
    page = string.Template(
        resources.files(__package__).joinpath("picture.html").read_text(encoding="utf-8")
    ).substitute(
        title=html.escape(title),
        summary=_summary(origins),
        times=_times(figures.get("ttft_ms", {}), figures.get("answers", {})),
        legend=_legend(origins),
        strip="".join(_strip(runs, len(tokens))),
        lanes="".join(_lanes(runs, len(tokens))),
        axis="".join(_axis(len(tokens))),
        prompt="".join(_prompt(runs, tokens)),
        facts=_facts(figures.get("facts", {})),
        total=len(tokens),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _runs(
    origins: Sequence[str], sources: Sequence[str | None], deltas: Sequence[int | None]
) -> Iterator[_Run]:
    start = 0
    kinds = list(zip(origins, sources, deltas, strict=True))
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[start]:
            yield _Run(start, end, *kinds[start])
            start = end


def _passages(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    """Runs grouped by where they come from: what was recomputed amid a run does not part it."""
    group: list[_Run] = []
    for run in runs:
        if group and (run.source, run.delta) != (group[0].source, group[0].delta):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _summary(origins: Sequence[str]) -> str:
    counts = Counter(origins)
    found = counts["exact"] + counts["reused"]
    return (
        f"A prompt of {len(origins):,} tokens. The KV cache of {found:,} of them "
        f"({_percent(found, len(origins))}) was loaded instead of computed. Point at a token, or "
        "move to it with Tab and the arrow keys, to see where it came from."
    )


def _times(ttft_ms: Mapping[str, float], answers: Mapping[str, str]) -> str:
    if not ttft_ms:
        return ""
    longest = max(ttft_ms.values())
    first = next(iter(ttft_ms.values()))
    rows = []
    for way, ms in ttft_ms.items():
        answer = f'<td class="answer">{html.escape(answers.get(way, ""))}</td>' if answers else ""
        rows.append(
            f'<tr><th scope="row">{html.escape(way)}</th><td class="number">{_duration(ms)}</td>'
            f'<td class="number">{_times_as_fast(first, ms)}</td>'
            f'<td class="bars"><div class="bar" style="width:{100 * ms / longest:.2f}%"></div></td>'
            f"{answer}</tr>"
        )
    answer_head = '<th scope="col">Answer</th>' if answers else ""
    return (
        '<div class="times"><table><caption>Time to first token</caption><thead><tr>'
        '<th scope="col">Way</th><th scope="col" class="number">TTFT</th>'
        '<th scope="col" class="number">Faster</th>'
        f'<th scope="col"><span>Linear, shorter is better</span></th>{answer_head}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _legend(origins: Sequence[str]) -> str:
    counts = Counter(origins)
    return "\n".join(
        f'<li class="{origin}{"" if counts[origin] else " none"}">'
        f'<span class="name">{origin}</span>'
        f"<strong>{counts[origin]:,}</strong>"
        f"{_percent(counts[origin], len(origins))}, {meaning}</li>"
        for origin, meaning in MEANING.items()
    )


def _strip(runs: Sequence[_Run], total: int) -> Iterator[str]:
    for run in runs:
        place, about = _place(run.start, run.end, total), _about(run)
        yield (
            f'<a class="{run.origin}" href="#t{run.start}" style="{place}" '
            f'aria-label="{about}" title="{about}"></a>'
        )


def _lanes(runs: Sequence[_Run], total: int) -> Iterator[str]:
    for passage in _passages(runs):
        if passage[0].source is not None:
            place = _place(passage[0].start, passage[-1].end, total)
            yield f'<span style="{place}">{_label(passage[0])}</span>'


def _axis(total: int) -> Iterator[str]:
    step = next(s for s in (1, 10, 100, 250, 500, 1000, 2500, 5000, 10**9) if total / s <= 10)
    ticks = [tick for tick in range(0, total, step) if tick == 0 or total - tick > step / 2]
    for tick in [*ticks, total]:
        yield f'<span style="left:{100 * tick / total:.3f}%">{tick:,}</span>'


def _prompt(runs: Sequence[_Run], tokens: Sequence[str]) -> Iterator[str]:
    for passage in _passages(runs):
        if passage[0].source is not None:
            yield f'<span class="chip" aria-hidden="true">{_label(passage[0])}</span>'
        for run in passage:
            data = "" if run.source is None else f' data-source="{html.escape(run.source)}"'
            data += "" if run.delta is None else f' data-delta="{run.delta}"'
            yield (
                f'<span class="run {run.origin}" id="t{run.start}" role="group" tabindex="0" '
                f'data-start="{run.start}"{data} aria-label="{_about(run)}">'
            )
            for token in tokens[run.start : run.end]:
                yield f"<i>{_visible(token)}</i>"
            yield "</span>"


def _facts(facts: Mapping[str, str]) -> str:
    if not facts:
        return ""
    rows = (f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def _about(run: _Run) -> str:
    """A run in words, as attribute text."""
    words = f"{run.origin}: {run.length:,} {'token' if run.length == 1 else 'tokens'}"
    words += f" at position {run.start:,}"
    if run.source is not None:
        words += f", from {run.source}"
    if run.delta is not None:
        words += f", source position {run.start - run.delta:,}, moved by {_signed(run.delta)}"
    return html.escape(words)


def _label(run: _Run) -> str:
    moved = "" if run.delta is None else f" <em>{_signed(run.delta)}</em>"
    return f"{html.escape(run.source or '')}{moved}"


def _visible(token: str) -> str:
    """A token as HTML in which nothing is invisible: line ends, blanks, control characters."""
    if not token:
        return "<b>∅</b>"
    blank: Callable[[str], bool] = str.isspace
    return "".join(_visible_character(c, blank(token)) for c in token)


def _visible_character(character: str, among_blanks: bool) -> str:
    if character == "\n":
        return "<b>↵</b>\n"
    if character == "\t":
        return "<b>⇥</b>"
    if character.isspace():
        return "<b>·</b>" if among_blanks else " "
    if unicodedata.category(character) in ("Cc", "Cf", "Cs"):
        return f"<b>U+{ord(character):04X}</b>"
    return html.escape(character)


def _place(start: int, end: int, total: int) -> str:
    return f"left:{100 * start / total:.3f}%;width:{100 * (end - start) / total:.3f}%"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _signed(delta: int) -> str:
    return "±0" if delta == 0 else f"{'+' if delta > 0 else _MINUS}{abs(delta):,}"


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.2f} s"


def _times_as_fast(first: float, ms: float) -> str:
    return "" if ms == first else f"{first / ms:.1f} {_TIMES}" if ms > 0 else ""
