"""Prefixes: found, walked once, verified, proved, and equal to what the program says in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import eqfuse as eq
from eqfuse import compiler
from eqfuse.certification import Checks
from eqfuse.devices import device_named
from eqfuse.errors import ScheduleError, VerificationError
from eqfuse.loops import lower as lowering
from eqfuse.loops import scans as tiled
from eqfuse.loops.nodes import Loop, Nest
from eqfuse.loops.walk import loops_in
from eqfuse.proof.examine import examine
from eqfuse.rules.assignments import Assignment, combines, fold_of_merge, updates
from eqfuse.rules.merge import Group, Merge
from eqfuse.terms.nodes import Const, Fold, Local, Reduce, reductions
from eqfuse.terms.parser import parse
from eqfuse.terms.prefixes import Prefix, alike, scanned
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.triton.launch import interpret, load

PREFIX = "j: axis[k]\ny[i,j] = "
MEAN = "sum[k](where(k <= j, x[i,k], 0)) / (j + 1)"
SOFTMAX = """j: axis[k]
s[i,j,k] = where(k <= j, x[i,k], -inf)
m[i,j] = max[k](s[i,j,k])
p[i,j,k] = exp(s[i,j,k] - m[i,j])
"""

PROGRAMS: dict[str, str] = {
    "sum": f"{PREFIX}sum[k](where(k <= j, x[i,k], 0))",
    "sum before": f"{PREFIX}sum[k](where(k < j, x[i,k], 0))",
    "sum from": f"{PREFIX}sum[k](where(k >= j, x[i,k], 0))",
    "sum after": f"{PREFIX}sum[k](where(j < k, x[i,k], 0))",
    "sum, mirrored": f"{PREFIX}sum[k](where(k <= N(j) - 1 - j, x[i,k], 0))",
    "log-sum-exp after, mirrored": f"{PREFIX}logsumexp[k](where(k > N(j) - 1 - j, x[i,k], -inf))",
    "four positions before": f"{PREFIX}sum[k](where(k <= j - 4, x[i,k], 0))",
    "log-sum-exp three positions after": f"{PREFIX}logsumexp[k](where(k >= j + 3, x[i,k], -inf))",
    "maximum two before, mirrored": f"{PREFIX}max[k](where(k + 2 <= N(j) - 1 - j, x[i,k], -inf))",
    "read at another position": "j: axis[k]\na[i,j] = sum[k](where(k <= j, x[i,k], 0))\n"
    "y[i,j] = a[i,j] - where(j >= 4, a[i,j-4], 0)",
    "condition with numbers": f"{PREFIX}sum[k](where(k - j <= -1, x[i,k], 0))",
    "product": f"{PREFIX}prod[k](where(k <= j, 1 + x[i,k] / 8, 1))",
    "maximum": f"{PREFIX}max[k](where(k <= j, x[i,k], -inf))",
    "maximum before": f"{PREFIX}max[k](where(k < j, x[i,k], -inf))",
    "log-sum-exp": f"{PREFIX}logsumexp[k](where(k <= j, x[i,k], -inf))",
    "log-sum-exp before": f"{PREFIX}logsumexp[k](where(k < j, x[i,k], -inf))",
    "place of the maximum": f"{PREFIX}argmax[k](where(k <= j, x[i,k], -inf))",
    "mean": PREFIX + MEAN,
    "mean and variance": f"j: axis[k]\nm[i,j] = {MEAN}\n"
    "y[i,j] = sum[k](where(k <= j, sq(x[i,k] - m[i,j]), 0)) / (j + 1)",
    "softmax of numbers": f"{SOFTMAX}y[i,j] = sum[k](p[i,j,k] * w[i,k]) / sum[k](p[i,j,k])",
    "softmax of rows": f"{SOFTMAX}y[i,j,e] = sum[k](p[i,j,k] * v[i,k,e]) / sum[k](p[i,j,k])",
    "geometric decay": f"{PREFIX}sum[k](where(k <= j, x[i,k] * exp((k - j) * 0.1), 0))",
    "decays from data": "j: axis[k]\nl: axis[k]\na[i,j] = sum[l](where(l <= j, -abs(w[i,l]), 0))\n"
    "y[i,j] = sum[k](where(k <= j, x[i,k] * exp(a[i,j] - a[i,k]), 0))",
    "scan of a scan": "j: axis[k]\nl: axis[k]\na[i,j] = sum[k](where(k <= j, x[i,k], 0))\n"
    "y[i,j] = sum[l](where(l <= j, a[i,l], 0))",
    "normalised": f"{PREFIX}sum[k](where(k <= j, x[i,k], 0)) / sum[k](sq(x[i,k]))",
    "of a softmax": f"{PREFIX}sum[k](where(k <= j, exp(x[i,k] - max[j](x[i,j])) / sum[j](exp(x[i,j])), 0))",
    "of products": f"{PREFIX}sum[k](where(k <= j, sum[e](u[i,e] * v[i,k,e]), 0))",
    "under another mask too": f"{PREFIX}sum[k](where((k <= j) & (w[i,k] > 0), x[i,k], 0))",
    "folded again": "j: axis[k]\nc[i,j] = sum[k](where(k <= j, x[i,k], 0))\ny[i] = max[j](c[i,j])",
    "two walks of one kernel": "j: axis[k]\na[i,j] = sum[k](where(k <= j, x[i,k], 0))\n"
    "y[i,j] = max[k](where(k <= j, x[i,k], -inf)) - a[i,j]",
    "with and without another fold": "j: axis[k]\na[i,j] = sum[k](where(k <= j, x[i,k], 0))\n"
    "y[i,j] = a[i,j] / sum[k](sq(x[i,k]))",
    "both directions": "j: axis[k]\na[i,j] = sum[k](where(k <= j, x[i,k], 0))\n"
    "y[i,j] = a[i,j] * sum[k](where(k >= j, x[i,k], 0))",
    "along the first axis": "i: axis[k]\ny[i,j] = sum[k](where(k <= i, x[k,j], 0))",
    "read again": f"{PREFIX}x[i,j] - sum[k](where(k <= j, x[i,k], 0))",
    "times rows": "j: axis[k]\ny[i,j,e] = sum[k](where(k <= j, x[i,k], 0)) * v[i,j,e]",
}

LINEAR: dict[str, str] = {
    "linear attention": "j: axis[k]\ny[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d]) * v[i,k,e], 0))",
    "with a normaliser": "j: axis[k]\nw[i,j,k] = where(k <= j, sum[d](sq(q[i,j,d]) * sq(r[i,k,d])), 0)\n"
    "y[i,j,e] = sum[k](w[i,j,k] * v[i,k,e]) / sum[k](w[i,j,k])",
    "retention": "j: axis[k]\n"
    "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d]) * exp((k - j) * 0.1) * v[i,k,e], 0))",
    "a gate for each row": "j: axis[k]\nl: axis[k]\na[i,j] = sum[l](where(l <= j, g[i,l,0], 0))\n"
    "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d]) * exp(a[i,j] - a[i,k]) * v[i,k,e], 0))",
    "a gate for each feature": "j: axis[k]\nl: axis[k]\na[i,j,d] = sum[l](where(l <= j, g[i,l,d], 0))\n"
    "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d] * exp(a[i,j,d] - a[i,k,d])) * v[i,k,e], 0))",
    "its gradient by keys": "j: axis[k]\n"
    "y[i,k,d] = sum[j](where(k <= j, sum[e](z[i,j,e] * v[i,k,e]) * q[i,j,d], 0))",
}
"""Programs of which factors leave the prefix: quadratic as they are written."""

NESTED = "j: axis[k]\ny[i,j] = sum[k](where(k < j, sum[e](where(k < j, x[i,k] * u[i,e], 0)), 0)) * x[i,j]\nreturn y"
"""A mask inside of a sum over another axis."""

REFUSED: dict[str, str] = {
    "a window": f"{PREFIX}sum[k](where((k <= j) & (k > j - 3), x[i,k], 0))",
    "what is read at the position": f"{PREFIX}sum[k](where(k <= j, abs(x[i,j] - x[i,k]), 0))",
    "another extent": "y[i,j] = sum[k](where(k <= j, x[i,k] * z[j], 0))",
    "what the mask leaves adds": f"{PREFIX}sum[k](where(k <= j, x[i,k], 1))",
    "twice the position": f"{PREFIX}sum[k](where(2 * k <= j, x[i,k], 0))",
    "positions after": f"{PREFIX}sum[k](where(k <= j + 2, x[i,k], 0))",
    "the position, some positions later": f"{PREFIX}sum[k](where(k <= j - 4, x[i,k] * j, 0))",
    "a position of none": f"{PREFIX}argmax[k](where(k < j, x[i,k], -inf))",
}


def inputs(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    shapes = {"x": (rows, columns), "w": (rows, columns), "v": (rows, columns, 3), "u": (rows, 3)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def given(kernel: eq.Kernel, every: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {tensor.name: every[tensor.name] for tensor in kernel.program.tensors}


def expected(source: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    plain = eq.compile(source, native="off", prefer="multi_pass", verify=False)
    found = plain(**{name: tensor.double() for name, tensor in tensors.items()})
    assert isinstance(found, torch.Tensor)
    return found


def text(name: str) -> str:
    return f"{PROGRAMS[name]}\nreturn y"


def scan_of(kernel: eq.Kernel) -> list[Group]:
    groups = (group for each in kernel.plan.kernels for group in each.groups)
    return [group.group for group in groups if group.schedule == "scan"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_prefix_is_walked_once_verified_proved_and_right(name: str) -> None:
    kernel = eq.compile(text(name), native="off", prefer="scan")
    assert kernel.certificate.ok and scan_of(kernel)
    assert compiler.derivation(kernel.derived, kernel.plan, {}).check().ok
    for rows, columns in ((3, 7), (17, 33), (2, 1)):
        tensors = given(kernel, inputs(rows, columns))
        found = kernel(**tensors)
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(
            found.double(), expected(text(name), tensors).double(), rtol=2e-5, atol=2e-5, equal_nan=True
        )


@pytest.mark.slow(but=["sum", "mean and variance", "decays from data", "softmax of rows"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_by_kernels_in_rows_and_columns(name: str) -> None:
    kernel = eq.compile(text(name), native="wait", prefer="scan")
    for rows, columns in ((3, 7), (130, 65), (1, 300)):
        tensors = given(kernel, inputs(rows, columns))
        wanted = expected(text(name), tensors).double()
        for each in (
            tensors,
            {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in tensors.items()},
        ):
            found = kernel(**each)
            assert isinstance(found, torch.Tensor)
            torch.testing.assert_close(found.double(), wanted, rtol=5e-5, atol=5e-5, equal_nan=True)


def needed(source: str, every: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {tensor.name: every[tensor.name] for tensor in parse(source).tensors}


def by_triton(
    source: str,
    tensors: dict[str, torch.Tensor],
    schedule: str,
    shards: int | None = None,
    checks: Checks | None = None,
) -> torch.Tensor:
    """What the kernels for an H200 compute by tiles of 8 positions, interpreted."""
    derived = compiler.derive(source, None, strict_casts=False)
    tensors = needed(source, tensors)
    dtypes = {name: SHORT[tensor.dtype] for name, tensor in tensors.items()}
    extents = bind(derived.program, {n: tuple(t.shape) for n, t in tensors.items()})
    compiled = compiler.pipeline(derived, extents, dtypes, device_named("h200"), schedule, checks)
    chosen = compiled.chosen
    assert any(group.schedule == schedule for kernel in chosen.plan.kernels for group in kernel.groups)
    emitted = compiler.emit_triton(derived, compiled, "made")
    walked = {f"BLOCK_{axis.upper()}" for axis in ("k", "l")}
    config = {
        kernel: {setting: min(8, size) for setting, size in settings.items() if setting in walked}
        for kernel, settings in load(emitted, interpreted=True).CONFIGS.items()
    }
    sizes = None if shards is None else {shard: shards for shard, _ in chosen.nest.shards}
    found = interpret(emitted, "made", *tensors.values(), sizes=sizes, config=config)
    assert isinstance(found, torch.Tensor)
    return found


SHORT = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
}
OF_VECTORS = {"softmax of rows"}
"""Programs whose states have axes of their own: on a GPU they are scanned position by position."""


@pytest.mark.slow(but=["[log-sum-exp-", "[sum from-", "[mean and variance-", "[place of the maximum-"])
@pytest.mark.pairwise
@pytest.mark.parametrize(("rows", "columns", "shards"), [(5, 9, 4), (2, 1, 2), (2, 37, 2)])
@pytest.mark.parametrize("schedule", ["scan", "scan_tiles", "scan_split"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_by_triton(name: str, schedule: str, rows: int, columns: int, shards: int) -> None:
    """By tiles and shards that are full, and that are not; the last tile of a shard ends where that does."""
    if schedule != "scan" and name in OF_VECTORS:
        pytest.skip("its states are vectors")
    tensors = inputs(rows, columns)
    found = by_triton(text(name), tensors, schedule, shards if schedule == "scan_split" else None)
    torch.testing.assert_close(
        found.double(),
        expected(text(name), needed(text(name), tensors)).double(),
        rtol=2e-5,
        atol=2e-5,
        equal_nan=True,
    )


UNUSUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row of -inf": lambda x: x.index_fill(0, torch.tensor([1]), -math.inf),
    "-inf here and there": lambda x: x.masked_fill(x > 0, -math.inf),
    "-inf at first": lambda x: x.index_fill(1, torch.arange(30), -math.inf),
    "-1e30 at first": lambda x: x.index_fill(1, torch.arange(30), -1e30),
    "inf": lambda x: x.masked_fill(x > 2, math.inf),
    "NaN": lambda x: x.masked_fill(x > 2, math.nan),
    "f16": lambda x: x.half(),
    "bf16": lambda x: x.bfloat16(),
    "f64": lambda x: x.double(),
    "integers whose sum has more bits": lambda x: (x * 2**29).int(),
}


@pytest.mark.slow(but=["-inf at first", "integers whose sum has more bits", "f16"])
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize(
    "name", ["sum", "log-sum-exp", "log-sum-exp before", "maximum", "place of the maximum"]
)
@pytest.mark.parametrize("schedule", ["scan_tiles", "scan_split"])
def test_tiles_of_unusual_numbers(name: str, kind: str, schedule: str) -> None:
    """What a walk position by position computes, of the same dtype."""
    if kind.startswith("integers") and name.startswith("log"):
        pytest.skip("a logarithm is of reals")
    x = UNUSUAL[kind](torch.randn(3, 50, generator=torch.Generator().manual_seed(1)))
    wanted = eq.compile(text(name), native="off", prefer="scan", verify=False)(x=x)
    assert isinstance(wanted, torch.Tensor)
    tolerance = {"f16": 2e-3, "bf16": 2e-2, "f64": 1e-13}.get(kind, 1e-5)
    found = by_triton(text(name), {"x": x}, schedule, 4 if schedule == "scan_split" else None)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.slow(but=["linear attention", "a gate for each feature"])
@pytest.mark.parametrize("name", LINEAR)
def test_factors_leave_the_prefix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of sums and products is chosen for what a scan costs, and proved as any other."""
    source = f"{LINEAR[name]}\nreturn y"
    rows, columns, features = 3, 400, 4
    generator = torch.Generator().manual_seed(2)
    tensors = {n: torch.randn(rows, columns, features, generator=generator) for n in ("q", "r", "v", "z")}
    tensors["g"] = -tensors["q"].abs() / 8
    monkeypatch.setenv("EQFUSE_CPU", "here")  # what a step of a walk costs in C++
    kernel = eq.compile(source, native="wait")
    tensors = {tensor.name: tensors[tensor.name] for tensor in kernel.program.tensors}
    found = kernel(**tensors)
    assert isinstance(found, torch.Tensor)
    assert kernel.plan.form == "reassociated" and scan_of(kernel) and kernel.certificate.ok
    assert compiler.derivation(kernel.derived, kernel.plan, {}).check().ok
    wanted = expected(source, tensors).double()
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_a_mask_inside_of_another_sum() -> None:
    kernel = eq.compile(NESTED, native="off", prefer="scan")
    assert scan_of(kernel) and kernel.derivation.check().ok
    tensors = given(kernel, inputs(3, 9))
    torch.testing.assert_close(kernel(**tensors), expected(NESTED, tensors).float(), rtol=1e-5, atol=1e-5)


