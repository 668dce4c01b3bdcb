"""Known calls, `bind` and `prepare`: on a CPU, and as they launch on a GPU."""

from __future__ import annotations

import threading
from typing import Any

import needs
import numpy as np
import pytest
import torch
from fake_gpu import Gpu, gpu

import eqfuse as eq
from eqfuse.arguments import Arguments, call_key
from eqfuse.errors import BindError
from eqfuse.extract.machine import compiler as cxx
from eqfuse.tile.triton import direct

__all__ = ["gpu"]

SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
SCALED = "y[i] = sum[j](x[i,j] * w[j]) * scale + shift\nz[i] = max[j](x[i,j])\nreturn z, y"
ATTENTION = """
    s[h,j] = sum[d](q[h,d] * k[j,d]) * scale
    p[h,j] = exp(s[h,j] - max[j](s[h,j]))
    o[h,e] = sum[j](p[h,j] / sum[j](p[h,j]) * v[j,e])
    """


def attended(given: dict[str, Any]) -> torch.Tensor:
    return torch.softmax(given["scale"] * given["q"] @ given["k"].T, -1) @ given["v"]


def inputs(keys: int = 70, heads: int = 3) -> dict[str, Any]:
    shapes = {"q": (heads, 16), "k": (keys, 16), "v": (keys, 16)}
    return {"scale": 0.3, **{name: torch.randn(shape) for name, shape in shapes.items()}}


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
@pytest.mark.slow(but=["rolling"])
def test_a_known_call_on_a_gpu_goes_straight_to_what_was_compiled(gpu: Gpu, prefer: str) -> None:
    kernel = eq.compile(ATTENTION, target="h200", prefer=prefer, verify=False)
    for scale in (0.3, 0.1, -2.0):
        given = {**inputs(), "scale": scale}
        for name in "qkv":
            gpu.seen(given[name])
        torch.testing.assert_close(kernel(**given), attended(given), rtol=1e-3, atol=1e-3)
        count = len(kernel.tile.kernels)
        assert len(gpu.compiled) == count
    assert len(gpu.straight) == 2 * count
    first, second = kernel(**given), kernel(**given)
    assert first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(first, second)


class Launcher:
    """As Triton's own: gives a function in C what it was given, in another order, some of it in a tuple."""

    global_scratch_size = profile_scratch_size = 0
    launch_pdl = True

    def __init__(self, nested: bool) -> None:
        self.nested = nested
        self.launched: list[tuple[Any, ...]] = []
        self.launch = lambda *arguments: self.launched.append(arguments)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
        hooks, given = rest[:3], rest[3:]
        last = (("ptr", "i32"), given) if self.nested else given
        self.launch(x, y, z, stream, function, self.launch_pdl, None, None, packed, *hooks, *last)


@pytest.mark.parametrize("nested", [False, True])
def test_launches_are_given_what_the_launcher_gives_them(nested: bool) -> None:
    launcher = Launcher(nested)
    found = direct.arguments_of_launch(launcher, 7, 11, (4, 1, 0), 3)
    assert found is not None and found[0] is launcher.launch and not launcher.launched
    launcher(7, 1, 1, 70, 11, (4, 1, 0), None, None, None, "a", 5, 6.5)
    given = ["a", 5, 6.5]

    def filled(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(filled, part))
        if part is direct.STREAM:
            return 70
        return given[part.number] if isinstance(part, direct.Place) else part

    assert launcher.launched == [filled(tuple(found[1]))]


def test_launchers_that_do_more_are_called_themselves() -> None:
    launcher = Launcher(nested=False)
    launcher.global_scratch_size = 128
    assert direct.arguments_of_launch(launcher, 7, 11, (4, 1, 0), 3) is None
    assert direct.arguments_of_launch(print, 7, 11, (4, 1, 0), 3) is None
    twice = Launcher(nested=False)
    twice.__class__ = type(
        "Twice", (Launcher,), {"__call__": lambda self, *given: self.launch(*given, *given)}
    )
    assert direct.arguments_of_launch(twice, 7, 11, (4, 1, 0), 3) is None


