"""Golden files: `golden(name, text)` compares with tests/golden/<name>.txt; `--update-golden` rewrites them.
What a module registers, no later one knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eqfuse.extend.define import forget
from eqfuse.terms.registry import REGISTERED

GOLDEN = Path(__file__).parent / "golden"

Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden/*.txt with what the code prints now; read the diff before committing it",
    )


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
