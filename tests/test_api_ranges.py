"""Magnitudes from denormals to the largest floats: finite and right wherever the unfused float32 program is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

import eqfuse as eq
from bench.scaled import POWERS, Scaled
from bench.scales_report import CHOSEN, Tally, attempt
from eqfuse.errors import ScheduleError
from eqfuse.loops.interpreter import run
from eqfuse.loops.plan import SCHEDULES
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.parser import parse
from eqfuse.terms.sizes import bind

PROGRAMS = {
    "largest": "y[i] = sum[j](x[i,j] / max[j](abs(x[i,j])))",
    "largest and a little": "y[i] = sum[j](x[i,j] / (max[j](abs(x[i,j])) + 1e-30))",
    "largest, clipped": "y[i] = sum[j](x[i,j] / max(max[j](abs(x[i,j])), 1e-30))",
    "sum": "y[i] = sum[j](sq(x[i,j] / sum[j](abs(x[i,j]))))",
    "weighted square": "y[i] = sum[j](sq(x[i,j] / sum[j](abs(x[i,j])) * u[j]))",
    "largest weighted square": "y[i] = max[j](sq(x[i,j] / max[j](abs(x[i,j])) * u[j]))",
    "mean": "y[i] = sum[j](x[i,j] / mean[j](abs(x[i,j])))",
    "norm": "n[i] = max[j](abs(x[i,j]))\ny[i] = n[i] * sqrt(sum[j](sq(x[i,j] / n[i])))",
    "length": "y[i] = sum[j](x[i,j] / N(j))",
    "scalar": "y[i] = sum[j](x[i,j] * s)",
    "column": "y[i] = sum[j](x[i,j] * c[i])",
    "product": "y[i] = sum[j](x[i,j] / max[j](abs(x[i,j])) * z[i,j])",
    "weights": "w[i,j] = abs(x[i,j])\ny[i] = sum[j](w[i,j] / sum[j](w[i,j]) * z[i,j])",
    "difference": "n[i] = max[j](abs(x[i,j]))\ny[i] = n[i] * sqrt(sum[j](sq((x[i,j] - x[i,0]) / n[i])))",
    "two scales": "n[i] = max[j](abs(x[i,j]))\ny[i] = max[k](sum[j]((x[i,j] / n[i]) * (x[k,j] / n[k])))",
    "a scale in a product": """
        n[i] = sum[j](abs(x[i,j]))
        y[i] = max[k](sum[j]((x[i,j] / n[i]) * ((x[k,j] - x[k,0]) / mean[j](abs(x[k,j])))))
        """,
    "range and factor": "y[i] = sum[j](x[i,j] / (max[j](x[i,j]) - min[j](x[i,j])) * u[0])",
    "scale twice": "n[i] = max[j](abs(x[i,j]))\ny[i] = sum[j]((x[i,j] / n[i] * u[j]) * (x[i,j] / n[i] * u[j]))",
    "two quotients": "n[i] = max[j](abs(z[i,j]))\ny[i] = sum[j](abs(z[i,j] / n[i]) * (z[i,j] / n[i]))",
    "square and quotient": "n[i] = sum[j](abs(x[i,j]))\ny[i] = sum[j](sq(x[i,j] / n[i]) * (abs(z[i,j]) / max[j](abs(z[i,j]))))",
    "centred and weighted": """
        r[i] = max[j](x[i,j]) - min[j](x[i,j])
        y[i] = mean[j](sq((x[i,j] - mean[j](x[i,j])) * sigmoid(u[j]) / r[i]) / N(j))
        """,
    "masked": "y[i] = sum[j](where(j <= 50, x[i,j], 0) / max[j](abs(x[i,j])))",
}
IN_PASSES = {
    "centred": "y[i] = sqrt(mean[j](sq((x[i,j] - mean[j](x[i,j])) / max[j](abs(x[i,j])))))",
    "centred and scaled": """
        r[i] = max[j](x[i,j]) - min[j](x[i,j])
        y[i] = mean[j](sq((x[i,j] - mean[j](x[i,j])) * u[0] / r[i]) / N(j))
        """,
    "standing between the ends": "a[i] = min[j](x[i,j])\ny[i] = sum[j](sq((x[i,j] - a[i]) / (max[j](x[i,j]) - a[i])))",
}
"""What has no merge that keeps it in range."""
SCALED: Mapping[str, tuple[str, dict[str, int]]] = {
    "differences grow as one": (
        "n[i] = max[j](abs(x[i,j]))\ny[i] = std[j](((x[i,j] - z[i,j]) / n[i]) * (x[i,j] / max[j](abs((x[i,j] - z[i,j])))))",
        {"z": 0},
    ),
    "a fourth power of a norm": (
        "n[i] = sqrt(mean[j](sq(x[i,j])))\ny[i] = sqrt(mean[j](sq(((x[i,j] - min[j](x[i,j])) / n[i]) * (z[i,j] / n[i]))))",
        {},
    ),
    "a fourth moment": (
        "m[i] = mean[j](x[i,j])\nn[i] = sqrt(mean[j](sq(x[i,j] - m[i])))\ny[i] = mean[j](((x[i,j] - m[i]) / n[i])**4)",
        {},
    ),
    "scales of the rows of a product": (
        "y[i] = max[k](sum[j](((z[i,j] - z[i,0]) * t[i]) * ((p[k,j] - p[k,0]) * r[k] * u[j])))",
        {"t": -1, "r": 0},
    ),
    "the square of a length": (
        "y[i] = sqrt(mean[j](sq(((x[i,j] - min[j](x[i,j])) / N(j)) * sigmoid(u[j]))))",
        {"u": 1},
    ),
    "a length in a product": (
        "n[i] = sum[j](abs((z[i,j] - min[j](z[i,j]))))\ny[i] = max[k](sum[j](((z[i,j] - z[i,0]) / n[i]) * (p[k,j] / N(j) * u[j])))",
        {"z": 0, "p": 0, "u": -1},
    ),
    "an offset that is all of a scale": (
        (
            "y[i] = sum[k](sum[j]((z[i,j] / (max[j](abs((x[i,j] - min[j](x[i,j])))) + 1e-30)) "
            "* ((p[k,j] - mean[j](p[k,j])) / (max[j](abs((p[k,j] - mean[j](p[k,j])))) + 1e-30) * c)))"
        ),
        {"c": 0},
    ),
    "quotients are taken in order": (
        (
            "y[i] = std[j](((x[i,j] - mean[j](x[i,j])) * c - (x[i,j] - min[j](x[i,j])) / N(j)) "
            "* (z[i,j] / (max[j](abs(z[i,j])) + 1e-30) * v[j])) * s[i]"
        ),
        {"c": -1, "v": -1, "s": -1},
    ),
    "a square of another's scale": (
        (
            "n[i] = mean[j](abs((x[i,j] - x[i,0])))\n"
            "y[i] = sum[j]((abs(z[i,j]) / n[i] - (x[i,j] - x[i,0]) / n[i] * v[j]) * (z[i,j] / n[i] * v[j])) * s[i]"
        ),
        {"v": 1, "s": -1},
    ),
    "a scale leaves a product with a factor that grows": (
        "n[i] = mean[j](abs(z[i,j]))\ny[i] = sum[k](sum[j]((x[i,j] - min[j](x[i,j])) / n[i] * (p[k,j] - mean[j](p[k,j])) * r[k]))",
        {"r": -1},
    ),
    "a given scale leaves a product with one that is reduced": (
        "y[i] = sum[k](sum[j](z[i,j] * s[i] * (p[k,j] - q[k,j]) / sum[j](abs((p[k,j] - q[k,j])))))",
        {"p": 0, "q": 0, "s": -1},
    ),
    "a given scale leaves a product with a length": (
        "y[i] = max[k](sum[j](x[i,j] * s[i] * (q[k,j] - min[j](q[k,j])) / N(j)))",
        {"q": 0, "s": -1},
    ),
    "given scales leave a product with a norm": (
        "n[k] = sqrt(mean[j](sq((q[k,j] - min[j](q[k,j])))))\ny[i] = max[k](sum[j]((z[i,j] * s[i]) * (abs(q[k,j]) / n[k] * c)))",
        {"s": -1, "c": -1},
    ),
    "a vector scales a matrix before another does": (
        "y[i] = sum[j](v[j] * x[i,j] * v[j])",
        {"x": -1},
    ),
}
"""Programs and the powers of the magnitude that their inputs have, 1 if not told: what `eqfuse bench scales` found."""
MAGNITUDES = (1e-45, 1e-40, 1e-38, 1e-30, 1e-10, 1.0, 1e10, 1e18, 1e20, 1e30, 3e37, 1e38)
ROWS, COLUMNS = len(MAGNITUDES) + 2, 93


def rows(rng: np.random.Generator) -> np.ndarray:
    """A row of each magnitude, and two of magnitudes that are mixed."""
    values = rng.uniform(0.5, 1.0, (ROWS, COLUMNS)) * rng.choice([-1.0, 1.0, 1.0], (ROWS, COLUMNS))
    values[: len(MAGNITUDES)] *= np.array(MAGNITUDES)[:, None]
    values[len(MAGNITUDES) :] *= rng.choice(MAGNITUDES, (2, COLUMNS))
    return values.astype(np.float32)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("prefer", [None, *SCHEDULES])
@pytest.mark.slow(but=["rolling-"])
def test_what_the_program_keeps_in_range_stays_there(name: str, prefer: str | None) -> None:
    _in_range(PROGRAMS[name], prefer)


@pytest.mark.parametrize("name", IN_PASSES)
@pytest.mark.parametrize("prefer", [None, "resident", "multi_pass"])
def test_what_no_merge_keeps_in_range_is_not_merged(name: str, prefer: str | None) -> None:
    _in_range(IN_PASSES[name], prefer)
    with pytest.raises(ScheduleError):
        eq.compile(IN_PASSES[name], prefer="rolling")


@pytest.mark.parametrize("name", SCALED)
def test_what_random_programs_of_scaled_values_found(name: str) -> None:
    source, powers = SCALED[name]
    tried = Scaled(source, {tensor: powers.get(tensor, 1) for tensor in POWERS}, 3)
    tally = Tally()
    attempt(tried, tally, schedules=(CHOSEN,))
    assert not tally.failures, tally.failures[0]
    assert sum(count for (*_, kind), count in tally.counts.items() if kind == "judged") >= 6


def _in_range(source: str, prefer: str | None) -> None:
    program = parse(source)
    rng = np.random.default_rng(3)
    arrays = {"x": rows(rng), "z": rows(rng), "c": np.geomspace(1e-30, 1e-3, ROWS, dtype=np.float32)}
    arrays["u"] = rng.uniform(0.5, 1.0, COLUMNS).astype(np.float32)
    tensors = {t.name: arrays[t.name] for t in program.tensors}
    scalars = dict.fromkeys(program.scalars, 1e-20)
    try:
        kernel = eq.compile(source, prefer=prefer)
    except ScheduleError:
        pytest.fail("every program here has every schedule")
    with np.errstate(all="ignore"):
        exact = np.asarray(eq.reference(source)(**tensors, **scalars))
        extents = bind(program, {n: a.shape for n, a in tensors.items()}, None, scalars)
        domain = FloatDomain("float32")
        unfused = np.asarray(evaluate(program, tensors, scalars, extents, domain)["y"].data, dtype=np.float64)
        called = kernel(**{n: torch.from_numpy(a) for n, a in tensors.items()}, **scalars).double().numpy()
        nest = kernel.compiled.chosen.nest  # the same in many tiles, and in shards
        tiles, shards = {"j": 8, "j_shard": 1}, dict.fromkeys((shard for shard, _ in nest.shards), 3)
        tiled = run(nest, program, tensors, scalars, extents, domain, tiles=tiles, shards=shards)["y"]
        allowed = np.abs(unfused - exact)
        size = np.maximum(np.abs(exact), np.finfo(np.float32).tiny)
    good = np.isfinite(unfused) & (allowed <= 1e-4 * size)
    assert good.sum() >= ROWS // 2
    for found in (called, tiled):
        assert np.isfinite(found[good]).all()
        assert (np.abs(found - exact)[good] <= np.maximum(4 * allowed, 1e-5 * size)[good]).all()


def test_the_program_as_written_is_had_by_asking_for_its_passes() -> None:
    source = "P[i,j] = exp(x[i,j])\ny[i,j] = P[i,j] / sum[j](P[i,j])"
    rewritten, written = eq.compile(source), eq.compile(source, prefer="multi_pass")
    assert "max_j" in str(rewritten.loops) and "max_j" not in str(written.loops)
    assert written.plan.form == "written" and "as written" in repr(written.plan)
    assert written.certificate.ok and written.derivation.check()
    large = torch.full((2, 5), 100.0)
    assert torch.isfinite(rewritten(x=large)).all() and not torch.isfinite(written(x=large)).any()


def test_a_pass_for_each_reduction_that_waits_for_another() -> None:
    kernel = eq.compile("y = sum[c](sq(x[c] / sum[c](abs(x[c]))))", prefer="multi_pass")
    assert str(kernel.loops).count("for c in tiles") == 2


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
@pytest.mark.parametrize(
    "extreme", ["max[j](-x[i,j])", "-min[j](x[i,j])", "0 - min[j](x[i,j])"], ids=["max", "min", "minus"]
)
def test_differences_of_near_numbers_are_taken_before_anything_is_added(extreme: str, prefer: str) -> None:
    """What is above the least of a row is exact in float32, and what a state moves by is such a difference."""
    source = f"b[i,j] = x[i,j] + {extreme}\ny[i] = sum[j](b[i,j] - mean[j](b[i,j]))"
    steps = np.random.default_rng(3).integers(0, 5, (8, COLUMNS))
    steps[:, 0] += 5  # the least comes later
    x = torch.from_numpy(1 + steps * 2.0**-23).float()
    found = eq.compile(source, prefer=prefer, native="off")(x=x)
    above = (x - x.min(1, keepdim=True).values).double()
    assert (found.abs() <= 1e-6 * above.sum(1)).all()


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
def test_a_sum_of_squares_is_moved_from_its_own_reference(prefer: str) -> None:
    """Around a mean of what another sum is added to: made of squares of what is not centred, it has no digits left."""
    source = "a[i] = sum[j](x[i,j])\ny[i] = std[j](max(z[i,j], x[i,j]) - x[i,j] + a[i])"
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.uniform(1, 1.5, (8, 512))).float()
    z = x + torch.from_numpy(rng.normal(size=x.shape)).float()
    found = eq.compile(source, prefer=prefer, native="off")(x=x, z=z).double()
    exact = (torch.maximum(z, x) - x).double().std(1, correction=0)
    assert ((found - exact).abs() <= 1e-5 * exact).all()


@pytest.mark.parametrize("magnitude", [1e-39, 1e-20, 1e20, 1e38])
@pytest.mark.parametrize(("dtype", "axes"), [(torch.bfloat16, "j"), (torch.float32, "i,j")])
def test_operands_of_products_have_their_scales(dtype: torch.dtype, axes: str, magnitude: float) -> None:
    source = f"y[i,k] = sum[j](x[i,j] / max[{axes}](abs(x[i,j])) * (z[k,j] / max[j](abs(z[k,j]))))"
    generator = torch.Generator().manual_seed(3)
    x, z = ((torch.rand(4, COLUMNS, generator=generator) * 2 - 0.5) * magnitude for _ in range(2))
    x, z = x.to(dtype), z.to(dtype)
    found = eq.compile(source, native="off")(x=x, z=z).double()
    x, z = x.double(), z.double()
    most = x.abs().max() if "i" in axes else x.abs().amax(1, keepdim=True)
    exact = (x / most) @ (z / z.abs().amax(1, keepdim=True)).T
    assert ((found - exact).abs() <= 2.0**-8 * exact.abs()).all()
