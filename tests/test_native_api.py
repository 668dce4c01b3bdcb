"""Native kernels through the public interface: when they run, what is said where they do not, and their cache."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import needs
import pytest
import torch

import eqfuse as eq
from eqfuse.cache.files import read_whole
from eqfuse.extract.machine import compiler
from eqfuse.tile import host
from eqfuse.tile.native import build, printer
from eqfuse.tile.native.blocks import native_configs
from eqfuse.tile.native.nodes import NotNative
from eqfuse.tile.native.run import NativeProgram, longest
from eqfuse.tile.nodes import Constant, Elementwise, Kernel, Let, Start, TileProgram, Value

SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "eqfuse" / "native"


def softmax(native: str | None, source: str = SOFTMAX) -> tuple[eq.Kernel, torch.Tensor]:
    kernel = eq.compile(source, native=native, verify=False)
    x = torch.randn(33, 71)
    torch.testing.assert_close(kernel(x=x), x.softmax(1))
    return kernel, x


@needs.cxx
def test_waiting_runs_cpp_at_once() -> None:
    kernel, _ = softmax("wait")
    assert kernel.plan.code == "C++" and "C++" in repr(kernel.plan)
    assert "kernel1" in kernel.cpp and "exponential" in kernel.cpp


@needs.cxx
def test_the_first_call_does_not_wait_for_the_compiler(own_cache: Path) -> None:
    kernel, x = softmax("background")
    deadline = time.monotonic() + 60
    assert kernel.plan.code in ("torch calls until C++ is compiled", "C++")
    while kernel.plan.code != "C++" and time.monotonic() < deadline:
        time.sleep(0.05)
        torch.testing.assert_close(kernel(x=x), x.softmax(1))
    assert kernel.plan.code == "C++"


@needs.cxx
def test_calls_after_the_compiler_go_straight_to_its_code(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call of a kind makes what runs the others, though the first one ran as torch calls."""
    kernel = eq.compile("y[i] = sum[j](x[i,j])", target="cpu", native="background")
    x = torch.randn(5, 7)
    kernel(x=x)
    runs, deadline = kernel._calls.runners.host(kernel._current), time.monotonic() + 60
    while not runs.is_settled({"x": x}) and time.monotonic() < deadline:
        time.sleep(0.05)
    kernel(x=x)
    monkeypatch.setattr(NativeProgram, "__call__", lambda *_: pytest.fail("a call was looked at"))
    torch.testing.assert_close(kernel(x=x), x.sum(1))


