"""The programs of a stream: the merge of a fused group, written in the language.

Three texts: what a state and a chunk of the axis make, what two states make, and the outputs of a state. Each is
compiled as any program is, so that chunks are fused too.

Of prefixes a chunk has outputs itself. A fourth text makes them: at each position the update of the state before the chunk by the positions of the
chunk up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse.compiler import nominal_extents
from eqfuse.errors import EqfuseError
from eqfuse.loops.plan import KernelPlan
from eqfuse.names import Names
from eqfuse.rules.assignments import Assignment, combines, finishes, updates
from eqfuse.rules.merge import Group, Merge, State
from eqfuse.terms.extents import with_computed
from eqfuse.terms.folds import only_where
from eqfuse.terms.nodes import (
    Axis,
    Const,
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
    outside_loads,
    rebuild,
    reductions,
    replaced,
    transform,
    walk,
)
from eqfuse.terms.prefixes import alike, part_of
from eqfuse.terms.printer import show
from eqfuse.terms.recurrences import check_merges
from eqfuse.terms.types import kind, program_dtypes

LONG, SHORT = 2**20, 16
"""Extents of the axis of a stream that plans are looked for at, and of others."""

START, COUNT, TOTAL = "stream_start", "stream_count", "stream_total"
"""Scalars of the programs: the position of a chunk's first element, how many elements a state has seen, and how many
there will be at the end."""


@dataclass(frozen=True)
class Stream:
    """The programs of a kernel's merge, as text; `states` are what a state of the stream holds. That of prefixes has a `step`, which gives the next
    states and the outputs of a chunk, and no `finish`; it has no `combine` where kernels read what others store."""

    axis: str
    states: tuple[State, ...]
    outputs: tuple[str, ...]
    update: str
    combine: str
    finish: str
    reads_positions: bool
    reads_total: bool
    step: str = ""


def stream_of(
    program: Program, plans: Sequence[Sequence[KernelPlan]], why_not: Callable[[], Sequence[str]]
) -> Stream:
    """The stream of a program, by the first of its plans that scans prefixes, or is one fused merge over one axis. Raises EqfuseError
    where none is, saying why the first is not."""
    first: EqfuseError | None = None
    for kernels in sorted(plans, key=lambda kernels: not _has_prefixes(kernels)):  # in their order otherwise
        try:
            return _stream_of(program, kernels, why_not)
        except EqfuseError as error:
            first = first or error
    assert first is not None
    raise first


def _stream_of(program: Program, plans: Sequence[KernelPlan], why_not: Callable[[], Sequence[str]]) -> Stream:
    check_merges(program, "such a recurrence has no stream", "call the kernel on all positions")
    if _has_prefixes(plans):
        return _Steps(program, plans).stream()
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
    extents = alike(program)
    for output in kernel.outputs:
        if extents.get(group.axis, group.axis) in {extents.get(axis, axis) for axis in output.axes}:
            message = f"{output.name!r} has a value for each position of {group.axis!r}, which a stream does not keep"
            raise EqfuseError(
                message, hint="return values that do not have the streamed axis, or prefixes along it"
            )
    return _Writer(program, group, kernel).stream()


def _has_prefixes(kernels: Sequence[KernelPlan]) -> bool:
    return any(plan.group.prefix is not None for kernel in kernels for plan in kernel.groups)


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


def long_prefixes(program: Program) -> dict[str, int]:
    """Extents at which a program walks its prefixes, however long other axes are beside: those of a long stream. Empty where it has none."""
    same = alike(program)
    found = {
        same.get(node.axis, node.axis)
        for node in reductions(*(output.expr for output in program.outputs))
        if part_of(node, same) is not None
    }
    extents = nominal_extents(program)
    for axis in extents:
        if program.domains.get(axis, axis) not in program.lengths:
            extents[axis] = LONG if same.get(axis, axis) in found else SHORT
    return with_computed(program, extents) if found else {}


class _Writer:
    def __init__(self, program: Program, group: Group, kernel: KernelPlan) -> None:
        assert group.merge is not None
        self.program, self.group, self.kernel = program, group, kernel
        self.merge: Merge = group.merge
        self.states = group.states
        self._begin(group.axis, frozenset([group.axis]))

    def _begin(self, axis: str, streamed: frozenset[str]) -> None:
        """`streamed` are the axes whose positions are those of a chunk, of which `axis` is one."""
        self.axis, self.streamed = axis, streamed
        self.dims = {state.name: state.dims for state in self.states}
        self.kinds = self._kinds()
        self.reads_positions = self.reads_total = False
        loads = [
            node for node in walk(*(output.expr for output in self.program.outputs)) if isinstance(node, Load)
        ]
        self.chunked = {
            (load.tensor, dimension)
            for load in loads
            for dimension, part in enumerate(load.index)
            if isinstance(part, Axis) and part.name in streamed
        }

    def _kinds(self) -> dict[str, str]:
        known = dict(program_dtypes(self.program))
        found: dict[str, str] = {}
        for state in self.states:
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
                heads.append(f"{name}: i64{in_brackets(self.dims[state])}")
        used = {node.name for node in nodes if isinstance(node, Axis)}
        heads += [f"{axis}: axis[{of}]" for axis, of in self.program.domains.items() if axis in used]
        used |= {self.program.domains.get(axis, axis) for axis in used}
        heads += [f"{axis}: axis[{count}]" for axis, count in self.program.lengths.items() if axis in used]
        names = returned or [f"{state.name}_new" for state in self.states]
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

    def _is_real(self, name: str) -> bool:
        """Whether a name is that of a state of real numbers, in one of two parts or in the only one."""
        return self.kinds.get(name, self.kinds.get(name[:-2] if name[-2:] in ("_a", "_b") else "")) == "acc"

    def _within(self, expr: Expr, dims: Mapping[str, tuple[str, ...]]) -> Expr:
        """With states as tensors, and positions counted from the stream's first. Raises EqfuseError."""
        memo: dict[Expr, Expr] = {}
        for node in walk(expr):
            match node:
                case Local(name, own):
                    axes = dims.get(name, own)
                    if not axes and self._is_real(name):
                        memo[node] = Load(name, (Const(0),))  # a tensor: numbers have no dtype of their own
                    else:
                        memo[node] = Load(name, tuple(map(Axis, axes))) if axes else Scalar(name)
                case Load(tensor, index):
                    for dimension, part in enumerate(index):
                        is_own = isinstance(part, Axis) and part.name in self.streamed
                        moves = bool(free_axes(part) & self.streamed) or (tensor, dimension) in self.chunked
                        if moves and not is_own:
                            message = f"{tensor!r} is read at {show(part)}, which may lie in another chunk"
                            raise EqfuseError(message, hint=f"read it at {self.axis}")
                    memo[node] = node
                case Size(axis) if axis in self.streamed:
                    self.reads_total = True
                    memo[node] = Scalar(TOTAL)
                case Axis(name) if name not in self.streamed and self.program.domains.get(name) == self.axis:
                    message = f"{self.axis!r} is walked a second time inside, which a stream cannot do"
                    raise EqfuseError(message, hint="stream a program with one pass")
                case _:
                    memo[node] = rebuild(node, tuple(memo[child] for child in children(node)))
        found = memo[expr]
        for axis in self.streamed:
            if Axis(axis) in outside_loads(found):
                self.reads_positions = True
                found = _shifted(found, axis)
        return found


