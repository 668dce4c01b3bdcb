"""What a call launches is compiled while its plan is verified: by a driver of Triton's that has no GPU, and launches nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import eqfuse as eq
from eqfuse import certification, compiler
from eqfuse.arguments import Given
from eqfuse.calls.runners import Runners
from eqfuse.compiled import Compiled
from eqfuse.devices import Target
from eqfuse.errors import EqfuseError, VerificationError
from eqfuse.tile.triton import ahead, launch
from eqfuse.tile.triton.ahead import Ahead, is_aligned
from eqfuse.tile.triton.launch import TritonProgram, load

triton = pytest.importorskip("triton")

ROWS = "m[i] = max[j](x[i,j])\ny[i] = sum[j](exp(x[i,j] - m[i])) * m[i]\nreturn y"
TWO = "c[j] = sum[i](x[i,j] * w[i])\nr[i] = sum[j](x[i,j])\nreturn c, r"
PRODUCTS = """
    q: f16[h,i,d]
    k: f16[h,j,d]
    v: f16[h,j,e]
    y: f16[h,i,e]
    s[h,i,j] = sum[d](q[h,i,d] * k[h,j,d])
    p[h,i,j] = exp(s[h,i,j] - max[j](s[h,i,j]))
    y[h,i,e] = sum[j](p[h,i,j] * v[h,j,e]) / sum[j](p[h,i,j])
    return y