@needs.cxx
def test_parameters_go_straight_to_their_code_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without grad, and in forward and backward of autograd."""
    kernel = eq.compile("y[i] = sum[j](x[i,j] * w[j])", target="cpu", native="wait")
    x, w = torch.randn(5, 7, requires_grad=True), torch.nn.Parameter(torch.randn(7))

    def checked() -> None:
        with torch.no_grad():
            torch.testing.assert_close(kernel(x=x, w=w), x @ w)
        found = torch.autograd.grad(kernel(x=x, w=w), (x, w), torch.ones(5))
        torch.testing.assert_close(found, (w.detach().expand(5, 7).contiguous(), x.detach().sum(0)))

    checked()
    checked()
    monkeypatch.setattr(NativeProgram, "__call__", lambda *_: pytest.fail("a call was looked at"))
    checked()


def test_the_source_is_there_before_a_call(own_cache: Path) -> None:
    kernel = eq.compile(SOFTMAX, target="cpu", native="wait", sizes={"i": 7, "j": 300})
    before = kernel.cpp
    kernel(x=torch.randn(7, 300))
    assert kernel.plan.code == "C++" and kernel.cpp == before == kernel.sources()["C++"]
    gpu = eq.compile(SOFTMAX, target="h200")
    assert list(gpu.sources()) == ["Triton"]
    with pytest.raises(eq.EqfuseError, match="there is no C\\+\\+: nothing was called on a CPU"):
        _ = gpu.cpp


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = softmax("off")
    assert kernel.plan.code == ""
    with pytest.raises(eq.EqfuseError, match="there is no C\\+\\+: it is switched off"):
        _ = kernel.cpp
    monkeypatch.setenv("EQFUSE_NATIVE", "off")
    assert softmax(None)[0].plan.code == ""


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(eq.EqfuseError, match="native is 'now'"):
        eq.compile(SOFTMAX, native="now")
    monkeypatch.setenv("EQFUSE_NATIVE", "sometimes")
    with pytest.raises(eq.EqfuseError, match="native is 'sometimes'"):
        eq.compile(SOFTMAX)


def test_without_a_compiler_the_torch_form_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "compiler", lambda: None)
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in softmax("wait")[0].plan.code


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@needs.cxx
@pytest.mark.slow
def test_the_compiler_may_have_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """As with ccache: a program that calls the one that is its first argument."""
    found = compiler()
    assert found is not None
    wrapper = script(tmp_path / "a wrapper", 'exec "$@"')
    monkeypatch.setenv("CXX", f"'{wrapper}' {found[0]} -DWRAPPED=1")
    assert compiler() == (str(wrapper), found[0], "-DWRAPPED=1")
    assert softmax("wait")[0].plan.code == "C++"
    assert len(list(own_cache.glob("*.so"))) == 1
    monkeypatch.setenv("CXX", found[0])
    assert softmax("wait")[0].plan.code == "C++"
    assert len(list(own_cache.glob("*.so"))) == 2


BROKEN = {
    "is no command": ("no_such_compiler -O3", "is 'no_such_compiler -O3', which is no command here"),
    "is no text of a shell": ("g++ 'un", "which is no command here"),
    "fails at once": ("exit 3", "failed: exit status 3"),
    "fails at the source": (
        '[ "$1" = --version ] && exit 0\necho "kernel.cpp: error: no memory" >&2; exit 1',
        "failed: kernel.cpp: error: no memory",
    ),
    "makes nothing": ("exit 0", "compiled kernel cannot be read"),
    "makes what is no library": (
        'while [ "$#" -gt 1 ]; do shift; done\n[ "$1" = --version ] || echo nothing > "$1"',
        "compiled kernel cannot be loaded",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_compiler_that_cannot_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    text, said = BROKEN[name]
    command = text if said.endswith("no command here") else str(script(tmp_path / "cxx", text))
    monkeypatch.setenv("CXX", command)
    code = softmax("wait")[0].plan.code
    assert code.startswith("torch calls: ") and said in code


@needs.cxx
def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-include", "there_is_no_such_header.h"))
    kernel, _ = softmax("wait")
    assert "there_is_no_such_header.h" in kernel.plan.code


@needs.cxx
def test_what_has_no_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise NotNative("the function exp2 of f32")

    monkeypatch.setattr(printer, "applied", refuse)
    assert softmax("wait")[0].plan.code == "torch calls: the function exp2 of f32"


@needs.cxx
@pytest.mark.slow
def test_libraries_are_kept_by_content(own_cache: Path) -> None:
    softmax("wait")
    (first,) = own_cache.glob("*.so")
    made = first.stat().st_mtime_ns
    softmax("wait")
    assert [path.stat().st_mtime_ns for path in own_cache.glob("*.so")] == [made]
    eq.compile("y[i] = sum[j](x[i,j])", native="wait", verify=False)(x=torch.randn(3, 4))
    assert len(list(own_cache.glob("*.so"))) == 2


def test_what_is_no_library_is_told() -> None:
    with pytest.raises(NotNative, match="cannot be loaded"):
        build.load(b"nothing")


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "half": lambda path, other: os.truncate(path, path.stat().st_size // 2),
    "one page": lambda path, other: os.truncate(path, 4096),
    "another's": lambda path, other: path.write_bytes(other.read_bytes()),
    "writable by others": lambda path, other: path.chmod(0o666),
    "a folder": lambda path, other: (path.unlink(), path.mkdir()),
}


@needs.cxx
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_anew(damage: str, own_cache: Path) -> None:
    first, second = (build.library_of(source_of_a_library(number)) for number in (1, 2))
    assert (first.number(), second.number()) == (1, 2)
    paths = sorted(own_cache.glob("*.so"), key=lambda path: path.stat().st_mtime_ns)
    DAMAGES[damage](*paths)
    assert first.number() == 1  # what runs is not mapped from the cache
    assert build.library_of(source_of_a_library(1)).number() == 1
    assert read_whole(paths[0]) is not None


@needs.cxx
@pytest.mark.slow
def test_a_bit_of_a_library_decides_nothing(own_cache: Path) -> None:
    softmax("wait")
    (path,) = own_cache.glob("*.so")
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert softmax("wait")[0].plan.code == "C++" and path.read_bytes() == whole


@needs.cxx
def test_libraries_are_loaded_where_temporary_files_may_not_be_code(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with /tmp mounted noexec."""
    refused, load = [], ctypes.CDLL

    def forbidding(path: str) -> ctypes.CDLL:
        if Path(path).is_relative_to(own_cache.parent):
            return load(path)
        refused.append(path)
        raise OSError("failed to map segment from shared object")

    build.library_of(source_of_a_library(3))
    monkeypatch.setattr(ctypes, "CDLL", forbidding)
    assert build.library_of(source_of_a_library(3)).number() == 3 and refused
    assert [path.suffix for path in own_cache.parent.rglob("*") if path.is_file()] == [".so"]