def test_the_nest_of_a_prefix_is_one_loop() -> None:
    """No loop or fold inside of the walk over the axis: its time is linear in the extent."""
    kernel = eq.compile(text("log-sum-exp"), native="off", prefer="scan")
    (only,) = nest(kernel).kernels
    (loop,) = loops_in(only.body)
    assert isinstance(loop, Loop) and loop.unit and loop.axis == "k"
    assert not any(isinstance(getattr(stmt, "expr", None), Reduce) for stmt in loop.body)


def nest(kernel: eq.Kernel) -> Nest:
    return kernel.derived.nests[kernel.plan.kernels]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_prefix_is_not_scanned(name: str) -> None:
    with pytest.raises(ScheduleError, match="there is no scan plan"):
        eq.compile(f"{REFUSED[name]}\nreturn y", native="off", prefer="scan")


def test_the_place_of_the_maximum_before_is_the_first_where_there_is_none() -> None:
    """As in torch, of a row of -inf."""
    kernel = eq.compile(f"{REFUSED['a position of none']}\nreturn y", native="off")
    x = torch.randn(3, 20)
    wanted = torch.stack([x[:, :j].argmax(1) if j else torch.zeros(3).long() for j in range(20)], 1)
    found = kernel(x=x)
    assert isinstance(found, torch.Tensor) and kernel.certificate.ok and torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("condition", "prefix"),
    [
        ("k <= j", Prefix("j", exclusive=False, backwards=False)),
        ("j >= k", Prefix("j", exclusive=False, backwards=False)),
        ("not (k > j)", Prefix("j", exclusive=False, backwards=False)),
        ("k < j", Prefix("j", exclusive=True, backwards=False)),
        ("k + 1 <= j", Prefix("j", exclusive=True, backwards=False)),
        ("k >= j", Prefix("j", exclusive=False, backwards=True)),
        ("k > j", Prefix("j", exclusive=True, backwards=True)),
        ("k <= j - 4", Prefix("j", exclusive=True, backwards=False, lag=3)),
        ("k > j + 2", Prefix("j", exclusive=True, backwards=True, lag=2)),
        ("k + j < N(k)", Prefix("j", exclusive=False, backwards=False, mirrored=True)),
        ("k + j >= N(j) - 1", Prefix("j", exclusive=False, backwards=True, mirrored=True)),
    ],
)
def test_conditions_in_any_notation(condition: str, prefix: Prefix) -> None:
    program = parse(f"j: axis[k]\ny[i,j] = sum[k](where({condition}, x[i,k], 0))\nreturn y")
    (reduce,) = reductions(program.outputs[0].expr)
    found = scanned(reduce, alike(program))
    assert found is not None and found.prefix == prefix


