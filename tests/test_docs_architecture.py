"""docs/architecture.md is what the code is: its figure of the layers, and its walk of a program from text to launch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise

import needs
import pytest

from bench import layers

PAGE = (layers.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+)( ↑)? \| `(\S+)` \| `(\S+)` \|", re.MULTILINE)

TRACE = '''
import json, sys
from pathlib import Path
import torch
import eqfuse as eq

root, entered = Path(eq.__file__).parent, []

def note(frame, event, _):
    file = Path(frame.f_code.co_filename)
    if event == "call" and file.is_relative_to(root):
        entered.append((file.relative_to(root).as_posix(), frame.f_code.co_qualname))

x = torch.randn(8, 300)
sys.setprofile(note)
kernel = eq.compile(
    """
    x: f32[i, j]
    y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))
    """,
    native="wait",
)
kernel(x=x)
sys.setprofile(None)
print(json.dumps(entered))
'''


def test_the_figure_has_the_layers_of_the_contract(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        layers.FIGURE.write_text(layers.svg(), encoding="utf-8")
    assert layers.FIGURE.read_text(encoding="utf-8") == layers.svg() and 'src="layers.svg"' in PAGE
    names = [layers.shown(room) for layer in layers.layers() for room in layer]
    assert len(names) > 30 and re.findall(r">([\w.]+/?)</text>", layers.svg()) == names


def test_every_room_that_the_page_lists_is_in_a_layer() -> None:
    known = {layers.shown(room) for layer in layers.layers() for room in layer}
    table = PAGE.partition("| room | what is there |\n")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[1:] if "bench/" not in line]
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} <= known
    assert {name for name in known if name.endswith("/")} <= set(re.findall(r"`(\w+/)`", " ".join(cells)))


@needs.cxx
@pytest.mark.slow
def test_the_walk_is_the_one_that_a_program_takes() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TRACE], cwd=layers.ROOT, capture_output=True, text=True, check=True
    )
    entered = [(file, function) for file, function in json.loads(ran.stdout)]
    first = {step: place for place, step in reversed(list(enumerate(entered)))}
    rows = ROW.findall(PAGE)
    assert len(rows) > 40 and [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    walk = [(file, function) for _, _, file, function in rows]
    assert len({file for file, _ in walk}) == len(walk)
    assert [step for step in walk if step not in first] == []
    assert sorted(walk, key=first.__getitem__) == walk
    again = (("compiler.py", "pipeline"), ("loops/lower.py", "lower"), ("tile/lower/program.py", "lower"))
    assert [entered.count(step) for step in (*again, ("verify/check.py", "check_stages"))] == [2, 4, 5, 1]


def test_the_walk_says_where_it_climbs() -> None:
    layer = {layers.shown(room): n for n, rooms in enumerate(layers.layers(), 1) for room in rooms}
    rows = ROW.findall(PAGE)
    heights = [
        layer.get(file if "/" not in file else f"{file.partition('/')[0]}/", 0) for _, _, file, _ in rows
    ]
    climbs = [False, *(here < before for before, here in pairwise(heights))]
    assert [bool(mark) for _, mark, *_ in rows] == climbs
    assert f"the {sum(climbs)} rows whose file is in a higher layer" in PAGE
