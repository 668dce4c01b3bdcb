"""torch's `scan` and `associative_scan`, as recurrences of the language.

    scan(step, init, xs)              h[t,i] = step(where(t == 0, init[i], h[t-1,i]), x[t,i])
    associative_scan(combine, xs)     h[t,i] = where(t == 0, x[t,i], combine(h[t-1,i], x[t,i]))

Each tensor of the state is one definition. Where steps merge, they may read other states, which do not read them; else all are computed in
order. torch moves the dimension to the
front, and flips it for `reverse`, before it calls these operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from inspect import getclosurevars
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch._higher_order_ops import utils
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import _make_temp_remove_mode_context_manager
from torch.utils import _pytree as pytree

from eqfuse.terms.nodes import Axis, Const, Expr, Load, Scalar, call, free_axes, post_order, replaced, walk
from eqfuse.terms.recurrences import EXTREMES, MOST_BEFORE, itself, step_of
from eqfuse.torch.operators.table import Node, Unsupported, operator
from eqfuse.torch.positions import Part, Position
from eqfuse.torch.positions import Size as Extent
from eqfuse.torch.values import Digit, Line, Value, axes_in, position


@dataclass(frozen=True)
class State:
    """A tensor of the state, as the definition `name` over `groups` of axes, the first of which is that of the positions. `start` is
    what a scan begins with, or the first element of an associative scan."""

    name: str
    groups: tuple[tuple[Digit, ...], ...]
    values: Value
    start: Value

    @property
    def places(self) -> list[Position]:
        """The positions of its dimensions, but that of the scan."""
        return [position(group) for group in self.groups[1:]]

    @property
    def now(self) -> Load:
        return Load(self.name, tuple(map(Axis, axes_in(self.groups))))

    @property
    def before(self) -> Load:
        """Its value one position before."""
        along, *others = self.now.index
        return Load(self.name, (call("sub", along, Const(1)), *others))

    def started(self, index: Sequence[Expr]) -> Expr:
        """What it starts with, at an index of its axes but the first."""
        left = iter(index)
        return self.start.at(
            [tuple(Part(next(left), digit.size) for digit in group) for group in self.groups[1:]]
        )

    @property
    def is_first(self) -> Expr:
        """Whether a position is the first."""
        return call("eq", self.now.index[0], Const(0))


@contextmanager
def traced_scans(mode: type) -> Iterator[None]:
    """Has torch trace `associative_scan(..., combine_mode="generic")` as the operator that "pointwise" is, not as slices that are combined
    level by level; and steps, which Dynamo traces, without a mode that it does not know. Versions of torch whose scans have no such
    parts trace them as they do."""
    modules: list[Any] = [
        import_module(f"torch._higher_order_ops.{name}") for name in ("scan", "associative_scan")
    ]
    module = modules[1]
    without: Any = _make_temp_remove_mode_context_manager(mode)
    compile_and_run: Any = getattr(module, _TRACES, None)

    def generic(operator: Any, leaves: Sequence[torch.Tensor], **_: Any) -> Any:
        batched = operator.keywords["combine_fn"]  # torch.vmap of the function that was given
        combine = getclosurevars(batched).nonlocals["func"]
        flat = partial(operator.func, **{**operator.keywords, "combine_fn": combine})
        found = called(lambda fn, xs: module.associative_scan_op(fn, xs, additional_inputs=()), flat, leaves)
        return pytree.tree_leaves(found)

    def called(fn: Any, *args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return fn(*args)
        if isinstance(fn, FunctionType):
            # Dynamo keeps guards by code: those of another scan may fail on the tensors of this one.
            code = fn.__code__.replace()
            fn = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
        for given in args:
            if isinstance(given, partial):
                _check_reads(given.keywords.get("combine_fn"))
        with without():
            return compile_and_run(fn, *args)

    def whole(fn: Any, args: Sequence[Any], *others: Any) -> Any:
        with without():
            return hop_compile(fn, args, *others)

    hop_compile: Any = getattr(utils, _COMPILES, None)
    with ExitStack() as patches:
        if hop_compile is not None:  # of operators that are no scans: what they are is said by their names
            patches.enter_context(patch.object(utils, _COMPILES, whole))
        if compile_and_run is not None and hasattr(module, "generic_associative_scan"):
            patches.enter_context(patch.object(module, "generic_associative_scan", generic))
            for each in modules:
                if hasattr(each, _TRACES):
                    patches.enter_context(patch.object(each, _TRACES, called))
        yield


_TRACES, _COMPILES = "_maybe_compile_and_run_fn", "_hop_compile_and_call"
"""The names of torch's functions that trace steps, and other functions that operators call."""


def _check_reads(step: Any) -> None:
    """Raises Unsupported for a step that reads a tensor by a name, which torch cannot trace."""
    read = getclosurevars(step) if isinstance(step, FunctionType) else None
    for name, value in {**read.globals, **read.nonlocals}.items() if read else ():
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            raise Unsupported(
                f"scan: its step reads {name!r}, a tensor that is neither an argument nor a parameter (pass it to the function)"
            )