# -- what is wrong is seen -------------------------------------------------------------------------


def scanned_as(change: Callable[[Prefix], Prefix]) -> Callable[[pytest.MonkeyPatch], None]:
    """Scans of another part of the axis."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        init = lowering._KernelLowering.__init__

        def wrong(
            self: lowering._KernelLowering, plan: lowering.KernelPlan, context: lowering._Context
        ) -> None:
            groups = tuple(
                replace(g, group=replace(g.group, prefix=change(p)))
                if (p := g.group.prefix) is not None
                else g
                for g in plan.groups
            )
            init(self, replace(plan, groups=groups), context)

        patch.setattr(lowering._KernelLowering, "__init__", wrong)

    return apply


def flipped(field: str) -> Callable[[pytest.MonkeyPatch], None]:
    return scanned_as(lambda prefix: replace(prefix, **{field: not getattr(prefix, field)}))


def changed(**fields: int) -> Callable[[pytest.MonkeyPatch], None]:
    return scanned_as(lambda prefix: replace(prefix, **fields))


def assigned(change: Callable[[Assignment], Assignment | None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Scans whose steps are others."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def wrong(group: Group, merge: Merge) -> Iterator[Assignment]:
            yield from filter(None, map(change, updates(group, merge)))

        patch.setattr(lowering, "updates", wrong)

    return apply


def unrepaired(step: Assignment) -> Assignment:
    if step.name != "sum_k_new":
        return step
    return replace(
        step, value=lowering.call("add", Local("sum_k", step.dims), Local("sum_k_tile", step.dims))
    )


def forgetful(step: Assignment) -> Assignment:
    return replace(step, value=Local(f"{step.state}_tile", step.dims)) if step.name.endswith("_new") else step


def nothing_new(step: Assignment) -> Assignment:
    return replace(step, value=Local(step.state, step.dims)) if step.name.endswith("_new") else step


def twice(step: Assignment) -> Assignment:
    return (
        replace(step, value=lowering.call("mul", step.value, Const(2.0)))
        if step.name == "sum_k_new"
        else step
    )


MUTANTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "without the position": ("sum", flipped("exclusive")),
    "with the position": ("maximum before", flipped("exclusive")),
    "a position less": ("four positions before", changed(lag=2)),
    "a position more": ("log-sum-exp three positions after", changed(lag=3)),
    "backwards": ("log-sum-exp", flipped("backwards")),
    "forwards": ("sum from", flipped("backwards")),
    "mirrored": ("sum", flipped("mirrored")),
    "not mirrored": ("sum, mirrored", flipped("mirrored")),
    "with the position, after": ("sum after", flipped("exclusive")),
    "product without its position": ("product", flipped("exclusive")),
    "mean backwards": ("mean", flipped("backwards")),
    "variance without its position": ("mean and variance", flipped("exclusive")),
    "decays backwards": ("decays from data", flipped("backwards")),
    "softmax without repair": ("log-sum-exp", assigned(unrepaired)),
    "decay without repair": ("geometric decay", assigned(unrepaired)),
    "the last position alone": ("sum", assigned(forgetful)),
    "the last position's maximum": ("maximum", assigned(forgetful)),
    "nothing is added": ("sum", assigned(nothing_new)),
    "added and doubled": ("sum", assigned(twice)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_scan_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, mutate = MUTANTS[name]
    mutate(monkeypatch)
    monkeypatch.setenv("EQFUSE_CACHE", "off")
    with pytest.raises(VerificationError):
        eq.compile(text(program), native="off", prefer="scan")


def unlike(name: str, **changes: object) -> Callable[[pytest.MonkeyPatch], None]:
    """Tiles scanned in another order."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        order = getattr(tiled.Order, name)

        def wrong(*given: object) -> object:
            return replace(order(*given), **changes)

        patch.setattr(tiled.Order, name, staticmethod(wrong))

    return apply


