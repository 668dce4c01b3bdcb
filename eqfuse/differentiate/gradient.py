"""`eq.grad`: the gradient of a program, as a program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eqfuse import limits
from eqfuse.differentiate.interchange import KnownSum, interchanged
from eqfuse.differentiate.polynomial import UNIT, Polynomial, atom, collected, expression
from eqfuse.differentiate.reverse import Reverse
from eqfuse.differentiate.saved import Saved, UnitGradients, is_matrix_product, saving, scaling
from eqfuse.differentiate.steps import Step, Steps, name_of, plain, reached, with_stops, without_stops
from eqfuse.differentiate.text import needed_steps, text_of
from eqfuse.errors import EqfuseError, did_you_mean
from eqfuse.names import Names
from eqfuse.terms.expressions import Number
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Program, Scalar, call, once, post_order, walk
from eqfuse.terms.parser import parse, sized_axes
from eqfuse.terms.sizes import places
from eqfuse.terms.types import KINDS, kinds, program_dtypes
from eqfuse.threads import deep

if TYPE_CHECKING:  # its tensors are passed on
    import torch


def differentiable(program: Program) -> tuple[str, ...]:
    """The inputs that a gradient may be asked by: tensors and scalars of real numbers."""
    dtypes = program_dtypes(program)
    names = (*(tensor.name for tensor in program.tensors), *program.scalars)
    return tuple(name for name in names if dtypes.get(name, "f32") not in KINDS)


def real_outputs(program: Program) -> tuple[str, ...]:
    """The outputs that have a cotangent: those of real numbers."""
    known = kinds([output.expr for output in program.outputs], program_dtypes(program))
    return tuple(output.name for output in program.returned if known[output.expr] == "real")


@once
def cotangents(program: Program) -> Mapping[str, str]:
    """The names of the cotangents of outputs, and of those of inputs, their gradients: dQ of Q, or the first of dQ_2, dQ_3, ... that is
    the name of no input."""
    return _named("d", program)


@once
def tangents(program: Program) -> Mapping[str, str]:
    """The names of the tangents of inputs and outputs: tQ of Q, or the first of tQ_2, tQ_3, ... that is the name of no input."""
    return _named("t", program)


def _named(letter: str, program: Program) -> Mapping[str, str]:
    names = Names((*(tensor.name for tensor in program.tensors), *program.scalars))
    known = (*real_outputs(program), *differentiable(program))
    return {name: names.fresh(f"{letter}{name}") for name in known}


def outputs_by(
    program: Program, names: Collection[str], scalars: Mapping[str, Number] | None = None
) -> frozenset[str]:
    """The outputs that have a gradient by some of these inputs: real numbers of which a derivative reaches one."""
    real = real_outputs(program)
    reads = {
        output.name: {name_of(part) for part in reached(output.expr)}
        for output in with_stops(program, scalars).outputs
    }

    def states(name: str) -> list[str]:
        return [each for each in sorted(program.states) if each in reads[name]]

    return frozenset(
        name
        for name in reads.keys() & real
        if any(not reads[each].isdisjoint(names) for each in post_order([name], states))
    )


@deep()
def grad(
    source: str, wrt: Sequence[str] | None = None, *, scalars: Mapping[str, Number] | None = None
) -> str:
    """The gradient of a program, as the text of a program.

    It reads the tensors and scalars of `source`, and for each output O of real numbers a cotangent dO of its shape; its
    outputs are dQ for each Q of `wrt` (all tensors of real numbers, where it is not given), in that order: the sum over
    all outputs and their positions of dO times the derivative of O by Q. Run-time scalars may be named too. `scalars`
    are constants known now, as in `eq.compile`. The text may be edited, compiled, and differentiated again.

    An axis of Q that nothing in the gradient determines has to be given at the call: `sizes={"j": 128}`.

    Raises EqfuseError for a text that is no program, a name that is no input or holds integers, and a reduction
    without a gradient; and where `EQFUSE_DERIVE_SECONDS` of processor time end first.
    """
    with limits.derivation():
        return _differentiated(source, wrt, scalars).text


@deep()
def jvp(source: str, wrt: Sequence[str] | None = None, *, scalars: Mapping[str, Number] | None = None) -> str:
    """The directional derivative of a program (forward mode), as the text of a program.

    It reads the tensors and scalars of `source`, and for each Q of `wrt` (all tensors of real numbers, where it is not given) a
    tangent tQ of its shape; its outputs are tO for each output O that has a derivative by some Q: the sum over all Q and their
    positions of tQ times the derivative of O by Q. `scalars` are as in `eq.grad`.

    A gradient is linear in its cotangents, dQ = Jᵀ dO. The gradient of that by dO, at tangents for cotangents of the dQ, is J tQ.

    Raises EqfuseError as `eq.grad` does, and where no output has a derivative.
    """
    program = parse(source, scalars=scalars)
    with limits.derivation():
        names = wanted(program, wrt)
        gradient = _differentiated(source, names, scalars).text
        adjoint = parse(gradient)
        read = {*(tensor.name for tensor in adjoint.tensors), *adjoint.scalars, *adjoint.domains.values()}
        given, moved = cotangents(program), tangents(program)
        outputs = [name for name in real_outputs(program) if given[name] in read]
        if not outputs:
            raise EqfuseError(
                f"no output has a derivative by {', '.join(names)}", hint="leave them out of wrt"
            )
        named = {given[name]: moved[name] for name in (*names, *outputs)}
        known = {name: value for name, value in (scalars or {}).items() if name in read}
        by, sized = [given[name] for name in outputs], _sized(adjoint, named)
        return _differentiated(gradient, by, known, named=named, sized=sized).text


def _sized(adjoint: Program, named: Mapping[str, str]) -> dict[str, str]:
    """Declarations of the axes of a gradient's outputs that nothing gives a size, as those of the tangents that are `named` for them."""
    known = {*(axis for axis, *_ in places(adjoint)), *adjoint.lengths, *adjoint.computed}
    found: dict[str, str] = {}
    for output in adjoint.returned:
        tangent, lines = named[output.name], list[str]()
        for dimension, axis in enumerate(output.axes):
            if (base := adjoint.domains.get(axis, axis)) not in known:
                known.add(base)
                lines.append(f"{base}: axis[N({tangent}, {dimension})]")
        if lines:
            found[tangent] = "\n".join(lines)
    return found