@operator("scan", space="higher_order")
def _(node: Node) -> tuple[Value, ...]:
    init, xs = node.given["init"], node.given["xs"]
    count = len(init)
    if _length(node) == 1:
        found = node.given["combine_fn"]([*init, *map(_only, xs), *node.given["additional_inputs"]])
        return (*found[:count], *(_alone(y) for y in found[count:]))
    steps = Steps(node, init)

    def begun(state: State, step: Expr) -> Expr:
        return steps.started(step)

    steps.define(begun)
    last = (Part(call("sub", node.writer.size_text(steps.length), Const(1)), steps.length),)
    ends = (_at(state.values, last) for state in steps.states)
    return (*ends, *(steps.stacked(y) for y in steps.results[count:]))


@operator("associative_scan", space="higher_order")
def _(node: Node) -> tuple[Value, ...]:
    xs = node.given["xs"]
    if _length(node) == 1:
        return tuple(xs)
    steps = Steps(node, [_only(x) for x in xs])

    def begun(state: State, step: Expr) -> Expr:
        first = steps.here[steps.states.index(state)].at(state.places)
        return (
            step
            if steps.makes_of_nothing(state, step) is first
            else call("where", state.is_first, first, step)
        )

    steps.define(begun)
    return tuple(state.values for state in steps.states)


def _length(node: Node) -> Extent:
    """How many positions the tensors have that a scan goes along."""
    first, *others = node.given["xs"]
    for x in others:
        node.writer.equate(first.shape[0], x.shape[0])
    return first.shape[0]


def _at(x: Value, place: Position) -> Value:
    """A tensor at a position of its first dimension."""
    return Value(x.shape[1:], x.dtype, x.layout[1:], lambda positions: x.at((place, *positions)))


def _only(x: Value) -> Value:
    """A tensor at the first position of its first dimension."""
    return _at(x, () if x.shape[0] == 1 else (Part(Const(0), x.shape[0]),))


def _alone(y: Value) -> Value:
    """A tensor with a first dimension of one position."""
    return Value((1, *y.shape), y.dtype, ((), *y.layout), lambda positions: y.at(positions[1:]))


def _parts(line: Line) -> tuple[str, tuple[str, ...], tuple[Expr, ...]]:
    """The reduction of several values that a definition is, its axes and arguments; of another one its expression."""
    return line.several or ("", (), () if line.expr is None else (line.expr,))


def _line(line: Line, args: tuple[Expr, ...]) -> Line:
    """The same definition, of other arguments."""
    op, bound, _ = _parts(line)
    return replace(line, several=(op, bound, args)) if op else replace(line, expr=args[0])


