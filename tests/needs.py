"""What some tests need and a machine may lack: they are skipped there, with the reason."""

from __future__ import annotations

import resource
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from eqfuse.extract.machine import compiler

cxx = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler (g++, clang++ or $CXX)")

address_space = pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY,
    reason="address space is limited (ulimit -v), and sanitizers and browsers reserve terabytes of it",
)


def packages(*names: str) -> pytest.MarkDecorator:
    """Packages that can be imported here."""
    missing = [name for name in names if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def site_packages(*names: str) -> pytest.MarkDecorator:
    """Packages in this environment's own folder, which another environment can be pointed at."""
    home = Path(sysconfig.get_path("purelib"))
    missing = [name for name in names if not (home / name).exists()]
    return pytest.mark.skipif(bool(missing), reason=f"not in {home}: {', '.join(missing)}")
