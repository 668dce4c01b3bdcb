"""What a process waits for that has not asked for anything yet."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("sympy", "triton", "egglog", "jinja2", "matplotlib", "hypothesis", "rich", "IPython")
"""Packages that some part of eqfuse uses, none of which it needs before it is asked for that part."""

AT_FIRST_USE = (
    "eqfuse.explain.explanation",
    "eqfuse.differentiate.gradient",
    "eqfuse.proof.trace",
    "eqfuse.rules.prepare",
    "eqfuse.stream.streamer",
    "eqfuse.tile.cpu.run",
    "eqfuse.tile.native.printer",
    "eqfuse.tile.triton.module",
    "eqfuse.tune.tuner",
    "eqfuse.verify.equivalence",
    "eqfuse.verify.verification",
)


def printed(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_import_loads_only_what_it_needs() -> None:
    code = "import sys, torch; before = set(sys.modules); import eqfuse; print(*set(sys.modules) - before)"
    loaded = set(printed(code).split())
    assert "eqfuse.kernel" in loaded
    assert loaded.isdisjoint(AT_FIRST_USE)
    assert {name.partition(".")[0] for name in loaded}.isdisjoint(HEAVY)


@pytest.mark.slow
def test_a_function_named_as_a_package_stays() -> None:
    """The package of the same name is loaded before and after, and must not take the function's place."""
    code = """
import eqfuse as eq
import eqfuse.extend.rules, eqfuse.rules.engine
assert callable(eq.rules), eq.rules
import eqfuse.rules.prepare
print(eq.rules.__name__)
"""
    assert printed(code).split() == ["rules"]


@pytest.mark.slow
def test_collection_of_garbage_goes_on() -> None:
    code = "import gc; {}; import eqfuse; print(gc.isenabled())"
    assert printed(code.format("gc.enable()")).split() == ["True"]
    assert printed(code.format("gc.disable()")).split() == ["False"]


def test_every_public_name_is_there() -> None:
    import eqfuse

    assert all(getattr(eqfuse, name) is not None for name in eqfuse.__all__)
    assert set(eqfuse.__all__) <= set(dir(eqfuse))
    with pytest.raises(AttributeError, match="no attribute 'fuse'"):
        eqfuse.fuse  # type: ignore[attr-defined]  # noqa: B018