def with_fold(change: Callable[[Fold], Fold]) -> Callable[[pytest.MonkeyPatch], None]:
    """Prefixes within a tile are combined otherwise."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def wrong(name: str, group: Group, merge: Merge) -> Fold:
            fold = fold_of_merge(name, group, merge)
            assert fold is not None
            return change(fold)

        patch.setattr(tiled, "fold_of_merge", wrong)

    return apply


def the_second(fold: Fold) -> Fold:
    return replace(fold, combine=tuple(Local(f"{name}2", ()) for name in fold.state))


def sums_alone(fold: Fold) -> Fold:
    """Without what repairs them."""
    parts = [
        lowering.call("add", Local(f"{name}1", ()), Local(f"{name}2", ())) if op == "sum" else part
        for name, op, part in zip(fold.state, fold.reductions, fold.combine, strict=True)
    ]
    return replace(fold, combine=tuple(parts))


def combined(change: Callable[[Assignment], Assignment]) -> Callable[[pytest.MonkeyPatch], None]:
    """What is before a tile joins it otherwise."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(tiled, "combines", lambda group, merge: map(change, combines(group, merge)))

    return apply


def side(end: str) -> Callable[[Assignment], Assignment]:
    return lambda step: replace(step, value=Local(f"{step.state}_{end}", step.dims))


