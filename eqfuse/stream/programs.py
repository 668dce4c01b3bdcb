"""The programs of a stream: the merge of a fused group, written in the language.

Three texts: what a state and a chunk of the axis make, what two states make, and the outputs of a state. Each is
compiled as any program is, so that chunks are fused too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse.errors import EqfuseError
from eqfuse.loops.plan import KernelPlan
from eqfuse.rules.assignments import Assignment, combines, finishes, updates
from eqfuse.rules.merge import Group, Merge, State
from eqfuse.terms.nodes import (
    Axis,
    Expr,
    Load,
    Local,
    Program,
    Reduce,
    Scalar,
    Size,
    call,
    children,
    free_axes,
    rebuild,
    replaced,
    transform,
    walk,
)
from eqfuse.terms.printer import show
from eqfuse.terms.types import kind, program_dtypes

START, COUNT, TOTAL = "stream_start", "stream_count", "stream_total"
"""Scalars of the programs: the position of a chunk's first element, how many elements a state has seen, and how many
there will be at the end."""


@dataclass(frozen=True)
class Stream:
    """The three programs of a kernel's merge, as text; `states` are what a state of the stream holds."""

    axis: str
    states: tuple[State, ...]
    outputs: tuple[str, ...]
    update: str
    combine: str
    finish: str
    reads_positions: bool
    reads_total: bool


def stream_of(
    program: Program, plans: Sequence[Sequence[KernelPlan]], why_not: Callable[[], Sequence[str]]
) -> Stream:
    """The stream of a program, by the first of its plans that is one fused merge over one axis. Raises EqfuseError where none
    is, saying why the first is not."""
    first: EqfuseError | None = None
    for kernels in plans:
        try:
            return _stream_of(program, kernels, why_not)
        except EqfuseError as error:
            first = first or error
    assert first is not None
    raise first


def _stream_of(program: Program, plans: Sequence[KernelPlan], why_not: Callable[[], Sequence[str]]) -> Stream:
    groups = [plan.group for kernel in plans for plan in kernel.groups]
    if not groups:
        raise EqfuseError(
            "the program reduces nothing, so there is nothing to stream", hint="call the kernel"
        )
    if len(plans) == 1:
        groups, plans = _at_the_end(groups, plans[0])
    for group in groups:
        if group.merge is None:
            hint = "; ".join(why_not())
            raise EqfuseError(
                f"the reductions over {group.axis!r} have no merge, so they cannot be streamed", hint=hint
            )
    if len(groups) > 1 or len(plans) > 1:
        axes = ", ".join(dict.fromkeys(repr(group.axis) for group in groups))
        message = (
            f"the program is not one fused group over one axis: it takes {len(groups)} passes, over {axes}"
        )
        raise EqfuseError(message, hint="stream a program whose reductions fuse into one pass")
    (group,), (kernel,) = groups, plans
    for output in kernel.outputs:
        if group.axis in output.axes:
            message = f"{output.name!r} has a value for each position of {group.axis!r}, which a stream does not keep"
            raise EqfuseError(message, hint="return values that do not have the streamed axis")
    return _Writer(program, group, kernel).stream()


def _at_the_end(groups: Sequence[Group], kernel: KernelPlan) -> tuple[list[Group], list[KernelPlan]]:
    """The groups without those that are done once the first has seen all of its axis: outputs reduce themselves what
    those would have."""
    first, *others = groups
    kept, values = [first], dict[Expr, Expr]()
    for group in others:
        if group.axis == first.axis:
            kept.append(group)
            continue
        for state in group.states:
            body = replaced(state.body, values)
            values[Local(state.name, state.dims)] = Reduce(state.op, group.axis, body)
            if first.axis in free_axes(body):
                return list(groups), [kernel]
    outputs = tuple(replace(o, expr=replaced(o.expr, values)) for o in kernel.outputs)
    return kept, [replace(kernel, outputs=outputs)]