def test_the_launcher_of_the_triton_at_hand_is_understood() -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    launcher = object.__new__(driver.CudaLauncher)
    launched: list[tuple[Any, ...]] = []
    for name in ("num_ctas", "global_scratch_align", "profile_scratch_align"):
        setattr(launcher, name, 1)
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
    launcher.arg_annotations, launcher.kernel_signature = ("i32",), b"i"
    launcher.launch = lambda *arguments: launched.append(arguments)
    found = direct.arguments_of_launch(launcher, 7, 11, (4, 1, 0), 2)
    assert found is not None
    text = str(found[1])
    assert text.count("Place(number=0)") == text.count("Place(number=1)") == 1 and not launched


@pytest.mark.slow
def test_what_is_unusual_goes_the_other_way(gpu: Gpu) -> None:
    kernel = eq.compile(SOFTMAX, target="h200", verify=False)
    x = gpu.seen(torch.randn(6, 40))
    kernel(x=x)
    kernel(x=x)
    assert len(gpu.straight) == 1
    gpu.watched = True
    torch.testing.assert_close(kernel(x=x), torch.softmax(x, -1))
    gpu.watched, gpu.device = False, 1
    torch.testing.assert_close(kernel(x=x), torch.softmax(x, -1))
    assert len(gpu.straight) == 1
    gpu.device = 0
    for other in (x[:, ::2], x.T, x[1:, 3:], x[:1].expand(5, 40), x.double(), x[:0], x[:, :1]):
        for _ in range(2):
            torch.testing.assert_close(kernel(x=other), torch.softmax(other, 1))
    assert np.allclose(kernel(x=x.numpy()), torch.softmax(x, -1))
    torch.testing.assert_close(kernel(x=torch.nn.Parameter(x)), torch.softmax(x, -1))
    grown = gpu.seen(x.clone()).requires_grad_()
    kernel(x=grown).square().sum().backward()
    assert grown.grad is not None
    kernel(x=x)
    assert len(gpu.straight) > 1


@pytest.mark.parametrize("native", ["off", "wait"])
def test_known_calls_on_a_cpu(native: str) -> None:
    if native == "wait" and cxx() is None:
        pytest.skip("there is no C++ compiler")
    kernel = eq.compile(SCALED, native=native, verify=False)
    for rows, shift in ((5, 0.5), (5, 2), (5, -1.0), (2, 3), (5, 2)):
        x, w = torch.randn(rows, 9), torch.randn(9)
        z, y = kernel(w=w, x=x, shift=shift, scale=2.0)
        torch.testing.assert_close(y, x @ w * 2 + shift)
        torch.testing.assert_close(z, x.amax(1))
    assert torch.equal(kernel(x=x, w=w, scale=2.0, shift=2)[1], y)
    with torch.device("meta"):
        assert kernel(x=x, w=w, scale=2.0, shift=2)[1].device.type == "cpu"
    with pytest.raises(BindError, match="'w' is a str"):
        kernel(x=x, w="w", scale=2.0, shift=2)


