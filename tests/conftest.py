"""Golden files: `golden(name, text)` compares with tests/golden/<name>.txt; `--update-golden` rewrites them.
What a module registers, no later one knows. `slow` marks what `-m "not slow"` leaves out; `slow(but=[...])` keeps the cases
whose id has one of the words."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eqfuse.extend.define import forget
from eqfuse.terms.registry import REGISTERED

# Kernels that tests compile by the thousand run as torch calls; those of C++ ask for it.
os.environ.setdefault("EQFUSE_NATIVE", "off")
# Plans for a CPU are the same on every machine.
os.environ["EQFUSE_CPU"] = "reference"
# Every test derives and verifies for itself; those of the cache ask for it.
os.environ["EQFUSE_CACHE"] = "off"

GOLDEN = Path(__file__).parent / "golden"

Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden/*.txt with what the code prints now; read the diff before committing it",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes the mark `slow` off the cases that its `but` names."""
    kept: dict[tuple[Path, str], int] = {}
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is None or not (but := mark.kwargs.get("but")):
            continue
        if len([other for other in item.own_markers if other.name == "slow"]) > 1:
            raise pytest.UsageError(f"{item.nodeid}: `slow` stands twice")
        function = (item.path, item.name.partition("[")[0])
        case = item.name.removeprefix(function[1])
        is_kept = any(word in case for word in but)
        kept[function] = kept.get(function, 0) + is_kept
        if is_kept:
            item.own_markers.remove(mark)
    for (path, name), count in kept.items():
        if not count and not any("::" in argument for argument in items[0].config.args):
            raise pytest.UsageError(f"{path.name}::{name}: `slow(but=...)` names none of its cases")


def pytest_collection_finish() -> None:
    """What is loaded by now stays to the end: collections of garbage need not look at it."""
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a printed form with its golden file, line by line; trailing newline is not significant."""
    update = request.config.getoption("--update-golden")

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"{path.name} does not exist: run pytest --update-golden, and read what it wrote")
        assert text.rstrip("\n").splitlines() == path.read_text(encoding="utf-8").rstrip("\n").splitlines()

    return compare


@pytest.fixture(autouse=True, scope="module")
def reductions_of_one_module() -> Iterator[None]:
    """Forgets the reductions that random programs have registered."""
    before = set(REGISTERED)
    yield
    for name in set(REGISTERED) - before:
        forget(name)