"""


class _Driver:
    """A Hopper GPU that is not there."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        room = {"max_shared_mem": 227 << 10, "multiprocessor_count": 132}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: room, load_binary=lambda *given: (1, 1, 0, 0, 1024)
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *given: self.launched.append(metadata.name)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[_Driver]:
    from triton.runtime.driver import driver

    made, before = _Driver(), driver._active
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    driver.set_active(made)
    launch._loaded.cache_clear()
    yield made
    driver._active = before
    launch._loaded.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles."""
    from triton import knobs

    names: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda src, **_: names.append(src.name))
    yield names


def _program(source: str, sizes: dict[str, int]) -> tuple[TritonProgram, bool]:
    kernel = eq.compile(source, target="h200", sizes=sizes, assume_finite=True)
    compiled = kernel._current
    if compiled.roles is None:
        return TritonProgram(kernel.triton, kernel.name), False
    return TritonProgram(kernel._shapes.gluon(compiled), kernel.name), True


SIZES = {"h": 32, "i": 8192, "j": 8192, "d": 128, "e": 128}
CASES = {
    "a row a block": (ROWS, {"i": 64, "j": 512}, {"x": (64, 512)}),
    "two kernels": (TWO, {"i": 4096, "j": 512}, {"x": (4096, 512), "w": (4096,)}),
    "roles": (PRODUCTS, SIZES, {name: (32, 8192, 128) for name in "qkv"}),
}


@pytest.mark.parametrize("name", [*CASES])
def test_a_launch_finds_what_was_compiled_ahead(name: str, driver: _Driver, compiled: list[str]) -> None:
    source, sizes, shapes = CASES[name]
    program, in_roles = _program(source, sizes)
    assert in_roles == (name == "roles")
    tensors = {
        n: torch.empty(s, dtype=torch.float16 if in_roles else torch.float32) for n, s in shapes.items()
    }
    program.begin({**tensors, "sizes": sizes})
    program._ahead[0].wait()
    kernels = sorted(load(program.source_text).CONFIGS)
    assert sorted(compiled) == kernels and not driver.launched
    program(**tensors, sizes=sizes)
    assert sorted(compiled) == kernels and driver.launched == list(load(program.source_text).CONFIGS)


def test_other_addresses_are_left_to_the_launch(driver: _Driver, compiled: list[str]) -> None:
    x = torch.empty(64 * 512 + 1)[1:].view(64, 512)
    assert not is_aligned({"x": x})
    program, _ = _program(*CASES["a row a block"][:2])
    program.begin({"x": x})
    assert not program._ahead
    program(x=x)
    assert driver.launched and len(compiled) == 1


def test_the_launch_raises_what_could_not_be_compiled(
    driver: _Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _ = _program(*CASES["a row a block"][:2])
    (name,) = program._triton.CONFIGS
    getattr(program._triton, name).device_caches.clear()
    tried: list[Any] = []

    def refused(*given: Any, **options: Any) -> None:
        tried.append(given)
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr("triton.compiler.compile", refused)
    x = torch.empty(64, 512)
    program.begin({"x": x})
    program._ahead[0].wait()
    assert len(tried) == 1
    with pytest.raises(EqfuseError, match="Triton refused a kernel of fused_y"):
        program(x=x)
    assert len(tried) > 1


def test_a_fault_of_the_launcher_is_the_launchs(driver: _Driver) -> None:
    def fails() -> ModuleType:
        raise OSError("no room")

    begun = Ahead(fails, "f", {"x": torch.empty(4)})
    begun.wait()


def test_a_forked_child_waits_for_no_thread(driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = _program(*CASES["a row a block"][:2])
    begun = Ahead(lambda: program._triton, program.name, {"x": torch.empty(64, 512)})
    begun.wait()
    begun._kernels.append(type(begun._launcher)())  # one that never ends
    monkeypatch.setattr(ahead.os, "getpid", lambda: begun._process + 1)
    begun.wait()


def test_the_hash_of_triton_is_begun_where_a_kept_plan_has_roles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """By which its binaries are looked up; what has none needs no Triton in a second process."""
    hashed: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("EQFUSE_CACHE", "on")
    monkeypatch.setattr(ahead, "hash_library", lambda: hashed.append(threading.current_thread().name))
    options: dict[str, Any] = {"target": "h200", "sizes": SIZES, "assume_finite": True, "verify": False}
    for initialized, expected in ((True, 0), (False, 0), (True, 1)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_there=initialized: is_there)
        assert any(eq.compile(PRODUCTS, **options).plan.roles)
        eq.compile(ROWS, target="h200", verify=False)
        for thread in threading.enumerate():
            if thread.name == "eqfuse hashes Triton":
                thread.join()
        assert hashed == ["eqfuse hashes Triton"] * expected


def test_threads_end_once_all_is_compiled(driver: _Driver) -> None:
    program, _ = _program(*CASES["two kernels"][:2])
    begun = Ahead(lambda: program._triton, program.name, {"x": torch.empty(32, 48), "w": torch.empty(32)})
    begun.wait()
    for thread in begun._threads._threads:
        thread.join(10)
        assert not thread.is_alive()


# Calls ---------------------------------------------------------------------------------------------


class _OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> eq.Kernel:
    monkeypatch.setattr(Target, "of", lambda self, tensors: self.device)
    return eq.compile(ROWS, target="h200")


def test_a_call_begins_to_compile_before_its_plan_is_verified(
    kernel: eq.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    begin, certify = TritonProgram.begin, certification.certify
    monkeypatch.setattr(
        TritonProgram, "begin", lambda self, values: events.append(f"begin {values['sizes']}")
    )
    monkeypatch.setattr(compiler, "certify", lambda *given: [events.append("certify"), certify(*given)][1])
    x = torch.empty(64, 70000).as_subclass(_OnGpu)
    given = Given({"x": x}, {}, None, numpy=False)
    kernel._routes.routed(replace(given, is_run=False))
    assert events == ["certify"]
    events.clear()
    x = torch.empty(3, 17).as_subclass(_OnGpu)
    routed = kernel._routes.routed(Given({"x": x}, {}, None, numpy=False))
    sizes = routed.special.sizes
    assert events == [f"begin {sizes}", "certify"] and begin is not TritonProgram.begin
    runners = kernel._calls.runners
    (_, launcher) = runners._begun[id(routed.special.compiled)]
    runners.runner(routed.special.compiled)
    assert runners._programs[id(routed.special.compiled)][1] is launcher and not runners._begun


def test_what_is_not_verified_is_compiled_and_not_run(
    kernel: eq.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Compiled] = []

    def refuses(*given: Any) -> None:
        raise VerificationError("the fused program was not verified", hint="")

    monkeypatch.setattr(Runners, "begin", lambda self, given, compiled, sizes: begun.append(compiled))
    monkeypatch.setattr(compiler, "certify", refuses)
    with pytest.raises(VerificationError):
        kernel._routes.routed(Given({"x": torch.empty(3, 17)}, {}, None, numpy=False))
    assert len(begun) == 1 and not kernel._calls.runners._runners