class Steps:
    """The definitions of one scan: its states, and what its step computes at a position of `axis` from the states one before."""

    def __init__(self, node: Node, starts: Sequence[Value]) -> None:
        self.writer, self.length = node.writer, node.given["xs"][0].shape[0]
        used = [digit.axis for x in starts for digits in x.layout for digit in digits or ()]
        self.axis = self.writer.names.axis(self.length, used)
        self.writer.prefixes.add(self.axis)
        self.states = [self._state(start) for start in starts]
        before = (Part(call("sub", Axis(self.axis), Const(1)), self.length),)
        self.here = [_at(x, position((Digit(self.axis, self.length),))) for x in node.given["xs"]]
        begin = len(self.writer.lines)
        given = [*(_at(state.values, before) for state in self.states), *self.here]
        self.results: tuple[Value, ...] = node.given["combine_fn"]([*given, *node.given["additional_inputs"]])
        self.inner: dict[str, str] = {}
        self.varying: set[str] = set()
        self.behind: list[Line] = []
        self._extend(begin)
        self.known: dict[Expr, Expr] = {}

    def _state(self, start: Value) -> State:
        name = self.writer.names.definition("scan")
        shape = (self.length, *start.shape)
        groups = self.writer.axes(shape, ((Digit(self.axis, self.length),), *start.layout))
        values = self.writer.named(name, Value(shape, start.dtype, groups, start.read), groups)
        return State(name, groups, values, start)

    def _extend(self, begin: int) -> None:
        """Gives what the step defines, from the line `begin` on, the axis of the scan where it varies along that. What reads a state is
        written behind the states."""
        states = {state.name for state in self.states}
        made: dict[object, str] = {}
        lines, self.writer.lines[begin:] = self.writer.lines[begin:], []
        for line in lines:
            op, bound, args = _parts(line)
            args = tuple(map(self._moved, args))
            if any(self.axis in free_axes(arg) for arg in args):
                line = replace(line, axes=tuple((self.axis, *axes) for axes in line.axes))
                self.varying.update(line.names)
            for number, name in enumerate(line.names):
                self.inner[name] = made.setdefault((op, bound, args, line.axes, number), name)
            reads = {each.tensor for each in walk(*args) if isinstance(each, Load)}
            (self.writer.lines if reads.isdisjoint(states) else self.behind).append(_line(line, args))
            states |= set() if reads.isdisjoint(states) else set(line.names)

    def _moved(self, expr: Expr) -> Expr:
        """An expression with what the step defines read at the position of the scan, and of equal definitions the first."""
        found: dict[Expr, Expr] = {}
        for each in walk(expr):
            match each:
                case Load(name, index) if name in self.inner:
                    along = (Axis(self.axis),) if name in self.varying else ()
                    found[each] = Load(self.inner[name], (*along, *index))
                case Scalar(name) if name in self.varying:
                    found[each] = Load(self.inner[name], (Axis(self.axis),))
        return replaced(expr, found)

    def define(self, begun: Callable[[State, Expr], Expr]) -> None:
        """Writes a definition for each state: what `begun` makes of its step, so that it has a value at the first position. Steps that
        merge read other states where they are; others all of them one position before."""
        results = zip(self.states, self.results, strict=False)
        steps = {state.name: self._moved(result.at(state.places)) for state, result in results}
        lines = self._merging(steps, begun)
        if lines is not None:
            self.writer.lines += [*lines, *(self._begun(line) for line in self.behind)]
            return
        self.known = {}
        lines = [self._begun(line) for line in self.behind]
        lines += [self._defined(state, begun(state, steps[state.name])) for state in self.states]
        self.writer.lines += _makers_first(lines)

    def _merging(self, steps: Mapping[str, Expr], begun: Callable[[State, Expr], Expr]) -> list[Line] | None:
        """The definitions of states whose steps merge, each after those that it reads; None where there are others."""
        graph = {name: _reads(step) & steps.keys() - {name} for name, step in steps.items()}
        try:
            order = tuple(TopologicalSorter(graph).static_order())
        except CycleError:
            return None
        lines: list[Line] = []
        for state in sorted(self.states, key=lambda state: order.index(state.name)):
            step = replaced(steps[state.name], self.known)
            if not self._is_step(state, step):
                return None
            lines.append(self._defined(state, begun(state, step)))
            self.known.setdefault(steps[state.name], state.now)
        return lines

    def _defined(self, state: State, expr: Expr) -> Line:
        return Line((state.name,), (axes_in(state.groups),), expr)

    def _begun(self, line: Line) -> Line:
        """What reads states one position before, as it is from the first one on."""
        _, _, args = _parts(line)
        return _line(line, tuple(self.started(replaced(arg, self.known)) for arg in args))

    def _is_step(self, state: State, expr: Expr) -> bool:
        """Whether an expression is a step of one state that merges. Raises Unsupported for an extreme of integers, which has none before
        the first."""
        names = {state.name, *(name for line in self.behind for name in line.names)}
        if {each for each in walk(expr) if isinstance(each, Load) and each.tensor in names} - {state.before}:
            return False
        law, _ = step_of(replaced(expr, {state.before: BEFORE[0]}), BEFORE) or (None, ())
        if law in EXTREMES.values() and not state.start.is_real:
            raise Unsupported("its step is an extreme of integers (torch.cummax and cummin have those)")
        return law is not None

    def makes_of_nothing(self, state: State, step: Expr) -> Expr | None:
        """What a step makes of the value that a recurrence has before the first position; None where it reads other states there."""
        before = {each.name for each in self.states if each.before in walk(step)}
        law, parts = step_of(replaced(step, {state.before: BEFORE[0]}), BEFORE) or (None, ())
        return parts[1] if law is not None and before == {state.name} else None

    def started(self, expr: Expr) -> Expr:
        """What reads states one position before, with what they start with before the first."""
        starts: dict[Expr, Expr] = {}
        for each in walk(expr):
            for state in self.states:
                if (
                    isinstance(each, Load)
                    and each.tensor == state.name
                    and each.index[0] is state.before.index[0]
                ):
                    starts[each] = call("where", state.is_first, state.started(each.index[1:]), each)
        return replaced(expr, starts)

    def stacked(self, y: Value) -> Value:
        """What the step computes at every position, as a tensor of all."""
        shape = (self.length, *y.shape)
        groups = self.writer.axes(shape, ((Digit(self.axis, self.length),), *y.layout))
        expr = self.started(
            replaced(self._moved(y.at([position(group) for group in groups[1:]])), self.known)
        )
        for state in self.states:
            if expr is state.now:
                return state.values
        return self.writer.defined(Value(shape, y.dtype, groups, y.read), groups, expr, "scan")


def _reads(*exprs: Expr) -> set[str]:
    return {node.tensor for node in walk(*exprs) if isinstance(node, Load)}


def _makers_first(lines: Sequence[Line]) -> list[Line]:
    """Definitions, each after those that it reads and that do not read it."""
    made = {name: line for line in lines for name in line.names}
    graph = {name: sorted(_reads(*_parts(line)[2]) & made.keys()) for name, line in made.items()}
    below = {name: {name, *post_order(graph[name], graph.__getitem__)} for name in made}
    return sorted(lines, key=lambda line: len(below[line.names[0]]))


BEFORE = [itself("state", "t", False, distance) for distance in range(1, MOST_BEFORE + 1)]
"""What stands for the values before a step while it is read as one."""
