"""Compiling in threads, in forked children, and where it is interrupted; what goes wrong beside Python."""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.rules.catalogue import PREPARE
from eqfuse.rules.egraph import client, server
from eqfuse.rules.egraph.saturate import session
from eqfuse.terms.floats import FloatDomain, rounded

pytestmark = pytest.mark.anew
"""Threads and processes that derive at once."""

SOFTMAX = "e[i,j] = exp(x[i,j] - max[j](x[i,j]))\ny[i,j] = e[i,j] / sum[j](e[i,j])"
SOURCES = (
    SOFTMAX,
    "y[i] = log(sum[j](exp(x[i,j])))",
    "m[i] = mean[j](x[i,j])\ny[i] = mean[j](sq(x[i,j] - m[i]))",
    "s[i] = sum[j](abs(x[i,j]))\ny[i] = max[j](x[i,j] / s[i])",
)


def check(source: str) -> None:
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    found = eq.compile(source)(x=x)
    torch.testing.assert_close(
        found.double(), torch.from_numpy(eq.reference(source)(x=x)), rtol=1e-4, atol=1e-5
    )


@contextmanager
def fresh() -> Iterator[None]:
    """As in a process that has compiled nothing."""
    ended()
    yield
    ended()


def ended() -> None:
    while client._idle:
        client._idle.pop().end()


