"""Sums over prefixes with axes in chunks: the programs that are made, their kernels, what is left as it is, and mutants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse import certification, compiler
from eqfuse.calls.routing import Routes
from eqfuse.compiled import Asked, Compiled
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.differentiate.gradient import saving_gradient
from eqfuse.errors import VerificationError
from eqfuse.loops.plan import SCANS
from eqfuse.terms.interpreter import reference
from eqfuse.terms.parser import parse, sized_axes, spare_axes
from eqfuse.terms.printer import show_program
from eqfuse.terms.split_axes import chunk_of, split_axes
from eqfuse.terms.types import program_dtypes
from eqfuse.terms.views import Views
from eqfuse.tile.triton.launch import interpret

ATTENTION = "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d]) * v[i,k,e], 0))"
GATES = "A[i,j] = sum[k](where(k <= j, g[i,k], 0))\n"
GATED = "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d]) * exp(A[i,j] - A[i,k]) * v[i,k,e], 0))"

PROGRAMS = {
    "attention": ATTENTION,
    "of the positions before": ATTENTION.replace("<=", "<"),
    "from each position on": ATTENTION.replace("<=", ">="),
    "of the positions after": ATTENTION.replace("<=", ">"),
    "by a negated mask": ATTENTION.replace("k <= j", "not (k > j)"),
    "with a mask of data": ATTENTION.replace("k <= j", "(k <= j) & (ok[k] > 0)"),
    "retention": ATTENTION.replace("* v", "* exp((k - j) * h[i]) * v"),
    "retention, by the distance": ATTENTION.replace("* v", "* exp(-(h[i] * (j - k))) * v"),
    "gates": GATES + GATED,
    "gates of the positions before": GATES.replace("<=", "<") + GATED.replace("<=", "<"),
    "gates, backwards": GATES + GATED.replace("<=", ">=").replace("A[i,j] - A[i,k]", "A[i,k] - A[i,j]"),
    "gates, from the end": GATES.replace("<=", ">=")
    + GATED.replace("<=", ">=").replace("A[i,j] - A[i,k]", "A[i,j] - A[i,k]"),
    "gates of each feature": "A[i,j,d] = sum[k](where(k <= j, g[i,k] * w[d], 0))\n"
    "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d] * exp(A[i,j,d] - A[i,k,d])) * v[i,k,e], 0))",
    "normalised": "s[i,j,k] = where(k <= j, sum[d](sq(q[i,j,d]) * sq(r[i,k,d])), 0)\n"
    "y[i,j,e] = sum[k](s[i,j,k] * v[i,k,e]) / (sum[k](s[i,j,k]) + 1)",
    "heads that share keys": GATES
    + "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i//2,k,d]) * exp(A[i,j] - A[i,k]) * v[i,k,e], 0))",
    "a state that is written": "S[i,j,d,e] = sum[k](where(k <= j, r[i,k,d] * v[i,k,e], 0))\n"
    "y[i,j,e] = sum[d](q[i,j,d] * S[i,j,d,e])",
    "beside a mean": ATTENTION + " / (j + 1) + sum[k](v[i,k,e]) / N(k)",
    "beside a maximum": ATTENTION + " + max[k](where(k <= j, g[i,k], -inf))",
    "twice": "u[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d]) * v[i,k,e], 0))\n"
    "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d]) * u[i,k,e], 0))",
}


def text_of(source: str) -> str:
    return f"j: axis[k]\n{source}\nreturn y"


def inputs(source: str, n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (2, n, 3),
        "r": (2, n, 3),
        "v": (2, n, 4),
        "g": (2, n),
        "h": (2,),
        "w": (3,),
        "ok": (n,),
    }
    found = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    for name in ("g", "h", "w"):
        found[name] = found[name].abs() / 4
    found["g"] = -found["g"]
    return {name: value for name, value in found.items() if f"{name}[" in source}


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run in chunks wherever there are any, whatever is predicted."""
    monkeypatch.setattr(Routes, "_chosen", lambda *arguments: True)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("n", [12, 9, 7, 1])