@needs.cxx
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
def test_any_layout_of_the_tensors(layout: str) -> None:
    kernel, _ = softmax("wait")
    x = {
        "transposed": torch.randn(71, 33).t(),
        "strided": torch.randn(66, 142)[::2, ::2],
        "expanded": torch.randn(33, 1).expand(33, 71),
        "offset": torch.randn(40, 90)[3:36, 7:78],
    }[layout]
    before = x.clone()
    torch.testing.assert_close(kernel(x=x), x.softmax(1))
    assert kernel.plan.code == "C++" and torch.equal(x, before)


@needs.cxx
def test_one_library_for_every_size(own_cache: Path) -> None:
    kernel = eq.compile(SOFTMAX, native="wait", verify=False, prefer="resident")
    for shape in ((33, 71), (1, 16), (5, 1), (64, 300)):
        x = torch.randn(shape)
        torch.testing.assert_close(kernel(x=x), x.softmax(1))
    assert len(list(own_cache.glob("*.so"))) <= 2


@needs.cxx
@pytest.mark.parametrize("columns", [64, 70])
def test_rows_of_a_table_are_read_as_vectors(columns: int) -> None:
    """Which row is checked once for all of its elements; a row that is not there is not read."""
    kernel = eq.compile("y[i] = sum[j](t[k[i], j])", native="wait", verify=False)
    t, k = torch.randn(9, columns), torch.tensor([3, 0, 8, 8])
    torch.testing.assert_close(kernel(t=t, k=k), t[k].sum(1))
    assert kernel.cpp is not None and "? tensor1 +" in kernel.cpp
    for wrong in (9, 1 << 40, -1):
        with pytest.raises(eq.EqfuseError, match=f"'t': position {wrong} is outside a dimension of 9"):
            kernel(t=t, k=torch.tensor([3, 0, wrong, 8]))


@needs.cxx
@pytest.mark.parametrize("columns", [64, 70])
def test_rows_behind_a_mask_are_read_as_vectors(columns: int) -> None:
    """A mask that all elements of a row share is looked at once; where it does not hold nothing is read."""
    source = "t: f32[v,j]\ny[i,j] = where(0 <= k[i] and k[i] < N(v), t[k[i], j], 0)"
    kernel = eq.compile(source, native="wait")
    t, k = torch.randn(9, columns), torch.tensor([3, -1, 8, 9, 1 << 40])
    wanted = torch.where(((k >= 0) & (k < 9))[:, None], t[k.clamp(0, 8)], 0)
    torch.testing.assert_close(kernel(t=t, k=k), wanted)
    assert kernel.cpp is not None and "gather_f32" not in kernel.cpp


@needs.cxx
def test_a_product_is_computed_once_for_all_columns_beside_it() -> None:
    """Columns that the product has not are in one block, for every block computes it again."""
    kernel = eq.compile("y[b,p] = sum[o](tanh(sum[k](x[b,k] * w[o,k]))) + z[b,p]", native="wait")
    x, w, z = torch.randn(70, 40), torch.randn(50, 40), torch.randn(70, 600)
    torch.testing.assert_close(kernel(x=x, w=w, z=z), (x @ w.T).tanh().sum(1, keepdim=True) + z)
    assert len(kernel.plan.kernels) == 1
    (config,) = native_configs(kernel._current.tile, kernel.plan.configs, dict(kernel.plan.sizes))
    assert {block.axis: block.size for block in config.blocks}["p"] == 600