def test_a_negated_view_is_what_it_says() -> None:
    x = torch.randn(4, 6, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    kernel = eq.compile(SOFTMAX, verify=False)
    for _ in range(2):
        torch.testing.assert_close(kernel(x=x), torch.softmax(x, -1))


def test_threads_share_known_calls() -> None:
    kernel = eq.compile(SOFTMAX, verify=False)
    wrong: list[int] = []

    def calls(number: int) -> None:
        for step in range(50):
            x = torch.randn(1 + (number + step) % 3, 33)
            if not torch.allclose(kernel(x=x), torch.softmax(x, -1), atol=1e-6):
                wrong.append(number)

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_keys_tell_apart_what_launches_depend_on() -> None:
    x = torch.zeros(64, 64)
    views = [x, x.T, x[:32], x.view(-1)[1:1025].view(32, 32), x.half(), x.view(4, 32, 32)]
    keys = [found[0] for view in views if (found := call_key({"x": view}, None)) is not None]
    assert len(set(keys)) == len(views)
    assert call_key({"x": x}, {"j": 3}) != call_key({"x": x}, {"j": 4})
    given: list[Any] = [x.to_sparse(), torch.tensor(1.0), x.numpy(), True, "x"]
    assert [call_key({"x": value}, None) for value in given] == [None] * len(given)
    tracked = call_key({"x": x.clone().requires_grad_()}, None)
    assert tracked is not None and tracked.wants_gradient and tracked.key not in keys
    with torch.no_grad():
        untracked = call_key({"x": x.clone().requires_grad_()}, None)
    assert untracked is not None and not untracked.wants_gradient and untracked.key == keys[0]


# -- bind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", ["off", "background"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_launch_runs_again_on_the_same_tensors(native: str, dtype: torch.dtype) -> None:
    kernel = eq.compile(SCALED, native=native, verify=False)
    x, w = torch.randn(7, 12, dtype=dtype), torch.randn(12, dtype=dtype)
    launch = kernel.bind(x=x, w=w, scale=0.5, shift=1.0)
    first = launch()
    for _ in range(2):
        x.copy_(torch.randn(7, 12))
        z, y = launch()
        assert (z is first[0]) and (y is first[1])
        torch.testing.assert_close(y, (x @ w * 0.5 + 1), rtol=1e-2, atol=2e-2)
        assert torch.equal(z, x.amax(1))
    short = {torch.float32: "f32", torch.float16: "f16"}[dtype]
    assert repr(launch) == (
        f"<eqfuse.Launch fused_z_y: x: {short}[7, 12], w: {short}[12], scale=0.5, shift=1.0"
        f" -> z: {short}[7], y: {short}[7] on cpu>"
    )


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
@pytest.mark.slow(but=["rolling"])
def test_a_launch_on_a_gpu_allocates_nothing(gpu: Gpu, prefer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = eq.compile(ATTENTION, target="h200", prefer=prefer, verify=False)
    given = inputs()
    launch = kernel.bind(**given)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_strided", None)
        patched.setattr(torch, "empty", None)
        given["k"].mul_(0.5)
        found = launch()
    torch.testing.assert_close(found, attended(given), rtol=1e-3, atol=1e-3)
    assert len(gpu.straight) == len(kernel.tile.kernels)
    gpu.device = 1
    given["v"].mul_(2)
    torch.testing.assert_close(launch(), attended(given), rtol=1e-3, atol=1e-3)


def test_a_launch_with_an_empty_axis_and_with_nothing_but_sizes() -> None:
    x = torch.randn(3, 0)
    launch = eq.compile("y[i] = sum[j](x[i,j]) + 1", verify=False).bind(x=x)
    assert torch.equal(launch(), torch.ones(3)) and torch.equal(launch(), torch.ones(3))
    counted = eq.compile("y[i] = sum[j](j) + i", verify=False).bind(sizes={"i": 3, "j": 4})
    assert counted().tolist() == [6, 7, 8]


def test_a_launch_refuses_what_it_cannot_hold() -> None:
    kernel = eq.compile(SCALED, verify=False)
    x, w = torch.randn(4, 6), torch.randn(6)
    good: dict[str, Any] = {"x": x, "w": w, "scale": 1.0, "shift": 2.0}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"x": x.numpy()}, "'x' is a numpy array: a launch cannot hold it"),
        ({"scale": torch.tensor(1.0)}, "'scale' is a number in a tensor"),
        ({"x": torch.randn(4, 6, dtype=torch.complex64).conj().imag}, "'x' is a negated view"),
        ({"x": x.clone().requires_grad_()}, "'x' requires grad"),
        ({"x": x.to_sparse()}, "'x' is a sparse_coo tensor"),
        ({"x": torch.randn(4, 5)}, "axis 'j' has size"),
        ({"u": 1.0}, "the program has no input 'u'"),
    ]
    for change, message in bad:
        with pytest.raises(BindError, match=message):
            kernel.bind(**{**good, **change})
    with pytest.raises(BindError, match="1 argument without a name"):
        kernel.bind(x)
    launch = kernel.bind(**good)
    w.resize_(400_000)
    with pytest.raises(BindError, match="'w' was given other memory"):
        launch()