def rolled_otherwise(
    change: Callable[[Assignment], Assignment | None],
) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        def wrong(group: Group, merge: Merge) -> Iterator[Assignment]:
            yield from filter(None, map(change, updates(group, merge)))

        patch.setattr(tiled, "updates", wrong)

    return apply


def all_shards(patch: pytest.MonkeyPatch) -> None:
    """A shard goes on from its own states too."""
    patch.setattr(lowering, "substitute_axes", lambda expr, _: expr)


TILED: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "without the position": ("sum", flipped("exclusive")),
    "with the position": ("maximum before", flipped("exclusive")),
    "a position less": ("four positions before", changed(lag=2)),
    "backwards": ("log-sum-exp", flipped("backwards")),
    "mirrored": ("sum", flipped("mirrored")),
    "variance without its position": ("mean and variance", flipped("exclusive")),
    "the position before is not late": ("sum before", unlike("of", late=False)),
    "the last position of a tile alone": ("sum", with_fold(the_second)),
    "prefixes without repair": ("log-sum-exp", with_fold(sums_alone)),
    "decays without repair": ("geometric decay", with_fold(sums_alone)),
    "the tile alone": ("sum", combined(side("b"))),
    "what is before the tile alone": ("maximum", combined(side("a"))),
    "a sum that is not joined": (
        "log-sum-exp",
        combined(lambda s: side("b")(s) if s.state == "sum_k" else s),
    ),
    "tiles that forget": ("sum", rolled_otherwise(forgetful)),
    "tiles that add nothing": ("sum", rolled_otherwise(nothing_new)),
    "tiles without repair": ("log-sum-exp", rolled_otherwise(unrepaired)),
    "tiles that are doubled": ("sum", rolled_otherwise(twice)),
}