def test_the_program_in_chunks_says_the_same(name: str, n: int) -> None:
    program = parse(text_of(PROGRAMS[name]))
    split = split_axes(program)
    assert split is not None
    values = {key: value.double().numpy() for key, value in inputs(PROGRAMS[name], n).items()}
    expected = reference(program, values, {}, None)
    views = {key: value.reshape(split.shape(key, value.shape)) for key, value in values.items()}
    again = parse(show_program(split.program))
    found = reference(again, views, {}, {"j_chunk": n // chunk_of(n), "j_in": chunk_of(n)})
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(but=["attention", "gates"])
def test_calls_in_chunks_are_verified_and_right(name: str) -> None:
    source = text_of(PROGRAMS[name])
    kernel = eq.compile(source)
    values = inputs(PROGRAMS[name], 256)
    found = kernel(**values)
    assert kernel.certificate.ok
    assert any("axes in chunks" in line for line in kernel.certificate.passes)
    assert "It runs as the program below: axes in chunks" in " ".join(kernel.explain().split())
    expected = torch.from_numpy(eq.reference(source)(**values))
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    kernel.derivation.check()


STRONG = text_of(GATES + GATED)


@pytest.mark.usefixtures("in_chunks")
def test_strong_decays_stay_finite() -> None:
    """Exponentials of running sums themselves would be 0 and infinite."""
    values = inputs(STRONG, 512)
    values["g"] = values["g"] * 40
    found = eq.compile(STRONG, verify=False)(**values)
    expected = torch.from_numpy(eq.reference(STRONG)(**values))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("name", ["attention", "gates", "normalised"])
@pytest.mark.slow(but=["gates"])
def test_gradients_in_chunks(name: str) -> None:
    source = text_of(PROGRAMS[name])
    n = 512
    values = {key: value.requires_grad_() for key, value in inputs(PROGRAMS[name], n).items()}
    if "g" in values:
        values["g"] = (values["g"].detach() * 4).requires_grad_()
    exact = {key: value.detach().double().requires_grad_() for key, value in values.items()}
    scores = exact["q"] @ exact["r"].transpose(1, 2)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    if name == "gates":
        sums = exact["g"].cumsum(1)
        scores = scores * (sums[:, :, None] - sums[:, None, :]).masked_fill(~mask, 0).exp()
    if name == "normalised":
        scores = exact["q"].square() @ exact["r"].square().transpose(1, 2)
    scores = scores.masked_fill(~mask, 0)
    y = scores @ exact["v"]
    if name == "normalised":
        y = y / (scores.sum(-1, keepdim=True) + 1)
    above = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (y * above.double()).sum().backward()
    kernel = eq.compile(source, verify=False)
    (kernel(**values) * above).sum().backward()
    for key, value in values.items():
        assert value.grad is not None
        wanted = exact[key].grad
        assert (value.grad - wanted).abs().max() <= 1e-4 * wanted.abs().max(), key
    assert "chunk" in str(kernel.backward.loops)


REFUSED = {
    "a softmax": "s[i,j,k] = where(k <= j, sum[d](q[i,j,d] * r[i,k,d]), -inf)\n"
    "m[i,j,k] = exp(s[i,j,k] - max[k](s[i,j,k]))\ny[i,j,e] = sum[k](m[i,j,k] * v[i,k,e]) / sum[k](m[i,j,k])",
    "a running sum": "y[i,j] = sum[k](where(k <= j, g[i,k], 0))",
    "gates that are summed already": ATTENTION.replace("* v", "* exp(g[i,j] - g[i,k]) * v"),
    "a maximum in an exponent": "M[i,j] = max[k](where(k <= j, g[i,k], -inf))\n"
    + ATTENTION.replace("* v", "* exp(M[i,k] - M[i,j]) * v"),
    "a window": ATTENTION.replace("k <= j", "k <= j - 3"),
    "the position before": ATTENTION.replace("v[i,k,e]", "where(k > 0, v[i,k-1,e], 0)"),
    "a function of both": ATTENTION.replace("sum[d](q[i,j,d] * r[i,k,d])", "abs(g[i,j] - g[i,k])"),
    "no prefix": ATTENTION.replace("k <= j", "ok[k] > 0"),
    "a position of the greatest": "a[i,j] = argmax[k](where(k <= j, g[i,k], -inf))\n"
    + ATTENTION.replace("* v", "* a[i,j] * v"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_said_by_chunks_is_left(name: str) -> None:
    assert split_axes(parse(text_of(REFUSED[name]))) is None


def test_a_length_that_the_program_declares_is_left() -> None:
    assert split_axes(parse(f"j: axis[256]\nk: axis[256]\n{ATTENTION}\nreturn y")) is None


@pytest.mark.parametrize(
    ("n", "chunk"), [(8192, 64), (256, 64), (1000, 50), (1009, 1), (96, 8), (9, 3), (7, 1), (1, 1), (0, 1)]
)
def test_the_positions_of_a_chunk(n: int, chunk: int) -> None:
    assert chunk_of(n) == chunk


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("n", [63, 509, 1018])
def test_lengths_without_chunks_run_as_they_were(n: int) -> None:
    source = text_of(ATTENTION)
    kernel = eq.compile(source, verify=False)
    values = inputs(source, n)
    torch.testing.assert_close(
        kernel(**values).double(), torch.from_numpy(eq.reference(source)(**values)), rtol=1e-4, atol=1e-3
    )
    assert "chunk" not in str(kernel.loops)
    assert any(
        line.startswith("not in chunks: ") and f" has {n} positions" in line for line in kernel.why_not()
    )


@pytest.mark.usefixtures("in_chunks")
def test_views_of_any_strides_are_split() -> None:
    source = text_of(ATTENTION)
    kernel = eq.compile(source, verify=False)
    values = inputs(source, 512)
    expected = torch.from_numpy(eq.reference(source)(**{k: t[:, ::2] for k, t in values.items()}))
    torch.testing.assert_close(
        kernel(**{k: t[:, ::2] for k, t in values.items()}).double(), expected, rtol=1e-4, atol=1e-3
    )
    turned = {k: t[:, ::2].transpose(0, 1).contiguous().transpose(0, 1) for k, t in values.items()}
    for _ in range(3):  # looked at, cached, and cached as the last one
        torch.testing.assert_close(kernel(**turned).double(), expected, rtol=1e-4, atol=1e-3)
    halves = {k: t.half() for k, t in turned.items()}
    assert kernel(**halves).dtype == torch.float16
    torch.testing.assert_close(kernel(**halves).double(), expected, rtol=2e-2, atol=5e-2)


def test_long_sequences_run_in_chunks_where_matrices_are_multiplied_fast() -> None:
    kernel = eq.compile(text_of(ATTENTION), verify=False)
    derived, made = kernel.derived, compiler.of_chunks(kernel.derived)
    assert made is not None
    device = device_named("h200")
    for n in (8192, 65536):
        extents = {"i": 16, "j": n, "k": n, "d": 64, "e": 64}
        asked = Asked(extents, program_dtypes(derived.program), device)
        assert 2 * compiler.predicted_in_chunks(made, asked) < compiler.predicted(derived, asked)
    asked = replace(asked, extents={**extents, "j": 1009, "k": 1009})
    assert compiler.predicted_in_chunks(made, asked) == float("inf")


WINDOWS = {
    "a sum": "y[i,j] = sum[k](where((k <= j) & (k > j - 32), x[i,k], 0))",
    "a maximum": "y[i,j] = max[k <= j, k > j - 32](x[i,k])",
    "a minimum of what follows": "y[i,j] = min[k >= j, k < j + 32](x[i,k])",
    "a product": "y[i,j] = prod[k <= j, k >= j - 31](1 + x[i,k] / 64)",
    "of several chunks": "y[i,j] = max[k <= j, k > j - 192](x[i,k])",
    "of several chunks that follow": "y[i,j] = sum[k >= j, k < j + 192](x[i,k])",
    "no power of two": "y[i,j] = sum[k <= j, k > j - 100](x[i,k])",
    "with a mask of data": "y[i,j] = sum[k](where((k <= j) & (k > j - 32) & (ok[k] > 0), x[i,k], 0))",
    "of positions": "y[i,j] = max[k <= j, k > j - 32](x[i,k] + k / 64)",
    "a mean and a maximum": "y[i,j] = sum[k <= j, k > j - 32](x[i,k]) / 32 - max[k <= j, k > j - 32](x[i,k])",
    "of what a sum makes": "y[i,j] = sum[k <= j, k > j - 32](sum[d](q[i,k,d] * q[i,k,d]))",
}


def of_windows(source: str, n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    shapes = {"x": (3, n), "ok": (n,), "q": (3, n, 4)}
    found = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return {name: value for name, value in found.items() if f"{name}[" in source}


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_parts_of_chunks(name: str) -> None:
    source = text_of(WINDOWS[name])
    split = split_axes(parse(source))
    assert split is not None
    n = 5 * split.chunk(0) * (1 if split.chunk(0) == split.width else 2)
    values = of_windows(source, n)
    kernel = eq.compile(source, native="off")
    found = kernel(**values)
    expected = torch.from_numpy(eq.reference(source)(**values))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert kernel.certificate.ok and any("axes in chunks" in line for line in kernel.certificate.passes)


@pytest.mark.usefixtures("in_chunks")
def test_what_left_a_window_is_forgotten() -> None:
    source = text_of(WINDOWS["a sum"])
    values = of_windows(source, 256)
    values["x"][:, 40], values["x"][:, 100] = torch.inf, torch.nan
    found = eq.compile(source, native="off")(**values)
    expected = torch.from_numpy(eq.reference(source)(**values)).float()
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-4)
    assert found[:, 132:].isfinite().all()


@pytest.mark.usefixtures("in_chunks")
def test_gradients_of_sums_of_windows_are_windows() -> None:
    source = text_of(WINDOWS["a sum"])
    x = of_windows(source, 256)["x"].requires_grad_()
    above = torch.randn(3, 256)
    kernel = eq.compile(source, native="off")
    (kernel(x=x) * above).sum().backward()
    wanted = torch.nn.functional.pad(above, (0, 31)).unfold(1, 32, 1).sum(2)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted, rtol=1e-5, atol=1e-4)
    assert "chunk" in str(kernel.backward.loops)


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("n", [250, 31, 33, 1])
def test_windows_of_other_lengths_run_as_they_were(n: int) -> None:
    source = text_of(WINDOWS["a maximum"])
    kernel = eq.compile(source, native="off", verify=False)
    values = of_windows(source, n)
    torch.testing.assert_close(kernel(**values).double(), torch.from_numpy(eq.reference(source)(**values)))
    assert "not in chunks: " in kernel.why_not()[-1] and f" has {n} positions" in kernel.why_not()[-1]


@pytest.mark.parametrize(
    "window",
    [
        "max[k <= j, k > j - 8](x[i,k])",
        "max[k <= j, k > j - 1024](x[i,k])",
        "max[k <= j, k > j - 67](x[i,k])",
        "max[k < j, k > j - 32](x[i,k])",
        "max[k <= j, k > j - 32](x[i,k] * x[i,j])",
        "argmax[k <= j, k > j - 32](x[i,k])",
        "max[k <= j, k > j - 32](x[i,k]) + max[k <= j, k > j - 64](x[i,k])",
        "max[k <= j, k > j - w](x[i,k])",
    ],
    ids=[
        "narrow",
        "wide",
        "prime",
        "without its end",
        "of both positions",
        "places",
        "two widths",
        "a scalar",
    ],
)
def test_other_windows_are_left(window: str) -> None:
    assert split_axes(parse(text_of(f"y[i,j] = {window}"))) is None


MUTANTS = {
    "the own chunk twice": ("k_chunk < j_chunk", "k_chunk <= j_chunk"),
    "a chunk left out": ("k_chunk < j_chunk", "k_chunk + 1 < j_chunk"),
    "the position left out": ("k_in <= j_in", "k_in < j_in"),
    "the whole own chunk": ("k_in <= j_in", "k_in >= 0"),
    "the wrong chunk": ("r[i, j_chunk, k_in, d]", "r[i, 0, k_in, d]"),
    "a decay of a chunk too many": ("k_1_chunk <= k_chunk", "k_1_chunk < k_chunk"),
    "no decay to the end of the chunk": ("k_1_in > k_in", "k_1_in < 0"),
    "a decay of the position too many": ("k_1_in > k_in", "k_1_in >= k_in"),
}
WRONG_WINDOWS = {
    "one position more": ("k_in > j_in", "k_in >= j_in"),
    "one position fewer": ("k_in > j_in", "k_in > j_in + 1"),
    "the chunk before alone": ("k_in <= j_in", "k_in < 0"),
    "without its own position": ("k_in <= j_in", "k_in < j_in"),
    "the first chunk": ("x[i, j_chunk - 1, k_in]", "x[i, 0, k_in]"),
    "the own chunk twice": ("x[i, j_chunk - 1, k_in]", "x[i, j_chunk, k_in]"),
    "nothing of the first two chunks": ("j_chunk - 1 >= 0", "j_chunk - 2 >= 0"),
}
ALL_MUTANTS = {
    **{name: (STRONG, mutant) for name, mutant in MUTANTS.items()},
    **{f"of a window: {name}": (text_of(WINDOWS["a sum"]), mutant) for name, mutant in WRONG_WINDOWS.items()},
}


@pytest.mark.parametrize("name", ALL_MUTANTS)
def test_mutants_of_programs_in_chunks_are_caught(name: str) -> None:
    source, (before, after) = ALL_MUTANTS[name]
    kernel = eq.compile(source, verify=False)
    split = split_axes(kernel.program)
    assert split is not None
    text = show_program(split.program)
    assert before in text

    def checked(text: str) -> None:
        made = compiler.derive_like(kernel.program, text, made=True)
        made = replace(made, views=Views(split=replace(split, program=made.program)))
        extents: dict[str, Any] = split.extents({"i": 2, "j": 256, "k": 256, "k_1": 256, "d": 3, "e": 4})
        compiler.pipeline(
            made,
            extents,
            program_dtypes(made.program),
            device_named("cpu"),
            None,
            certification.Checks(24, 1e-12, {}, ()),
        )

    checked(text)
    with pytest.raises(VerificationError):
        checked(text.replace(before, after))


@pytest.mark.parametrize("name", ["attention", "gates", "from each position on", "retention", "normalised"])
@pytest.mark.slow(but=["gates"])
def test_the_kernels_for_a_gpu_in_chunks(name: str) -> None:
    """By Triton's interpreter: those that an H200 is given for long sequences."""
    source = text_of(PROGRAMS[name])
    made = compiler.of_chunks(eq.compile(source, verify=False).derived)
    assert made is not None and made.split is not None
    values = inputs(source, 96)
    views = {key: value.contiguous() for key, value in made.split.views(values).items()}
    long = dict.fromkeys(("j_in", "k_in", "k_1_in"), 64) | dict.fromkeys(
        ("j_chunk", "k_chunk", "k_1_chunk"), 512
    )
    program = made.program
    own = [axis for axis in sized_axes(program) if axis not in spare_axes(program)]
    extents = {axis: {"i": 16, "d": 64, "e": 64, **long}[axis] for axis in own}
    compiled = compiler.pipeline(made, extents, program_dtypes(program), device_named("h200"), None)
    assert compiled.chosen.plan.schedule in SCANS
    emitted = compiler.emit_triton(made, compiled, "made")
    ordered = [views[tensor.name] for tensor in program.tensors]
    found = interpret(emitted, "made", *ordered)
    assert isinstance(found, torch.Tensor)
    expected = torch.from_numpy(eq.reference(source)(**values))
    torch.testing.assert_close(found.reshape(expected.shape).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("in_chunks")
def test_sums_of_many_gates_lose_nothing() -> None:
    """All kernels add the same sums of chunks, so that differences of large running sums are those of what lies between."""
    n, generator = 16384, torch.Generator().manual_seed(0)
    q, r, v, f = (torch.randn(1, n, 16, generator=generator) for _ in range(4))
    f = -f.abs()
    kernel = eq.compile(
        "j: axis[k]\nA[i,j,d] = sum[k](where(k <= j, f[i,k,d], 0))\n"
        "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d] * exp(A[i,j,d] - A[i,k,d])) * v[i,k,e], 0))\n"
        "return y",
        verify=False,
        native="off",
    )
    found = kernel(q=q, r=r, v=v, f=f)
    state, wanted = torch.zeros(1, 16, 16, dtype=torch.double), []
    for t in range(n):
        state = state * f[:, t, :, None].double().exp() + (r[:, t, :, None] * v[:, t, None]).double()
        wanted.append((q[:, t, :, None] * state).sum(1))
    exact = torch.stack(wanted, 1)
    assert (found - exact).abs().max() < 2e-6 * exact.abs().max()


def for_an_h200(source: str, **dtypes: str) -> tuple[Derived, Compiled]:
    """A program in chunks, compiled for many positions."""
    made = compiler.of_chunks(eq.compile(source, verify=False).derived)
    assert made is not None and made.split is not None
    sizes = {"i": 256, "d": 128, "e": 128}
    every = {*sized_axes(made.program), *made.program.domains}
    extents = {axis: sizes.get(axis) or (64 if axis.endswith(("_in", "_chunk")) else 1) for axis in every}
    kinds = {**program_dtypes(made.program), **dtypes}
    return made, compiler.pipeline(made, extents, kinds, device_named("h200"), None)


@pytest.mark.parametrize("name", ["attention", "from each position on", "retention", "gates"])
def test_the_state_stays_in_one_kernel(name: str) -> None:
    """What is folded at each chunk is part of the walk: no state is stored, and the derivation holds."""
    made, compiled = for_an_h200(text_of(PROGRAMS[name]), q="bf16", r="bf16", v="bf16")
    plan = compiled.chosen.plan
    walk = plan.kernels[-1]
    assert any(group.schedule == "scan" and group.group.axis == "k_chunk" for group in walk.groups)
    assert [output.name for output in walk.outputs] == ["y"]
    assert not any({"d", "e"} <= set(o.axes) for kernel in plan.kernels for o in kernel.outputs)
    assert compiler.derivation(made, plan, {}).check()


def test_a_gradient_of_gates_is_a_fold_of_others() -> None:
    """That of a running sum is the difference of what queries and keys have times their gradients (as of gated linear attention): what is
    added up is no product of pairs of positions."""
    source = text_of(PROGRAMS["gates"])
    halves = dict.fromkeys("qrv", "bf16")
    saved = saving_gradient(source, ["q", "r", "v", "g"], halves=halves, saves="f32")
    assert "sum[d](q[i, j, d] * dq_sum[i, j, d])" in saved.backward
    assert "sum[d](r[i, j, d] * dr_sum[i, j, d])" in saved.backward
    made, compiled = for_an_h200(saved.backward, **halves, dy="bf16")
    plan = compiled.chosen.plan
    pairs = ({"k_chunk", "k_1_chunk"}, {"d", "e"})
    assert plan.cost is not None and plan.cost.seconds < 1e-2
    assert not any(pair <= set(o.axes) for kernel in plan.kernels for o in kernel.outputs for pair in pairs)
    assert compiler.derivation(made, plan, {}).check()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_behind_its_position(bad: float) -> None:
    """A loop looks for it once, behind, and runs again: by Triton's interpreter."""
    source = text_of(ATTENTION)
    made, compiled = for_an_h200(source, q="bf16", r="bf16", v="bf16")
    assert made.split is not None
    values = {key: value.bfloat16() for key, value in inputs(source, 96).items()}
    values["v"][1, 40, 2] = bad
    views = {key: value.contiguous() for key, value in made.split.views(values).items()}
    emitted = compiler.emit_triton(made, compiled, "made")
    assert emitted.count("rest_of_product(") == 2 and "_again" in emitted  # where it is defined, and once
    found = interpret(emitted, "made", *(views[tensor.name] for tensor in made.program.tensors))
    assert isinstance(found, torch.Tensor)
    found, expected = (
        found.reshape(2, 96, 4),
        torch.from_numpy(eq.reference(source)(**{key: value.float() for key, value in values.items()})),
    )
    kept = expected.isfinite()
    assert torch.equal(found.isfinite(), kept) and kept[1, :40].all() and not kept[1, 40:, 2].any()
    torch.testing.assert_close(found[kept].double(), expected[kept], rtol=2e-2, atol=0.2)


def test_infinite_rates_of_positions_are_lost_on_a_gpu() -> None:
    """A GPU multiplies either side of `k - j`, which leaves NaN of an infinite rate; the certificate says so."""
    source = text_of(PROGRAMS["retention"].replace("<=", "<"))
    derived = eq.compile(source, verify=False).derived
    extents = {"i": 2, "j": 512, "k": 512, "d": 64, "e": 64}
    kinds = {**program_dtypes(derived.program), **dict.fromkeys("qrv", "bf16")}
    found = compiler.pipeline(derived, extents, kinds, device_named("h200"), "rolling")
    checks = certification.Checks(24, 1e-12, {}, ())
    certificate = certification.certify(derived, found, checks)
    assert certificate.ok and certification.INFINITIES_LOST in certificate.unverified
