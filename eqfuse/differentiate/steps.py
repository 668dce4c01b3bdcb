"""A source text as steps: temporaries are kept, every reduction has a name, and so has what broadcasting repeats.

    step ::= name[axes] = body                      body without a reduction
           | name[axes] = op[over](body)

In `sum[j](p[i,j] / l[i] * v[j,e])` the quotient does not depend on e, so it is a step of its own: its cotangent is
summed over e before anything else is done with it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eqfuse.errors import EqfuseError, locate
from eqfuse.names import Names
from eqfuse.terms.bounds import longer_dimensions
from eqfuse.terms.definitions import KeepingStops, definition
from eqfuse.terms.expressions import Number, Reader
from eqfuse.terms.folds import PAIR, contributions, fold_of, packed
from eqfuse.terms.functions import ABBREVIATIONS, APART, FUNCTIONS
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Expr,
    Load,
    Local,
    Program,
    Reduce,
    Scalar,
    call,
    children,
    free_axes,
    rebuild,
    substitute_axes,
    transform,
    walk,
)
from eqfuse.terms.parser import Texts, axes_of, parse, texts
from eqfuse.terms.prefixes import Extents as SameExtents
from eqfuse.terms.prefixes import alike
from eqfuse.terms.printer import show
from eqfuse.terms.registry import REGISTERED
from eqfuse.terms.sizes import places
from eqfuse.terms.syntax import Declaration, Source
from eqfuse.terms.types import KINDS, kind, kinds, program_dtypes


def _reader(stops: bool, inlined: frozenset[str]) -> type[Reader]:
    """What reads temporaries as tensors, after the checks that reading them has, but for those that are `inlined`, and those that are the same at
    all positions that an index reads of data: the program has no such data."""

    class Named(Reader):
        keeps_stops = stops

        def _definition(self, node: ast.expr, index: tuple[Expr, ...], name_node: ast.expr) -> Expr:
            found, name = super()._definition(node, index, name_node), getattr(name_node, "id", "")
            data = {node for node in walk(*index) if isinstance(node, Load)}
            is_written_out = name in inlined or name == self.current or not data.issubset(walk(found))
            return found if is_written_out else read(name, index)

    return Named


def with_stops(program: Program, scalars: Mapping[str, Number] | None) -> Program:
    """The program with the `stop(...)` calls of its text, which the program that is run lacks; integers and truth values have no
    gradient to stop."""
    read = (each for each in REGISTERED.values() if each.name in program.source)
    known = [program.source, *(text for reduction in read for text in reduction.results)]
    apart = [*APART, *(n for n, (_, text) in ABBREVIATIONS.items() if any(name in text for name in APART))]
    if not any(name in text for text in known for name in apart):
        return program
    done = texts(Source.of(program.source), scalars, KeepingStops).reader.done
    dtypes = program_dtypes(program)
    exprs = (without_stops(done[o.name], lambda part: kind(part, dtypes) != "real") for o in program.outputs)
    outputs = (replace(o, expr=expr) for o, expr in zip(program.outputs, exprs, strict=True))
    return replace(program, outputs=tuple(outputs))


def without_stops(expr: Expr, those: Callable[[Expr], bool] = lambda _: True) -> Expr:
    """The expression with what is stopped in place of its stops, or of `those` of something."""

    def dropped(node: Expr) -> Expr:
        is_apart = isinstance(node, Call) and node.fn in APART and those(node.args[0])
        return (definition(node) if is_apart else None) or node  # type: ignore[arg-type]

    return transform(expr, dropped)


def reached(expr: Expr) -> Iterator[Expr]:
    """The parts of an expression that a derivative reaches: nothing that is stopped, compared or a condition."""
    seen: set[Expr] = set()
    left = [expr]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if isinstance(node, Call) and node.fn in FUNCTIONS:
            partials = FUNCTIONS[node.fn].derivative
            left += [part for part, text in zip(node.args, partials, strict=True) if text]
        else:
            left += children(node)


def read(name: str, index: Sequence[Expr]) -> Expr:
    """A value with a name, at a position."""
    return Load(name, tuple(index)) if index else Scalar(name)


def plain(name: str, axes: Sequence[str]) -> Expr:
    """A value with a name, at the positions of its own axes."""
    return read(name, tuple(map(Axis, axes)))


def name_of(expr: Expr) -> str | None:
    """The name that a read is of."""
    match expr:
        case Load(name, _) | Scalar(name):
            return name
        case _:
            return None


def index_of(expr: Expr) -> tuple[Expr, ...]:
    """The position that a read is at."""
    return expr.index if isinstance(expr, Load) else ()


@dataclass(frozen=True)
class Step:
    """One named value. `over` are the axes that `op` reduces; `written`: the name is the author's own."""

    name: str
    axes: tuple[str, ...]
    body: Expr
    op: str = ""
    over: tuple[str, ...] = ()
    written: bool = False

    @property
    def value(self) -> Expr:
        """The step as one expression."""
        found = self.body
        for axis in reversed(self.over):
            found = Reduce(self.op, axis, found)
        return found

    @property
    def is_extreme(self) -> bool:
        """Whether it is the greatest or the least of several values, which what shifts an exponent is."""
        pair = isinstance(self.body, Call) and self.body.fn in ("maximum", "minimum")
        return self.op in ("max", "min") or (not self.op and pair)

    @property
    def itself(self) -> Expr:
        """A read of it, at its own axes."""
        return plain(self.name, self.axes)

    @property
    def loops(self) -> tuple[str, ...]:
        """Every axis that its body has."""
        return (*self.axes, *self.over)