@pytest.mark.parametrize("schedule", ["scan_tiles", "scan_split"])
@pytest.mark.parametrize("name", TILED)
def test_a_wrong_scan_of_tiles_is_refused(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, mutate = TILED[name]
    mutate(monkeypatch)
    monkeypatch.setenv("EQFUSE_CACHE", "off")
    with pytest.raises(VerificationError):
        by_triton(text(program), inputs(3, 7), schedule, checks=Checks(16))


def test_a_shard_that_goes_on_from_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    all_shards(monkeypatch)
    monkeypatch.setenv("EQFUSE_CACHE", "off")
    with pytest.raises(VerificationError):
        by_triton(text("sum"), {"x": inputs(3, 7)["x"]}, "scan_split", checks=Checks(16))


@pytest.mark.parametrize("schedule", ["scan_tiles", "scan_split"])
@pytest.mark.parametrize(
    "name", ["log-sum-exp before", "mean and variance", "place of the maximum", "decays from data"]
)
def test_a_scan_of_tiles_is_verified_and_proved(name: str, schedule: str) -> None:
    derived = compiler.derive(text(name), None, strict_casts=False)
    extents = bind(derived.program, {t.name: (3, 70) for t in derived.program.tensors})
    dtypes = program_dtypes(derived.program)
    compiled = compiler.pipeline(derived, extents, dtypes, device_named("h200"), schedule, Checks(16))
    proof = compiler.derivation(derived, compiled.chosen.plan, {})
    walked = {walk.schedule for kernel in proof.proof.kernels for walk in kernel.walks}
    assert proof.check().ok and schedule in walked


@pytest.mark.parametrize(
    "where", ["k < j", "k >= j", "k <= i", "k <= N(k) - 1 - j", "k <= j + 1", "", "k <= 3"]
)
def test_a_proof_of_another_part_is_refused(where: str) -> None:
    kernel = eq.compile(text("log-sum-exp"), native="off", prefer="scan")
    proof = compiler.derivation(kernel.derived, kernel.plan, {}).proof
    assert examine(proof).ok
    (only,) = proof.kernels
    walks = tuple(replace(walk, where=where) for walk in only.walks)
    assert not examine(replace(proof, kernels=(replace(only, walks=walks),))).ok


def test_a_registered_recurrence_is_scanned_forwards() -> None:
    """Of parts that combine in their order alone."""
    law = {"args": "a, b", "state": "p, h", "lift": "a, b", "identity": "1, 0", "result": "h"}
    eq.reduction("recurred", combine="p1 * p2, h1 * p2 + h2", why="h = a h + b, from 0", replace=True, **law)
    body = "recurred[k](where(k {} j, w[i,k], 1), where(k {} j, x[i,k], 0))"
    forwards = eq.compile(f"{PREFIX}{body.format('<=', '<=')}\nreturn y", native="off", prefer="scan")
    tensors = inputs(3, 50)
    x, w = tensors["x"], tensors["w"]
    h, wanted = torch.zeros(3), torch.empty(3, 50)
    for at in range(50):
        h = w[:, at] * h + x[:, at]
        wanted[:, at] = h
    assert forwards.certificate.ok and compiler.derivation(forwards.derived, forwards.plan, {}).check().ok
    torch.testing.assert_close(forwards(x=x, w=w), wanted)
    for schedule in ("scan_tiles", "scan_split"):
        source = f"{PREFIX}{body.format('<=', '<=')}\nreturn y"
        torch.testing.assert_close(by_triton(source, {"w": w, "x": x}, schedule), wanted)
    with pytest.raises(ScheduleError):
        eq.compile(f"{PREFIX}{body.format('>=', '>=')}\nreturn y", native="off", prefer="scan")


# -- as torch has them -----------------------------------------------------------------------------

X = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": lambda x: torch.cumsum(x, 1),
    "cumsum along the first axis": lambda x: torch.cumsum(x, 0),
    "cumsum of all": lambda x: torch.cumsum(x.flatten(), 0),
    "cumsum of a part": lambda x: torch.cumsum(x.view(6, 4, 10), 1),
    "cumsum from the end": lambda x: torch.flip(torch.cumsum(torch.flip(x, [1]), 1), [1]),
    "cumsum of integers": lambda x: torch.cumsum((x > 0).int(), 1),
    "cumsum of truth values": lambda x: torch.cumsum(x > 0, 1),
    "cumsum of halves": lambda x: torch.cumsum(x.half(), 1),
    "cumprod": lambda x: torch.cumprod(x, 1),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "cummin": lambda x: torch.cummin(x, 1).values,
    "cumsum of cumsum": lambda x: torch.cumsum(torch.cumsum(x, 1), 1),
    "running variance": lambda x: (
        torch.cumsum(x * x, 1) / torch.arange(1, 41) - (torch.cumsum(x, 1) / torch.arange(1, 41)) ** 2
    ),
    "cumsum of softmax": lambda x: torch.cumsum(torch.softmax(x, 1), 1),
}


