"""`python -m bench.layers`: docs/layers.svg, the layers of the package, as the import contract in pyproject.toml has them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIGURE = ROOT / "docs" / "layers.svg"

WIDTH, ROW, GAP, GLYPH, MOST = 640, 22, 6, 7.23, 7
"""Pixels: of the figure, of one row of boxes, between boxes, of a character; and the boxes of a row, at most."""


def layers(root: Path = ROOT) -> list[tuple[str, ...]]:
    """The rooms of each layer, the uppermost first: a room imports those of lower layers alone, and none of its own."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [tuple(room.strip() for room in layer.split("|")) for layer in contract["layers"]]


def shown(room: str, root: Path = ROOT) -> str:
    """A room as the pages write it: a folder or a file."""
    return f"{room}/" if (root / "eqfuse" / room).is_dir() else f"{room}.py"


def svg() -> str:
    """The figure: a band for each layer, with a box for each room."""
    body: list[str] = []
    y = 1.0
    for layer in layers():
        names = [shown(room) for room in layer]
        rows = [names[at : at + MOST] for at in range(0, len(names), MOST)]
        for row in rows:
            body += _boxes(row, y)
            y += ROW
        y += GAP
    size = f'width="{WIDTH}" height="{y:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="12">'
    style = (
        "<style>text{fill:#1b1f24;text-anchor:middle}.f{fill:#e8eaf6;stroke:#3949ab}"
        ".m{fill:#f6f8fa;stroke:#d0d7de}</style>"
    )
    return "\n".join([head, style, *body, "</svg>\n"])


def _boxes(names: Sequence[str], y: float) -> Iterator[str]:
    """Boxes side by side over the whole width; folders are coloured."""
    spare = (WIDTH - 2 - GLYPH * sum(map(len, names))) / len(names)
    x = 1.0
    for name in names:
        width = GLYPH * len(name) + spare
        kind = "f" if name.endswith("/") else "m"
        yield f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{ROW - 2}" rx="3"/>'
        yield f'<text x="{x + width / 2 - 1:.1f}" y="{y + 14:.1f}">{escape(name)}</text>'
        x += width


if __name__ == "__main__":
    FIGURE.write_text(svg(), encoding="utf-8")
    print(f"written to {FIGURE}")
