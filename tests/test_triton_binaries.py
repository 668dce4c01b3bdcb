"""Binaries that are kept between processes: found for the arguments that Triton compiled them for, and for no others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from fake_driver import Driver, nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

import eqfuse as eq
from eqfuse.cache import entries
from eqfuse.errors import EqfuseError
from eqfuse.tile.triton import binaries, driver, launch
from eqfuse.tile.triton.binaries import Binary

__all__ = ["nvidia"]

SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
SCALED = "y[i] = a * sum[j](x[i,j])"
H200 = GPUTarget("cuda", 90, 32)


class Compiling:
    """Stands for a `@triton.jit` function: Triton specialises and compiles it as for a GPU, and nothing is launched."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.device_caches: dict[int, Any] = {0: ({},)}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def first(*arguments: Any, **options: Any) -> Any:
            kernel, backend = self.original, make_backend(H200)
            options |= {"debug": False, "instrumentation_mode": ""}
            binder = create_function_from_signature(kernel.signature, kernel.params, backend)
            bound, found, chosen = binder(*arguments, **options)
            chosen, signature, constants, attributes = kernel._pack_args(
                backend, options, bound, found, chosen
            )
            source = ASTSource(kernel, signature, constants, attributes)
            made = triton.compile(source, target=H200, options=chosen.__dict__)
            self.device_caches[0][0][len(self.device_caches[0][0])] = made
            return Ran(made)

        return first