@pytest.mark.parametrize("name", TORCH)
def test_programs_of_torch_are_scanned(name: str) -> None:
    made = eq.from_torch(TORCH[name], X, prefer="scan", native="off")
    found, wanted = made(X), TORCH[name](X)
    assert scan_of(made.kernel)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("running", [torch.cummax, torch.cummin])
def test_places_of_running_extremes_are_scanned(
    running: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """The last position where the extreme stands, of NaN too."""
    x = X.round()
    x[1, 20], x[2, 3], x[3, :2] = torch.nan, torch.inf, -torch.inf
    made = eq.from_torch(lambda x: tuple(running(x, 1)), x, prefer="scan", native="off")
    assert len(scan_of(made.kernel)) == 2
    for found, wanted in zip(made(x), running(x, 1), strict=True):
        assert torch.equal(found.nan_to_num(nan=99), wanted.nan_to_num(nan=99))
    assert compiler.derivation(made.kernel.derived, made.kernel.plan, {}).check().ok


def test_a_long_sum_is_as_exact_as_torchs() -> None:
    """torch adds float32 in float64 on a CPU; so do scans."""
    x = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(3))
    kernel = eq.compile(text("sum"), native="wait", prefer="scan")
    assert torch.equal(kernel(x=x), torch.cumsum(x, 1))


