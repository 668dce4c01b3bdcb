"""The catalogue of wrong transformations, the programs they are made in, and the trial of each.

A mutant is judged where it was made and at every level below: outputs against the program as written;
a merge or a loop nest as loops, then as the tile program that it is lowered to; a tile program as tiles.
The first level that refuses it has caught it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from bench import (
    mutants_loops,
    mutants_merges,
    mutants_orders,
    mutants_passes,
    mutants_roles,
    mutants_terms,
    mutants_tiles,
)
from bench.mutation import Level, Mutant, Same
from bench.stability import Uncast, draw_floats, first_gross_error
from eqfuse import certification, compiler
from eqfuse.derived import Derived
from eqfuse.errors import EqfuseError, ScheduleError
from eqfuse.extract.candidates import Candidate, PlanSearch
from eqfuse.extract.devices import DEVICES
from eqfuse.extract.partition import Partition
from eqfuse.extract.unsuited import Unsuited
from eqfuse.loops.check import NestError
from eqfuse.loops.check import check as check_nest
from eqfuse.loops.lower import lower as lower_plan
from eqfuse.loops.plan import KernelPlan, Plan, Roles
from eqfuse.rules.states import axis_order
from eqfuse.terms.folds import fold_of
from eqfuse.terms.functions import CASTS
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.nodes import (
    Call,
    Expr,
    Load,
    Local,
    Output,
    Program,
    Reduce,
    call,
    reductions,
    replaced,
    walk,
)
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.check import check as check_tiles
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.roles.check import check as check_roles
from eqfuse.tile.roles.nodes import RolesProgram
from eqfuse.verify.certificate import Counterexample
from eqfuse.verify.check import check_stages
from eqfuse.verify.inputs import input_specs, roots
from eqfuse.verify.sampling import Inputs
from eqfuse.verify.sizes import small_extents
from eqfuse.verify.source import Stage
from eqfuse.verify.stages import loop_stages, roles_stages, term_stage, tile_stages

MUTANTS: tuple[Mutant, ...] = (
    *mutants_terms.MUTANTS,
    *mutants_orders.MUTANTS,
    *mutants_merges.MUTANTS,
    *mutants_loops.MUTANTS,
    *mutants_tiles.MUTANTS,
    *mutants_passes.MUTANTS,
    *mutants_roles.MUTANTS,
)

SOURCES: Mapping[str, str] = {
    "softmax": """
        x: f32[i, j]
        y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))
        """,
    "scaled softmax and its maximum": """
        x: f32[i, j]
        m[i] = max[j](x[i,j] * scale)
        y[i,j] = exp(x[i,j] * scale - m[i]) / sum[j](exp(x[i,j] * scale - m[i]))
        return m, y
        """,
    "attention, causal window": """
        Q: f32[i, d]
        K: f32[j, d]
        V: f32[j, e]
        S[i,j] = sum[d](Q[i,d] * K[j,d]) * scale
        T[i,j] = where(j <= i and i - j < 4, S[i,j], -inf)
        m[i] = max[j](T[i,j])
        Z[i] = sum[j](exp(T[i,j] - m[i]))
        O[i,e] = sum[j](exp(T[i,j] - m[i]) / Z[i] * V[j,e])
        L[i] = m[i] + log(Z[i])
        return O, L
        """,
    "attention in half precision": """
        Q: f16[i, d]
        K: f16[j, d]
        V: f16[j, e]
        S[i,j] = sum[d](Q[i,d] * K[j,d]) * scale
        m[i] = max[j](S[i,j])
        Z[i] = sum[j](exp(S[i,j] - m[i]))
        O[i,e] = sum[j](exp(S[i,j] - m[i]) / Z[i] * V[j,e])
        L[i] = m[i] + log(Z[i])
        """,
    "attention with distances": """
        Q: f32[i, d]
        K: f32[j, d]
        V: f32[j, e]
        S[i,j] = sum[d](Q[i,d] * K[j,d]) / c + slope * (j - i)
        m[i] = max[j](S[i,j])
        Z[i] = sum[j](exp(S[i,j] - m[i]))
        O[i,e] = sum[j](exp(S[i,j] - m[i]) / Z[i] * V[j,e])
        return m, O
        """,
    "attention, grouped heads": """
        Q: f32[h, i, d]
        K: f32[k, j, d]
        V: f32[k, j, e]
        S[h,i,j] = sum[d](Q[h,i,d] * K[h//2,j,d])
        m[h,i] = max[j](S[h,i,j])
        Z[h,i] = sum[j](exp(S[h,i,j] - m[h,i]))
        O[h,i,e] = sum[j](exp(S[h,i,j] - m[h,i]) / Z[h,i] * V[h//2,j,e])
        L[h,i] = m[h,i] + log(Z[h,i])
        return O, L
        """,
    "positions in groups": """
        x: f32[i, j]
        y[i] = sum[j](x[i,j] * ((j - 3) // 2))
        z[i] = max[j](x[i,j] * (1 + (i - j) % 3))
        return y, z
        """,
    "paged sum": """
        K: f32[p, r, d]
        table: i64[b, t]
        y[b,d] = sum[j](K[table[b, j//4], j%4, d])
        """,
    "variance": """
        x: f32[i, j]
        y[i] = mean[j](sq(x[i,j] - mean[j](x[i,j])))
        """,
    "scaled L2 norm": """
        x: f32[i, j]
        m[i] = max[j](abs(x[i,j]))
        n[i] = m[i] * sqrt(sum[j](sq(x[i,j] / m[i])))
        return m, n
        """,
    "quantisation and product": """
        A: f32[i, k]
        W: f32[n, k]
        s[i] = max[k](abs(A[i,k])) / 448
        C[i,n] = sum[k](f8e4m3(A[i,k] / s[i]) * W[n,k]) * s[i]
        return s, C
        """,
    "integer quantisation and product": """
        A: f32[i, k]
        W: f32[n, k]
        s[i] = max[k](abs(A[i,k])) / 127
        C[i,n] = sum[k](round(A[i,k] / s[i]) * W[n,k]) * s[i]
        return s, C
        """,
    "layer norm": """
        x: f32[i, j]
        w: f32[j]
        m[i] = mean[j](x[i,j])
        y[i,j] = (x[i,j] - m[i]) * rsqrt(mean[j](sq(x[i,j] - m[i])) + eps) * w[j]
        """,
    "logarithm of a sum": """
        x: f32[i, j]
        y[i] = logsumexp[j](x[i,j])
        """,
    "covariance": """
        x: f32[i, j]
        u: f32[i, j]
        m[i] = mean[j](x[i,j])
        n[i] = mean[j](u[i,j])
        v[i] = mean[j]((x[i,j] - m[i]) * (u[i,j] - n[i]))
        return m, n, v
        """,
    "norm and absolute maximum": """
        x: f32[i, j]
        w: f32[j]
        r[i] = rsqrt(mean[j](sq(x[i,j])) + eps)
        a[i] = max[j](abs(x[i,j] * r[i] * w[j]))
        """,
    "performer": """
        Q: f32[i, r]
        K: f32[j, r]
        V: f32[j, e]
        F[j,r] = exp(K[j,r] - max[j](K[j,r]))
        O[i,e] = sum[r](Q[i,r] * sum[j](F[j,r] * V[j,e])) / sum[r](Q[i,r] * sum[j](F[j,r]))
        """,
    "products in another order": """
        a: f32[i, j]
        b: f32[j, k]
        c: f32[k]
        x: f32[i, k]
        w: f32[o, k]
        u: f32[o, r]
        v: f32[r, k]
        y[i] = sum[k](sum[j](a[i,j] * b[j,k]) * c[k])
        m[i] = mean[o](sum[k](x[i,k] * w[o,k]))
        z[i,o] = sum[k](x[i,k] * (w[o,k] + sum[r](u[o,r] * v[r,k])))
        d[i,j] = sum[k](where(i == k, c[k], 0) * b[j,k])
        return y, m, z, d
        """,
    "sums over positions": """
        x: f32[i]
        z: f32[j]
        y[i] = sum[j](where(j <= 2 * i - 3, x[i], 0)) + sum[j](j * x[i]) + sum[j](where(j >= i, j * j * x[i], 0))
        s[i] = sum[j](z[j])
        return y, s
        """,
    "a few positions next to each other": """
        x: f32[j]
        t: f32[i, j]
        y[i] = sum[j](where((j <= i) & (i < j + 3), x[j], 0))
        z[i] = sum[j](where(abs(i - j) <= 1, t[i,j], 0) * x[j])
        return y, z
        """,
    "position of the maximum": """
        x: f32[i, j]
        y[i] = argmax[j](x[i,j])
        """,
    "the two greatest": """
        x: f32[i, j]
        k: axis[2]
        y[i, k], p[i, k] = topk[j, k](x[i,j])
        """,
}
"""Programs that mutants are made in. They return their maxima, scales and means: a softmax is the same under any
shift, and a norm under any scale, so that a wrong one would be no mistake but for overflow."""

REORDERED = frozenset(
    {"products in another order", "sums over positions", "a few positions next to each other"}
)
"""Programs of which another order is cheaper. Mistakes in orders are made in these alone, and no others are."""

TRIALS = 16
ORDERED = (-np.inf, 0.0, 1.0, np.nan)
EXACT = 1e-12
"""Relative error in float64 that is rounding."""
DEVICE, GPU = DEVICES["cpu"], DEVICES["h200"]


@dataclass(frozen=True)
class Subject:
    """A program in one schedule; `strict` makes its casts opaque."""

    name: str
    derived: Derived
    candidate: Candidate
    strict: bool

    @property
    def program(self) -> Program:
        return self.derived.program

    @property
    def schedule(self) -> str:
        return str(self.candidate.plan.schedule)

    @cached_property
    def dtypes(self) -> Mapping[str, str]:
        return program_dtypes(self.program)

    @cached_property
    def extents(self) -> dict[str, int]:
        return small_extents(self.program)

    @cached_property
    def vanishing(self) -> tuple[str, ...]:
        """Sums that are 0 for all inputs in exact arithmetic: what they hold is rounding alone."""
        values: dict[Expr, Expr] = {}
        outputs: list[Output] = []
        for group in self.derived.groups.values():
            for state in group.states:
                body = replaced(state.body, values)
                if any(
                    isinstance(node, Load) and node.tensor not in self.normal.tensors for node in walk(body)
                ):
                    continue  # another kernel has stored it
                value = Reduce(state.op, group.axis, body)
                values[Local(state.name, state.dims)] = value
                if state.op != "sum":
                    continue
                size = Reduce("sum", group.axis, call("abs", body))
                outputs += [
                    Output(state.name, state.dims, value),
                    Output(f"{state.name} size", state.dims, size),
                ]
        found = self.run_float64(replace(self.program, outputs=tuple(outputs)))
        return tuple(
            output.name
            for output in outputs[::2]
            if (abs(found[output.name]) <= EXACT * found[f"{output.name} size"]).all()
        )

    @cached_property
    def normal(self) -> Inputs:
        """Normal numbers for every input, in float64."""
        specs = input_specs(self.program, self.extents, {}, self.dtypes)
        return draw_floats(self.program, specs, self.extents)[0]

    def run_float64(self, program: Program, inputs: Inputs | None = None) -> Mapping[str, Any]:
        """The outputs of a program for some inputs, or for the normal ones."""
        i = inputs or self.normal
        return evaluate(program, i.tensors, i.scalars, i.extents, Uncast("float64"), batch=i.trials)

    @cached_property
    def tiles(self) -> list[TileProgram]:
        return certification.verified_tiles(self.candidate.nest, self.program, self.dtypes, DEVICE)

    @cached_property
    def after_passes(self) -> list[TileProgram]:
        return certification.verified_tiles(self.candidate.nest, self.program, self.dtypes, GPU)

    @cached_property
    def roles(self) -> list[RolesProgram]:
        """Its forms in roles, where it has any: as they are verified, of products side by side and one behind another. Whether a
        schedule needs several kernels, or is none, may depend on the sizes."""
        if self.schedule == "rolling" and not self.strict:
            try:
                chosen = compiler.pipeline(self.derived, self.extents, self.dtypes, GPU, self.schedule).chosen
            except ScheduleError:
                return []
            if len(chosen.nest.kernels) > 1:
                return []
            roles = Roles(chosen.plan.configs[0].blocks, consumers=2, slots=2, delayed=(1,))
            try:
                return certification.verified_roles(chosen.nest, self.program, self.dtypes, GPU, [roles])
            except Unsuited:
                return []
        return []


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: the level that caught it ("" for none), the first trial (from 1) that
    saw it and how many of the round's trials did; no trials where a level's own rules refused it."""

    caught: str
    first: int
    seen: int
    shown: str


def subjects(
    name: str, source: str, scalars: Mapping[str, float] | None = None, *, strict: bool = False
) -> list[Subject]:
    """The program in every schedule that it has. Raises EqfuseError for a text that is no program."""
    derived = compiler.derive(source, scalars, strict)
    extents = compiler.nominal_extents(derived.program)
    order = axis_order(replace(derived.program, outputs=derived.outputs))
    search = PlanSearch(derived.program, program_dtypes(derived.program), DEVICE)
    found: dict[str, Candidate] = {}
    for candidate in compiler.plans(derived, derived.outputs, Partition(order, extents), search):
        found.setdefault(candidate.plan.schedule, candidate)
    return [Subject(name, derived, candidate, strict) for candidate in found.values()]


def mutations(mutant: Mutant, subject: Subject) -> Iterator[Any]:
    """Every IR of the subject with this mistake in one place; nothing where there is no such place."""
    if (mutant.level == "order") is not (subject.name in REORDERED):
        return
    match mutant.level:
        case "term" | "order":
            yield from mutant.mutate(subject.derived.outputs)
        case "merge":
            yield from _plans(mutant, subject.candidate.plan)
        case "loop":
            yield from mutant.mutate(subject.candidate.nest)
        case "tile" | "pass" | "roles":
            # The same mistake for every size of block.
            programs: Sequence[Any] = subject.tiles if mutant.level == "tile" else subject.after_passes
            if mutant.level == "roles":
                programs = subject.roles
            for tiles in zip(*map(mutant.mutate, programs), strict=False):
                same = [found for found in tiles if isinstance(found, Same)]
                yield same[0] if same else tiles


def _plans(mutant: Mutant, plan: Plan) -> Iterator[Plan | Same]:
    for at, kernel in enumerate(plan.kernels):
        for to, group_plan in enumerate(kernel.groups):
            if group_plan.schedule in ("rolling", "split_k"):
                for group in mutant.mutate(group_plan.group):
                    if isinstance(group, Same):
                        yield group
                        continue
                    groups = (*kernel.groups[:to], replace(group_plan, group=group), *kernel.groups[to + 1 :])
                    changed: KernelPlan = replace(kernel, groups=groups)
                    yield replace(plan, kernels=(*plan.kernels[:at], changed, *plan.kernels[at + 1 :]))


def places(mutant: Mutant, subject: Subject, most: int) -> list[Any]:
    """At most `most` of the mutations, the first and the last among them."""
    found = list(mutations(mutant, subject))
    if len(found) <= most:
        return found
    return [found[round(k * (len(found) - 1) / max(1, most - 1))] for k in range(most)]


def rejected(subject: Subject) -> str:
    """Why the right form of a program does not pass what the mutants have to fail; empty where it does."""
    program, nest, extents = subject.program, subject.candidate.nest, subject.extents
    stages = [
        term_stage(replace(program, outputs=subject.derived.outputs), extents),
        *loop_stages(program, nest, extents),
        *tile_stages(program, subject.tiles, extents),
    ]
    after, roles = subject.after_passes, subject.roles
    divided = roles_stages(program, roles, extents) if roles else []
    for some in (stages, tile_stages(program, after, extents), *((divided,) if divided else ())):
        certificate = check_stages(program, some, trials=TRIALS, dtypes=subject.dtypes)
        if not certificate.ok:
            return certificate.reason
        if gross := _gross_error(some, subject):
            return str(gross).splitlines()[0]
    return ""


def judge(level: Level, mutated: Any, subject: Subject) -> Verdict | Same:
    """Which level refuses a mutated IR, and how; `Same` where it does not change what is verified."""
    if isinstance(mutated, Same):
        return mutated
    ran: list[Stage] = []
    try:
        if level == "merge":
            mutated = lower_plan(mutated, subject.program)
            if mutated == subject.candidate.nest:
                return Same("the schedule does not use this part of the merge")
        for stage in _stages(level, mutated, subject):
            ran.append(stage)
            certificate = check_stages(subject.program, [stage], trials=TRIALS, dtypes=subject.dtypes)
            if not certificate.ok:
                return _seen_by(certificate.counterexample, certificate.reason, stage.name)
        gross = _gross_error(ran, subject)
    except NestError as error:
        return Verdict("rules of loops", 0, 0, str(error))
    except EqfuseError as error:
        return Verdict("rules of tiles", 0, 0, error.message)
    if gross is not None:
        return _seen_by(gross, "", gross.stage)
    if level == "roles":
        return Verdict("", 0, 0, "")
    if level not in ("term", "order") and _right_for_every_order(ran, subject):
        return Same("it gives the same for every row of -inf, 0, 1 and NaN")
    if level not in ("term", "order") and subject.vanishing and _exact(ran, subject):
        return Same("it changes how a rounding error is kept, which is 0 in exact arithmetic")
    return Verdict("", 0, 0, "")


def _seen_by(example: Counterexample | None, reason: str, stage: str) -> Verdict:
    if example is None:
        return Verdict(stage, 0, 0, reason)
    return Verdict(stage, example.trials[0], len(example.trials), str(example).splitlines()[0])


def _gross_error(stages: Sequence[Stage], subject: Subject) -> Counterexample | None:
    program, extents = subject.program, subject.extents
    specs = input_specs(program, extents, {}, subject.dtypes)

    def reference(i: Inputs, d: Any) -> Mapping[str, Any]:
        return evaluate(program, i.tensors, i.scalars, i.extents, d, batch=i.trials)

    inputs = draw_floats(program, specs, extents)
    casts = any(isinstance(node, Call) and node.fn in CASTS for node in walk(*roots(program)))
    runs = [(stage.name, stage.run) for stage in stages]
    return first_gross_error(reference, runs, inputs, casts=casts)


def _right_for_every_order(stages: Sequence[Stage], subject: Subject) -> bool:
    """Whether a program that only compares the values of one tensor gets the same from the stages for every row of
    `ORDERED`: equal values, the identity and NaN at every position."""
    folds = [fold_of(node.op) for output in subject.program.outputs for node in reductions(output.expr)]
    if len(subject.program.tensors) != 1 or not all(found is not None and found[0].order for found in folds):
        return False
    normal = subject.normal
    ((name, values),) = normal.tensors.items()
    _, lines, length = values.shape
    rows = np.array(list(product(ORDERED, repeat=length)))
    trials = math.ceil(len(rows) / lines)
    filled = np.resize(rows, (trials, lines, length))
    inputs = replace(normal, tensors={name: filled}, trials=trials)
    return _agree(stages, subject, inputs, partial(np.array_equal, equal_nan=True))


def _exact(stages: Sequence[Stage], subject: Subject) -> bool:
    """Whether the stages are right in float64 but for its rounding."""

    def close(found: Any, value: Any) -> bool:
        return np.allclose(found, value, rtol=EXACT, atol=EXACT * abs(value).max())

    return _agree(stages, subject, subject.normal, close)


def _agree(
    stages: Sequence[Stage], subject: Subject, inputs: Inputs, equal: Callable[[Any, Any], bool]
) -> bool:
    """Whether every output of every stage equals that of the program, in float64."""
    expected = subject.run_float64(subject.program, inputs)
    results = [stage.run(inputs, Uncast("float64")) for stage in stages]
    return all(equal(result[name], value) for result in results for name, value in expected.items())


def _stages(level: Level, mutated: Any, subject: Subject) -> Iterator[Stage]:
    program, extents = subject.program, subject.extents
    match level:
        case "term" | "order":
            yield term_stage(replace(program, outputs=mutated), extents)
        case "merge" | "loop":
            check_nest(mutated, program)
            yield from loop_stages(program, mutated, extents)
            tiles = certification.verified_tiles(mutated, program, subject.dtypes, DEVICE)
            yield from tile_stages(program, tiles, extents)
        case "tile" | "pass":
            for lowered in mutated:
                check_tiles(lowered, subject.dtypes)
            yield from tile_stages(program, mutated, extents)
        case "roles":
            for roles in mutated:
                check_roles(roles)
            yield from roles_stages(program, mutated, extents)