class _Steps(_Writer):
    """The programs of prefixes: the kernels of a plan, one after the other, each of which has a group of prefixes or none."""

    def __init__(self, program: Program, kernels: Sequence[KernelPlan]) -> None:
        self.program, self.kernels, self.all_extents = program, kernels, alike(program)
        self.groups: list[Group | None] = []
        taken = Names()
        renamed: list[dict[str, str]] = []
        for kernel in kernels:
            groups = [plan.group for plan in kernel.groups if plan.group.prefix is not None]
            self.groups.append(groups[0] if groups else None)
            names = [state.name for group in groups for state in group.states]
            renamed.append({name: taken.fresh(name) for name in names})
        self.group = first = next(group for group in self.groups if group is not None)
        assert first.merge is not None
        self.merge = first.merge
        extent = self._extent(first.axis)
        known = {axis for kernel in kernels for output in kernel.outputs for axis in output.axes}
        known |= {axis for axis in self.all_extents} | {
            group.axis for group in self.groups if group is not None
        }
        self.states = tuple(
            replace(state, name=names[state.name], body=self._renamed(state.body, names))
            for group, names in zip(self.groups, renamed, strict=True)
            if group is not None
            for state in group.states
        )
        self.names = renamed
        self._begin(first.axis, frozenset(axis for axis in known if self._extent(axis) == extent))

    def _extent(self, axis: str) -> int | str:
        return self.all_extents.get(axis, axis)

    def stream(self) -> Stream:
        lines, exprs = list[str](), list[Expr]()
        for kernel, group, names in zip(self.kernels, self.groups, self.names, strict=True):
            found = self._kernel(kernel, group, names)
            lines += found[0]
            exprs += found[1]
        outputs = [output.name for output in self.program.outputs]
        following = [f"{state.name}_next" for state in self.states]
        combine = self._combine() if len(self.kernels) == 1 else ""
        update, step = (
            self._text(exprs, lines, list(self.dims), [*following, *shown]) for shown in ([], outputs)
        )
        flags = self.reads_positions, self.reads_total
        return Stream(self.axis, self.states, tuple(outputs), update, combine, "", *flags, step)

    def _kernel(
        self, kernel: KernelPlan, group: Group | None, names: Mapping[str, str]
    ) -> tuple[list[str], list[Expr]]:
        """The lines of a kernel: the states after the chunk, those at each of its positions, and what is made of these."""
        lines, exprs, values = list[str](), list[Expr](), dict[Expr, Expr]()
        for plan in kernel.groups:
            if plan.group is group:
                continue
            for state in plan.group.states:
                body = replaced(state.body, values)
                if plan.group.axis in self.streamed:
                    raise EqfuseError(
                        f"{show(Reduce(state.op, plan.group.axis, body))} is over all of the stream",
                        hint="stream prefixes and what is made of them",
                    )
                values[Local(state.name, state.dims)] = Reduce(state.op, plan.group.axis, body)

        known = dict(self.dims)

        def put(name: str, dims: tuple[str, ...], value: Expr, seen: Expr | None = None) -> None:
            known[name] = dims
            found = self._within(replaced(value, values), known)
            if seen is not None and isinstance(found, Reduce):
                found = Reduce(found.op, found.axis, only_where(seen, found.op, found.body))
            exprs.append(found)
            lines.append(f"{_left(name, dims)} = {show(exprs[-1])}")

        if group is not None:
            prefix, merge = group.prefix, group.merge
            assert prefix is not None and merge is not None
            if prefix.backwards != prefix.mirrored or prefix.lag:
                why = "before it" if prefix.lag else "after it"
                raise EqfuseError(
                    f"a position of {prefix.at!r} has what comes some positions {why}",
                    hint="stream what comes up to each position",
                )
            seen = call("lt" if prefix.exclusive else "le", Axis(group.axis), Axis(prefix.at))
            for suffix, at, mask in (("next", (), None), ("here", (prefix.at,), seen)):
                made = {f"{name}_new": f"{own}_{suffix}" for name, own in names.items()}
                for each in updates(group, merge):
                    own = (
                        made.get(each.name)
                        or f"{names[each.state]}_{each.name.removeprefix(each.state + '_')}_{suffix}"
                    )
                    value = self._renamed(each.value, {**names, **made})
                    made[each.name] = own
                    put(own, (*each.dims, *at), value, mask)
            exact = {name: f"{own}_here" for name, own in names.items()}
            carried = dict(exact)
            for each in finishes(group, merge):
                exact[each.state] = f"{names[each.state]}_final"
                put(exact[each.state], (*each.dims, prefix.at), self._renamed(each.value, carried))
            names = exact
        for output in kernel.outputs:
            put(output.name, output.axes, self._renamed(output.expr, names))
        return lines, exprs


def _left(name: str, axes: Sequence[str]) -> str:
    return f"{name}{in_brackets(axes)}"


def in_brackets(axes: Sequence[str]) -> str:
    """Axes as they stand after a name."""
    return f"[{', '.join(axes)}]" if axes else ""


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
