"""Golden files: `golden(name, text)` compares with tests/golden/<name>.txt; `--update-golden` rewrites them.
What a module registers, no later one knows. `slow` marks what `-m "not slow"` leaves out; `slow(but=[...])` keeps the cases
whose id has one of the words.

Tests of derivation, verification, planning and the cache itself compile from scratch. Tests of `AFTERWARDS`, what comes after
these, share a cache on disk that lasts for one session: a program is derived, planned and verified once, by whichever test
compiles it first, and read by the others. A test that asks for `monkeypatch` may change what is compiled, so it neither reads
nor writes that cache; nor does one that is marked `anew`."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from covering import covering

from eqfuse.cache.files import cache_home, made
from eqfuse.extend.define import forget
from eqfuse.terms.registry import REGISTERED

# Kernels that tests compile by the thousand run as torch calls; those of C++ ask for it.
os.environ.setdefault("EQFUSE_NATIVE", "off")
# Plans for a CPU are the same on every machine.
os.environ["EQFUSE_CPU"] = "reference"
# Nothing is kept between tests; those of the cache ask for it, and those of AFTERWARDS have it.
os.environ["EQFUSE_CACHE"] = "off"

RESULTS = "EQFUSE_TEST_RESULTS"
"""The variable that names the folder of what this session's tests of AFTERWARDS compile."""

AFTERWARDS = frozenset(
    ("api", "bench", "calls", "from", "grad", "native", "operator", "roles", "shard", "tile", "triton")
)
"""Tests of these rooms, the first word of a file's name, are of code that runs after a program is derived and verified, or of
its gradient, which is a program again."""

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
    """Takes the mark `slow` off the cases that its `but` names; marks as a `sweep` what `pairwise` leaves out. What is a sweep is
    slow."""
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
    keep_pairs(items)
    for item in items:
        if item.get_closest_marker("sweep") is not None and item.get_closest_marker("slow") is None:
            item.add_marker("slow")


def keep_pairs(items: list[pytest.Item]) -> None:
    """Marks as a `sweep` the cases of tests marked `pairwise` that add no pair of arguments, or of test and argument where
    several tests share the mark's word. The fast cases stay."""
    products: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        mark = item.get_closest_marker("pairwise")
        if mark is not None:
            assert isinstance(item, pytest.Function)
            word = mark.args[0] if mark.args else item.originalname
            products.setdefault((item.path, word), []).append(item)
    for cases in products.values():
        rows = [
            (case.originalname, *(str(case.callspec.params[name]) for name in sorted(case.callspec.params)))
            for case in cases
        ]
        fast = [place for place, case in enumerate(cases) if case.get_closest_marker("slow") is None]
        chosen = covering(rows, fast if len(fast) < len(cases) else ())
        for place, case in enumerate(cases):
            if place not in chosen:
                case.add_marker("sweep")


def pytest_collection_finish() -> None:
    """What is loaded by now stays to the end: collections of garbage need not look at it."""
    gc.freeze()


def shares_results(item: pytest.Item) -> bool:
    """Whether what this test compiles is kept for the session, and read from there. On a GPU kernels are launched in another way
    where their binaries are kept, so tests on one share nothing."""
    room = item.path.stem.split("_")[1]
    names = getattr(item, "fixturenames", ())
    is_apart = any(item.get_closest_marker(name) is not None for name in ("anew", "gpu"))
    return room in AFTERWARDS and "monkeypatch" not in names and not is_apart


def pytest_configure(config: pytest.Config) -> None:
    """Makes the folder of the session's results, which the processes of pytest-xdist inherit. Compiled libraries in it are those
    of the user's cache: they are found by what they were compiled from and with."""
    if hasattr(config, "workerinput"):
        return
    folder = Path(tempfile.mkdtemp(prefix="eqfuse-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ[RESULTS] = str(folder)
    native = cache_home() / "native"
    made(native)
    made(folder / "eqfuse" / "kept")
    (folder / "eqfuse" / "native").symlink_to(native)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Sets the environment of the test and of its fixtures."""
    if not shares_results(item):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ[RESULTS])
        patch.setenv("EQFUSE_CACHE", "on")
        return (yield)


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