def test_a_long_sum_of_folds_is_as_exact() -> None:
    x = torch.randn(1, 50_000, 3, generator=torch.Generator().manual_seed(3))
    kernel = eq.compile("j: axis[k]\ny[i,j] = sum[k <= j](sum[d](x[i,k,d]))", native="wait", prefer="scan")
    exact = x.double().sum(2).cumsum(1)
    assert float((kernel(x=x) - exact).abs().max() / exact.abs().max()) < 2e-7


def test_the_gradient_of_a_scan_is_one_in_the_other_direction() -> None:
    kernel = eq.compile(eq.grad(text("sum")), native="off", prefer="scan")
    (group,) = scan_of(kernel)
    assert group.prefix == Prefix("k", exclusive=False, backwards=True)
    x = X.clone().requires_grad_()
    dy = torch.randn(6, 40)
    torch.cumsum(x, 1).backward(dy)
    torch.testing.assert_close(kernel(dy=dy), x.grad)


@pytest.mark.parametrize("native", ["off", "wait"])
def test_special_values(native: str) -> None:
    x = torch.tensor(
        [
            [-torch.inf, -torch.inf, 1.0, 2.0],
            [-1e30, -1e30, 0.0, 1.0],
            [1.0, torch.nan, 2.0, 3.0],
            [torch.inf, 1.0, torch.inf, -1.0],
        ]
    )
    for name, torchs in (("sum", torch.cumsum), ("log-sum-exp", torch.logcumsumexp)):
        kernel = eq.compile(text(name), native=native, prefer="scan")
        torch.testing.assert_close(kernel(x=x), torchs(x, 1), equal_nan=True)
    kernel = eq.compile(text("maximum"), native=native, prefer="scan")
    torch.testing.assert_close(kernel(x=x), torch.cummax(x, 1).values, equal_nan=True)


@pytest.mark.parametrize("mask", ["k < j", "k <= j"])
def test_integers_of_an_empty_prefix_are_infinite(mask: str) -> None:
    """As the program says: no integer is."""
    kernel = eq.compile(f"x: i64[i,k]\n{PREFIX}max[k](where({mask}, x[i,k], -inf))\nreturn y", native="off")
    x = torch.tensor([[3, 1, 4, 1, 5], [-9, 2, -6, 5, 3]])
    wanted = torch.cummax(x, 1).values.float()
    if mask == "k < j":
        wanted = torch.cat((torch.full((2, 1), -torch.inf), wanted[:, :-1]), 1)
    found = kernel(x=x)
    assert isinstance(found, torch.Tensor) and kernel.certificate.ok
    torch.testing.assert_close(found.float(), wanted)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1)])
def test_empty_axes(shape: tuple[int, int]) -> None:
    kernel = eq.compile(text("sum"), native="off", prefer="scan")
    assert torch.equal(kernel(x=torch.ones(shape)), torch.cumsum(torch.ones(shape), 1))


@pytest.mark.parametrize(
    "text, loop",
    [
        ("max[k <= j, k > j - 3](x[i,k])", lambda x, j: x[:, max(0, j - 2) : j + 1].amax(1)),
        ("max[k <= j, k > j - 64](x[i,k])", lambda x, j: x[:, max(0, j - 63) : j + 1].amax(1)),
        ("min[k >= j, k < j + 64](x[i,k])", lambda x, j: x[:, j : j + 64].amin(1)),
        ("prod[k <= j, k > j - 3](x[i,k])", lambda x, j: x[:, max(0, j - 2) : j + 1].prod(1)),
        (
            "max[k <= j](x[i,k] * (j - k + 1))",
            lambda x, j: (x[:, : j + 1] * torch.arange(j + 1, 0, -1)).amax(1),
        ),
    ],
)
def test_gradients_of_what_a_position_leaves(
    text: str, loop: Callable[[torch.Tensor, int], torch.Tensor]
) -> None:
    """The greatest of a window may be one before that was less: nothing is carried from one position to the next."""
    x = torch.randn(3, 150, dtype=torch.float64)
    given, exact = x.float().requires_grad_(), x.requires_grad_()
    wanted = torch.stack([loop(exact, j) for j in range(x.shape[1])], 1)
    above = torch.randn_like(wanted)
    wanted.backward(above)
    eq.compile(f"j: axis[k]\ny[i,j] = {text}", native="off")(x=given).backward(above.float())
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)