@dataclass(frozen=True)
class Extents:
    """Which axes have as many positions as others, since they are put for the same dimension of an input. `axis` is one
    of each dimension's."""

    axis: dict[tuple[str, int], str]
    _roots: dict[str, str]

    @staticmethod
    def of(program: Program, domains: Mapping[str, str], values: Iterable[Expr]) -> Extents:
        """`values` are those of the text's definitions. An axis of a definition that is read elsewhere alone is none of
        the program's: it has the extent of an input if it is put for one dimension, since nothing says that two agree."""
        found = Extents({}, {})
        for axis, tensor, dimension in places(program):
            found._put(axis, (tensor, dimension))
        known = {domains.get(axis, axis) for axis in (*axes_of(program.outputs), *program.domains)}
        inputs = {tensor.name for tensor in program.tensors}
        apart: dict[str, set[tuple[str, int]]] = {}
        for node in walk(*values):
            for dimension, part in enumerate(index_of(node)):
                if isinstance(part, Axis) and (name := name_of(node)) in inputs:
                    apart.setdefault(domains.get(part.name, part.name), set()).add((name or "", dimension))
        longer = longer_dimensions(program)
        for axis, read in apart.items():
            if axis not in known and len(read) == 1 and not read & longer.keys():
                found._put(axis, *read)
        return found

    def root(self, axis: str) -> str:
        """What axes of the same extent share."""
        while axis in self._roots:
            axis = self._roots[axis]
        return axis

    def _put(self, axis: str, place: tuple[str, int]) -> None:
        other, own = self.root(self.axis.setdefault(place, axis)), self.root(axis)
        if own != other:
            self._roots[own] = other


def _without_sizes(program: Program, found: Texts) -> frozenset[str]:
    """The definitions with an axis that nothing gives a size: of those that are read at computed positions alone, where
    inputs are not read along it. What reads them has them written out."""
    extents = Extents.of(program, found.domains, found.reader.done.values())
    known = {
        *axes_of(program.outputs),
        *program.domains.values(),
        *found.names.lengths,
        *found.computed,
        *extents.axis.values(),
    }
    roots = {extents.root(axis) for axis in known}
    return frozenset(
        name
        for name, written in found.names.definitions.items()
        if not {extents.root(found.domains.get(axis, axis)) for axis in written.axes} <= roots
    )


