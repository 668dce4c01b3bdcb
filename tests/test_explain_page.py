"""The HTML page: one file, nothing from outside, and what a browser makes of it."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import needs
import pytest

import eqfuse as eq

SOFTMAX = "y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))"
UNFUSED = "x: f32[i,j]\na[i] = sum[j](x[i,j])\nb[i] = sum[j](tanh(x[i,j] - a[i]) * (x[i,j] < 3))\nreturn b"

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@cache
def page(source: str = SOFTMAX) -> str:
    prefer = "rolling" if source == SOFTMAX else None
    return eq.compile(source, target="cpu", verify=False, prefer=prefer).explain("html")


class Tags(HTMLParser):
    """Refuses tags that are not closed in order, collects what is referred to, and text by tag."""

    VOID = frozenset({"meta", "br", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("source", [SOFTMAX, UNFUSED])
def test_the_page_is_well_formed_and_self_contained(source: str) -> None:
    tags = Tags()
    tags.feed(page(source))
    assert tags.open == []
    assert tags.references == []
    assert not tags.seen & {"script", "link", "img", "iframe"}
    assert "http" not in page(source) and "@import" not in page(source) and "url(" not in page(source)
    assert {"svg", "rect", "details", "table"} <= tags.seen


def test_the_page_has_every_part() -> None:
    text = page()
    for part in ("Program", "Derivation", "What runs", "Plans", "E-graph", "Certificate"):
        assert f"<h2>{part}</h2>" in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert html.escape(SOFTMAX) in text
    assert "<mark>max(" in text
    assert "Checked: " in text


def test_a_state_has_one_colour_everywhere() -> None:
    colours: dict[str, set[str]] = {}
    for number, name in re.findall(r'<span class="s(\d)">(max_j|sum_j)(?:_new|_tile|_a|_b)?</span>', page()):
        colours.setdefault(name, set()).add(number)
    assert {name: len(found) for name, found in colours.items()} == {"max_j": 1, "sum_j": 1}
    assert colours["max_j"] != colours["sum_j"]
    for title in ("loop nest", "tile program", "Triton"):
        code = page().split(f"<h3>{title}")[1].split("</section>")[0]
        assert '<span class="s0">' in code, title


def test_what_is_not_fused_is_shown_and_escaped() -> None:
    assert "<h2>Why not</h2>" in page(UNFUSED)
    assert "x[i,j] &lt; 3" in page(UNFUSED)


def in_browser(tmp_path: Path, text: str, width: int, *flags: str) -> str:
    """The document after a browser laid it out in a frame of a width, with what a script found in its title."""
    framed = f"""<!DOCTYPE html><title></title>
<iframe id="f" width="{width}" height="800" style="border:0" srcdoc="{html.escape(text)}"></iframe>
<script>document.getElementById("f").onload = () => {{
  const inner = document.getElementById("f").contentDocument;
  document.title = [inner.documentElement.scrollWidth, getComputedStyle(inner.body).backgroundColor,
    inner.querySelectorAll("mark").length, inner.querySelectorAll("svg rect").length].join(" ");
}};</script>"""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "page.html").write_text(framed, encoding="utf-8")
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command += [*flags, "--window-size=1400,900", "--virtual-time-budget=4000", "--dump-dom"]
    found = subprocess.run(
        [*command, f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=120, check=True
    )
    title = re.search(r"<title>(.*?)</title>", found.stdout)
    assert title and title[1], found.stderr[-500:]
    return title[1]


@needs_browser
@needs.address_space
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.slow
def test_a_browser_lays_it_out_without_scrolling_sideways(tmp_path: Path, width: int) -> None:
    seen, *_, marks, bars = in_browser(tmp_path, page(), width).split()
    assert int(seen) <= width
    assert int(marks) > 3 and int(bars) > 3


@needs_browser
@needs.address_space
@pytest.mark.slow
def test_a_browser_shows_it_dark_where_that_is_preferred(tmp_path: Path) -> None:
    light = in_browser(tmp_path / "light", page(), 1280)
    dark = in_browser(tmp_path / "dark", page(), 1280, "--blink-settings=preferredColorScheme=0")
    assert "rgb(253, 253, 251)" in light
    assert "rgb(20, 23, 26)" in dark
