"""A program that runs chunk by chunk along one axis: what it stores for each other's kernels is as long as a chunk.

    dL[i, v] = ...                             for each chunk of v, a program of its own:
    dx[i, d] = sum[v](dL[i, v] * W[v, d])          dx_sum[i, d] = dx_sum_before[i, d] + sum[v](dL[i, v] * W[v, d])
    dW[v, d] = sum[i](dL[i, v] * x[i, d])          dW[v, d] = sum[i](dL[i, v] * x[i, d])
                                               and one at the end: dx[i, d] = dx_sum[i, d]

Outputs that have the axis are made a chunk at a time. Sums over it are taken on from chunk to chunk, and so are differences and the like
of such sums; those without axes are added up by who calls. What is made of them waits for the last. Positions of the axis, as values, count
from the start of the chunk, and its length is that of all chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eqfuse.differentiate.saved import Again
from eqfuse.differentiate.steps import Step, Steps, index_of, name_of, plain
from eqfuse.differentiate.text import needed_steps, text_of
from eqfuse.terms.domain import Domain
from eqfuse.terms.expressions import Number
from eqfuse.terms.extents import sizes_in
from eqfuse.terms.functions import CASTS
from eqfuse.terms.integers import is_exact
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Program,
    Reduce,
    Scalar,
    Size,
    call,
    children,
    rebuild,
    replaced,
    walk,
)
from eqfuse.terms.parser import parse
from eqfuse.terms.promises import ascends
from eqfuse.terms.segments import segments
from eqfuse.terms.types import KINDS, program_dtypes
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.check import check_stages
from eqfuse.verify.sampling import Inputs
from eqfuse.verify.sizes import small_extents
from eqfuse.verify.source import Stage


class Undivided(ValueError):
    """Why a program does not run in chunks of an axis."""


@dataclass(frozen=True)
class Chunks:
    """`chunk` is the text of a chunk's program, in which the scalar `start` is the position of its first element and `count` the length of the
    whole axis; `finish` that of what is made at the end, where there is any. `sums` are outputs of `chunk`, each with the input that it
    goes on from, and `added` those that are added up. What is made of them, `finish` among it, has them by the names in `totals`.
    `inputs` and `outputs` have the dimension of tensors that is along the axis, by name; `results` are all outputs, in order."""

    axis: str
    chunk: str
    finish: str | None
    start: str
    count: str
    sums: Mapping[str, str]
    added: tuple[str, ...]
    totals: Mapping[str, str]
    inputs: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, int]
    results: tuple[str, ...]


def chunks_of(
    source: str,
    axis: str,
    scalars: Mapping[str, Number] | None = None,
    *,
    saves: str | None = None,
    narrow: bool = False,
) -> Chunks:
    """The programs of chunks of an axis; `scalars` are constants. Sums are taken on in the precision of sums, which has the dtype `saves` where outputs
    have another one; where `narrow`, those that are outputs are in the dtype that these declare. Raises Undivided, with the reason, where there
    are none."""
    steps = Steps.of(source, (), scalars, set())
    if axis in steps.domains:
        raise Undivided(f"another axis is as long as {axis!r}")
    if axis in steps.computed or axis in sizes_in(steps.computed.values()):
        raise Undivided(f"the size of {axis!r} makes, or is made of, that of another axis")
    return _Divided(steps, axis, saves, narrow).made()


def divisible(source: str, again: Sequence[Again], scalars: Mapping[str, Number] | None = None) -> bool:
    """Whether a program runs in chunks of an axis that all these products have; one of sorted positions does not."""
    if segments(parse(source, scalars=scalars)) is not None:
        return False
    for axis in dict.fromkeys(axis for product in again for axis in product.axes):
        with suppress(Undivided):
            if all(axis in product.axes for product in again):
                chunks_of(source, axis, scalars)
                return True
    return False


class _Divided:
    def __init__(self, steps: Steps, axis: str, saves: str | None, narrow: bool) -> None:
        self.steps, self.axis, self.saves, self.narrow = steps, axis, saves, narrow
        self.start = steps.names.fresh(f"{axis}_start")
        self.count = steps.names.fresh(f"{axis}_count")
        steps.steps[:] = [replace(step, body=self._counted(step.body)) for step in steps.steps]
        self.by_name = {step.name: step for step in steps.steps}
        self.results = [self.by_name[name] for name in steps.outputs]
        self.needed = needed_steps(self.by_name, self.results)
        promised = [pair for pair in steps.program.at_most if ascends(*pair) is None]
        self.promised = [(self._counted(left), self._counted(right)) for left, right in promised]
        self._drop_copies()
        self.inputs = self._inputs()

    def made(self) -> Chunks:
        sums = self._sums()
        self._check_late(sums)
        along = [step for step in self.results if self.axis in step.axes]
        rest = [step for step in self.results if self.axis not in step.axes]
        if not self.inputs:
            raise Undivided(f"no input has the axis {self.axis!r}")
        moved = {step.name: replace(step, body=self._moved(step.body)) for step in self.needed}
        totals, before, added = dict[str, Step](), dict[str, str](), list[str]()
        for name in sums:
            of, total = moved[name], self.steps.names.fresh(f"{name}_sum")
            body = of.value if of.op else self._stored(of)
            if of.axes:
                before[total] = self.steps.names.fresh(f"{total}_before")
                body = call("add", plain(before[total], of.axes), body)
            else:
                added.append(total)
            totals[name] = Step(total, of.axes, body, written=True)
        late = [step for step in rest if step.name not in totals]
        finish = self._finish(late, totals) if late else None
        made: dict[str, Step] = {}
        for result in self.results:  # in the order of the program: the layout of what is stored follows it
            for step in (result,) if result in along else needed_steps(self.by_name, [result]):
                output = moved[step.name] if result in along else totals.get(step.name)
                if output is not None:
                    made[output.name] = output
        chunk = self._chunk(list(made.values()), moved, totals, before)
        dims = {step.name: step.axes.index(self.axis) for step in along}
        names = tuple(step.name for step in self.results)
        by_total = {total.name: name for name, total in totals.items()}
        return Chunks(
            self.axis,
            chunk,
            finish,
            self.start,
            self.count,
            before,
            tuple(added),
            by_total,
            self.inputs,
            dims,
            names,
        )

    # -- what depends on the whole axis ----------------------------------------------------------------

    def _counted(self, expr: Expr) -> Expr:
        """The expression with the length of the whole axis, and of those that are as long, as a number that is given."""
        domains = self.steps.domains
        sizes = {node for node in walk(expr) if isinstance(node, Size)}
        counts: dict[Expr, Expr] = {
            size: Scalar(self.count) for size in sizes if domains.get(size.axis, size.axis) == self.axis
        }
        return replaced(expr, counts) if counts else expr

    def _drop_copies(self) -> None:
        """Forgets the axes that are as long and nothing runs along. Raises Undivided where something does."""
        copies = {copy for copy, of in self.steps.domains.items() if of == self.axis}
        exprs = [step.value for step in self.needed]
        read = {node.name for node in walk(*exprs) if isinstance(node, Axis)}
        read |= {axis for step in self.needed for axis in step.loops}
        read |= {axis for tensor in self.steps.program.tensors for axis in tensor.axes if axis}
        if copies & read:
            raise Undivided(f"another axis is as long as {self.axis!r}")
        for copy in copies:
            del self.steps.domains[copy]

    def _sums(self) -> list[str]:
        """The names of sums over the axis, and of what differs from such sums by numbers alone, in their places."""
        found = [step for step in self.needed if self.axis in step.over]
        for step in found:
            if step.op != "sum":
                raise Undivided(f"{step.name!r} is a reduction over {self.axis!r} that is no sum")
            if self.steps.dtypes[step.name] != "f32" and self._reads_reals(step):
                raise Undivided(f"{step.name!r} counts over {self.axis!r} by real numbers")
        sums = {step.name: step for step in found}
        for step in self.needed:
            parts = None if step.op or step.name in sums else _combined(self._stored(step), step.axes)
            if parts and parts <= sums.keys() and not any(self._is_read_beside(part, step) for part in parts):
                sums = {name: each for name, each in sums.items() if name not in parts}
                sums[step.name] = step
        return list(sums)

    def _stored(self, step: Step) -> Expr:
        """What a step is before it is rounded to the dtype of an output."""
        match step.body:
            case Call(fn, (part,)) if fn in CASTS and step.name in self.steps.outputs:
                return part
            case body:
                return body

    def _reads_reals(self, step: Step) -> bool:
        names = {name_of(node) for each in needed_steps(self.by_name, [step]) for node in walk(each.value)}
        return any(self.steps.dtypes.get(name or "", "i64") not in KINDS for name in names)

    def _is_read_beside(self, name: str, reader: Step) -> bool:
        """Whether something else than one step reads a value, or it is a result."""
        others = (step for step in self.needed if step is not reader)
        read = any(name_of(node) == name for step in others for node in walk(step.value))
        return read or name in self.steps.outputs

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

    def _chunk(
        self,
        results: Sequence[Step],
        moved: Mapping[str, Step],
        totals: Mapping[str, Step],
        before: Mapping[str, str],
    ) -> str:
        names = {step.name for step in results}
        known = self._with([*(step for name, step in moved.items() if name not in names), *results])
        known.declared[self.start] = f"{self.start}: i64"
        known.lengths.pop(self.axis, None)
        promised = [(self._moved(left), self._moved(right)) for left, right in self.promised]
        declared = self._dtypes()
        dtypes = dict(declared)
        for name, total in totals.items():
            if self.steps.dtypes[name] == "i64":
                if total.axes:
                    read = before[total.name]
                    known.declared[read] = f"{read}: i64[{', '.join(total.axes)}]"
            elif dtype := declared.get(name) if self.narrow else self.saves:
                dtypes[total.name] = dtype
        return text_of(known, results, at_most=promised, dtypes=dtypes)

    def _finish(self, results: Sequence[Step], totals: Mapping[str, Step]) -> str:
        """The text of what is made at the end, in which the sums are inputs."""
        reads = {
            name: total.itself if total.axes else Load(total.name, (Const(0),))
            for name, total in totals.items()
        }
        steps = [
            Step(step.name, step.axes, reads[step.name], written=True) if step.name in reads else step
            for step in self.needed
            if self.axis not in step.loops or step.name in reads
        ]
        by_name = {step.name: step for step in steps}
        known = self._with(steps)
        for name, total in totals.items():
            if self.steps.dtypes[name] == "i64":
                axes = total.axes or (self.steps.names.fresh("one"),)
                known.declared[total.name] = f"{total.name}: i64[{', '.join(axes)}]"
        return text_of(known, [by_name[step.name] for step in results], dtypes=self._dtypes())

    def _with(self, steps: Sequence[Step]) -> Steps:
        """The same text with other steps."""
        own = self.steps
        return replace(
            own,
            steps=list(steps),
            declared={**own.declared, self.count: f"{self.count}: i64"},
            lengths=dict(own.lengths),
            domains=dict(own.domains),
        )

    def _dtypes(self) -> dict[str, str]:
        return {o.name: o.dtype for o in self.steps.program.outputs if o.dtype is not None}


def _combined(expr: Expr, axes: Sequence[str]) -> set[str] | None:
    """The names of values, at these axes, of which an expression is a sum, each times a number; None where it is something else."""
    match expr:
        case Load() | Scalar():
            is_own = index_of(expr) == tuple(map(Axis, axes))
            return {name} if is_own and (name := name_of(expr)) else None
        case Call("add" | "sub", (left, right)):
            one, other = _combined(left, axes), _combined(right, axes)
            return None if one is None or other is None else one | other
        case Call("neg", (part,)) | Call("mul", (Const(), part)) | Call("mul" | "div", (part, Const())):
            return _combined(part, axes)
        case _:
            return None


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
        self.chunk_dtypes = program_dtypes(self.chunk)

    def __call__(self, inputs: Inputs, domain: Domain) -> dict[str, Any]:
        chunks, count = self.chunks, inputs.extents[self.chunks.axis]
        axes = {output.name: output.axes for output in self.chunk.outputs}

        def zeros(name: str) -> Any:
            shape = tuple(inputs.extents[axis] for axis in axes[name])
            before = chunks.sums.get(name)
            if before is not None and self.chunk_dtypes.get(before) == "i64":
                return np.zeros(shape, np.int64)
            return domain.full((inputs.trials, *shape), 0.0)

        made = {name: zeros(name) for name in axes if name not in chunks.added}
        for start in range(0, count, VERIFIED):
            stop = min(start + VERIFIED, count)
            given = {
                name: _cut(value, chunks.inputs.get(name, ()), start, stop, domain)
                for name, value in inputs.tensors.items()
            }
            given |= {before: made[name] for name, before in chunks.sums.items()}
            known = {chunks.start: start, chunks.count: count}
            found = self._run(self.chunk, inputs, domain, given, known, {chunks.axis: stop - start})
            for name, dimension in chunks.outputs.items():
                place = (*(slice(None),) * (dimension + 1), slice(start, stop))
                domain.put(made[name], place, found[name])
            found = {n: np.asarray(value[0]) if is_exact(value) else value for n, value in found.items()}
            made |= {name: found[name] for name in chunks.sums}
            for name in chunks.added:
                made[name] = _added(made[name], found[name], domain) if name in made else found[name]
        for name, of in chunks.totals.items():
            value = made[name]
            made[of] = np.broadcast_to(value, (inputs.trials, *value.shape)) if is_exact(value) else value
        if self.finish is not None:
            ones = {name: _of_one(made[name], domain) for name in chunks.added}
            given = {**inputs.tensors, **made, **ones}
            made |= self._run(self.finish, inputs, domain, given, {chunks.count: count}, {})
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
        known = {**inputs.scalars, **scalars}
        numbers = {name: known[name] for name in program.scalars}
        return evaluate(program, given, numbers, sizes, domain, batch=inputs.trials)


def _added(one: Any, other: Any, domain: Domain) -> Any:
    return np.asarray(one + other) if is_exact(one) else domain.call("add", (one, other))


def _of_one(value: Any, domain: Domain) -> Any:
    """A number as a tensor of one element."""
    return np.reshape(value, (1,)) if is_exact(value) else domain.reshape(value, (*domain.shape(value), 1))


def _cut(value: Any, dims: Sequence[int], start: int, stop: int, domain: Domain) -> Any:
    """Positions of a tensor along some dimensions; one of reals has trials in front."""
    if not dims:
        return value
    exact = is_exact(value)
    rank = len(value.shape) if exact else len(domain.shape(value)) - 1
    index = tuple(slice(start, stop) if dimension in dims else slice(None) for dimension in range(rank))
    return value[index] if exact else domain.take(value, (slice(None), *index))
