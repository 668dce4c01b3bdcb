"""`python -m bench.picture`: docs/picture.svg, a program, its derived merge and its kernel, as they are printed.

The kernel is the loop of the Triton source over whole blocks, without what comes before it and after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

import eqfuse as eq

PICTURE = Path(__file__).parent.parent / "docs" / "picture.svg"

PROGRAM = """\
S[i,j] = sum[d](Q[i,d] * K[j,d])
P[i,j] = exp(S[i,j] - max[j](S[i,j]))
O[i,e] = sum[j](P[i,j] / sum[j](P[i,j]) * V[j,e])"""

DECLARATIONS = "d: axis[64]\ne: axis[64]\nQ: f16[i, d]\nK: f16[j, d]\nV: f16[j, e]\n"

GLYPH, ROW, MARGIN, GAP = 7.23, 17, 14, 40
"""Of the text and around it, in pixels."""


def panels() -> tuple[str, str, str]:
    """The program, the merge of two parts, and the loop of the kernel."""
    kernel = eq.compile(DECLARATIONS + PROGRAM, prefer="rolling", target="sm_90")
    if not kernel.certificate.ok:
        raise RuntimeError("the kernel of the picture is not verified")
    merge = re.search(r"  two parts a and b:\n(.*?)\n  what", str(kernel.merge), re.DOTALL)
    loop = re.search(r"\n( +for j_start in .*?)\n    #", kernel.triton, re.DOTALL)
    if merge is None or loop is None:
        raise RuntimeError("the merge or the loop is printed in another form")
    return PROGRAM, _flush(merge[1]).replace("    #", "\n#"), _flush(loop[1])


def _flush(text: str) -> str:
    lines = text.splitlines()
    least = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[least:] for line in lines)


def svg() -> str:
    """The picture."""
    program, merge, loop = panels()
    left = _width(program)
    right = _width(merge)
    width = max(left + GAP + right, _width(loop))
    height = max(_height(program), _height(merge))
    below = height + GAP
    body = [
        *_panel(0, 0, left, height, "a program", program),
        *_panel(left + GAP, 0, width - left - GAP, height, "its merge: two parts of the axis j", merge),
        *_panel(0, below, width, _height(loop), "its kernel: one pass over j (Triton)", loop),
        _arrow(left + 6, height / 2 + 12, left + GAP - 6, height / 2 + 12),
        _arrow(left + GAP + right / 2, height + 6, left + GAP + right / 2, below + 18),
    ]
    size = f'width="{width:.0f}" height="{below + _height(loop) + 1:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="12">'
    style = (
        "<style>text{white-space:pre;fill:#1b1f24}.t{fill:#3949ab;font-family:sans-serif;font-weight:bold}"
        ".b{fill:#f6f8fa;stroke:#d0d7de}.a{stroke:#3949ab;stroke-width:2;marker-end:url(#m)}</style>"
        '<defs><marker id="m" markerWidth="8" markerHeight="8" refX="5" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#3949ab"/></marker></defs>'
    )
    return "\n".join([head, style, *body, "</svg>\n"])


def _width(text: str) -> float:
    return 2 * MARGIN + GLYPH * max(map(len, text.splitlines()))


def _height(text: str) -> float:
    return 20 + 2 * MARGIN + ROW * len(text.splitlines())


def _panel(x: float, y: float, width: float, height: float, title: str, text: str) -> Iterator[str]:
    yield f'<text class="t" x="{x + 2:.0f}" y="{y + 13:.0f}">{escape(title)}</text>'
    yield (
        f'<rect class="b" x="{x + 0.5:.1f}" y="{y + 20.5:.1f}" rx="6" width="{width - 1:.0f}" '
        f'height="{height - 20:.0f}"/>'
    )
    for n, line in enumerate(text.splitlines()):
        at = y + 20 + MARGIN + ROW * (n + 0.75)
        yield f'<text x="{x + MARGIN:.0f}" y="{at:.0f}" xml:space="preserve">{escape(line)}</text>'


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="a" x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"/>'


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
    print(f"written to {PICTURE}")