class _Writer:
    def __init__(self, program: Program, group: Group, kernel: KernelPlan) -> None:
        assert group.merge is not None
        self.program, self.group, self.kernel = program, group, kernel
        self.merge: Merge = group.merge
        self.axis = group.axis
        self.dims = {state.name: state.dims for state in group.states}
        self.kinds = self._kinds()
        self.reads_positions = self.reads_total = False
        loads = [
            node for node in walk(*(output.expr for output in program.outputs)) if isinstance(node, Load)
        ]
        self.chunked = {
            (load.tensor, dimension)
            for load in loads
            for dimension, part in enumerate(load.index)
            if part is Axis(self.axis)
        }

    def _kinds(self) -> dict[str, str]:
        known = dict(program_dtypes(self.program))
        found: dict[str, str] = {}
        for state in self.group.states:
            dtype = "i64" if kind(Reduce(state.op, self.axis, state.body), known) == "int" else "acc"
            known[state.name] = found[state.name] = dtype
        return found

    def stream(self) -> Stream:
        update = self._update()
        return Stream(
            self.axis,
            self.group.states,
            tuple(output.name for output in self.kernel.outputs),
            update,
            self._combine(),
            self._finish(),
            self.reads_positions,
            self.reads_total,
        )

    # Texts ----------------------------------------------------------------------------------------

    def _update(self) -> str:
        lines, exprs = self._written(updates(self.group, self.merge), self.dims)
        return self._text(exprs, lines, list(self.dims))

    def _combine(self) -> str:
        dims = {f"{name}{side}": d for name, d in self.dims.items() for side in ("_a", "_b")}
        lines, exprs = self._written(combines(self.group, self.merge), dims)
        return self._text(exprs, lines, [f"{name}{side}" for side in ("_a", "_b") for name in self.dims])

    def _finish(self) -> str:
        last = [replace(each, value=self._counted(each.value)) for each in finishes(self.group, self.merge)]
        lines, exprs = self._written(last, self.dims)
        exact = {each.state: each.name for each in last}
        dims = self.dims | {each.name: each.dims for each in last}
        for output in self.kernel.outputs:
            exprs.append(self._within(self._counted(self._renamed(output.expr, exact)), dims))
            lines.append(f"{_left(output.name, output.axes)} = {show(exprs[-1])}")
        read = {node.name for expr in exprs for node in walk(expr) if isinstance(node, Scalar)}
        read |= {node.tensor for expr in exprs for node in walk(expr) if isinstance(node, Load)}
        names = [output.name for output in self.kernel.outputs]
        return self._text(exprs, lines, [name for name in self.dims if name in read], names)

    def _text(
        self, exprs: Sequence[Expr], lines: Sequence[str], inputs: Sequence[str], returned: Sequence[str] = ()
    ) -> str:
        nodes = list(walk(*exprs))
        tensors = {node.tensor for node in nodes if isinstance(node, Load)}
        scalars = {node.name for node in nodes if isinstance(node, Scalar)}
        heads = [
            f"{tensor.name}: {tensor.dtype}[{', '.join(axis or '' for axis in tensor.axes)}]"
            for tensor in self.program.tensors
            if tensor.dtype is not None and tensor.name in tensors
        ]
        heads += [f"{name}: i64" for name in self.program.integers if name in scalars]
        heads += [f"{name}: i64" for name in (START, COUNT, TOTAL) if name in scalars]
        for name in inputs:
            state = name.removesuffix("_a").removesuffix("_b") if name not in self.dims else name
            if self.kinds[state] == "i64" and (name in tensors or name in scalars):
                heads.append(f"{name}: i64{_axes(self.dims[state])}")
        used = {node.name for node in nodes if isinstance(node, Axis)}
        heads += [f"{axis}: axis[{of}]" for axis, of in self.program.domains.items() if axis in used]
        used |= {self.program.domains.get(axis, axis) for axis in used}
        heads += [f"{axis}: axis[{count}]" for axis, count in self.program.lengths.items() if axis in used]
        names = returned or [f"{state.name}_new" for state in self.group.states]
        return "\n".join([*heads, *lines, f"return {', '.join(names)}"])

    def _written(
        self, assignments: Iterable[Assignment], dims: Mapping[str, tuple[str, ...]]
    ) -> tuple[list[str], list[Expr]]:
        """Assignments as lines, and the expressions in them; `dims` are those of the values that they read."""
        known, lines, exprs = dict(dims), list[str](), list[Expr]()
        for each in assignments:
            known[each.name] = each.dims
            exprs.append(self._within(each.value, known))
            lines.append(f"{_left(each.name, each.dims)} = {show(exprs[-1])}")
        return lines, exprs

    # Terms ----------------------------------------------------------------------------------------

    def _renamed(self, expr: Expr, names: Mapping[str, str]) -> Expr:
        return transform(
            expr, lambda n: Local(names.get(n.name, n.name), n.dims) if isinstance(n, Local) else n
        )

    def _counted(self, expr: Expr) -> Expr:
        """With the number of positions of the whole axis as a scalar."""
        return transform(expr, lambda node: Scalar(COUNT) if node is Size(self.axis) else node)

    def _within(self, expr: Expr, dims: Mapping[str, tuple[str, ...]]) -> Expr:
        """With states as tensors, and positions counted from the stream's first. Raises EqfuseError."""
        memo: dict[Expr, Expr] = {}
        for node in walk(expr):
            match node:
                case Local(name, own):
                    axes = dims.get(name, own)
                    memo[node] = Load(name, tuple(map(Axis, axes))) if axes else Scalar(name)
                case Load(tensor, index):
                    for dimension, part in enumerate(index):
                        moves = Axis(self.axis) in list(walk(part)) or (tensor, dimension) in self.chunked
                        if part is not Axis(self.axis) and moves:
                            message = f"{tensor!r} is read at {show(part)}, which may lie in another chunk"
                            raise EqfuseError(message, hint=f"read it at {self.axis}")
                    memo[node] = node
                case Size(axis) if axis == self.axis:
                    self.reads_total = True
                    memo[node] = Scalar(TOTAL)
                case _ if self.program.domains.get(getattr(node, "name", "")) == self.axis and isinstance(
                    node, Axis
                ):
                    message = f"{self.axis!r} is walked a second time inside, which a stream cannot do"
                    raise EqfuseError(message, hint="stream a program with one pass")
                case _:
                    memo[node] = rebuild(node, tuple(memo[child] for child in children(node)))
        found = memo[expr]
        if Axis(self.axis) in _values(found):
            self.reads_positions = True
            found = _shifted(found, self.axis)
        return found


def _left(name: str, axes: Sequence[str]) -> str:
    return f"{name}{_axes(axes)}"


def _axes(axes: Sequence[str]) -> str:
    return f"[{', '.join(axes)}]" if axes else ""


def _values(expr: Expr) -> set[Expr]:
    """Subexpressions that are not inside the index of a load."""
    found: set[Expr] = set()
    stack = [expr]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(() if isinstance(node, Load) else children(node))
    return found


def _shifted(expr: Expr, axis: str) -> Expr:
    """With `axis + START` for the position as a value."""
    memo: dict[Expr, Expr] = {}

    def visit(node: Expr) -> Expr:
        if node not in memo:
            match node:
                case Axis(name) if name == axis:
                    memo[node] = call("add", node, Scalar(START))
                case Load():
                    memo[node] = node
                case _:
                    memo[node] = rebuild(node, tuple(map(visit, children(node))))
        return memo[node]

    return visit(expr)
