"""The picture of a blend: what stands in the file is what was given."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.demo.picture import MEANING, render_blend

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Parses a page strictly: every element is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[str] = []
        self.legend: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, dict(attrs))
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)
        if tag == "i":
            self.tokens.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        names = [name for name, _ in self.open]
        if "i" in names:
            self.tokens[-1] += data
        elif names[-2:] == ["li", "strong"]:
            self.legend[str(self.open[-2][1]["class"]).split()[0]] = data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def picture(folder: Path, tokens: list[str], **more: Any) -> str:
    path = folder / "blend.html"
    given = {
        "title": "a prompt",
        "origins": ["new"] * len(tokens),
        "sources": [None] * len(tokens),
        "deltas": [None] * len(tokens),
        "figures": {},
    }
    render_blend(path, tokens=tokens, **(given | more))
    return path.read_text(encoding="utf-8")


def test_every_token_is_there_in_order(tmp_path: Path) -> None:
    tokens = ["The", " ship", " is", " called", " the", " Petrel", "."]
    origins = ["exact", "exact", "reused", "recomputed", "new", "new", "last"]
    assert Page(picture(tmp_path, tokens, origins=origins)).tokens == tokens


def test_what_a_token_or_a_name_says_is_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert('&amp;')</script>"
    text = picture(
        tmp_path,
        [evil],
        title=evil,
        origins=["reused"],
        sources=['"><img src=x onerror="alert(1)">' + evil],
        deltas=[3],
        figures={
            "ttft_ms": {evil: 1.0},
            "answers": {evil: evil},
            "facts": {evil: evil},
        },
    )
    page = Page(text)
    assert page.tokens == [evil]
    assert len(page.of("script")) == 1, "the page's own"
    assert not page.of("img")


@pytest.mark.parametrize(
    "token", ["\n", "\n\n", " ", "   ", "\t", "\r", "\u00a0", "\u200b", "\x00", "\ud800", ""]
)
def test_a_token_without_ink_is_visible(tmp_path: Path, token: str) -> None:
    (shown,) = Page(picture(tmp_path, [token])).tokens
    ink = "".join(shown.split())
    assert ink
    assert ink.isprintable()


def test_blanks_within_words_stay_blanks(tmp_path: Path) -> None:
    assert Page(picture(tmp_path, [" ferry", "a b"])).tokens == [" ferry", "a b"]


@given(origins=st.lists(st.sampled_from(list(MEANING)), min_size=1, max_size=60))
def test_the_legend_counts_what_was_given(
    tmp_path_factory: pytest.TempPathFactory, origins: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("picture")
    page = Page(picture(folder, ["x"] * len(origins), origins=origins))
    assert page.legend == {origin: f"{origins.count(origin):,}" for origin in MEANING}
    marked = [a["class"] for a in page.of("span") if str(a.get("class")).startswith("run ")]
    assert {str(c).removeprefix("run ") for c in marked} == set(origins)


def test_a_run_says_where_its_tokens_stood_and_stand(tmp_path: Path) -> None:
    tokens = ["x"] * 1010
    origins = ["new"] * 1000 + ["reused"] * 9 + ["last"]
    sources = [None] * 1000 + ["ferry"] * 9 + [None]
    deltas = [None] * 1000 + [890] * 9 + [None]
    page = Page(picture(tmp_path, tokens, origins=origins, sources=sources, deltas=deltas))
    (run,) = [a for a in page.of("span") if a.get("class") == "run reused"]
    assert run["data-start"] == "1000"
    assert run["data-source"] == "ferry"
    assert run["data-delta"] == "890"
    assert run["aria-label"] == (
        "reused: 9 tokens at position 1,000, from ferry, source position 110, moved by +890"
    )
    assert run["tabindex"] == "0"


def test_every_link_of_the_strip_leads_to_tokens(tmp_path: Path) -> None:
    origins = ["exact", "reused", "reused", "recomputed", "new", "last"]
    page = Page(picture(tmp_path, ["x"] * 6, origins=origins))
    targets = {a["id"] for _, a in page.elements if "id" in a}
    links = [str(a["href"]) for a in page.of("a")]
    assert len(links) == 5
    assert {link.removeprefix("#") for link in links} <= targets


def test_the_file_needs_nothing_else(tmp_path: Path) -> None:
    text = picture(tmp_path, ["x"], figures={"ttft_ms": {"cold": 5.0}})
    page = Page(text)
    assert not page.of("link")
    assert not [a for _, a in page.elements if "src" in a]
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_the_figures_are_in_the_table(tmp_path: Path) -> None:
    text = picture(
        tmp_path,
        ["x"],
        figures={
            "ttft_ms": {"cold": 20_000.0, "blend": 2_000.0, "exact": 400.0},
            "answers": {"cold": "The Petrel."},
            "facts": {"Command": "kvloom demo"},
        },
    )
    for shown in ("20.00 s", "2.00 s", "400 ms", "10.0 ", "50.0 ", "The Petrel.", "kvloom demo"):
        assert shown in text
    assert "width:100.00%" in text
    assert "width:10.00%" in text


def test_four_thousand_tokens_that_all_differ_stay_a_small_file(tmp_path: Path) -> None:
    count = 4000
    text = picture(
        tmp_path,
        [" token"] * count,
        origins=[list(MEANING)[i % 4] for i in range(count)],
        sources=[f"document-{i % 7}" for i in range(count)],
        deltas=[i % 11 for i in range(count)],
    )
    assert len(text.encode()) < 3_000_000, "one run a token, the worst there is"
    usual = picture(tmp_path, [" token"] * count)
    assert len(usual.encode()) < 200_000


@pytest.mark.parametrize("short", ["tokens", "origins", "sources", "deltas"])
def test_lists_of_different_lengths_are_refused(tmp_path: Path, short: str) -> None:
    lists: dict[str, list[Any]] = {
        "tokens": ["x"] * 3,
        "origins": ["new"] * 3,
        "sources": [None] * 3,
        "deltas": [None] * 3,
    }
    lists[short] = lists[short][:2]
    with pytest.raises(ValueError, match="as many"):
        picture(tmp_path, **lists)
    assert not list(tmp_path.iterdir())


def test_unknown_words_are_refused_and_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="borrowed"):
        picture(tmp_path, ["x"], origins=["borrowed"])
    with pytest.raises(ValueError, match="tfft_ms"):
        picture(tmp_path, ["x"], figures={"tfft_ms": {}})
    with pytest.raises(ValueError, match="at least one"):
        picture(tmp_path, [])