@dataclass
class Steps:
    """A program as steps. `dtypes` are those of every name; `declared` the declarations of inputs, as text; `domains`
    `lengths` and `computed` what the text says of axes, `states` those of recurrences in order, which are read before they are defined, `extents` which of them have equally many positions."""

    program: Program
    names: Names
    dtypes: dict[str, str]
    active: set[str]
    domains: dict[str, str]
    lengths: dict[str, int]
    computed: dict[str, Expr]
    declared: dict[str, str]
    outputs: tuple[str, ...]
    extents: Extents
    steps: list[Step] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    _known: dict[tuple[object, ...], Step] = field(default_factory=dict)
    _reducing: set[str] = field(default_factory=set)
    _remainders: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def alike(self) -> SameExtents:
        """The extents of axes, as prefixes compare them."""
        known = alike(self.program)
        return {**known, **{axis: known.get(of, of) for axis, of in self.domains.items()}}

    @staticmethod
    def of(
        source: str, wrt: Sequence[str], scalars: Mapping[str, Number] | None, reserved: set[str]
    ) -> Steps:
        """The steps of a text, with its stops where `wrt` are inputs that derivatives are asked by. `reserved` are names
        that no step may have."""
        program = parse(source, scalars=scalars)
        found = texts(Source.of(source), scalars, _reader(bool(wrt), frozenset()))
        if unsized := _without_sizes(program, found):
            found = texts(Source.of(source), scalars, _reader(bool(wrt), unsized))
        taken = {*re.findall(r"\w+", source), *found.domains, *reserved}
        declared = {
            name: _declaration(each)
            for name, each in found.names.declared.items()
            if name not in found.names.definitions
        }
        for axis, (name, dimension) in found.dimensions.items():
            text = f"{axis}: axis[N({name}, {dimension})]"
            declared[name] = f"{declared[name]}\n{text}" if name in declared else text
        steps = Steps(
            program,
            Names(taken),
            dict(program_dtypes(program)),
            set(wrt),
            dict(found.domains),
            dict(found.names.lengths),
            dict(found.computed),
            declared,
            tuple(found.outputs),
            Extents.of(program, found.domains, found.reader.done.values()),
        )
        renamed = {name: steps.names.numbered(name) for name in found.names.definitions if name in reserved}
        for name in program.states:
            steps.dtypes[renamed.get(name, name)] = steps.dtypes[name]
            if steps.dtypes[name] not in KINDS:
                steps.states.add(renamed.get(name, name))
        steps.active |= steps.states
        for name, written in found.names.definitions.items():
            if name in unsized:
                continue
            expr = _renamed(found.reader.done[name], renamed)
            steps.define(renamed.get(name, name), written.axes, expr)
        steps.outputs = tuple(renamed.get(name, name) for name in steps.outputs)
        return steps

    def drop_stops(self) -> None:
        """Once all is differentiated, what is stopped is read as it is."""
        self.steps[:] = [replace(step, body=without_stops(step.body)) for step in self.steps]

    def put(self, step: Step) -> None:
        """Gives a step that is there another body."""
        place = next(n for n, each in enumerate(self.steps) if each.name == step.name)
        self.steps[place] = step

    def step(self, name: str) -> Step:
        """The step that defines a name."""
        return next(step for step in self.steps if step.name == name)

    def define(self, name: str, axes: tuple[str, ...], expr: Expr) -> None:
        """Adds a definition of the text, and the steps that it is made of."""
        if isinstance(expr, Reduce):
            expr = extreme_of(expr) or expr
        if (
            isinstance(expr, Reduce)
            and free_axes(expr) == set(axes)
            and not set(axes) & set(_peeled(expr)[1])
        ):
            op, over, body = _peeled(expr)
            step = Step(name, axes, self.lowered(body, (*axes, *over)), op, over, written=True)
        else:
            step = Step(name, axes, self.lowered(expr, axes), written=True)
        self.add(step)

    def add(self, step: Step) -> Step:
        """Adds a step, and notes what its value is; one that is there already is taken."""
        key = (step.axes, step.op, step.over, step.body)
        if not step.written and key in self._known:
            return self._known[key]
        self.steps.append(step)
        self._known.setdefault(key, step)
        if step.op or self.reads_sums(step.body):
            self._reducing.add(step.name)
        kind = kinds([step.value], self.dtypes)[step.value]
        self.dtypes[step.name] = {"int": "i64", "bool": "bool", "real": "f32"}[kind]
        if kind == "real" and self.is_active(step.value):
            self.active.add(step.name)
        return step

    def reduced(self, name: str, axes: Sequence[str], op: str, over: str, body: Expr) -> Expr:
        """Adds a reduction under a new name, with those of the axes that it depends on; a read of it."""
        own = tuple(axis for axis in axes if axis in free_axes(Reduce(op, over, body)))
        return self.add(Step(self.names.fresh(name), own, body, op, (over,))).itself

    def others(
        self, axis: str, side: str, parts: Sequence[Expr], nothing: Sequence[Expr]
    ) -> tuple[str, Expr]:
        """What the positions on one `side` of each one contribute to a fold ("lt": those before it), packed; and their axis."""
        other = self.another(axis)
        inside = call(side, Axis(other), Axis(axis))
        moved = (substitute_axes(part, {axis: Axis(other)}) for part in parts)
        return other, packed(
            [call("where", inside, part, none) for part, none in zip(moved, nothing, strict=True)]
        )

    def another(self, axis: str) -> str:
        """A new axis of the same extent."""
        base = self.domains.get(axis, axis)
        name = self.names.numbered(base)
        self.domains[name] = base
        return name

    def remainder(self, axis: str, divisor: int, taken: Sequence[str]) -> str:
        """The axis of the remainders of an axis by a number: the same one every time, but where it is taken."""
        name = self._remainders.get((axis, divisor))
        if name is None or name in taken:
            name = self.names.fresh(f"{axis}_rest")
            self.lengths[name] = divisor
            self._remainders.setdefault((axis, divisor), name)
        return name

    def same_extent(self, left: str, right: str) -> bool:
        """Whether two axes have as many positions whatever the sizes are."""
        one, two = (self.extents.root(self.domains.get(axis, axis)) for axis in (left, right))
        return one == two or (one in self.lengths and self.lengths.get(one) == self.lengths.get(two))

    def is_real(self, expr: Expr) -> bool:
        """Whether an expression is a real number, so that it may have a derivative."""
        return kinds([expr], self.dtypes)[expr] == "real"

    def is_active(self, expr: Expr) -> bool:
        """Whether a derivative of the expression may be asked for."""
        return any(name_of(node) in self.active for node in reached(expr))

    def reads_sums(self, expr: Expr) -> bool:
        """Whether an expression is made of reductions."""
        return any(name_of(node) in self._reducing for node in walk(expr))

    def lowered(self, expr: Expr, scope: tuple[str, ...]) -> Expr:
        """The expression with its reductions, and what does not depend on all of `scope`, read from steps."""
        return self._split(self._without_reductions(expr, scope), scope, {})

    def _without_reductions(self, expr: Expr, scope: tuple[str, ...]) -> Expr:
        memo: dict[Expr, Expr] = {}

        def visit(node: Expr) -> Expr:
            if node not in memo:
                if isinstance(node, Reduce) and (extreme := extreme_of(node)) is not None:
                    memo[node] = visit(extreme)
                elif isinstance(node, Reduce):
                    memo[node] = self._reduction(node, scope)
                else:
                    memo[node] = rebuild(node, tuple(map(visit, children(node))))
            return memo[node]

        return visit(expr)

    def _split(self, node: Expr, scope: tuple[str, ...], memo: dict[Expr, Expr]) -> Expr:
        if node not in memo:
            if self._is_repeated(node, scope):
                axes = tuple(axis for axis in scope if axis in free_axes(node))
                memo[node] = self._step(Step("", axes, self._split(node, axes, {})), "u")
            else:
                memo[node] = rebuild(node, tuple(self._split(part, scope, memo) for part in children(node)))
        return memo[node]

    def _is_repeated(self, node: Expr, scope: tuple[str, ...]) -> bool:
        """Whether broadcasting repeats an expression of which several values have derivatives. A state of several
        variables is no value that a step has."""
        if not isinstance(node, Call) or node.fn == PAIR:
            return False
        if not free_axes(node) < set(scope) or not self.is_real(node):
            return False
        return len([part for part in reached(node) if name_of(part) in self.active]) > 1

    def _reduction(self, node: Reduce, scope: tuple[str, ...]) -> Expr:
        op, over, body = _peeled(node)
        axes = tuple(axis for axis in scope if axis in free_axes(node))
        step = Step("", axes, self.lowered(body, (*axes, *over)), op, over)
        hint = f"{op.partition('.')[0]}_{_main(step.body)}"
        return self._step(step, hint)

    def _step(self, step: Step, hint: str) -> Expr:
        key = (step.axes, step.op, step.over, step.body)
        if key in self._known:
            return self._known[key].itself
        return self.add(replace(step, name=self.names.fresh(hint))).itself


