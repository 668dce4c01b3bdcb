"""Native kernels of all benchmark programs under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest

from bench.workloads import WORKLOADS
from eqfuse.extract.machine import compiler

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")
CHILD = """
import sys
import eqfuse as eq
from bench.workloads import WORKLOADS
from test_native_programs import PROGRAMS, both, check, drawn
for name in sys.argv[1:]:
    print(name, flush=True)
    if name in WORKLOADS:
        workload = WORKLOADS[name]
        case = workload.cases["small"]
        kernel = eq.compile(workload.text(case), scalars=case.constants, verify=False)
        given = workload.arguments(case, workload.inputs(case))
    else:
        source, shapes = PROGRAMS[name]
        kernel, given = eq.compile(source, verify=False), drawn(source, shapes)
    check(both(kernel, given, FLAGS), 2e-5)
print("all ran", flush=True)
"""


def _runtime() -> str | None:
    """The address sanitizer's library, which has to be loaded before everything else; None where there is none."""
    found = compiler()
    if found is None:
        return None
    asked = subprocess.run(
        [*found, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    )
    path = asked.stdout.strip()
    return path if os.path.isabs(path) else None


def _sanitized(names: list[str], source: str = CHILD) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent
    environment = {
        **os.environ,
        "LD_PRELOAD": str(_runtime()),
        # What Python and torch keep until the end is no leak of a kernel.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}",
    }
    text = source.replace("FLAGS", repr(FLAGS))
    return subprocess.run(
        [sys.executable, "-c", text, *names],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        check=False,
    )


pytestmark = [
    pytest.mark.skipif(_runtime() is None, reason="there is no address sanitizer"),
    needs.address_space,
]


@pytest.mark.slow
@pytest.mark.sweep
def test_no_program_touches_what_is_not_its_own() -> None:
    from test_native_programs import PROGRAMS

    done = _sanitized([*WORKLOADS, *PROGRAMS])
    assert done.returncode == 0 and "all ran" in done.stdout, done.stdout[-200:] + done.stderr[-3000:]


WRONG = """
import ctypes, torch
from eqfuse.tile.native.build import library_of
source = 'extern "C" float past(const float* x, i64 n) { float* y = (float*)__builtin_malloc(4 * n); '
source += 'for (i64 k = 0; k < n; k++) y[k] = x[k]; float z = y[n]; __builtin_free(y); return z; }'
library = library_of(source, FLAGS)
x = torch.ones(8)
library.past(ctypes.c_void_p(x.data_ptr()), ctypes.c_longlong(8))
print("all ran", flush=True)
"""


@pytest.mark.slow
def test_a_read_past_the_end_is_seen() -> None:
    done = _sanitized([], WRONG)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