def as_read(gradient: Program, name: str, value: torch.Tensor) -> torch.Tensor:
    """What a gradient reads by a name, as it reads it: without dimensions as a scalar, or as a tensor of one element (see `saved`)."""
    return value.reshape(1) if not value.ndim and name not in gradient.scalars else value


def gradient_sizes(
    gradient: Program, extents: Mapping[str, Any], shapes_of_outputs: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """The sizes of the axes of a derivative: the extents that the call has, and those of its outputs, whose shapes are known by name."""
    axes = {gradient.domains.get(axis, axis) for axis in sized_axes(gradient)}
    found = {axis: size for axis, size in extents.items() if axis in axes and axis not in gradient.lengths}
    for output in gradient.returned:
        shape = shapes_of_outputs[output.name] if output.axes else ()
        found |= {gradient.domains.get(a, a): n for a, n in zip(output.axes, shape, strict=True)}
    return found


@deep()
def saving_gradient(
    source: str,
    wrt: Sequence[str],
    *,
    scalars: Mapping[str, Number] | None = None,
    only: Collection[str] | None = None,
    strict_casts: bool = False,
    alike: bool = False,
    halves: Mapping[str, str] | None = None,
    saves: str | None = None,
) -> Saved:
    """The gradient as `grad` gives it, in two programs: a forward that also gives what the backward reads of it. Of
    these, `only` some are saved, where given. `alike`: dimensions that are read at the same quotient (see `divided`)
    have the same extent, so that their gradients have one axis in common. `halves` are inputs of half precision, with
    their dtypes: the kernel rounds their gradients where it stores them. `saves` is the dtype of residuals, where
    it is not the one of outputs."""
    with limits.derivation():
        found = _differentiated(source, wrt, scalars, alike)
    if found.steps.program.in_order:  # the backward makes the states again
        return Saved(source, found.text, found.text, (), ())
    found.steps.drop_stops()
    results = [replace(result, body=without_stops(result.body)) for result in found.results]
    given = [found.named[name] for name in found.outputs if name in found.named]
    dtypes = {found.named[name]: dtype for name, dtype in (halves or {}).items()}
    return saving(
        found.steps,
        found.outputs,
        given,
        results,
        found.notes,
        only,
        strict_casts,
        dtypes,
        halves,
        saves,
    )


@deep()
def scaled_gradient(
    source: str,
    of: Sequence[str],
    wrt: Sequence[str] | None = None,
    *,
    scalars: Mapping[str, Number] | None = None,
    strict_casts: bool = False,
    halves: Mapping[str, str] | None = None,
    saves: str | None = None,
) -> Saved | None:
    """The gradient of a loss by the inputs `wrt`, of those that the forward makes it `of` (all, where it is not given), in two programs: the
    forward gives the loss and its gradients for a cotangent of 1, which the backward multiplies by the cotangent that it gets. Arguments
    are those of `saving_gradient`. None where there is more than one output with a gradient, or it has axes.

    Where the loss is a function of one scalar alone, as a mean is of a sum, the gradients are those of this scalar, and the derivative of the loss by
    it is saved beside them: half precision holds them as they are, and each position's share of them is known before all others."""
    program = parse(source, scalars=scalars)
    by = outputs_by(program, of, scalars)
    output = next((each for each in program.returned if each.name in by), None)
    if len(by) != 1 or output is None or output.axes or program.in_order:
        return None
    with limits.derivation():
        named = cotangents(program)
        steps, outputs = _steps(source, program, of, scalars, [named[name] for name in (*of, output.name)])
        _read_known_sums(steps)
        loss = steps.step(outputs[output.name])
        cut = _scalar_below(steps, loss)
        reverse = Reverse(steps, _axes(steps, of, alike=False), cut.name)
        reverse.run({loss.name: (UNIT,)})
        steps.drop_stops()
        units, results = dict[str, Step](), []
        for name in of:
            unit = _result(steps, reverse, name, steps.names.fresh(f"{named[name]}_unit"))
            units[named[name]] = replace(unit, body=without_stops(unit.body))
        above = without_stops(expression(reverse.above))
        factor = None
        if above != Const(1):
            factor = Step(steps.names.fresh(f"d{cut.name}_unit"), (), above, written=True)
        scale = (
            Scalar(named[output.name])
            if factor is None
            else call("mul", Scalar(named[output.name]), factor.itself)
        )
        for name in wrt or of:
            unit = units[named[name]]
            results.append(Step(named[name], unit.axes, call("mul", scale, unit.itself), written=True))
        known = {**(halves or {}), **{named[name]: dtype for name, dtype in (halves or {}).items()}}
        notes = ("the forward makes these gradients, for a cotangent of 1",)
        saved = scaling(
            steps,
            outputs,
            named[output.name],
            results,
            UnitGradients(units, factor),
            notes,
            strict_casts,
            known,
            saves,
        )
    return None if _unsized(parse(saved.forward, strict_casts=strict_casts), program) else saved


def _unsized(made: Program, of: Program) -> set[str]:
    """The axes of a program that was made `of` another one which neither gives a size."""
    axes = {made.domains.get(axis, axis) for axis in sized_axes(made)}
    known = {*(axis for axis, *_ in places(made)), *made.lengths, *made.computed}
    return axes - known - {of.domains.get(axis, axis) for axis in sized_axes(of)}


def _read_known_sums(steps: Steps) -> None:
    """Reads sums of products that are elements of another step from that: `sum[d](x[i,d] * W[label[i],d])` is `L[i,label[i]]`."""
    by_name = {step.name: step for step in steps.steps}
    for known in [step for step in steps.steps if is_matrix_product(step)]:
        candidate = KnownSum.of(known, known.name, by_name)
        made_of = {step.name for step in needed_steps(by_name, [known])}
        for step in list(steps.steps):
            if candidate is None or step.name in made_of or len(step.loops) >= len(known.loops):
                continue
            found = interchanged(step, steps, by_name, [candidate])
            if found is not None and not found.op:
                steps.put(found)
                by_name[step.name] = found


def _scalar_below(steps: Steps, step: Step) -> Step:
    """The first of the scalars that a step is a function of, each of the one before alone."""
    while not step.op:
        names = {name_of(node) for node in reached(step.body)} & steps.active
        below = next((each for each in steps.steps if each.name in names), None)
        if len(names) != 1 or below is None or below.axes:
            break
        step = below
    return step


@dataclass(frozen=True)
class _Differentiated:
    """A program and its gradient as steps: `results` are made of `steps`; `outputs` are the steps of the program's
    outputs, by their names, and `named` what cotangents are called."""

    steps: Steps
    outputs: Mapping[str, str]
    results: Sequence[Step]
    notes: Sequence[str]
    named: Mapping[str, str]

    @property
    def text(self) -> str:
        return text_of(self.steps, self.results, self.notes)


def _differentiated(
    source: str,
    wrt: Sequence[str] | None,
    scalars: Mapping[str, Number] | None,
    alike: bool = False,
    named: Mapping[str, str] | None = None,
    sized: Mapping[str, str] | None = None,
) -> _Differentiated:
    """`named` are the names of cotangents, where they are not `cotangents`; `sized` declarations of what gives axes their sizes, by the
    cotangent that has them."""
    program = parse(source, scalars=scalars)
    names = wanted(program, wrt)
    outputs = real_outputs(program)
    named = cotangents(program) if named is None else named
    steps, by_output = _steps(source, program, names, scalars, [named[name] for name in (*names, *outputs)])
    steps.declared.update(sized or {})
    reverse = Reverse(steps, _axes(steps, names, alike))
    seeds: dict[str, Polynomial] = {}
    for name in outputs:
        step = steps.step(by_output[name])
        steps.dtypes[named[name]] = "f32"
        seeds[step.name] = atom(plain(named[name], step.axes))
    reverse.run(seeds)
    made = [_result(steps, reverse, name, named[name]) for name in names]
    if limits.was_cut():
        reverse.notes.append(
            "EQFUSE_DERIVE_SECONDS or EQFUSE_DERIVE_MB left no room to find all that is 0 or cancels"
        )
    return _Differentiated(steps, by_output, made, reverse.notes, named)


def _steps(
    source: str,
    program: Program,
    names: Sequence[str],
    scalars: Mapping[str, Number] | None,
    reserved: Sequence[str],
) -> tuple[Steps, dict[str, str]]:
    """A program as steps, to be differentiated by inputs of these names; and those of its outputs, by name."""
    steps = Steps.of(source, names, scalars, set(reserved))
    return steps, dict(zip((o.name for o in program.returned), steps.outputs, strict=True))


def _result(steps: Steps, reverse: Reverse, name: str, called: str) -> Step:
    found = reverse.together(name, collected(reverse.found.get(name, ())))
    if not found:
        reverse.notes.append(f"{called} is 0: no output has a gradient by {name}")
    value = expression(found) if found else Const(0.0)
    return Step(called, reverse.targets[name], value, written=True)


def wanted(program: Program, wrt: Sequence[str] | None) -> tuple[str, ...]:
    """The inputs that a derivative is asked by: all tensors of real numbers, where none are named. Raises EqfuseError."""
    allowed = differentiable(program)
    if wrt is None:
        tensors = {tensor.name for tensor in program.tensors}
        found = tuple(name for name in allowed if name in tensors)
        if not found:
            raise EqfuseError(
                "the program reads no tensor of real numbers", hint="there is nothing to differentiate by"
            )
        return found
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    known = (*(tensor.name for tensor in program.tensors), *program.scalars)
    for name in names:
        if name not in known:
            guess = did_you_mean(name, allowed) or "inputs: " + " ".join(allowed)
            raise EqfuseError(f"the program has no input {name!r}", hint=guess)
        if name not in allowed:
            raise EqfuseError(
                f"{name!r} holds integers or truth values, and has no gradient", hint="leave it out of wrt"
            )
    if not names or len(set(names)) < len(names):
        raise EqfuseError("wrt names each input once, and one or more", hint='write wrt=("Q", "K")')
    return names


def divided(program: Program) -> list[list[tuple[str, int]]]:
    """Dimensions of tensors that nothing but one quotient of an axis and a number is put for, as `h // 4` in
    `K[h // 4, j]`: those of each quotient together."""
    put: dict[tuple[str, int], set[Expr]] = {}
    for node in walk(*(output.expr for output in program.outputs)):
        if isinstance(node, Load):
            for dimension, part in enumerate(node.index):
                put.setdefault((node.tensor, dimension), set()).add(part)
    axes = {(tensor.name, k): axis for tensor in program.tensors for k, axis in enumerate(tensor.axes)}
    groups: dict[Expr, list[tuple[str, int]]] = {}
    for place, parts in put.items():
        match list(parts):
            case [Call("floordiv", (Axis(), Const())) as quotient] if axes.get(place) is None:
                groups.setdefault(quotient, []).append(place)
    return list(groups.values())


def _axes(steps: Steps, names: Sequence[str], alike: bool) -> dict[str, tuple[str, ...]]:
    """The axes of every input: those that it is declared or read with; others where they differ. Where dimensions are
    `alike`, those of the same quotient share one."""
    shared: dict[tuple[str, int], tuple[str, int]] = {}
    for group in divided(steps.program) if alike else ():
        members = [place for place in group if place[0] in names]
        shared |= {place: members[0] for place in members}
    made: dict[tuple[str, int], str] = {}
    return {name: _axes_of(steps, name, shared, made) for name in names}


def _axes_of(
    steps: Steps,
    name: str,
    shared: Mapping[tuple[str, int], tuple[str, int]],
    made: dict[tuple[str, int], str],
) -> tuple[str, ...]:
    tensor = next((each for each in steps.program.tensors if each.name == name), None)
    if tensor is None:
        return ()
    found: list[str] = []
    for dimension in range(tensor.rank):
        axis = tensor.axes[dimension] if dimension < len(tensor.axes) else None
        axis = axis or steps.extents.axis.get((name, dimension))
        place = shared.get((name, dimension), (name, dimension))
        if axis is None:
            if place not in made or made[place] in found:
                made[place] = steps.names.fresh(f"{name.lower()}{dimension}")
            axis = made[place]
        elif axis in found:
            axis = steps.another(axis)
        found.append(axis)
    return tuple(found)
