"""The certificate of a gradient: the adjoint identity, in a finite field.

For a program f and what is said to be its gradient g, for all inputs x, cotangents ȳ and directions v of one input:

    sum over all outputs of ȳ * (J v)  ==  sum of g(x, ȳ) * v

The left side is the tangent of `sum ȳ * f(x)`, which dual numbers give exactly (see `dual`). Both sides are
polynomials in random values, so a wrong gradient passes a trial with a small chance, which is bounded as it is for any
two programs (docs/verification.md). Directions of one input at a time tell which gradient is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from eqfuse.differentiate.dual import Dual, DualDomain
from eqfuse.differentiate.gradient import cotangents, differentiable, real_outputs, tangents, wanted
from eqfuse.differentiate.rows import NotLinear, along
from eqfuse.differentiate.shares import taken_apart
from eqfuse.differentiate.steps import extreme_of, with_stops, without_stops
from eqfuse.differentiate.vanish import few_ranks
from eqfuse.errors import EqfuseError
from eqfuse.progress import progress
from eqfuse.terms.domain import Domain
from eqfuse.terms.expressions import Number
from eqfuse.terms.extents import of_outputs
from eqfuse.terms.integers import is_exact
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.nodes import (
    Axis,
    Const,
    Expr,
    Load,
    Output,
    Program,
    Reduce,
    Scalar,
    Size,
    Tensor,
    call,
    substitute_axes,
    transform,
    walk,
)
from eqfuse.terms.parser import axes_of, parse
from eqfuse.threads import deep
from eqfuse.verify.bound import Side
from eqfuse.verify.certificate import REQUESTED, SAME_EVERYWHERE, Certificate
from eqfuse.verify.facts import facts
from eqfuse.verify.field.choice import FieldChoice
from eqfuse.verify.inputs import small_integers
from eqfuse.verify.joint import JointSizes
from eqfuse.verify.sampling import Inputs
from eqfuse.verify.shrink_constants import are_places, shrink_constants
from eqfuse.verify.sizes import constant_conditions
from eqfuse.verify.source import Source, Stage
from eqfuse.verify.verification import Verification

Length = TypeVar("Length", int, Expr)

DIRECTION = "direction."
"""Starts the name of the direction of an input: no input is called so."""

ASSUMED = (
    "points where the program has no derivative: max(a, b) of equals has the mean of both, a reduction that of the first",
    "conditions, integers and steps (floor, round, sign): constants to a derivative, as casts are the identity",
)
"""What a certificate of a gradient takes for the derivative."""


@deep()
def certify_gradient(
    source: str,
    gradient: str,
    *,
    scalars: Mapping[str, Number] | None = None,
    trials: int = 16,
    seed: int = 0,
    bound: float = REQUESTED,
) -> Certificate:
    """Whether `gradient` is a gradient of `source`: its outputs dQ are those of the inputs Q, its inputs dO the
    cotangents of the outputs O. It may be written by hand, or edited.

    The certificate says with which chance a wrong one would have passed, and what is assumed where a program has no
    derivative. Raises EqfuseError for texts that are no programs, and for outputs that are no gradient of an input.
    """
    program, adjoint = parse(source, scalars=scalars), parse(gradient, scalars=_read(gradient, scalars))
    names = _inputs(program, adjoint)
    program, adjoint = _differentiable(program, scalars), _decidable(adjoint)
    of = {output.name: name for output, name in zip(adjoint.returned, names, strict=True)}
    check = _Check(program, adjoint, of, _difference(program, adjoint), trials, seed, bound)
    with progress("verify"):
        every = _whole(program, adjoint, names)
        whole = check.compared(every)
        if not whole.ok and (whole.counterexample is not None or not whole.stages):
            return whole
        try:
            sides = _by_row(program, adjoint, names)
        except NotLinear as error:
            why = f"no theorem: {error} is not linear in the cotangents as written"
            return replace(whole, bound=1.0, theorem=why)
        rows = check.compared(sides)
    seen = set(rows.at_sizes()) - set(whole.at_sizes())
    seen &= {
        f"{each.node}{SAME_EVERYWHERE}"
        for side in (every.primal, every.dual)
        for each in facts(side).conditions
    }
    return replace(
        rows,
        stages=(*whole.stages, *rows.stages),
        trials=whole.trials + rows.trials,
        # What was not the same everywhere in the one run has been compared on both sides.
        not_covered=tuple(text for text in rows.not_covered if text not in seen),
        untaken=tuple(text for text in rows.untaken if text not in seen),
    )


@deep()
def certify_jvp(
    source: str,
    derivative: str,
    wrt: Sequence[str] | None = None,
    *,
    scalars: Mapping[str, Number] | None = None,
    trials: int = 16,
    seed: int = 0,
    bound: float = REQUESTED,
) -> Certificate:
    """Whether `derivative` is a directional derivative of `source`, as `eq.jvp` gives it: its outputs tO are those of the outputs O, its
    inputs tQ the tangents of the inputs `wrt` (those of which it reads tangents, where it is not given). The program is run on dual
    numbers, and its tangents are compared, as those of `eq.certify_gradient`. An output of which it gives no tangent has to have none.

    Raises EqfuseError for texts that are no programs, outputs that are no tangent of an output, and names in `wrt` that are no input."""
    program, linear = parse(source, scalars=scalars), parse(derivative, scalars=_read(derivative, scalars))
    named, ranks, read = tangents(program), _ranks(program), _ranks(linear)
    _derivatives_of(linear, {named[name]: name for name in real_outputs(program)}, "tangent of an output")
    by = wanted(program, wrt) if wrt else tuple(n for n in differentiable(program) if named[n] in read)
    reason = _strange("the derivative", linear, {**ranks, **{named[name]: ranks[name] for name in by}})
    program, linear = _differentiable(program, scalars), _decidable(linear)
    check = _Check(program, linear, {}, reason, trials, seed, bound)
    with progress("verify"):
        return check.compared(_forward(program, linear, by))


def _forward(program: Program, linear: Program, by: Collection[str]) -> _Sides:
    """Each tangent of an output at all of its positions."""
    named, ranks = tangents(program), _ranks(program)
    given = {output.name: output for output in linear.returned}
    left = [replace(o, name=named[o.name]) for o in program.returned if o.name in named]
    directions = {name: named[name] for name in by}
    zeros = (
        _zero(each, [f"{name}.{k}" for k in range(ranks[name])])
        for name in by
        if ranks[name]
        for each in (name, named[name])
    )
    nothing = _total(zeros)
    right = [given.get(each.name) or replace(each, expr=call("mul", Const(0.0), each.expr)) for each in left]
    right = [replace(each, expr=call("add", each.expr, nothing)) for each in right]
    scalars = [*program.scalars, *(named[name] for name in by if not ranks[name])]
    sides = _made(program, left, (), {}, {}), _made(linear, right, scalars, {}, {})
    return _Sides("tangents", *sides, {each.name: (directions, "") for each in left})


@dataclass(frozen=True)
class _Sides:
    """A program whose tangents are the values of another one. `along` are, of each output, the directions of inputs, and by what its
    tangent is multiplied, if by anything."""

    name: str
    primal: Program
    dual: Program
    along: Mapping[str, tuple[Mapping[str, str], str]]


@dataclass(frozen=True)
class _Check:
    """`of` are the inputs that outputs of the derivative are of; `reason` is why that cannot be one, if it cannot."""

    program: Program
    derivative: Program
    of: Mapping[str, str]
    reason: str
    trials: int
    seed: int
    bound: float

    def compared(self, sides: _Sides) -> Certificate:
        """Compares the tangents of one program with the values of another, and again with small constants for the large ones that positions
        meet, where a mask is the same everywhere at the sizes of trials: what differs there alone is refused, if these numbers are places."""
        made = self._compared(sides)
        shrunk = shrink_constants((sides.primal, sides.dual)) if made.at_sizes() else None
        if shrunk is None:
            return made
        (primal, dual), numbers = shrunk
        small = self._compared(replace(sides, primal=primal, dual=dual))
        if small.counterexample is not None and are_places(sides.primal) and are_places(sides.dual):
            return replace(small, shrunk=numbers)
        return made.with_shrunk(small, numbers)

    def _compared(self, sides: _Sides) -> Certificate:
        stopped, dual = sides.primal, sides.dual
        primal = replace(
            stopped, outputs=tuple(replace(o, expr=without_stops(o.expr)) for o in stopped.outputs)
        )
        field = FieldChoice.of(primal, dual)
        verification = Verification(self.trials, self.seed, field, self.bound)
        verification.reason = self.reason
        if verification.reason:
            return verification.certificate()
        given = small_integers(self.program, self.derivative)
        pair = JointSizes.of(primal, dual, given)
        sizes = few_ranks(primal, dual)
        for output in self.derivative.returned:
            spec = pair.specs.get(self.of.get(output.name, ""))
            if spec is not None:
                sizes |= dict(zip(output.axes, spec.shape, strict=True))
        pair = pair.at(sizes, given)
        expected = Stage("tangent of the program", _Tangents(stopped, pair.left, sides.along), pair.left)
        stage = Stage.of_program(sides.name, dual, pair.right)
        # The functions of derivatives are those of the gradient: they count on both sides.
        every = (Side(primal, pair.left), Side(dual, pair.right), Side(dual, pair.right))
        verification.run([stage], Source(every, pair.specs, given, pair.left, "ignored", expected))
        for side, extents in ((primal, pair.left), (dual, pair.right)):
            verification.note_constant(str(expr) for expr, _ in constant_conditions(side, extents, given))
        made = verification.certificate()
        return replace(made, not_covered=(*ASSUMED, *made.not_covered))


def without_folds(output: Output) -> Output:
    """The output with extremes that a registered reduction combines as such: see `extreme_of`."""

    def step(node: Expr) -> Expr:
        return (extreme_of(node) if isinstance(node, Reduce) else None) or node

    return replace(output, expr=transform(output.expr, step))


def _differentiable(program: Program, scalars: Mapping[str, Number] | None) -> Program:
    """The program as it is run on dual numbers: with its stops, and without what they know no derivative of."""
    program = with_stops(program, scalars)
    return _decidable(replace(program, outputs=tuple(map(without_folds, program.outputs))))


def _decidable(program: Program) -> Program:
    """The program with its exponentials of logarithms taken apart."""
    outputs = (replace(output, expr=taken_apart(output.expr)) for output in program.outputs)
    return replace(program, outputs=tuple(outputs))


def _read(text: str, scalars: Mapping[str, Number] | None) -> Mapping[str, Number]:
    """The constants that a gradient still has by name."""
    known = parse(text)
    names = {*known.scalars, *known.domains.values()}
    return {name: value for name, value in (scalars or {}).items() if name in names}


def _inputs(program: Program, adjoint: Program) -> tuple[str, ...]:
    """The inputs that the outputs of a gradient are of."""
    named = cotangents(program)
    return _derivatives_of(
        adjoint, {named[name]: name for name in differentiable(program)}, "gradient of an input"
    )


def _derivatives_of(derivative: Program, known: Mapping[str, str], what: str) -> tuple[str, ...]:
    """What the outputs of a derivative are of, which have to be among those that are known. Raises EqfuseError."""
    for output in derivative.returned:
        if output.name not in known:
            hint = "its outputs are " + " ".join(known)
            raise EqfuseError(f"{output.name!r} is no {what}", hint=hint)
    return tuple(known[output.name] for output in derivative.returned)


def _difference(program: Program, adjoint: Program) -> str:
    """Why a program cannot be the gradient, from its names and ranks alone; empty if it may be."""
    ranks, named = _ranks(program), cotangents(program)
    for output in adjoint.returned:
        rank = next(ranks[name] for name in ranks if named.get(name) == output.name)
        if len(output.axes) != rank:
            return f"{output.name!r} has {len(output.axes)} dimensions, the input has {rank}"
    above = {named[o.name]: len(o.axes) for o in program.returned if o.name in named}
    return _strange("the gradient", adjoint, {**ranks, **above})


def _ranks(program: Program) -> dict[str, int]:
    """The number of dimensions of each input."""
    return {tensor.name: tensor.rank for tensor in program.tensors} | dict.fromkeys(program.scalars, 0)


def _strange(what: str, derivative: Program, known: Mapping[str, int]) -> str:
    """What a derivative reads that it cannot, in words; empty where it reads known inputs and derivatives, of these numbers of dimensions."""
    for name, rank in _ranks(derivative).items():
        if name not in known:
            return f"{what} reads {name!r}, which is neither an input of the program nor a derivative that is given"
        if known[name] != rank:
            return f"{name!r} has {rank} dimensions in {what}, {known[name]} in the program"
    return ""


def _value(name: str, axes: Sequence[str]) -> Expr:
    return Load(name, tuple(map(Axis, axes))) if axes else Scalar(name)


def _summed(body: Expr, axes: Sequence[str]) -> Expr:
    return reduce(lambda inner, axis: Reduce("sum", axis, inner), reversed(axes), body)


def _whole(program: Program, adjoint: Program, names: Sequence[str]) -> _Sides:
    """All cotangents at once: each side is one number for each input."""
    outputs, named = {output.name: output for output in program.returned}, cotangents(program)
    terms = [
        _summed(call("mul", outputs[o].expr, _value(named[o], outputs[o].axes)), outputs[o].axes)
        for o in real_outputs(program)
    ]
    total = reduce(lambda a, b: call("add", a, b), terms)
    left = [Output(named[name], (), total) for name in names]
    right = [Output(named[name], (), _product(adjoint, named[name], name)) for name in names]
    along = {named[name]: ({name: DIRECTION + name}, "") for name in names}
    return _Sides("gradient", *_programs(program, adjoint, names, left, right), along)


def _by_row(program: Program, adjoint: Program, names: Sequence[str]) -> _Sides:
    """The cotangent of one position of one output at a time: each side has that position for its axes. Raises
    NotLinear."""
    if adjoint.in_order:
        raise NotLinear(f"{adjoint.in_order[0].states[0]!r}, which is computed in order,")
    outputs = {output.name: output for output in program.returned}
    left: list[Output] = []
    right: list[Output] = []
    directions: dict[str, tuple[Mapping[str, str], str]] = {}
    bases = {**{axis: axis for axis in adjoint.lengths}, **adjoint.domains}
    lengths = {axis: adjoint.lengths[of] for axis, of in bases.items() if of in adjoint.lengths}
    named = cotangents(program)
    above = frozenset(named[o] for o in real_outputs(program))
    for o in real_outputs(program):
        axes = outputs[o].axes
        rows = tuple(f"{o}.{axis}" for axis in axes)
        for name in names:
            label = f"{named[name]} of {o}"
            left.append(Output(label, rows, _at_rows(outputs[o], rows)))
            product = _product(adjoint, named[name], name)
            product = along(product, named[o], rows, above - {named[o]}, lengths)
            right.append(Output(label, rows, product))
            directions[label] = {name: DIRECTION + name}, named[o]
    made = _programs(program, adjoint, names, left, right)
    return _Sides("gradient, row by row", *made, directions)


def _at_rows(output: Output, rows: Sequence[str]) -> Expr:
    """The value of an output along axes of other names: equal terms of both sides have equal names."""
    moved = substitute_axes(
        output.expr, {axis: Axis(row) for axis, row in zip(output.axes, rows, strict=True)}
    )
    bound = {node.axis for node in walk(moved) if isinstance(node, Reduce)}
    names = {axis: row for axis, row in zip(output.axes, rows, strict=True) if axis not in bound}

    def step(node: Expr) -> Expr:
        return Size(names[node.axis]) if isinstance(node, Size) and node.axis in names else node

    return transform(moved, step)


def _product(adjoint: Program, gradient: str, name: str) -> Expr:
    """The product of the gradient by an input and its direction."""
    output = next(each for each in adjoint.returned if each.name == gradient)
    return _summed(call("mul", output.expr, _value(DIRECTION + name, output.axes)), output.axes)


def _programs(
    program: Program,
    adjoint: Program,
    names: Sequence[str],
    left: Sequence[Output],
    right: Sequence[Output],
) -> tuple[Program, Program]:
    """Both sides as programs. Zeros that read inputs tell which axes of the second have the size of a dimension."""
    named = cotangents(program)
    axes = {named[o.name]: o.axes for o in program.returned if o.name in named}
    inputs = {tensor.name for tensor in program.tensors}
    zeros = list(_sizes(adjoint, axes))
    for output, name in zip(adjoint.returned, names, strict=True):
        if name in inputs:
            zeros += [_zero(each, output.axes) for each in (name, DIRECTION + name)]
    nothing = _total(zeros)
    scalars = [name for name in axes if not axes[name]]
    scalars += [DIRECTION + name for name in names if name not in inputs]
    left = [replace(each, expr=call("add", each.expr, _nothing(each, named))) for each in left]
    right = [replace(o, expr=call("add", call("add", o.expr, _nothing(o, named)), nothing)) for o in right]
    lengths = dict(_row_lengths(program, program.lengths))
    computed = dict(_row_lengths(program, program.computed))
    return _made(program, left, scalars, lengths, computed), _made(adjoint, right, scalars, lengths, computed)


def _row_lengths(program: Program, known: Mapping[str, Length]) -> Iterator[tuple[str, Length]]:
    """The lengths of axes that stand for those of an output of which the text gives one."""
    for output in program.returned:
        for axis in output.axes:
            count = known.get(program.domains.get(axis, axis))
            if count is not None:
                yield f"{output.name}.{axis}", count
                yield f"{cotangents(program).get(output.name)}.{axis}", count


def _sizes(adjoint: Program, axes: Mapping[str, tuple[str, ...]]) -> Iterator[Expr]:
    """Zeros that read cotangents along the axes of which a gradient reads the size."""
    nodes = walk(*(output.expr for output in adjoint.returned))
    sizes = (node.axis for node in nodes if isinstance(node, Size))
    for axis in dict.fromkeys(adjoint.domains.get(axis, axis) for axis in sizes):
        for name, along_axes in axes.items():
            if axis in along_axes:
                yield _zero(name, tuple(axis if a == axis else f"{name}.{a}" for a in along_axes))
                break


def _nothing(output: Output, named: Mapping[str, str]) -> Expr:
    """A zero that reads the cotangent which an output is a row of: it tells the sizes of its axes."""
    row = output.name.partition(" of ")[2]
    return call("mul", Const(0.0), _value(named[row], output.axes)) if row else Const(0.0)


def _total(zeros: Iterable[Expr]) -> Expr:
    nothing: Expr = Const(0.0)
    for zero in zeros:
        nothing = call("add", nothing, zero)
    return nothing


def _zero(name: str, axes: Sequence[str]) -> Expr:
    return _summed(call("mul", Const(0.0), _value(name, axes)), axes)


def _made(
    program: Program,
    outputs: Sequence[Output],
    scalars: Sequence[str],
    lengths: Mapping[str, int],
    computed: Mapping[str, Expr],
) -> Program:
    """A program with other outputs, and with what they read. `lengths` and `computed` are those of axes that it may have."""
    program = of_outputs(program, outputs)
    nodes = list(walk(*(output.expr for output in program.outputs)))
    own = {axis: count for axis, count in lengths.items() if axis in axes_of(outputs)}
    known = {tensor.name: tensor for tensor in program.tensors}
    loads = (node for node in nodes if isinstance(node, Load) and node.tensor not in program.states)
    ranks = {node.tensor: len(node.index) for node in loads}
    tensors = [known.get(name, Tensor(name, rank, None, (None,) * rank)) for name, rank in ranks.items()]
    every = tuple(dict.fromkeys((*program.scalars, *scalars)))
    known_lengths = {**program.lengths, **own}
    made = {axis: count for axis, count in computed.items() if axis in axes_of(outputs)}
    made = {**program.computed, **made}
    return replace(
        program,
        tensors=tuple(tensors),
        scalars=every,
        lengths=known_lengths,
        computed=made,
    )


class _Tangents:
    """The tangent of each output of a program, along its directions."""

    def __init__(
        self,
        program: Program,
        extents: Mapping[str, int],
        along: Mapping[str, tuple[Mapping[str, str], str]],
    ) -> None:
        self.program, self.extents, self.along = program, extents, along

    def __call__(self, inputs: Inputs, domain: Domain) -> dict[str, Any]:
        found: dict[str, Any] = {}
        groups: dict[tuple[tuple[str, str], ...], list[Output]] = {}
        for output in self.program.returned:
            groups.setdefault(tuple(self.along[output.name][0].items()), []).append(output)
        for directions, outputs in groups.items():
            program = of_outputs(self.program, outputs)
            tensors, scalars = (
                self._duals(values, inputs, dict(directions)) for values in (inputs.tensors, inputs.scalars)
            )
            made = evaluate(program, tensors, scalars, self.extents, DualDomain(domain), batch=inputs.trials)
            for output in outputs:
                tangent, factor = self._tangent(made[output.name], domain), self.along[output.name][1]
                if factor:
                    tangent = domain.call("mul", [tangent, {**inputs.tensors, **inputs.scalars}[factor]])
                found[output.name] = tangent
        return {output.name: found[output.name] for output in self.program.returned}

    def _tangent(self, value: Any, domain: Domain) -> Any:
        if not isinstance(value, Dual):
            return domain.full(np.shape(value), 0.0)
        return domain.full(domain.shape(value.value), 0.0) if value.tangent is None else value.tangent

    def _duals(
        self, values: Mapping[str, Any], inputs: Inputs, directions: Mapping[str, str]
    ) -> dict[str, Any]:
        """Values as dual numbers; inputs that the derivative is by have their directions for tangents."""
        every = {**inputs.tensors, **inputs.scalars}
        made: dict[str, Any] = {}
        for key, value in values.items():
            if is_exact(value) or isinstance(value, int | float):
                made[key] = value
            else:
                made[key] = Dual(value, every[directions[key]] if key in directions else None)
        return made
