"""Adjacent axes as one: which are collapsed, that it means the same, and which tensors run so."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse import compiler
from eqfuse.certification import Checks, certify
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.errors import BindError, VerificationError
from eqfuse.terms.collapse_axes import CollapsedAxes, Layout, collapse_axes
from eqfuse.terms.extents import shapes_of
from eqfuse.terms.interpreter import reference
from eqfuse.terms.nodes import Call, Expr, Reduce, Size, transform
from eqfuse.terms.parser import parse
from eqfuse.terms.printer import show_program
from eqfuse.terms.types import program_dtypes
from eqfuse.terms.views import Views

BATCH_NORM = """
m[c] = mean[n,h,w](x[n,c,h,w])
v[c] = mean[n,h,w](sq(x[n,c,h,w] - m[c]))
y[n,c,h,w] = (x[n,c,h,w] - m[c]) * rsqrt(v[c] + 1e-5) * g[c] + b[c]
"""
VARIANCE = "v[b] = var[s,d](x[b,s,d])"
SOFTMAX = "y[b,s,d] = exp(x[b,s,d] - max[s,d](x[b,s,d])) / sum[s,d](exp(x[b,s,d] - max[s,d](x[b,s,d])))"

TOGETHER = {
    BATCH_NORM: {"h_w": ("h", "w")},
    VARIANCE: {"s_d": ("s", "d")},
    SOFTMAX: {"s_d": ("s", "d")},
    "v[b] = var[d,s](x[b,s,d])": {"s_d": ("s", "d")},
    "x: f16[a,b,c,d]\ny[a,b,c,d] = x[a,b,c,d] * 2": {"a_b_c_d": ("a", "b", "c", "d")},
    "y[o] = sum[c,p,q](w[o,c,p,q] * z[c,p,q])": {"c_p_q": ("c", "p", "q")},
    "h: axis[3]\nw: axis[4]\ny[h,w] = x[h,w] + z[h,w]": {"h_w": ("h", "w")},
    "y[i] = sum[h,w](x[i,h,w]) / (1 + max[w,h](abs(x[i,h,w])))": {"h_w": ("h", "w")},
    "m[i] = logsumexp[h,w](x[i,h,w])": {"h_w": ("h", "w")},
    "h_w[i] = sum[h,w](x[i,h,w])": {"h_w_": ("h", "w")},
}
APART = (
    "y[b,s,d] = x[b,s,d] + u[d]",
    "y[h,w] = x[h,w] * N(h)",
    "y[i] = sum[h,w](x[i,h,w]) / N(h)",
    "y[h,w] = x[h,w] * h",
    "y[w,h] = x[h,w]",
    "y[h] = sum[w](x[h,w])",
    "y = sum[h](max[w](x[h,w]))",
    "y[h] = x[h,0] + sum[w](x[h,w])",
    "k: i32[h,w]\ny[h,w] = t[k[h,w],h]",
    "h: axis[3]\ny[h,w] = x[h,w] + z[h,w]",
    "y[h,w] = x[h,w] + sum[p,q](x[p,q])",
    "k[i] = argmax[w](x[i,w])",
    "S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d])",
    "y[h,w] = x[h,w] + z[w,h]",
    "y[h,w] = 1.0",
)


@pytest.mark.parametrize("source", TOGETHER)
def test_axes_that_are_always_together_are_joined(source: str) -> None:
    program = parse(source)
    found = collapse_axes(program)
    assert found is not None and found.axes == TOGETHER[source]
    assert show_program(parse(show_program(found.program))) == show_program(found.program)
    sizes = dict(zip("abcdhinopqsw", (2, 3, 2, 5, 3, 4, 2, 3, 5, 2, 3, 4), strict=True))
    rng = np.random.default_rng(1)
    given = {t.name: rng.standard_normal([sizes[axis or ""] for axis in t.axes]) for t in program.tensors}
    views = {name: value.reshape(found.shape(name, value.shape)) for name, value in given.items()}
    wanted, got = reference(program, given), reference(found.program, views)
    shapes = shapes_of(found.source, sizes)
    for output, one, other in zip(
        program.outputs, *(r if isinstance(r, tuple) else (r,) for r in (wanted, got)), strict=True
    ):
        np.testing.assert_allclose(np.reshape(other, shapes[output.name]), one, rtol=1e-6)


@pytest.mark.parametrize("source", APART)
def test_other_axes_stay_apart(source: str) -> None:
    assert collapse_axes(parse(source)) is None


def _check(kernel: eq.Kernel, x: torch.Tensor, is_joined: bool) -> None:
    wanted = x.double().var(dim=(1, 2), correction=0)
    for _ in range(3):  # looked at, remembered, run from addresses
        torch.testing.assert_close(
            kernel(x=x).double(), wanted, rtol=1e-3 if x.dtype == torch.half else 1e-4, atol=1e-5
        )
        assert ("s_d" in dict(kernel.plan.sizes)) is is_joined


@pytest.mark.slow(but=["off"])
@pytest.mark.parametrize("native", ["wait", "off"])
def test_tensors_run_as_they_lie(native: str) -> None:
    kernel = eq.compile(VARIANCE, target="cpu", native=native)
    x = torch.randn(4, 30, 50)
    _check(kernel, x, True)
    assert kernel.joint is not None and "collapsed axes (s and d as s_d)" in str(kernel.certificate)
    assert "s_d" in str(kernel.merge) and "s_d" in str(kernel.loops) and "s_d" in kernel.explain()
    _check(kernel, torch.randn(4, 30, 100)[:, :, ::2], True)
    _check(kernel, torch.randn(4, 60, 50)[:, ::2], False)
    assert "s_d" not in str(kernel.loops)
    _check(kernel, torch.randn(50, 30, 4).permute(2, 1, 0), False)
    _check(kernel, torch.randn(30, 50).expand(4, 30, 50), True)
    _check(kernel, x.half(), True)
    assert "s_d" not in kernel.triton and kernel.program.source == VARIANCE
    again = pickle.loads(pickle.dumps(kernel))
    _check(again, x, True)
    assert kernel(x=torch.randn(4, 0, 50)).isnan().all() and kernel(x=x.numpy()).shape == (4,)


@pytest.mark.slow
def test_launches_gradients_and_tuning_of_joined_axes() -> None:
    kernel = eq.compile(SOFTMAX, target="cpu", native="wait")
    x = torch.randn(3, 10, 20, requires_grad=True)
    wanted = x.flatten(1).softmax(1).view_as(x)
    torch.testing.assert_close(kernel(x=x), wanted)
    (mine,), (other,) = (torch.autograd.grad(y.square().sum(), x) for y in (kernel(x=x), wanted))
    torch.testing.assert_close(mine, other)
    plain = x.detach()
    launch = kernel.bind(x=plain)
    assert kernel.prepare({"x": (3, 10, 20)}) == 0
    plain += 1
    torch.testing.assert_close(launch(), wanted)
    assert launch.outputs["y"].shape == x.shape and "s_d" in dict(launch.compiled.chosen.plan.sizes)
    kernel.tune(x=plain, seconds=0.5, plans=2)
    torch.testing.assert_close(kernel(x=plain), wanted)
    assert "s_d" in dict(kernel.plan.sizes) and kernel.plan.measured


LIES: dict[str, tuple[Callable[[], torch.Tensor], str | None]] = {
    "transposed": (lambda: torch.randn(5, 30, 4).permute(2, 1, 0), "d and s as d_s, x by dimensions 2, 1, 0"),
    "nearest in the middle": (
        lambda: torch.randn(4, 5, 30).transpose(1, 2),
        "d and s as d_s, x by dimensions 0, 2, 1",
    ),
    "nearest first": (
        lambda: torch.randn(30, 5, 4).permute(2, 0, 1),
        "s and d as s_d, x by dimensions 1, 2, 0",
    ),
    "every other one": (lambda: torch.randn(4, 30, 10)[:, :, ::2], "s and d as s_d"),
    "part of a row": (lambda: torch.randn(4, 30, 6)[:, :, 1:], None),
    "of one row": (lambda: torch.randn(4, 1, 6)[:, :, 1:], "s and d as s_d"),
    "the same rows": (lambda: torch.randn(4, 1, 5).expand(4, 30, 5), None),
    "the same numbers": (lambda: torch.randn(4, 30, 1).expand(4, 30, 5), None),
    "the same numbers, nearest first": (lambda: torch.randn(4, 1, 6).permute(2, 0, 1).expand(6, 4, 5), None),
    "turned, the same rows": (
        lambda: torch.randn(5, 1, 4).permute(2, 1, 0).expand(4, 30, 5),
        "x by dimensions 1, 2, 0",
    ),
    "the same everywhere": (lambda: torch.randn(1).expand(4, 30, 5), "s and d as s_d"),
}


@pytest.mark.parametrize("name", LIES)
def test_dimensions_are_in_the_order_of_memory(name: str) -> None:
    kernel = eq.compile(VARIANCE, target="cpu", native="off")
    make, wanted = LIES[name]
    for _ in range(3):  # looked at, remembered, called again
        x = make()
        torch.testing.assert_close(kernel(x=x), x.var(dim=(1, 2), correction=0), rtol=1e-4, atol=1e-6)
        assert (
            None if (form := (kernel._current.views or Views()).collapsed) is None else str(form)
        ) == wanted
    assert wanted is None or wanted in str(kernel.certificate)


def test_seams_leave_other_axes_to_be_collapsed() -> None:
    kernel = eq.compile("y = sum[a,b,c](x[a,b,c])", target="cpu", native="off")
    x = torch.randn(4, 30, 6)[:, :, 1:]
    torch.testing.assert_close(kernel(x=x), x.sum())
    assert str((kernel._current.views or Views()).collapsed) == "a and b as a_b"
    torch.testing.assert_close(kernel(x=torch.ones(4, 30, 6)), torch.tensor(720.0))
    assert (
        str((kernel._current.views or Views()).collapsed) == "a and b and c as a_b_c"
        and len(kernel.regions) == 2
    )


def test_matrix_products_take_dimensions_as_they_are() -> None:
    kernel = eq.compile("C[i,j] = sum[k](A[i,k] * B[k,j])", target="cpu", native="off")
    A, B = torch.randn(7, 5).t(), torch.randn(3, 7).t()
    torch.testing.assert_close(kernel(A=A, B=B), A @ B)
    assert kernel._current.views is None


def test_rows_of_what_is_reduced_are_collapsed() -> None:
    source = "y[b,s,d] = exp(x[b,s,d] - max[d](x[b,s,d])) / sum[d](exp(x[b,s,d] - max[d](x[b,s,d])))"
    found = collapse_axes(parse(source))
    assert found is not None and found.axes == {"b_s": ("b", "s")}


def test_what_is_compared_with_a_position_stays_an_integer() -> None:
    kernel = eq.compile("""
        s[b,k] = where(k <= at[0], sum[j](x[b,0,j] * w[b,j,k]), -inf)
        y[b,j] = sum[k](exp(s[b,k] - max[k](s[b,k])) * z[b,k,j]) / sum[k](exp(s[b,k] - max[k](s[b,k])))
    """)
    x, w, z = torch.randn(2, 1, 5), torch.randn(2, 7, 5).mT, torch.randn(2, 7, 5)
    found = kernel(x=x, w=w, z=z, at=torch.tensor([2]))
    assert [each.derived.program.integer_tensors for each in kernel._made_of_views] == [("at",)]
    torch.testing.assert_close(found, (torch.softmax((x @ w)[..., :3], -1) @ z[:, :3])[:, 0])


def test_a_schedule_that_is_asked_for_is_that_of_the_program_as_it_is() -> None:
    kernel = eq.compile(VARIANCE, target="cpu", prefer="multi_pass", native="off")
    kernel(x=torch.randn(4, 5, 6))
    assert "s" in dict(kernel.plan.sizes)


def test_errors_are_of_the_program_as_it_is() -> None:
    kernel = eq.compile("y[h,w] = x[h,w] + z[h,w]", target="cpu", native="off")
    with pytest.raises(BindError, match="axis 'h' has size 6 in x"):
        kernel(x=torch.zeros(6, 4), z=torch.zeros(4, 6))


def _twice(node: Expr) -> Expr:
    return Call("mul", (node, Size("s_d"))) if isinstance(node, Size) else node


def _greatest(node: Expr) -> Expr:
    return Reduce("max", node.axis, node.body) if isinstance(node, Reduce) and node.op == "sum" else node


def _of_program(step: Callable[[Expr], Expr]) -> Callable[[CollapsedAxes], CollapsedAxes]:
    def wrong(found: CollapsedAxes) -> CollapsedAxes:
        outputs = tuple(replace(o, expr=transform(o.expr, step)) for o in found.program.outputs)
        return replace(found, program=replace(found.program, outputs=outputs))

    return wrong


def _other_source(source: str) -> Callable[[CollapsedAxes], CollapsedAxes]:
    return lambda found: replace(found, source=parse(source))


DECLARED = "x: f32[b,s,d]\n"
MISTAKES: dict[str, Callable[[CollapsedAxes], CollapsedAxes]] = {
    "a size multiplied twice": _of_program(_twice),
    "another reduction": _of_program(_greatest),
    "dimensions in the other order": _other_source(f"{DECLARED}v[b] = var[s,d](x[b,s,d] * z[d,s])"),
    "tensors that lie otherwise": lambda found: replace(found, layouts=(("z", Layout((1, 0))),)),
    "one of the axes alone": _other_source(f"{DECLARED}v[b] = max[s](var[d](x[b,s,d] * z[s,d]))"),
}


@pytest.mark.parametrize("name", ["", *MISTAKES])
def test_a_wrong_join_is_not_verified(name: str) -> None:
    found = collapse_axes(parse(f"{DECLARED}v[b] = var[s,d](x[b,s,d] * z[s,d])"))
    assert found is not None
    wrong = MISTAKES[name](found) if name else found
    derived: Derived = replace(compiler.rederived(wrong.program), views=Views(collapsed=wrong))
    dtypes = program_dtypes(wrong.program)
    compiled = compiler.pipeline(derived, {"b": 8, "s_d": 60}, dtypes, device_named("cpu"))
    if not name:
        assert certify(derived, compiled, Checks(16, again=True)).ok
        return
    with pytest.raises(VerificationError):
        certify(derived, compiled, Checks(16, again=True))


def test_axes_that_are_too_long_together_are_not_joined() -> None:
    form = collapse_axes(parse("y = sum[i,j](x[i,j])"))
    assert form is not None
    few, many = (torch.ones(1, dtype=torch.int8).expand(rows, 2**15) for rows in (2**14, 2**16))
    assert form.views({"x": few}) is not None and form.views({"x": many}) is None