@needs.cxx
def test_a_vector_times_a_matrix_is_computed_once_for_a_few_rows() -> None:
    """Of one row, what its product is multiplied by has no matrix product: it is summed for each position of its own axis."""
    kernel = eq.compile(
        "y[b,p] = sum[o](sum[k](x[b,k] * w[o,k]) * z[p,o])", native="wait", reassociate="exact"
    )
    x, w, z = torch.randn(1, 512), torch.randn(512, 512), torch.randn(8, 512)
    torch.testing.assert_close(kernel(x=x, w=w, z=z), x @ w.T @ z.T, rtol=1e-4, atol=1e-2)
    (config,) = native_configs(kernel._current.tile, kernel.plan.configs, dict(kernel.plan.sizes))
    assert {block.axis: block.size for block in config.blocks}["p"] == 8


@needs.cxx
def test_a_position_outside_is_the_caller_s_error() -> None:
    kernel = eq.compile("y[i] = sum[j](x[i,j]) * t[k[i]]", native="wait", verify=False)
    x, t = torch.randn(9, 20), torch.randn(4)
    k = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0])
    torch.testing.assert_close(kernel(x=x, t=t, k=k), x.sum(1) * t[k])
    k[7] = 4
    with pytest.raises(eq.EqfuseError, match="'t': position 4 is outside a dimension of 4"):
        kernel(x=x, t=t, k=k)
    assert kernel.plan.code == "C++"
    window = "O[n,o,y] = sum[c](I[c,off[n]+y] * W[o,c])\ny: axis[19]"
    kernel = eq.compile(window, native="wait", verify=False)
    given, weights, off = torch.randn(40, 21), torch.randn(20, 40), torch.tensor([0, 2, 1])
    wanted = torch.stack([weights @ given[:, n : n + 19] for n in off.tolist()])
    torch.testing.assert_close(kernel(I=given, W=weights, off=off), wanted)
    with pytest.raises(eq.EqfuseError, match="'I': position 21 is outside a dimension of 21"):
        kernel(I=given, W=weights, off=off + 1)
    assert kernel.plan.code == "C++"


@needs.cxx
def test_a_forked_child_computes_alone() -> None:
    kernel = eq.compile(SOFTMAX, native="wait", verify=False)
    x = torch.randn(300, 700)
    wanted = kernel(x=x).numpy()
    child = os.fork()
    if not child:
        os._exit(0 if (kernel(x=x).numpy() == wanted).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs.cxx
@pytest.mark.parametrize("rows", [3, 700])
def test_any_number_of_threads_gives_one_result(rows: int) -> None:
    kernel = eq.compile(SOFTMAX, native="wait", verify=False)
    x = torch.randn(rows, 300)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(kernel(x=x))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def source_of_a_library(number: int) -> str:
    return f'extern "C" int number() {{ return {number}; }}\n'


@needs.cxx
def test_a_cache_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert softmax("wait")[0].plan.code == "C++"


@needs.cxx
def test_threads_that_compile_one_source_at_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, replace = threading.Barrier(2), os.replace

    def both_at_once(*paths: Any) -> None:
        together.wait(60)
        replace(*paths)

    monkeypatch.setattr(os, "replace", both_at_once)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(build.library_of, [source_of_a_library(71)] * 2))
    assert [library.number() for library in made] == [71, 71]
    assert [path.suffix for path in own_cache.iterdir()] == [".so"]


def until_compiled(kernel: eq.Kernel, x: torch.Tensor) -> str:
    deadline = time.monotonic() + 100
    while kernel.plan.code.endswith("until C++ is compiled") and time.monotonic() < deadline:
        time.sleep(0.05)
        kernel(x=x)
    return kernel.plan.code