def _renamed(expr: Expr, names: Mapping[str, str]) -> Expr:
    if not names:
        return expr
    memo: dict[Expr, Expr] = {}
    for node in walk(expr):
        again = rebuild(node, tuple(memo[part] for part in children(node)))
        name = names.get(name_of(again) or "")
        memo[node] = again if name is None else read(name, index_of(again))
    return memo[expr]


def extreme_of(node: Reduce) -> Expr | None:
    """A state variable that `max(v1, v2)` or `min` combines as the extreme and its identity; None for any other. So it
    has one derivative, however its parts are grouped."""
    found = fold_of(node.op)
    if found is None or found[0].ranks:
        return None
    fold, index = found
    name = fold.state[index]
    match fold.combine[index]:
        case Call("maximum" | "minimum" as fn, (Local(left, _), Local(right, _))) if {left, right} == {
            f"{name}1",
            f"{name}2",
        }:
            whole = Reduce(fn[:3], node.axis, contributions(node)[index])
            return call(fn, whole, fold.identity[index])
        case _:
            return None


def _peeled(node: Reduce) -> tuple[str, tuple[str, ...], Expr]:
    """The op, the axes and the body of a reduction; sums of sums are one."""
    over: tuple[str, ...] = (node.axis,)
    body = node.body
    while node.op == "sum" and isinstance(body, Reduce) and body.op == "sum" and body.axis not in over:
        if body.axis in free_axes(node):
            break
        over, body = (*over, body.axis), body.body
    return node.op, over, body


def _main(body: Expr) -> str:
    """The first tensor that an expression reads, for a name."""
    for node in walk(body):
        if isinstance(node, Load):
            return node.tensor
    return "t"


def _declaration(declaration: Declaration) -> str:
    axes = "" if declaration.axes is None else f"[{', '.join(declaration.axes)}]"
    return f"{declaration.name}: {declaration.dtype}{axes}"


def refused(program: Program, expr: Expr, message: str, hint: str) -> EqfuseError:
    """An error that points at an expression of the program."""
    return EqfuseError(message, source=program.source, span=locate(program.source, show(expr)), hint=hint)


def is_fold(op: str) -> bool:
    """Whether a reduction is a state variable of a registered one."""
    return fold_of(op) is not None
