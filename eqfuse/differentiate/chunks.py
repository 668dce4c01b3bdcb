"""A program that runs chunk by chunk along one axis: what it stores for each other's kernels is as long as a chunk.

    dL[i, v] = ...                             for each chunk of v, a program of its own:
    dx[i, d] = sum[v](dL[i, v] * W[v, d])          dx_sum[i, d] = dx_sum_before[i, d] + sum[v](dL[i, v] * W[v, d])
    dW[v, d] = sum[i](dL[i, v] * x[i, d])          dW[v, d] = sum[i](dL[i, v] * x[i, d])
                                               and one at the end: dx[i, d] = dx_sum[i, d]

Outputs that have the axis are made a chunk at a time. Sums over it are taken on from chunk to chunk, and what is made of
them waits for the last. Positions of the axis, as values, count from the start of the chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eqfuse.differentiate.steps import Step, Steps, index_of, name_of, plain
from eqfuse.differentiate.text import needed_steps, text_of
from eqfuse.terms.domain import Domain
from eqfuse.terms.expressions import Number
from eqfuse.terms.extents import sizes_in
from eqfuse.terms.integers import is_exact
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.nodes import Axis, Expr, Load, Program, Reduce, Scalar, Size, call, children, rebuild, walk
from eqfuse.terms.parser import parse
from eqfuse.terms.promises import ascends
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.check import check_stages
from eqfuse.verify.sampling import Inputs
from eqfuse.verify.sizes import small_extents
from eqfuse.verify.source import Stage


class Undivided(ValueError):
    """Why a program does not run in chunks of an axis."""


@dataclass(frozen=True)
class Chunks:
    """`chunk` is the text of a chunk's program, in which the scalar `start` is the position of its first element; `finish` that
    of what is made at the end, where there is any. `sums` are outputs of `chunk`, each with the input that it goes on from.
    `inputs` and `outputs` have the dimension of tensors that is along the axis, by name; `results` are all outputs, in order."""

    axis: str
    chunk: str
    finish: str | None
    start: str
    sums: Mapping[str, str]
    inputs: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, int]
    results: tuple[str, ...]


def chunks_of(source: str, axis: str, scalars: Mapping[str, Number] | None = None) -> Chunks:
    """The programs of chunks of an axis; `scalars` are constants. Raises Undivided, with the reason, where there are none."""
    steps = Steps.of(source, (), scalars, set())
    if axis in steps.domains or axis in steps.domains.values():
        raise Undivided(f"another axis is as long as {axis!r}")
    if axis in steps.computed or axis in sizes_in(steps.computed.values()):
        raise Undivided(f"the size of {axis!r} makes, or is made of, that of another axis")
    return _Divided(steps, axis).made()


class _Divided:
    def __init__(self, steps: Steps, axis: str) -> None:
        self.steps, self.axis = steps, axis
        self.by_name = {step.name: step for step in steps.steps}
        self.results = [self.by_name[name] for name in steps.outputs]
        self.needed = needed_steps(self.by_name, self.results)
        self.start = steps.names.fresh(f"{axis}_start")
        self.promised = [pair for pair in steps.program.at_most if ascends(*pair) is None]
        self.inputs = self._inputs()

    def made(self) -> Chunks:
        sums = self._sums()
        self._check_late(sums)
        along = [step for step in self.results if self.axis in step.axes]
        rest = [step for step in self.results if self.axis not in step.axes]
        if not self.inputs:
            raise Undivided(f"no input has the axis {self.axis!r}")
        moved = {step.name: replace(step, body=self._moved(step.body)) for step in self.needed}
        totals, before = {}, {}
        for name in sums:
            of, total = moved[name], self.steps.names.fresh(f"{name}_sum")
            before[total] = self.steps.names.fresh(f"{total}_before")
            body = call("add", plain(before[total], of.axes), of.value)
            totals[name] = Step(total, of.axes, body, written=True)
        finish = self._finish(rest, totals) if rest else None
        made: dict[str, Step] = {}
        for result in self.results:  # in the order of the program: the layout of what is stored follows it
            for step in (result,) if result in along else needed_steps(self.by_name, [result]):
                output = moved[step.name] if result in along else totals.get(step.name)
                if output is not None:
                    made[output.name] = output
        chunk = self._chunk(list(made.values()), moved)
        dims = {step.name: step.axes.index(self.axis) for step in along}
        names = tuple(step.name for step in self.results)
        return Chunks(self.axis, chunk, finish, self.start, before, self.inputs, dims, names)

    # -- what depends on the whole axis ----------------------------------------------------------------

    def _sums(self) -> list[str]:
        """The names of sums over the axis."""
        found = [step for step in self.needed if self.axis in step.over]
        for step in found:
            if self.steps.dtypes[step.name] != "f32":
                raise Undivided(f"{step.name!r} counts over {self.axis!r}")
            if step.op != "sum":
                raise Undivided(f"{step.name!r} is a reduction over {self.axis!r} that is no sum")
        return [step.name for step in found]

    def _check_late(self, sums: Sequence[str]) -> None:
        """Raises Undivided where something that is made of the sums has the axis."""
        late = set(sums)
        for step in self.needed:
            reads = {name_of(node) for node in walk(step.value)}
            if reads & late:
                if self.axis in step.loops:
                    raise Undivided(f"{step.name!r} needs all of {self.axis!r} first")
                late.add(step.name)

    # -- positions ---------------------------------------------------------------------------------------

    def _inputs(self) -> dict[str, tuple[int, ...]]:
        """The dimensions of inputs along the axis: they are read at its positions alone."""
        read_at: dict[tuple[str, int], set[Expr]] = {}
        sides = [side for pair in self.promised for side in pair]
        if any(isinstance(node, Reduce) and node.axis == self.axis for node in walk(*sides)):
            raise Undivided(f"a promise is of what is reduced over {self.axis!r}")
        for node in walk(*(step.value for step in self.needed), *sides):
            if isinstance(node, Size) and node.axis == self.axis:
                raise Undivided(f"the length of {self.axis!r} is read")
            name = name_of(node)
            for dimension, part in enumerate(index_of(node)):
                read_at.setdefault((name or "", dimension), set()).add(part)
        found: dict[str, tuple[int, ...]] = {}
        own = Axis(self.axis)
        for (name, dimension), parts in read_at.items():
            made = self.by_name.get(name)
            is_along = own in parts if made is None else made.axes[dimension] == self.axis
            if not is_along:
                continue
            if parts != {own}:
                raise Undivided(f"{name!r} is read at other positions than {self.axis!r}")
            if made is None:
                found[name] = (*found.get(name, ()), dimension)
        for tensor in self.steps.program.tensors:
            for dimension, axis in enumerate(tensor.axes):
                if axis == self.axis and dimension not in found.get(tensor.name, ()):
                    raise Undivided(f"{tensor.name!r} is read at other positions than {self.axis!r}")
        return found

    def _moved(self, expr: Expr) -> Expr:
        """The expression with positions of the axis, as values, from its start."""
        memo: dict[tuple[Expr, bool], Expr] = {}
        own = Axis(self.axis)

        def visit(node: Expr, is_place: bool) -> Expr:
            if node is own:
                return own if is_place else call("add", own, Scalar(self.start))
            key = node, is_place
            if key not in memo:
                along = self._along(node)
                parts = tuple(visit(part, k in along) for k, part in enumerate(children(node)))
                memo[key] = rebuild(node, parts)
            return memo[key]

        return visit(expr, False)

    def _along(self, node: Expr) -> tuple[int, ...]:
        """The places of the parts of a read that are along the axis."""
        if not isinstance(node, Load):
            return ()
        made = self.by_name.get(node.tensor)
        if made is None:
            return self.inputs.get(node.tensor, ())
        return tuple(k for k, axis in enumerate(made.axes) if axis == self.axis)

    # -- texts -------------------------------------------------------------------------------------------

    def _chunk(self, results: Sequence[Step], moved: Mapping[str, Step]) -> str:
        names = {step.name for step in results}
        known = self._with([*(step for name, step in moved.items() if name not in names), *results])
        known.declared[self.start] = f"{self.start}: i64"
        known.lengths.pop(self.axis, None)
        promised = [(self._moved(left), self._moved(right)) for left, right in self.promised]
        return text_of(known, results, at_most=promised, dtypes=self._dtypes())

    def _finish(self, results: Sequence[Step], totals: Mapping[str, Step]) -> str:
        """The text of what is made at the end, in which the sums are inputs."""
        steps = [
            Step(step.name, step.axes, totals[step.name].itself, written=True)
            if step.name in totals
            else step
            for step in self.needed
            if self.axis not in step.loops or step.name in totals
        ]
        by_name = {step.name: step for step in steps}
        return text_of(self._with(steps), [by_name[step.name] for step in results], dtypes=self._dtypes())

    def _with(self, steps: Sequence[Step]) -> Steps:
        """The same text with other steps."""
        own = self.steps
        return replace(
            own,
            steps=list(steps),
            declared=dict(own.declared),
            lengths=dict(own.lengths),
            domains=dict(own.domains),
        )

    def _dtypes(self) -> dict[str, str]:
        return {o.name: o.dtype for o in self.steps.program.outputs if o.dtype is not None}


VERIFIED = 2
"""Positions of a chunk as it is verified: there are several, and the last one is ragged."""


def certify_chunks(program: Program, chunks: Chunks, *, bound: float) -> Certificate:
    """That the chunks, one after the other, and what is made at the end, give what the program gives: at random points of
    a finite field, as every stage of a kernel is compared."""
    stage = Stage(
        f"chunks of {chunks.axis}",
        _Composed(chunks, program.strict_casts, program.assume_finite),
        small_extents(program),
        f"{VERIFIED} positions each",
    )
    return check_stages(program, [stage], bound=bound)


class _Composed:
    """The chunks as they follow each other, in any domain."""

    def __init__(self, chunks: Chunks, strict_casts: bool, assume_finite: bool) -> None:
        def parsed(text: str) -> Program:
            return replace(parse(text, strict_casts=strict_casts, made=True), assume_finite=assume_finite)

        self.chunks, self.chunk = chunks, parsed(chunks.chunk)
        self.finish = None if chunks.finish is None else parsed(chunks.finish)

    def __call__(self, inputs: Inputs, domain: Domain) -> dict[str, Any]:
        chunks, count = self.chunks, inputs.extents[self.chunks.axis]
        axes = {output.name: output.axes for output in self.chunk.outputs}

        def zeros(name: str) -> Any:
            return domain.full((inputs.trials, *(inputs.extents[axis] for axis in axes[name])), 0.0)

        made = {name: zeros(name) for name in axes}
        for start in range(0, count, VERIFIED):
            stop = min(start + VERIFIED, count)
            given = {
                name: _cut(value, chunks.inputs.get(name, ()), start, stop, domain)
                for name, value in inputs.tensors.items()
            }
            given |= {before: made[name] for name, before in chunks.sums.items()}
            found = self._run(
                self.chunk, inputs, domain, given, {chunks.start: start}, {chunks.axis: stop - start}
            )
            for name, dimension in chunks.outputs.items():
                place = (*(slice(None),) * (dimension + 1), slice(start, stop))
                domain.put(made[name], place, found[name])
            made |= {name: found[name] for name in chunks.sums}
        if self.finish is not None:
            made |= self._run(self.finish, inputs, domain, {**inputs.tensors, **made}, {}, {})
        return {name: made[name] for name in chunks.results}

    @staticmethod
    def _run(
        program: Program,
        inputs: Inputs,
        domain: Domain,
        tensors: Mapping[str, Any],
        scalars: Mapping[str, int],
        extents: Mapping[str, int],
    ) -> dict[str, Any]:
        sizes = {**inputs.extents, **extents}
        sizes |= {axis: sizes[of] for axis, of in program.domains.items()}
        given = {tensor.name: tensors[tensor.name] for tensor in program.tensors}
        known = {**inputs.scalars, **tensors, **scalars}  # a sum of one number is a scalar
        numbers = {name: known[name] for name in program.scalars}
        return evaluate(program, given, numbers, sizes, domain, batch=inputs.trials)


def _cut(value: Any, dims: Sequence[int], start: int, stop: int, domain: Domain) -> Any:
    """Positions of a tensor along some dimensions; one of reals has trials in front."""
    if not dims:
        return value
    exact = is_exact(value)
    rank = len(value.shape) if exact else len(domain.shape(value)) - 1
    index = tuple(slice(start, stop) if dimension in dims else slice(None) for dimension in range(rank))
    return value[index] if exact else domain.take(value, (slice(None), *index))