@needs.cxx
def test_what_breaks_in_the_background_is_told_and_stops_nothing_else(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    def breaks(*_: object) -> str:
        raise KeyError("a dim")

    with monkeypatch.context() as broken:
        broken.setattr(printer, "applied", breaks)
        assert until_compiled(*softmax("background")) == "torch calls: KeyError: 'a dim'"
    assert until_compiled(*softmax("background")) == "C++"


@needs.cxx
def test_a_forked_child_compiles_what_its_parent_had_begun(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setattr(host, "_background", lambda job: None)  # a parent that never gets to it
    kernel, x = softmax("background")
    monkeypatch.undo()
    assert kernel.plan.code == "torch calls until C++ is compiled"
    child = os.fork()
    if not child:
        kernel(x=x)
        os._exit(0 if until_compiled(kernel, x) == "C++" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs.cxx
@pytest.mark.slow
def test_a_process_that_ends_while_it_compiles_leaves_no_file(own_cache: Path) -> None:
    child = (
        "import torch, eqfuse as eq\n"
        "k = eq.compile('y[i] = sum[j](x[i,j] * 3)', native='background', verify=False)\n"
        "k(x=torch.randn(3, 4))\n"
        "print(k.plan.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, timeout=100, check=True
    )
    assert "C++" in done.stdout and not done.stderr
    assert {path.suffix for path in own_cache.glob("*")} <= {".so"}
    for path in own_cache.glob("*.so"):
        build.load(read_whole(path) or b"")


@needs.cxx
@pytest.mark.slow
def test_an_axis_too_long_for_positions_of_32_bits_is_run_by_torch_calls() -> None:
    """`i * 100` has 32 bits in C++ up to 2**24 positions; no tensor has the axis."""
    source = "y = sum[i](where(i * 100 >= 0, 1, 0))"
    kernel = eq.compile(source, target="cpu", native="wait", prefer="resident", verify=False)
    assert kernel(sizes={"i": 1000}) == 1000 and kernel.plan.code == "C++"
    assert kernel(sizes={"i": 2**25}) == 2**25
    assert kernel.plan.code == f"torch calls: axis i has {2**25} positions, of {2**30 // 100} in C++"


@needs.cxx
@pytest.mark.parametrize("source", ["y = sum[j](x[j])", "y = sum[i,j](x[i,j])"])
@pytest.mark.slow
def test_more_positions_than_32_bits_count(source: str) -> None:
    """2**31 bytes that are one, and two axes that are not joined where together they are too long."""
    shape = (2**16 + 2, 2**15) if "[i,j]" in source else (2**31 + 70,)
    x = torch.ones(1, dtype=torch.int8).expand(shape)
    found = eq.compile(source, target="cpu", native="wait", verify=False)(x=x)
    assert found.item() == math.prod(shape)


HANGING = '[ "$1" = --version ] && exit 0\nsleep 1000 &\necho $! > "$HANGING_FILE"\nwait'


def gone(file: Path) -> bool:
    """Whether the process of a hanging compiler's part, whose id is in a file, has ended."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        state = Path(f"/proc/{file.read_text().strip()}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_compiler_that_hangs_ends_with_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "cxx", HANGING)))
    monkeypatch.setenv("HANGING_FILE", str(tmp_path / "process"))
    monkeypatch.setattr(build, "SECONDS", 1)
    assert "timed out after" in softmax("wait")[0].plan.code
    assert gone(tmp_path / "process")


@pytest.mark.slow
def test_a_compiler_that_hangs_ends_with_the_process(tmp_path: Path, own_cache: Path) -> None:
    child = (
        "import os, time, torch, eqfuse as eq\n"
        "k = eq.compile('y[i] = sum[j](x[i,j] * 3)', native='background', verify=False)\n"
        "k(x=torch.randn(3, 4))\n"
        "while not os.path.exists(os.environ['HANGING_FILE']): time.sleep(0.05)\n"
        "time.sleep(0.2)\n"
    )
    given = {"CXX": str(script(tmp_path / "cxx", HANGING)), "HANGING_FILE": str(tmp_path / "process")}
    subprocess.run([sys.executable, "-c", child], env={**os.environ, **given}, timeout=100, check=True)
    assert gone(tmp_path / "process")


def test_names_of_one_kernel_say_nothing_of_another() -> None:
    """A constant of one kernel counts as what positions are multiplied with there alone, whatever has its name elsewhere."""
    at, times, found = Value("at", (), "i32"), Value("c", (), "i32"), Value("found", (), "i32")
    body = (Let(at, Start("i")), Let(times, Constant(4)), Let(found, Elementwise("mul", (at, times))))
    kernels = (
        Kernel("first", (), (), body),
        Kernel("second", (), (), (Let(replace(times, dtype="f32"), Constant(-math.inf)),)),
    )
    assert longest(TileProgram(kernels, ())) == 2**28