def in_child(work: Callable[[], Any], seconds: float = 120) -> None:
    """Runs in a forked child, which has to end well and in time."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(seconds)
    if child.exitcode is None:
        child.kill()
        child.join()
        pytest.fail("the child hangs")
    assert child.exitcode == 0


def test_another_thread_than_the_first_compiles() -> None:
    check(SOFTMAX)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(check, SOFTMAX).result()
        pool.submit(check, SOURCES[1]).result()
    check(SOFTMAX)


@pytest.mark.parametrize("sources", [SOURCES, (SOFTMAX,) * 4], ids=["different", "same"])
@pytest.mark.slow
def test_several_threads_compile_at_once(sources: tuple[str, ...]) -> None:
    barrier = threading.Barrier(len(sources))

    def work(source: str) -> None:
        barrier.wait()
        check(source)

    with fresh(), ThreadPoolExecutor(len(sources)) as pool:
        list(pool.map(work, sources))


@pytest.mark.slow
def test_one_thread_parses_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, inside, together = ast.parse, set[int](), 0

    def watched(*arguments: Any, **options: Any) -> ast.AST:
        nonlocal together
        inside.add(threading.get_ident())
        time.sleep(0)  # others may run
        together = max(together, len(inside))
        tree = parse(*arguments, **options)
        inside.discard(threading.get_ident())
        return tree

    monkeypatch.setattr(ast, "parse", watched)
    with fresh(), ThreadPoolExecutor(4) as pool:
        list(pool.map(check, SOURCES))
    assert together == 1


def test_another_thread_that_parses_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, calls = ast.parse, iter(range(10**6))

    def disturbed(*arguments: Any, **options: Any) -> ast.AST:
        if next(calls) % 3 == 0:
            raise SystemError("AST constructor recursion depth mismatch (before=36, after=32)")
        return parse(*arguments, **options)

    monkeypatch.setattr(ast, "parse", disturbed)
    with fresh():
        check(SOFTMAX)


@pytest.mark.slow
def test_threads_explain_and_replay_at_once() -> None:
    kernels = [eq.compile(source) for source in SOURCES]

    def work(kernel: eq.Kernel) -> list[str]:
        kernel.derivation.check()
        return kernel.explain().splitlines()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, kernels))


def test_rules_are_of_the_thread_that_entered_them() -> None:
    rule = eq.rule("half-twice", "a * 0.5 * 2", "a")
    barrier = threading.Barrier(2)

    def work(inside: bool) -> int:
        with eq.rules(*([rule] if inside else [])):
            barrier.wait()
            return eq.compile("y[i] = sum[j](x[i,j] * 0.5 * 2)").rule_counts.get("half-twice", 0)

    with ThreadPoolExecutor(2) as pool:
        inside, outside = pool.map(work, (True, False))
    assert inside and not outside


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch with threads that a fork leaves behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    square = torch.ones(1000, 1000)
    assert (square @ square).exp().sum() > 0
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_forked_child_compiles_and_calls() -> None:
    kernel, streamed = eq.compile(SOFTMAX), eq.compile("y[i] = log(sum[j](exp(x[i,j])))")
    tall, wide = torch.randn(3000, 40), torch.randn(1, 200_000)
    half = tall.half()
    wanted, whole = kernel(x=tall), streamed(x=tall)

    def work() -> None:
        assert torch.get_num_threads() == 2
        assert (kernel(x=tall).numpy() == wanted.numpy()).all()
        for given in (half, wide, tall.numpy(), torch.empty(0, 40_000), torch.empty(40_000, 0)):
            kernel(x=given)
        state = streamed.combine(*(streamed.update(streamed.init(), x=tall) for _ in range(2)))
        assert (abs(streamed.finish(state).numpy() - whole.numpy()) < 1).all()
        eq.reference(SOURCES[2])(x=tall)
        for source in SOURCES:
            check(source)
        in_child(lambda: check(SOFTMAX))
        assert torch.get_num_threads() == 2

    in_child(work)
    check(SOURCES[1])


@pytest.mark.usefixtures("two_threads")
def test_a_forked_child_evaluates_functions_that_torch_has() -> None:
    x = np.linspace(-3, 3, 300_000)

    def work() -> None:
        for fn in ("erf", "gelu"):
            assert np.isfinite(eq.reference(f"y[i] = {fn}(x[i])")(x=x)).all()
            assert np.isfinite(FloatDomain().call(fn, [x])).all()
        assert np.isfinite(rounded(x, "bf16")).all()

    in_child(work)


@pytest.mark.slow
def test_a_child_that_was_forked_while_others_compile_compiles() -> None:
    """Modules are imported before: Python gives a child the lock of one that another thread is importing."""
    check(SOURCES[2])
    done = threading.Event()

    def busy() -> None:
        while not done.is_set():
            check(SOURCES[2])

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(busy) for _ in range(2)]
        try:
            for _ in range(3):
                in_child(lambda: check(SOFTMAX))
        finally:
            done.set()
        for other in others:
            other.result()


def test_a_child_leaves_the_processes_of_its_parent_alone() -> None:
    with session(PREPARE) as saturation:
        saturation.run(['(let $a_ (Num "3"))'])
        in_child(lambda: check(SOFTMAX))
        assert saturation.read().roots.keys() == {"$a_"}


def _interrupted(seconds: float) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with suppress(KeyboardInterrupt):
            eq.compile(SOURCES[2], verify=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_compiling_goes_on_after_it_was_interrupted_anywhere() -> None:
    for milliseconds in (1, 3, 5, 8, 12, 17, 23, 30, 40, 55, 70, 90):
        _interrupted(milliseconds / 1e3)
        assert not any(graphs.broken for graphs in client._idle)
    check(SOURCES[2])


def test_an_interrupted_request_takes_its_process_along(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: int) -> Any:
        raise KeyboardInterrupt

    with session(PREPARE) as saturation:
        process = saturation.graphs._process
    with monkeypatch.context() as patch:
        patch.setattr(server, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt), session(PREPARE):
            pass
    assert process.returncode == -signal.SIGKILL
    check(SOFTMAX)


def test_an_interrupt_before_an_e_graph_is_open_costs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: client.Graphs, *arguments: object) -> None:
        raise KeyboardInterrupt

    with fresh():
        with monkeypatch.context() as patch:
            patch.setattr(client.Graphs, "open", interrupted)
            with pytest.raises(KeyboardInterrupt):
                eq.compile(SOFTMAX)
        (process,) = client.processes()
        check(SOFTMAX)
        assert client.processes() == (process,)


def test_a_process_that_nobody_holds_is_ended() -> None:
    graphs = client.Graphs()
    process = graphs._process
    del graphs
    assert process.returncode == -signal.SIGKILL
    assert process.stdin is not None and process.stdin.closed


def test_ctrl_c_on_a_terminal_is_not_for_the_process_of_e_graphs() -> None:
    with session(PREPARE) as saturation:
        assert os.getpgid(saturation.graphs.process) != os.getpgrp()


def test_a_process_that_is_killed_is_an_error_and_then_replaced() -> None:
    killed = pytest.raises(
        eq.EqfuseError, match=r"the process that rewrites programs \(.*\) was killed by SIGKILL"
    )
    with killed, session(PREPARE) as saturation:
        saturation.graphs._process.kill()
        saturation.read()
    check(SOFTMAX)
    for graphs in client._idle:
        graphs._process.kill()
    time.sleep(0.1)
    check(SOFTMAX)


def test_a_failure_of_egglog_is_an_error() -> None:
    with pytest.raises(eq.EqfuseError, match="egglog failed"), session(PREPARE) as saturation:
        saturation.run(["(let $a_ (Unknown))"])
    check(SOFTMAX)


def test_what_is_no_exception_there_is_one_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = Path(server.__file__).read_text(encoding="utf-8")
    broken = tmp_path / "server.py"
    broken.write_text(
        text.replace("def read(self) -> Any:", "def read(self) -> Any:\n        raise SystemExit('panic')")
    )
    monkeypatch.setattr(server, "__file__", str(broken))
    with fresh(), pytest.raises(eq.EqfuseError, match="SystemExit: panic"):
        eq.compile(SOFTMAX)


def test_without_egglog_compiling_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with fresh(), monkeypatch.context() as patch:
        patch.setattr(client, "find_spec", lambda name: None)
        with pytest.raises(eq.EqfuseError, match="egglog is not installed"):
            eq.compile(SOFTMAX)
    module = tmp_path / "bindings.so"
    module.write_bytes(b"nothing")
    with fresh(), monkeypatch.context() as patch:
        patch.setattr(client, "_bindings", lambda: module)
        with pytest.raises(eq.EqfuseError, match="egglog failed: it cannot be loaded"):
            eq.compile(SOFTMAX)


@pytest.mark.parametrize(
    ("executable", "text"),
    [
        ("/bin/false", "ended with status 1"),
        ("/nowhere/python", "cannot be started: No such file or directory"),
    ],
)
def test_without_a_python_to_run_compiling_says_so(
    executable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "get_executable", lambda: executable)
    with fresh(), pytest.raises(eq.EqfuseError, match=f"{executable} .*{text}\n.*set_executable"):
        eq.compile(SOFTMAX)


@pytest.mark.slow
def test_the_compiled_module_of_egglog_is_all_that_is_needed(tmp_path: Path) -> None:
    package = tmp_path / "egglog"
    package.mkdir()
    (package / "__init__.py").write_text("")
    module = client._bindings()
    (package / module.name).symlink_to(module)
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import eqfuse as eq
from eqfuse.rules.egraph import client
assert str(client._bindings()).startswith({str(tmp_path)!r})
assert eq.compile({SOFTMAX!r}).certificate.ok
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_thread_may_have_several_e_graphs_open() -> None:
    with session(PREPARE) as outer:
        outer.run(['(let $a_ (Num "3"))'])
        with session(PREPARE) as inner:
            inner.run(['(let $b_ (Num "4"))'])
            assert inner.read().roots.keys() == {"$b_"}
        assert outer.read().roots.keys() == {"$a_"}
    with session(PREPARE) as again:
        assert not again.read().roots


SCRIPT = f"""
import sys
import eqfuse as eq
from eqfuse.rules.egraph import client
eq.compile({SOFTMAX!r})
print("egglog" in sys.modules, *client.processes())
{{}}
"""


@pytest.mark.parametrize(
    "end", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "import os; os._exit(0)"]
)
@pytest.mark.slow
def test_processes_end_with_their_parent(end: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(end)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    imported, pid = run.stdout.split()
    assert imported == "False"
    assert not run.stderr
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.05)
    pytest.fail("the process is still there")
