"""A gradient that reads what its forward has computed: which outputs and states are saved, and which are made again.

A saved value is an output, which is there anyway, or a residual: a reduction, or what is made of reductions, that is
smaller than the largest input or output. It is saved where writing and reading it costs less than the reductions below
it, which are made again without it. The shares of a softmax then read one log-sum-exp (see `shares`), and a sum that an
output is known to be is that output (see `interchange`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eqfuse.differentiate.interchange import KnownSum, interchanged
from eqfuse.differentiate.polynomial import ZERO, product
from eqfuse.differentiate.shares import Shares
from eqfuse.differentiate.steps import Step, Steps, name_of
from eqfuse.differentiate.text import needed_steps, text_of
from eqfuse.loops.contraction import tiled_axes
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Scalar,
    Tensor,
    call,
    free_axes,
    transform,
    walk,
)
from eqfuse.terms.prefixes import Extents, scanned
from eqfuse.terms.scalars import as_elements

NOMINAL = 256
"""Positions of an axis, where costs are compared, of which the text gives no number."""

TOTAL = ("", *REDUCTIONS)
"""Reductions that have a value where there are no positions."""

WORD = 64
"""Multiplications and additions that take as long as moving a word of float32: about 30 on the vector units of an H200
and 400 on its matrix units."""


@dataclass(frozen=True)
class Again:
    """A matrix product of the forward that the backward computes again: the axes of its positions, and those that it sums `over`."""

    axes: tuple[str, ...]
    over: tuple[str, ...]


@dataclass(frozen=True)
class Saved:
    """Two programs for a gradient. `forward` gives the outputs and then the `residuals`; `backward` reads them and those
    of `outputs`, besides inputs and cotangents. Of these, what has no axes is a tensor of one element: a scalar would be read on the host, which
    waits for a GPU. `whole` is the backward with the definitions of all that it reads, and with such cotangents as scalars. `again` are the products that the backward computes which the forward has computed;
    `units` the residuals that results are multiples of, by the names of these."""

    forward: str
    backward: str
    whole: str
    outputs: tuple[str, ...]
    residuals: tuple[str, ...]
    again: tuple[Again, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)


def saving(
    steps: Steps,
    outputs: Mapping[str, str],
    cotangents: Collection[str],
    results: Sequence[Step],
    notes: Sequence[str],
    only: Collection[str] | None = None,
    strict_casts: bool = False,
    dtypes: Mapping[str, str] | None = None,
    halves: Mapping[str, str] | None = None,
    saves: str | None = None,
) -> Saved:
    """The programs of a gradient, whose `results` are made of `steps`. `outputs` are those of the forward: the step of
    each name. Of outputs and residuals `only` these are saved, where given. `dtypes` are those of some
    results, `halves` those of inputs of half precision; `saves` is that of residuals, where it is not the one of outputs."""
    known = _Saving(
        steps,
        dict(outputs),
        frozenset(cotangents),
        notes,
        only,
        strict_casts,
        dtypes or {},
        halves or {},
        saves,
    )
    return known.of(list(results))


@dataclass(frozen=True)
class UnitGradients:
    """The gradients of one scalar step of a program, for a cotangent of 1 of it: each of `made` by the name of the result that it is scaled for,
    and `factor`, which the cotangent of the loss is multiplied by first, unless that is 1."""

    made: Mapping[str, Step]
    factor: Step | None


def scaling(
    steps: Steps,
    outputs: Mapping[str, str],
    cotangent: str,
    results: Sequence[Step],
    units: UnitGradients,
    notes: Sequence[str],
    strict_casts: bool = False,
    halves: Mapping[str, str] | None = None,
    saves: str | None = None,
) -> Saved:
    """The programs of a gradient whose forward makes `units`, and whose backward multiplies some of them by the `cotangent` of the loss:
    the `results`. Arguments are those of `saving`; `halves` are those of inputs, by the names of their results too."""
    halves = halves or {}
    known = _Saving(steps, dict(outputs), frozenset(), (), None, strict_casts, {}, halves, saves)
    every = [*units.made.values(), *(() if units.factor is None else (units.factor,))]
    known._put(known._rounded(every, ()))
    forward = [known.by_name[name] for name in outputs.values()]
    # Of float16 the range is too small for what is not scaled yet.
    stored = {name: dtype for name, dtype in halves.items() if dtype == "bf16"}
    dtypes = {unit.name: stored.get(name, saves) for name, unit in units.made.items()}
    if units.factor is not None:
        dtypes[units.factor.name] = saves
    given = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    text = text_of(steps, [*forward, *every], dtypes=given)
    residuals = tuple(unit.name for unit in every)
    steps.steps += every
    reads = {name_of(node) for result in results for node in walk(result.body)}
    read = tuple(name for name in residuals if name in reads)
    backward = text_of(
        steps,
        results,
        notes,
        given=residuals,
        dtypes={result.name: halves[result.name] for result in results if result.name in halves},
    )
    backward = _from_memory(backward, (*steps.steps, *results), {cotangent, *residuals})
    by_result = {result.name: units.made[result.name].name for result in results}
    return Saved(text, backward, text_of(steps, results), (), read, units=by_result)


def _from_memory(text: str, steps: Iterable[Step], names: Collection[str]) -> str:
    """The text of these steps, in which those of the names that are numbers are elements of tensors."""
    read = walk(*(step.value for step in steps))
    return as_elements(text, {node.name for node in read if isinstance(node, Scalar) and node.name in names})


def saves_time(again: Sequence[Again], extents: Mapping[str, int], positions: int) -> bool:
    """Whether a forward that makes the gradients takes less than a backward that computes products of it `again`: what these multiply, less writing
    and reading them, against gradients of so many `positions`, which are written and read once more."""
    spared = 0
    for each in again:
        own = math.prod(extents[axis] for axis in each.axes)
        spared += own * max(0, math.prod(extents[axis] for axis in each.over) - 2 * WORD)
    return spared > 2 * WORD * positions


def most_stored(again: Sequence[Again], extents: Mapping[str, int]) -> int:
    """Bytes of the largest of these products, in float32."""
    return max((4 * math.prod(extents[axis] for axis in product.axes) for product in again), default=0)


@dataclass
class _Saving:
    steps: Steps
    outputs: dict[str, str]
    cotangents: frozenset[str]
    notes: Sequence[str]
    only: Collection[str] | None
    strict_casts: bool
    dtypes: Mapping[str, str]
    halves: Mapping[str, str]
    saves: str | None
    by_name: dict[str, Step] = field(init=False)
    _alike: Extents = field(init=False)

    def __post_init__(self) -> None:
        self._alike = self.steps.alike
        self.by_name = {step.name: step for step in self.steps.steps}

    def of(self, results: list[Step]) -> Saved:
        results = self._interchanged(results)
        written = list(self.steps.steps)
        shares = Shares(self.steps, self.by_name)
        results = self._shared(results, shares)
        saved = self._chosen(results)
        given = tuple(name for name in self.by_name if name in saved)
        again = self._again(results, given)
        residuals = tuple(name for name in given if name not in self.outputs.values())
        moved = self._moved(residuals, results)
        self._put({step.name: _step_as(moved, step) for step in self.steps.steps})
        results, written = ([_step_as(moved, step) for step in each] for each in (results, written))
        bounds = [(_read_as(moved, one), _read_as(moved, other)) for one, other in shares.bounded]
        at_most = [pair for pair in bounds if self._reads_given(pair, results, given)]
        self._put(self._rounded(results, given))
        backward = text_of(self.steps, results, self.notes, given=given, at_most=at_most, dtypes=self.dtypes)
        backward = _from_memory(backward, (*self.by_name.values(), *results), {*self.cotangents, *given})
        # What is saved is made as the program makes it.
        known = {**self.by_name, **{step.name: step for step in written}}
        self._put({name: replace(known[name], written=True) for name in saved})
        whole = text_of(self.steps, results)
        self._put({step.name: step for step in written})
        forward = [self.by_name[name] for name in self.outputs.values()]
        kept = [self.by_name[name] for name in residuals]
        dtypes: dict[str, str] = {}
        if self.saves:  # of copies: a declared dtype would be that of what reads it, too
            kept = [
                Step(self.steps.names.numbered(each.name), each.axes, each.itself, written=True)
                for each in kept
            ]
            dtypes = dict.fromkeys((each.name for each in kept), self.saves)
        outputs = tuple(name for name, step in self.outputs.items() if step in saved)
        text = text_of(self.steps, [*forward, *kept], dtypes=dtypes)
        return Saved(text, backward, whole, outputs, residuals, again)

    def _again(self, results: Sequence[Step], given: Collection[str]) -> tuple[Again, ...]:
        """The matrix products that both results, beside what is `given`, and outputs are made of."""
        known = {name: step for name, step in self.by_name.items() if name not in given}
        base = self.steps.domains
        outputs = [self.by_name[name] for name in self.outputs.values()]
        made = {step.name for step in needed_steps(self.by_name, outputs)}
        return tuple(
            Again(tuple(base.get(a, a) for a in step.axes), tuple(base.get(a, a) for a in step.over))
            for step in needed_steps(known, results)
            if step.name in made and is_matrix_product(step)
        )

    def _rounded(self, results: Sequence[Step], given: Collection[str]) -> dict[str, Step]:
        """The steps that several sums multiply inputs of one half precision by, in that precision: it is the one in which a
        device multiplies them, so that they may be stored in it."""
        halves = {} if self.strict_casts else self.halves
        needed = needed_steps({n: step for n, step in self.by_name.items() if n not in given}, results)
        found: dict[str, list[str | None]] = {}
        for step in needed:
            factors = product(_unmasked(step.body)).powers if step.op == "sum" else {}
            dtypes = {halves[name] for factor in factors if (name := name_of(factor) or "") in halves}
            dtype = dtypes.pop() if len(dtypes) == 1 else None
            for node in walk(step.value):
                read = name_of(node) if isinstance(node, Load) else None
                if read in self.by_name:
                    found.setdefault(read, []).append(dtype if factors.get(node) == 1 else None)
        kinds = {name: set(each) for name, each in found.items() if len(each) > 1}
        return {
            name: replace(step, body=call(dtype, step.body))
            for name, step in self.by_name.items()
            if len(kinds.get(name, ())) == 1 and not step.op and not step.written and name not in given
            for dtype in kinds[name]
            if dtype is not None
        }

    # -- what is read instead ------------------------------------------------------------------------

    def _interchanged(self, results: list[Step]) -> list[Step]:
        known = list(self._known_sums(results))
        if not known:
            return results
        found: list[Step | None] = []
        made_of: dict[str, set[str]] = {}  # the steps that each known sum is made of, and it
        for step in (*self.steps.steps, *results):
            made = None
            if not self._is_forward(step):
                made_of = made_of or {each.name: self._made_of(each.name) for each in known}
                others = [each for each in known if step.name not in made_of[each.name]]
                made = interchanged(step, self.steps, self.by_name, others)
            found.append(made)
            if made is not None and made.name in self.by_name:
                self._put({made.name: made})
                made_of = {}
        return [new or old for new, old in zip(found[len(self.steps.steps) :], results, strict=True)]

    def _made_of(self, name: str) -> set[str]:
        return {step.name for step in needed_steps(self.by_name, [self.by_name[name]])}

    def _known_sums(self, results: Sequence[Step]) -> Iterator[KnownSum]:
        """The sums that results are made of, and outputs."""
        for made in self._sums_of(results):
            known = KnownSum.of(made, made.name, self.by_name)
            if known is not None and not self._is_forward(made):
                yield known
        for name in self._outputs():
            step = self._sum_of(self.by_name[name])
            known = None if step is None else KnownSum.of(step, name, self.by_name)
            if known is not None:
                yield replace(known, axes=self.by_name[name].axes)

    def _sums_of(self, results: Sequence[Step]) -> list[Step]:
        """The outermost reductions of the steps that results are made of."""
        found: dict[str, Step] = {}
        left = list(results)
        while left:
            step = left.pop(0)
            if step.op and step.name in self.by_name:
                found[step.name] = step
            elif not step.op:
                left += [self.by_name[name] for name in self._read_by(step)]
        return list(found.values())

    def _outputs(self) -> list[str]:
        """The outputs that may be saved, which have the names of their steps."""
        every = (name for name, step in self.outputs.items() if name == step)
        return [name for name in every if self.only is None or name in self.only]

    def _sum_of(self, step: Step) -> Step | None:
        """The reduction that a step is, but for casts, which round."""
        while not step.op:
            body = step.body
            while isinstance(body, Call) and body.fn in CASTS and not self.strict_casts:
                (body,) = body.args
            inner = self.by_name.get(name_of(body) or "")
            if inner is None or body is not inner.itself or set(inner.axes) != set(step.axes):
                return None
            step = inner
        return step

    def _shared(self, results: list[Step], shares: Shares) -> list[Step]:
        """Every share that the results need, read from a log-sum-exp."""
        needed = needed_steps(self.by_name, results)
        final = {step.name for step in results}
        changed = {step.name: replace(step, body=shares.of(step.body)) for step in needed}
        self._put({name: step for name, step in changed.items() if name not in final})
        return [changed[step.name] for step in results]

    def _put(self, changed: Mapping[str, Step]) -> None:
        """Other definitions of steps."""
        self.steps.steps[:] = [changed.get(step.name, step) for step in self.steps.steps]
        self.by_name = {step.name: step for step in self.steps.steps}

    # -- what is saved -------------------------------------------------------------------------------

    def _chosen(self, results: Sequence[Step]) -> set[str]:
        """The names of what is saved."""
        saved: set[str] = set()
        for step in results:
            self._frontier(step, saved, set())
        for name in self._outputs():
            is_read = name not in saved and self._is_real(name) and self._is_needed(name, results, saved)
            if is_read and self._cost(results, {*saved, name}) <= self._cost(results, saved):
                saved.add(name)
        return {name for name in saved if self._is_needed(name, results, saved - {name})}

    def _frontier(self, step: Step, saved: set[str], seen: set[str]) -> None:
        """Adds what is saved of all that a step reads, from the top."""
        if step.name in seen:
            return
        seen.add(step.name)
        for name in self._read_by(step):
            if self._is_worth_saving(self.by_name[name]):
                saved.add(name)
            else:
                self._frontier(self.by_name[name], saved, seen)

    def _read_by(self, step: Step) -> list[str]:
        names = dict.fromkeys(name_of(node) or "" for node in walk(step.value))
        return [name for name in names if name in self.by_name and name != step.name]

    def _is_worth_saving(self, step: Step) -> bool:
        if not self._is_forward(step) or not self._is_real(step.name) or self._is_of_pairs(step):
            return False
        needed = needed_steps(self.by_name, [step])
        cost, own = self._walked(needed), self._positions(step.axes)
        if step.name in self.outputs.values():
            return step.name in self._outputs() and bool(step.over) and WORD * own < cost
        if self.only is not None and step.name not in self.only:
            return False
        # A position of nothing is an error: what has none to give is not asked for one.
        is_total = all(each.op in TOTAL for each in needed)
        return is_total and own < self._largest() and 2 * WORD * own < cost

    def _is_of_pairs(self, step: Step) -> bool:
        """Whether a step has a value for each two positions of an axis that prefixes are along: what is read up to each one takes a time
        linear in them."""
        axes = [self._alike.get(axis, axis) for axis in step.axes]
        twice = {axis for axis in axes if axes.count(axis) > 1}
        return bool(twice) and any(
            self._alike.get(each.over[0], each.over[0]) in twice and self._is_scan(each)
            for each in self.steps.steps
            if each.over
        )

    def _is_scan(self, step: Step) -> bool:
        value = step.value
        return isinstance(value, Reduce) and scanned(value, self._alike) is not None

    def _is_real(self, name: str) -> bool:
        return self.steps.dtypes.get(name) == "f32"

    def _is_forward(self, step: Step) -> bool:
        """Whether a step reads no cotangent."""
        every = needed_steps(self.by_name, [step])
        return not any(name_of(node) in self.cotangents for each in every for node in walk(each.value))

    def _is_needed(self, name: str, results: Sequence[Step], saved: Collection[str]) -> bool:
        known = {other: step for other, step in self.by_name.items() if other not in saved}
        return any(name in self._read_by(step) for step in needed_steps(known, results))

    def _reads_given(self, pair: tuple[Expr, Expr], results: Sequence[Step], given: Collection[str]) -> bool:
        """Whether a bound is one by a value that is saved, of one that the backward makes."""
        known = {name: step for name, step in self.by_name.items() if name not in given}
        needed = needed_steps(known, results)
        value, limit = pair
        exponent = Call("sub", (value, limit))
        return name_of(limit) in given and any(exponent in walk(step.body) for step in needed)

    def _moved(self, residuals: Sequence[str], results: Sequence[Step]) -> dict[str, tuple[int, ...]]:
        """The dimensions of residuals in the order in which they are stored, where it is another one: contiguous along the axes of
        tiles, in which they are read."""
        tiled = tiled_axes(step.value for step in needed_steps(self.by_name, results))
        moved = dict[str, tuple[int, ...]]()
        for name in residuals:
            axes = self.by_name[name].axes
            order = tuple(sorted(range(len(axes)), key=lambda dimension: axes[dimension] in tiled))
            if order != tuple(range(len(axes))):
                moved[name] = order
        return moved

    # -- costs ---------------------------------------------------------------------------------------

    def _extent(self, axis: str | None) -> int:
        base = self.steps.domains.get(axis or "", axis or "")
        return self.steps.lengths.get(base, NOMINAL)

    def _positions(self, axes: Sequence[str | None]) -> int:
        return math.prod(map(self._extent, axes))

    def _largest(self) -> int:
        """Positions of the largest input or output."""
        inputs = (self._size(tensor) for tensor in self.steps.program.tensors)
        outputs = (self._positions(output.axes) for output in self.steps.program.outputs)
        return max((*inputs, *outputs), default=0)

    def _size(self, tensor: Tensor) -> int:
        return self._positions(tensor.axes or (None,) * tensor.rank)

    def _cost(self, results: Sequence[Step], saved: Collection[str]) -> int:
        """What a backward costs: every tensor that it reads once, and its reductions."""
        known = {name: step for name, step in self.by_name.items() if name not in saved}
        needed = needed_steps(known, results)
        reads = {name_of(node) for step in needed for node in walk(step.value)}
        words = sum(self._size(tensor) for tensor in self.steps.program.tensors if tensor.name in reads)
        words += sum(self._positions(self.by_name[name].axes) for name in saved if name in reads)
        return WORD * words + self._walked(needed)

    def _walked(self, steps: Sequence[Step]) -> int:
        return sum(self._positions(self._loops(step)) for step in steps if step.over)

    def _loops(self, step: Step) -> tuple[str, ...]:
        """The axes that a step is computed along: all prefixes of an axis are one walk."""
        return step.axes if self._is_scan(step) else step.loops


def _unmasked(body: Expr) -> Expr:
    """What is summed where masks hold."""
    while isinstance(body, Call) and body.fn == "where" and body.args[2] in (ZERO, Const(0.0)):
        body = body.args[1]
    return body


def is_matrix_product(step: Step) -> bool:
    """Whether a step is a sum of products of two factors, each with axes that the other one lacks."""
    if step.op != "sum":
        return False
    own = [free_axes(factor) for factor in product(_unmasked(step.body)).powers]
    return any(one - other and other - one for one in own for other in own)


def _read_as(moved: Mapping[str, Sequence[int]], expr: Expr) -> Expr:
    """An expression, where values that have `moved` have their dimensions in these orders."""

    def step(node: Expr) -> Expr:
        if not (isinstance(node, Load) and node.tensor in moved):
            return node
        return Load(node.tensor, tuple(node.index[dimension] for dimension in moved[node.tensor]))

    return transform(expr, step) if moved else expr


def _step_as(moved: Mapping[str, Sequence[int]], step: Step) -> Step:
    """The same of a step."""
    order = moved.get(step.name, range(len(step.axes)))
    return replace(
        step, axes=tuple(step.axes[dimension] for dimension in order), body=_read_as(moved, step.body)
    )