# -- prepare ----------------------------------------------------------------------------------------------


@needs.cxx
def test_prepared_shapes_compile_nothing_at_a_call() -> None:
    kernel = eq.compile(SCALED, verify=False, native="background")
    half = ((5, 9), torch.float16)
    assert kernel.prepare({"x": (5, 9), "w": [9]}, {"x": half, "w": ((9,), "f16")}) == 2
    for dtype in (torch.float32, torch.float16):
        x, w = torch.randn(5, 9, dtype=dtype), torch.randn(9, dtype=dtype)
        kernel(x=x, w=w, scale=1.0, shift=0.0)
        assert kernel.plan.code == "C++"
    assert kernel.prepare({"x": x, "w": w}) == 0
    assert kernel.compilations == 2
    assert kernel.prepare() == 0


def test_shapes_are_not_prepared_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(eq.EqfuseError, match="torch sees no GPU here"):
        eq.compile(SCALED, target="h200", verify=False).prepare({"x": (5, 9), "w": [9]})


def test_prepared_shapes_on_a_gpu(gpu: Gpu) -> None:
    kernel = eq.compile(ATTENTION, target="h200", prefer="split_k", verify=False)
    found = kernel.prepare({"q": (3, 16), "k": (70, 16), "v": (70, 16)}, device="cpu")
    own = [each for each in kernel.tile.kernels if each.library is None]
    assert found == len(gpu.compiled) == len(own)
    for keys in (70, 71):  # prepared, and another one of its like: neither is compiled again
        given = inputs(keys)
        for name in "qkv":
            gpu.seen(given[name])
        torch.testing.assert_close(kernel(**given), attended(given), rtol=1e-3, atol=1e-3)
    assert len(gpu.compiled) == found and len(gpu.straight) == 2 * found


def test_prepare_takes_sizes_and_integers() -> None:
    source = "L: i32\ny[i] = sum[j](where(j < L, x[i,j//2], 0)) + N(k) * sum[k](1)"
    kernel = eq.compile(source, native="off", verify=False)
    assert kernel.prepare({"x": (3, 4), "L": 2}, sizes={"j": 8, "k": 2}) == 1
    with pytest.raises(BindError, match="scalar 'L' is not given"):
        kernel.prepare({"x": (3, 4)}, sizes={"j": 8, "k": 2})


@pytest.mark.parametrize(
    "wanted", ["x", {"x": "x"}, {"x": (3, -1)}, {"x": ((3, 4), "f17")}, {"x": 3}, {"x": ((3, 4), 5)}, None]
)
def test_prepare_refuses_what_is_no_shape(wanted: Any) -> None:
    with pytest.raises(BindError, match="prepare was given"):
        eq.compile(SOFTMAX, verify=False).prepare(wanted)


def test_prepare_refuses_other_devices_and_arrays() -> None:
    kernel = eq.compile(SOFTMAX, verify=False)
    with pytest.raises(BindError, match="there is no device 'gpu'"):
        kernel.prepare({"x": (3, 4)}, device="gpu")
    with pytest.raises(BindError, match="'x' is on device 'meta'"):
        kernel.prepare({"x": (3, 4)}, device="meta")
    with pytest.raises(BindError, match="axis|dimensions"):
        kernel.prepare({"x": (3, 4, 5)})
    with pytest.raises(BindError, match="numpy array"):
        kernel.prepare({"x": np.zeros((3, 4))})


def test_known_calls_are_not_looked_at(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    kernel = eq.compile(ATTENTION, target="h200", verify=False)
    given = inputs()
    for name in "qkv":
        gpu.seen(given[name])
    kernel(**given)
    monkeypatch.setattr(Arguments, "given", None)
    torch.testing.assert_close(kernel(**given), attended(given), rtol=1e-3, atol=1e-3)