class Ran:
    def __init__(self, made: Any) -> None:
        self.made = made

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: None


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, nvidia: Driver, tmp_path: Path) -> list[str]:
    """The modules that Triton was asked for, of processes with a cache of their own."""
    monkeypatch.setenv("EQFUSE_CACHE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[str] = []

    @lru_cache
    def loaded(source: str) -> ModuleType:
        asked.append(source)
        module = launch._loaded.__wrapped__(source, False)
        for name in module.CONFIGS:
            setattr(module, name, Compiling(getattr(module, name)))
        return module

    monkeypatch.setattr(launch, "load", loaded)
    original = binaries.compiled

    def compiled(found: Any, module: str) -> Any:
        entry = original(found, module)
        if entry is not None:
            nvidia.types[entry[1].name] = entry[1].types
        return entry

    monkeypatch.setattr(binaries, "compiled", compiled)
    return asked


def made(source: str, **options: Any) -> eq.Kernel:
    """A kernel as of a process of its own."""
    return eq.compile(source, target="h200", verify=False, **options)


def test_a_second_process_launches_what_the_first_has_compiled(nvidia: Driver, compiling: list[str]) -> None:
    x = torch.randn(64, 1000)
    first = made(SOFTMAX)
    first(x=x)
    assert len(compiling) == 1 and not nvidia.launched and first.compilations == 1
    second = made(SOFTMAX)
    y = second(x=x)
    assert len(compiling) == 1 and len(nvidia.loaded) == 1 and second.compilations == 1
    ((name, grid, threads, _, stream, overlaps, values),) = nvidia.launched
    (config,) = second.plan.configs
    rows = next((b.size for b in config.blocks if b.axis == "i"), 1)
    assert (name, grid, stream, overlaps) == ("kernel1", (-(-64 // rows), 1, 1), 70, False)
    assert threads == 32 * config.warps and nvidia.loaded[0][:4] == b"\x7fELF"
    # pointers, strides of rows (those along them are 1), sizes, and memory that is not used
    assert values[:2] == (x.data_ptr(), y.data_ptr()) and values[2:4] == (1000, 1000)
    assert 1000 in values[4:] and values[-1] == 0


def test_known_and_bound_calls_launch_it_too(nvidia: Driver, compiling: list[str]) -> None:
    made(SCALED)(x=torch.randn(8, 512), a=0.5)
    kernel = made(SCALED)
    for number in range(4):
        x = torch.randn(8, 512)
        y = kernel(x=x, a=float(number))
        *_, values = nvidia.launched[-1]
        assert {x.data_ptr(), y.data_ptr(), float(number)} <= set(values)
    assert len(nvidia.launched) == 4 and len(nvidia.loaded) == 1 and len(compiling) == 1
    bound = kernel.bind(x=x, a=2.0)
    before = len(nvidia.launched)
    assert bound() is bound.outputs["y"]
    assert len(nvidia.launched) == before + 1
    assert {x.data_ptr(), bound.outputs["y"].data_ptr(), 2.0} <= set(nvidia.launched[-1][-1])


LINEAR_ATTENTION = "j: axis[k]\ny[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d]) * v[i,k,e], 0))"


def test_calls_in_chunks_launch_the_same_each_time(nvidia: Driver, compiling: list[str]) -> None:
    """Tensors are taken as views with one more dimension, by calls that were looked at before too."""
    made(LINEAR_ATTENTION)(**{name: torch.randn(4, 4096, 64) for name in "qrv"})
    kernel, nvidia.launched = made(LINEAR_ATTENTION), []
    for count in range(1, 5):
        tensors = {name: torch.randn(4, 4096, 64) for name in "qrv"}
        y = kernel(**tensors)
        assert y.shape == (4, 4096, 64)
        pointers = {y.data_ptr()}
        launched = [each for each in kernel.plan.kernels if each.library is None]
        assert len(nvidia.launched) == count * len(launched)
        assert pointers <= {value for each in nvidia.launched for value in each[-1]}
    assert "j_chunk" in str(kernel.plan)
    bound = kernel.bind(**tensors)
    before = len(nvidia.launched)
    assert bound().shape == (4, 4096, 64) and len(nvidia.launched) > before


def test_several_kernels_share_a_call(nvidia: Driver, compiling: list[str]) -> None:
    x = torch.randn(4, 4096)
    made(SOFTMAX, prefer="split_k")(x=x)
    kernel = made(SOFTMAX, prefer="split_k")
    kernel(x=x)
    assert len(compiling) == 1
    assert len(nvidia.launched) == len(kernel.loops.kernels) > 1


@pytest.mark.slow
def test_new_lengths_launch_what_the_module_would(
    nvidia: Driver, compiling: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grids, sizes and strides of calls that go straight to binaries, beside those by way of the module's launcher."""
    lengths = (4000, 4001, 4016, 3333, 2500)
    given = [torch.randn(4, length) for length in lengths]
    for x in given:
        made(SOFTMAX, prefer="split_k")(x=x)
    launched = []
    for planner in (None, launch.TritonProgram.planner):
        monkeypatch.setattr(launch.TritonProgram, "planner", planner)
        kernel, nvidia.launched = made(SOFTMAX, prefer="split_k"), []
        for x in given:
            assert kernel(x=x).shape == x.shape
        addresses = [int(kind == "u64") for kind in nvidia.types["kernel1_partial"]]
        assert sum(addresses) > 2
        launched.append(
            [(*rest, [value for value in values if value < 2**32]) for *rest, values in nvidia.launched]
        )
    assert launched[0] == launched[1] and len(launched[0]) > len(lengths)


@pytest.mark.parametrize("change", ["other length", "unaligned", "other width"])
def test_others_are_compiled(change: str, nvidia: Driver, compiling: list[str]) -> None:
    made(SOFTMAX)(x=torch.randn(64, 1024))
    kernel = made(SOFTMAX)
    kernel(x=torch.randn(64, 1024))
    given = {
        "other length": torch.randn(64, 1000),
        "unaligned": torch.randn(64 * 1024 + 1)[1:].view(64, 1024),
        "other width": torch.randn(64, 1024, dtype=torch.float64),
    }[change]
    kernel(x=given)
    assert len(nvidia.launched) == 1 and kernel.compilations >= 2


def without_a_driver() -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


def test_faults_are_misses(nvidia: Driver, compiling: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 1024)
    made(SOFTMAX)(x=x)
    (path,) = entries.files(binaries.KIND)
    whole = path.read_text()
    for number, text in enumerate(("", "{}", whole.replace('"warps": ', '"warps": 1'), whole[:-40])):
        path.write_text(text)
        made(SOFTMAX)(x=x)
        assert not nvidia.launched and len(compiling) == 1, number
    path.write_text(whole)
    nvidia.statuses["cuModuleLoadData"] = [200]
    made(SOFTMAX)(x=x)
    assert not nvidia.launched
    monkeypatch.setattr(driver, "library", without_a_driver)
    made(SOFTMAX)(x=x)
    assert not nvidia.launched
    monkeypatch.setattr(driver, "library", lambda: nvidia)
    monkeypatch.setattr(binaries, "triton_stamps", lambda: [["__init__.py", 1, 2]])
    made(SOFTMAX)(x=x)
    assert not nvidia.launched


def test_a_thread_without_a_context_gets_one(nvidia: Driver, compiling: list[str]) -> None:
    x = torch.randn(64, 1024)
    made(SOFTMAX)(x=x)
    kernel = made(SOFTMAX)
    kernel(x=x)
    entered = nvidia.entered
    nvidia.statuses["cuLaunchKernelEx"] = [201]
    kernel(x=x)
    assert nvidia.entered == entered + 1 and len(nvidia.launched) == 2
    nvidia.statuses["cuLaunchKernelEx"] = [700]
    with pytest.raises(EqfuseError, match="cannot launch kernel1: CUDA_ERROR_OF_A_TEST"):
        kernel(x=x)


def test_nothing_is_kept_where_that_is_switched_off(
    nvidia: Driver, compiling: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQFUSE_CACHE", "off")
    assert binaries.key_of("0", "kernel1", ["i32"], dict.fromkeys(binaries._OPTIONS, 1), "sm_90") is None
    made(SOFTMAX)(x=torch.randn(64, 1024))
    assert not entries.files(binaries.KIND)


def test_tensors_on_a_cpu_are_not_served() -> None:
    assert not launch.is_served([torch.zeros(3), 1.0])
    assert not launch.is_served([1.0])


def test_values_are_specialised_as_triton_does() -> None:
    types = ["*fp32", "*fp32", "", "", "", "", "", "fp64", "constexpr"]
    values = [32, 40, 1, 1, 48, 3, 2**40, 0.5, "int32"]
    free = [False, False, False, True, False, False, False, False, False]
    found, places = binaries.specialised(types, values, free)
    assert found == ["*fp32D", "*fp32", "=1", "i32", "i32D", "i32", "i64D", "fp64", "=int32"]
    assert places == (0, 1, 3, 4, 5, 6, 7)


def test_parameters_are_read_from_assembly() -> None:
    text = """
.visible .entry kernel1(
	.param .u64 .ptr .global .align 1 kernel1_param_0,
	.param .u32 kernel1_param_1,
	.param .b32 kernel1_param_2,
	.param .f32 kernel1_param_3,
	.param .u64 .ptr .global .align 1 kernel1_param_4
)
.reqntid 128
"""
    assert binaries.parameter_types(text, "kernel1") == ("u64", "u32", "u32", "f32", "u64")
    odd = text.replace(".param .u32 kernel1_param_1", ".param .align 64 .b8 kernel1_param_1[128]")
    assert binaries.parameter_types(odd, "kernel1") is None


def test_entries_are_read_as_they_were_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    binary = Binary("kernel1", b"\x00\xff" * 40, 1024, 4, True, ("u64", "u32"), (0, 2))
    key = {"module": "0", "kernel": "kernel1"}
    binaries.keep(key, binary)
    assert binaries.read(key) == binary
    assert binaries.read({**key, "module": "1"}) is None


@pytest.mark.slow
def test_a_warm_call_imports_no_triton(nvidia: Driver, compiling: list[str], tmp_path: Path) -> None:
    made(SOFTMAX)(x=torch.randn(64, 1024))
    text = """
import sys; sys.path[:0] = ["tests"]
import pytest, torch
from fake_driver import nvidia
import eqfuse as eq
patch = pytest.MonkeyPatch()
driver = nvidia.__wrapped__(patch) if hasattr(nvidia, "__wrapped__") else nvidia._get_wrapped_function()(patch)
driver.types["kernel1"] = ("u64",) * 2
eq.compile(SOURCE, target="h200", verify=False)(x=torch.randn(64, 1024))
print(len(driver.launched), "triton" in sys.modules)
""".replace("SOURCE", repr(SOFTMAX))
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["1", "False"], done.stderr[-2000:]
