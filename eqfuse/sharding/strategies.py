"""What ranks compute and exchange: the steps of a sharded program, one sequence for each strategy.

A reduction over a sharded axis leaves a partial state on every rank, by the merge that the program's plan has; the state of the
whole axis is the merge of all. Where every state's merge is `share(a) op share(b)`, it is `op` over the ranks of their shares:
a reduction over ranks, which the program that goes on from it computes with the rest. Where a state has an axis that is sharded
over the same ranks, other ranks have other rows of it: operands or rows move instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import product
from math import inf

from eqfuse.loops.plan import KernelPlan
from eqfuse.names import Names
from eqfuse.rules.assignments import combines, finishes, of_none, updates
from eqfuse.rules.merge import Combine, Group, Merge, Part, State, Update
from eqfuse.sharding.nodes import (
    PASSED,
    RANK,
    AllGather,
    AllReduce,
    AllToAll,
    Compute,
    Concatenate,
    Grouped,
    Line,
    Narrow,
    Operand,
    Ring,
    Sharding,
    ShardPlan,
    Step,
    Tree,
    flat,
    own_rank,
    read_by,
    start_of,
    total_of,
)
from eqfuse.terms.folds import fold_of, only_where
from eqfuse.terms.nodes import (
    COMBINE,
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Output,
    Program,
    Reduce,
    Scalar,
    Size,
    call,
    children,
    free_axes,
    outside_loads,
    rebuild,
    replaced,
    transform,
    walk,
)

STATES = ("all_gather", "all_reduce", "tree")
"""How partial states become one on every rank: all of them on every rank, which merges them; a collective that reduces; or by pairs."""
ROWS = ("gather_operands", "ring", "gather_rows")
"""What moves where states have rows of their own on every rank: the operands, all at once or from rank to rank, or the rows."""
PREFIXES = ("carry", "gather_operands")
"""How prefixes go on from the ranks before: by the states of their shards, or from all operands."""
INNER = ("states", "gather_operands")
"""What is exchanged of reductions inside others: their partial states, or all that they read."""
STRATEGIES = (*STATES, "all_to_all", *ROWS, "carry", "none")

Values = dict[str, Expr]
"""The states of a kernel, by name, as what reads them."""


def strategies(
    program: Program, plans: Iterable[Sequence[KernelPlan]], sharding: Sharding
) -> tuple[list[ShardPlan], dict[str, str]]:
    """The steps of the program by every strategy that it has, those where fewer tensors become whole, then with fewer exchanges, where
    plans differ; and why it has not the others."""
    found: dict[str, ShardPlan] = {}
    refused: dict[str, str] = {}
    for kernels in plans:
        for choice in product(STATES, ROWS, PREFIXES, INNER):
            builder = _Builder(program, sharding, *choice)
            try:
                steps = builder.built(kernels)
            except _Refused as why:
                refused.setdefault(why.strategy, why.reason)
                continue
            name = " + ".join(dict.fromkeys(builder.used)) or (
                "gather_operands" if _weight(steps)[0] else "none"
            )
            if name not in found or _weight(steps) < _weight(found[name].steps):
                found[name] = ShardPlan(
                    name, steps, builder.dims, {own: of for of, own in builder.every.items()}
                )
    used = {part for name in found for part in name.split(" + ")}
    return list(found.values()), {name: why for name, why in refused.items() if name not in used}


def _weight(steps: Iterable[Step]) -> tuple[int, int]:
    """How many tensors become whole, and how many exchanges there are."""
    exchanges = [step for step in flat(steps) if not isinstance(step, Compute | Narrow)]
    return sum(len(each.tensors) for each in exchanges if isinstance(each, Concatenate)), len(exchanges)


class _Refused(Exception):
    """A strategy that a program does not have."""

    def __init__(self, strategy: str, reason: str) -> None:
        super().__init__(reason)
        self.strategy, self.reason = strategy, reason


class _Builder:
    """Makes the steps by one choice for each kind of reduction; `used` are the choices that mattered. `dims` are the axes of every
    value, "" where a dimension is whole of an axis that is sharded elsewhere."""

    def __init__(
        self, program: Program, sharding: Sharding, states: str, rows: str, prefixes: str, inner: str
    ) -> None:
        self.program, self.sharding = program, sharding
        self.states, self.rows, self.prefixes, self.inner = states, rows, prefixes, inner
        self.used: list[str] = []
        self.items: list[Line | Step] = []
        self.dims: dict[str, tuple[str, ...]] = {}
        self.names = Names([*(t.name for t in program.tensors), *program.scalars])
        self.names.taken |= {output.name for output in program.outputs}
        self.ranks = {tensor.name: tensor.rank for tensor in program.tensors}
        self.along = sharding.along(program)
        self.made: dict[tuple[str, str, int], str] = {}
        self.every: dict[str, str] = {}

    def built(self, kernels: Sequence[KernelPlan]) -> tuple[Step, ...]:
        for kernel in kernels:
            values: Values = {}
            groups, outputs = self._prepared(kernel)
            for group in groups:
                self._group(group, values)
            for output in outputs:
                self._put(output.name, output.axes, _with(output.expr, values))
        steps = _steps(self.items, [output.name for output in self.program.outputs])
        return _in_groups(steps, {*self.sharding.classes, *self.every.values()})

    def _prepared(self, kernel: KernelPlan) -> tuple[list[Group], list[Output]]:
        """A kernel's groups and outputs, with what is one rank's or a part on each as states: reads of single positions of sharded axes
        (`x[i, label[i]]`), which are sums over the axis, and reductions over sharded axes inside others. They are states of the first
        group over these ranks that reads none, or of one before."""
        groups, before = [plan.group for plan in kernel.groups], list[Group]()
        made: dict[Expr, Expr] = {}
        names = Names(self.names.taken | {state.name for group in groups for state in group.states})
        bodies = [state.body for group in groups for state in group.states]
        for node in walk(*bodies, *(output.expr for output in kernel.outputs)):
            found = self._part(node, [group.axis for group in groups])
            if found is None:
                continue
            name, axis, op, body = found
            dims = tuple(sorted(free_axes(node)))
            state = State(names.fresh(name), op, replaced(body, made), dims)
            reads = [bool(made.keys() & set(walk(*(s.body for s in group.states)))) for group in groups]
            places = (
                at for at, group in enumerate(groups) if self._takes(group, axis) and not any(reads[: at + 1])
            )
            at = None if made.keys() & set(walk(body)) else next(places, None)
            made[node] = self._inside(node, Local(state.name, dims))
            if at is not None:
                groups[at] = _grown(groups[at], state)
            elif (
                before
                and before[-1].axis == axis
                and not _named(state.body) & {s.name for s in before[-1].states}
            ):
                before[-1] = _grown(before[-1], state)
            else:
                before.append(_grown(_nothing(axis), state))
        if not made:
            return groups, list(kernel.outputs)
        groups = [
            replace(g, states=tuple(replace(s, body=replaced(s.body, made)) for s in g.states))
            for g in groups
        ]
        outputs = [replace(each, expr=replaced(each.expr, made)) for each in kernel.outputs]
        return [*before, *groups], outputs

    def _part(self, node: Expr, axes: Sequence[str]) -> tuple[str, str, str, Expr] | None:
        """The name of a state for an expression, and the axis, the op and the body of the reduction that it is, where every rank has a part
        of it and the same positions of its axes."""
        of = self.sharding.classes
        match node:
            case Load(tensor, index):
                for dimension, part in enumerate(index):
                    found = self._along(tensor, dimension)
                    if found is None or found in self.sharding.outputs or free_axes(part) & of.keys():
                        continue
                    axis = next(
                        (a for a in axes if of.get(a) == found), next(a for a in of if of[a] == found)
                    )
                    if self._has_rows(node, axis):
                        return None
                    read = Load(tensor, (*index[:dimension], Axis(axis), *index[dimension + 1 :]))
                    body = call("where", call("eq", Axis(axis), part), read, Const(0.0))
                    return f"{tensor}_at", axis, "sum", body
            case Reduce(op, axis, body) if axis in of and op in COMBINE and self.inner == "states":
                if not self._has_rows(node, axis):
                    return f"{op}_{axis}", axis, op, body
        return None

    def _inside(self, node: Expr, value: Expr) -> Expr:
        """A read of single positions as it is where they are positions of the axis, and NaN elsewhere: no rank has those."""
        if not isinstance(node, Load):
            return value
        for dimension, part in enumerate(node.index):
            found = self._along(node.tensor, dimension)
            if found is not None and not free_axes(part) & self.sharding.classes.keys():
                axis = next(a for a, of in self.sharding.classes.items() if of == found)
                inside = call("and", call("le", Const(0), part), call("lt", part, Size(axis)))
                value = call("where", inside, value, call("sub", Const(inf), Const(inf)))
        return value

    def _has_rows(self, expr: Expr, axis: str) -> bool:
        """Whether an expression has an axis that is sharded over the same ranks."""
        mesh = self.sharding.mesh(axis)
        return any(self.sharding.mesh(own) == mesh for own in free_axes(expr))

    def _takes(self, group: Group, axis: str) -> bool:
        """Whether states over an axis may be merged with those of a group."""
        of = self.sharding.classes
        return of.get(group.axis) == of[axis] and group.merge is not None and group.prefix is None

    # Groups: each adds what a group of reductions computes and exchanges, and its states to `values` ----

    def _group(self, group: Group, values: Values) -> None:
        mesh = self.sharding.mesh(group.axis)
        axes = dict.fromkeys(axis for state in group.states for axis in state.dims)
        rows = [axis for axis in axes if mesh is not None and self.sharding.mesh(axis) == mesh]
        given = [axis for axis in rows if self.sharding.classes[axis] not in self.sharding.outputs]
        if mesh is None:
            self._whole(group, values)
        elif group.prefix is not None:
            self._prefix(group, mesh, values)
        elif self._reads_sharded(group, values):
            self._whole(group, values, "gather_operands")
        elif group.merge is None and not given and all(state.op in COMBINE for state in group.states):
            for each in _rounds(group):
                self._group(each, values)
        elif group.merge is None:
            self._whole(group, values, "gather_operands")
        elif given and self.rows == "gather_operands":
            self._whole(group, values, self.rows)
        elif given and self.rows == "ring":
            self._ring(group, group.merge, mesh, values)
        elif rows:
            self._scattered(group, mesh, rows, values, self.rows if given else "all_to_all")
        else:
            self._merged(group, group.merge, mesh, values)

    def _reads_sharded(self, group: Group, values: Values) -> bool:
        """Whether bodies reduce over other sharded axes: what ranks would exchange of these is as large as what they read."""
        bodies = [_with(state.body, values) for state in group.states]
        return any(isinstance(n, Reduce) and n.axis in self.sharding.classes for n in walk(*bodies))

    def _whole(self, group: Group, values: Values, strategy: str = "") -> None:
        """States as the reductions that they are, over the whole axis."""
        self.used += [strategy] if strategy else []
        for state in group.states:
            body = _with(state.body, values)
            if group.prefix is not None:
                body = only_where(group.prefix.condition(group.axis), state.op, body)
            values[state.name] = Reduce(state.op, group.axis, body)

    def _merged(self, group: Group, merge: Merge, mesh: str, values: Values) -> None:
        self.used.append(self.states)
        if self.states == "tree":
            names = self._local(group, merge, values)
            ends = {f"{n}_{end}": f"{own}_{end}" for n, own in names.items() for end in ("a", "b", "new")}
            known = {name: _of(own, self.dims[names[name[: name.rindex("_")]]]) for name, own in ends.items()}
            lines = [Line(ends[e.name], e.dims, _with(e.value, known)) for e in combines(group, merge)]
            self.items.append(Tree(mesh, tuple(names.values()), tuple(lines)))
            whole = {n: self._known(f"{own}_all", self.dims[own]) for n, own in names.items()}
        elif self.states == "all_gather":
            shares = self._shares(group, self.states)
            names = self._local(group, merge, values)
            self.items.append(AllGather(mesh, tuple(names.values())))
            whole = self._folded(group, merge, shares, names)
        else:
            shares = self._shares(group, self.states)
            whole = self._reduced(group, merge, shares, self._local(group, merge, values), mesh)
        self._finish(group, merge, whole, values)

    def _scattered(self, group: Group, mesh: str, rows: Sequence[str], values: Values, strategy: str) -> None:
        """Partial states of the rows of all ranks, of which every rank gets its own from each."""
        if len(rows) > 1:
            raise _Refused(strategy, f"states have several axes over {mesh!r}: {', '.join(rows)}")
        merge, (axis,) = group.merge, rows
        assert merge is not None
        shares = self._shares(group, strategy)
        self.used.append(strategy)
        names = self._local(group, merge, values, {axis: self._every(axis)})
        gathered = [own for own in names.values() if self._every(axis) not in self.dims[own]]
        if gathered:
            self.items.append(AllGather(mesh, tuple(gathered)))
        scattered = tuple(own for own in names.values() if own not in gathered)
        self.items.append(AllToAll(mesh, scattered, axis))
        self._finish(group, merge, self._folded(group, merge, shares, names), values)

    def _ring(self, group: Group, merge: Merge, mesh: str, values: Values) -> None:
        """States that see the operands of one rank after the other, each from its own on."""
        for state in group.states:
            if (fold := fold_of(state.op)) is not None and not fold[0].commutative:
                raise _Refused("ring", f"operands do not come in order, which {fold[0].name} asks for")
        self.used.append("ring")
        axis, passed = group.axis, self.names.fresh(f"{group.axis}_{PASSED}")
        names = {state.name: self.names.fresh(state.name) for state in group.states}
        known: Values = {}
        for state in group.states:
            known[state.name] = _of(self._known(names[state.name], state.dims), state.dims)
        lines, read = list[Line](), dict[Operand, None]()

        def taken(tensor: str, dimension: int) -> str:
            if self._along(tensor, dimension) is None:
                return tensor
            name = f"{tensor}_{PASSED}"
            self.dims[name] = tuple(
                passed if at == dimension else of for at, of in enumerate(self._axes(tensor))
            )
            read[tensor, dimension, self.sharding.classes[axis], name] = None
            return name

        for each in updates(group, merge):
            value = _with(_with(each.value, known), values)
            if isinstance(value, Reduce) and value.axis == axis:
                value = Reduce(value.op, passed, self._renamed(value.body, {axis: passed}, taken))
            own = f"{names[each.state]}_{each.name.removeprefix(f'{each.state}_')}"
            self.dims[own] = each.dims
            lines.append(Line(own, each.dims, self._here(value, {passed: start_of(PASSED)})))
            known[each.name] = _of(own, each.dims)
        states = tuple(replace(state, name=names[state.name]) for state in group.states)
        self.items.append(Ring(mesh, states, tuple(read), tuple(lines)))
        self._finish(group, merge, names, values)

    def _prefix(self, group: Group, mesh: str, values: Values) -> None:
        """States at each position: those of the ranks before, and of the rank's own positions up to it."""
        prefix, merge = group.prefix, group.merge
        assert prefix is not None
        if self.prefixes != "carry":
            self._whole(group, values, self.prefixes)
            return
        shares = self._shares(group, "carry")
        assert merge is not None
        ordered = prefix.backwards and any(state.op not in COMBINE for state in group.states)
        if prefix.mirrored or prefix.lag or ordered:
            raise _Refused("carry", f"positions {prefix.where(group.axis)!r} are not those up to each one")
        if any(self.sharding.mesh(axis) == mesh for state in group.states for axis in state.dims):
            raise _Refused("carry", "a state has rows of its own on every rank")
        self.used.append("carry")
        names = self._local(group, merge, values)
        self.items.append(AllGather(mesh, tuple(names.values())))
        before = call("gt" if prefix.backwards else "lt", Axis(RANK), Scalar(own_rank(mesh)))
        carried = self._folded(group, merge, shares, names, before)
        at = {state.name: (*state.dims, prefix.at) for state in group.states}
        known: Values = {name: _of(own, self.dims[own]) for name, own in carried.items()}
        here: dict[str, str] = {}
        for each in updates(group, merge):
            value, name = _with(_with(each.value, known), values), self.names.fresh(f"{each.name}_here")
            own = self._put(name, at[each.state], value, group.axis, prefix.condition(group.axis))
            known[each.name] = _of(own, at[each.state])
            if each.name == f"{each.state}_new":
                here[each.state] = own
        self._finish(group, merge, here, values)

    # States ---------------------------------------------------------------------------------------

    def _shares(self, group: Group, strategy: str) -> dict[str, Expr]:
        """What one part gives to each state of a union, over names that end in `_a`."""
        if group.merge is None:
            why = group.obstacles[0].condition if group.obstacles else "no rule found one"
            raise _Refused(strategy, f"the reductions over {group.axis!r} have no merge: {why}")
        found: dict[str, Expr] = {}
        for each in group.merge.combine:
            share = _share(_op(group, each.state), each.value, [state.name for state in group.states])
            if share is None:
                raise _Refused(strategy, f"the merge of {each.state!r} is not share(a) op share(b)")
            found[each.state] = share
        return found

    def _local(
        self, group: Group, merge: Merge, values: Values, moved: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """The states of a rank's own positions, by their names in the group; axes that have `moved` are whole."""
        names = {state.name: self.names.fresh(state.name) for state in group.states}
        known: Values = {}
        for each in of_none(group, merge):
            value = _with(_with(each.value, known), values)
            last = each.name == f"{each.state}_new"
            own = names[each.state] if last else self.names.fresh(f"{names[each.state]}_tile")
            dims = tuple((moved or {}).get(axis, axis) for axis in each.dims)
            self._put(own, dims, self._renamed(value, moved or {}, self._gathered), group.axis)
            known[each.name] = _of(own, each.dims)
        return names

    def _folded(
        self,
        group: Group,
        merge: Merge,
        shares: Mapping[str, Expr],
        names: Mapping[str, str],
        among: Expr | None = None,
    ) -> dict[str, str]:
        """The states of all ranks, or of those `among` them, as reductions over what was gathered."""
        known: Values = {}
        for state in group.states:
            dims = (RANK, *state.dims)
            known[f"{state.name}_a"] = _of(self._known(f"{names[state.name]}_all", dims), dims)
        whole: dict[str, str] = {}
        for each in merge.combine:
            op, body = _op(group, each.state), _with(shares[each.state], known)
            body = body if among is None else only_where(among, op, body)
            dims = next(state.dims for state in group.states if state.name == each.state)
            own = self._put(self.names.fresh(f"{names[each.state]}_whole"), dims, Reduce(op, RANK, body))
            whole[each.state] = own
            known[f"{each.state}_new"] = _of(own, dims)
        return whole

    def _reduced(
        self, group: Group, merge: Merge, shares: Mapping[str, Expr], names: Mapping[str, str], mesh: str
    ) -> dict[str, str]:
        """The states of all ranks by collectives that reduce: one for all whose shares are known at once and that reduce alike."""
        for state in group.states:
            if state.op not in COMBINE:
                message = (
                    f"no collective reduces by {state.op.split('.')[0]}, the reduction of {state.name!r}"
                )
                raise _Refused("all_reduce", message)
        known: Values = {f"{name}_a": _of(own, self.dims[own]) for name, own in names.items()}
        whole: dict[str, str] = {}
        rest = [each.state for each in merge.combine]
        while rest:
            ready = [name for name in rest if _named(shares[name]) <= known.keys()]
            ready = [name for name in ready if _op(group, name) == _op(group, ready[0])]
            sent: list[str] = []
            for name in ready:
                own, share = names[name], _with(shares[name], known)
                if share != known[f"{name}_a"]:
                    own = self._put(self.names.fresh(f"{own}_share"), self.dims[own], share)
                sent.append(own)
            self.items.append(AllReduce(mesh, _op(group, ready[0]), tuple(sent)))
            for name, own in zip(ready, sent, strict=True):
                whole[name] = self._known(f"{own}_all", self.dims[own])
                known[f"{name}_new"] = _of(whole[name], self.dims[own])
            rest = [name for name in rest if name not in ready]
        return whole

    def _finish(self, group: Group, merge: Merge, whole: Mapping[str, str], values: Values) -> None:
        """The exact values of states from those that are carried."""
        carried: Values = {name: _of(own, self.dims[own]) for name, own in whole.items()}
        values |= carried
        for each in finishes(group, merge):
            own = self.names.fresh(f"{whole[each.state]}_final")
            dims = self.dims[whole[each.state]]
            value = _with(_with(each.value, carried), {n: v for n, v in values.items() if n not in carried})
            values[each.state] = _of(self._put(own, dims, value), dims)

    # Terms ----------------------------------------------------------------------------------------

    def _known(self, name: str, dims: tuple[str, ...]) -> str:
        self.names.taken.add(name)
        self.dims[name] = dims
        return name

    def _put(
        self, name: str, axes: tuple[str, ...], value: Expr, part: str = "", where: Expr | None = None
    ) -> str:
        """Adds a line. A reduction over the axis `part` is over a rank's own positions, those `where` a condition holds."""
        meshes = [self.sharding.mesh(axis) for axis in axes if axis in self.sharding.classes]
        if len(set(meshes)) < len(meshes):
            raise _Refused(self.rows, f"a value is kept that has two axes over {meshes[0]!r}")
        if isinstance(value, Reduce) and value.axis == part:
            body = self._here(value.body)
            body = body if where is None else only_where(where, value.op, body)
            value = Reduce(value.op, value.axis, body)
        else:
            value = self._here(value)
        self.items.append(Line(name, axes, value, where is not None and isinstance(value, Reduce)))
        return self._known(name, axes)

    def _every(self, axis: str) -> str:
        """The name of a sharded axis that is whole."""
        if axis not in self.every:
            self.every[axis] = self.names.fresh(f"{axis}_all")
        return self.every[axis]

    def _renamed(self, expr: Expr, axes: Mapping[str, str], read: Callable[[str, int], str]) -> Expr:
        """With other axes for some; `read` is the tensor that is read along one of them, by its name and dimension."""
        memo: dict[Expr, Expr] = {}
        for node in walk(expr):
            match node:
                case Axis(name) if name in axes:
                    memo[node] = Axis(axes[name])
                case Load(tensor, index) if axes:
                    for dimension, part in enumerate(index):
                        if isinstance(part, Axis) and part.name in axes:
                            tensor = read(tensor, dimension)
                    memo[node] = Load(tensor, tuple(memo[part] for part in index))
                case _:
                    memo[node] = rebuild(node, tuple(memo[child] for child in children(node)))
        return memo[expr]

    def _here(self, expr: Expr, starts: Mapping[str, str] | None = None) -> Expr:
        """As a rank evaluates it: with positions that count from the first of all ranks, or from scalars that are the `starts` of some
        axes; what it reads at positions that need not be its own is whole, and so are axes that it reduces."""
        known = {axis: start_of(of) for axis, of in self.sharding.classes.items()} | dict(starts or {})

        def step(node: Expr) -> Expr:
            match node:
                case Axis(name) if name in known:
                    return call("add", node, Scalar(known[name]))
                case Size(axis) if axis in self.sharding.classes:
                    return Scalar(total_of(self.sharding.classes[axis]))
                case Call("eq", (Call("add", (Axis(name), Scalar(start))), other)) if start == known.get(
                    name
                ):
                    return call("eq", Axis(name), call("sub", other, Scalar(start)))  # so that it selects
                case _:
                    return node

        memo: dict[Expr, Expr] = {}

        def visit(node: Expr) -> Expr:
            if node not in memo:
                match node:
                    case Load(tensor, index):
                        memo[node] = self._read(tensor, index, visit)
                    case Reduce(op, axis, body) if axis in self.sharding.classes:
                        every = self._every(axis)
                        inner = self._renamed(body, {axis: every}, self._gathered)
                        memo[node] = Reduce(op, every, self._here(inner, starts))
                    case _:
                        memo[node] = step(rebuild(node, tuple(map(visit, children(node)))))
            return memo[node]

        return visit(expr)

    def _read(self, tensor: str, index: tuple[Expr, ...], visit: Callable[[Expr], Expr]) -> Load:
        parts: list[Expr] = []
        for dimension, part in enumerate(index):
            found = self._along(tensor, dimension)
            if isinstance(part, Axis) and self._is_own(tensor, dimension, part.name):
                parts.append(part)
                if found is not None and found in self.sharding.outputs and tensor not in self.dims:
                    tensor = self._copy("own", tensor, dimension, found)
            else:
                parts.append(visit(part))
                tensor = self._gathered(tensor, dimension)
        return Load(tensor, tuple(parts))

    def _is_own(self, tensor: str, dimension: int, axis: str) -> bool:
        """Whether positions of an axis are those that a rank has along a dimension."""
        if tensor in self.dims and self.dims[tensor][dimension] == axis:
            return True
        found = self._along(tensor, dimension)
        return found is not None and self.sharding.classes.get(axis) == found

    def _along(self, tensor: str, dimension: int) -> str | None:
        """The sharded axis, by its class, along a dimension of an input or a value."""
        if tensor in self.dims:
            return self.sharding.classes.get(self.dims[tensor][dimension])
        return self.along.get((tensor, dimension))

    def _axes(self, tensor: str) -> Sequence[str]:
        """The sharded axes along the dimensions of an input, or those of a value."""
        inputs = (self.along.get((tensor, at), "") for at in range(self.ranks.get(tensor, 0)))
        return self.dims[tensor] if tensor in self.dims else tuple(inputs)

    def _gathered(self, tensor: str, dimension: int) -> str:
        """A tensor that is whole along a dimension."""
        found = self._along(tensor, dimension)
        if found is None or (found in self.sharding.outputs and tensor not in self.dims):
            return tensor
        return self._copy("all", tensor, dimension, found)

    def _copy(self, kind: str, tensor: str, dimension: int, axis: str) -> str:
        key = kind, tensor, dimension
        if key not in self.made:
            self.made[key] = name = self.names.fresh(f"{tensor}_{kind}")
            what = ((tensor, dimension, axis, name),)
            self.items.append(
                Narrow(what) if kind == "own" else Concatenate(self.sharding.meshes[axis], what)
            )
            own = axis if kind == "own" else ""
            self.dims[name] = tuple(
                own if at == dimension else of for at, of in enumerate(self._axes(tensor))
            )
        return self.made[key]


def _grown(group: Group, state: State) -> Group:
    """A group with another reduction, which reads none of its states."""
    tile, name, fn = Part(f"{state.name}_tile", state.op, state.body), state.name, COMBINE[state.op]
    update = Update(name, (tile,), call(fn, Local(name, state.dims), Local(tile.name, state.dims)))
    sides = (Local(f"{name}_{side}", state.dims) for side in ("a", "b"))
    merge = group.merge
    assert merge is not None
    merge = replace(
        merge,
        update=(*merge.update, update),
        combine=(*merge.combine, Combine(name, call(fn, *sides))),
    )
    return replace(group, states=(*group.states, state), merge=merge)


def _nothing(axis: str) -> Group:
    return Group(axis, (), Merge((), (), ()))


def _rounds(group: Group) -> list[Group]:
    """Groups one after the other of which each has states that read those of groups before it alone."""
    names = {state.name for state in group.states}
    known: set[str] = set()
    found: list[Group] = []
    while known < names:
        ready = [s for s in group.states if s.name not in known and _named(s.body) & names <= known]
        found.append(_nothing(group.axis))
        for state in ready:
            found[-1] = _grown(found[-1], state)
        known |= {state.name for state in ready}
    return found


def _op(group: Group, name: str) -> str:
    return next(state.op for state in group.states if state.name == name)


def _of(name: str, dims: Sequence[str]) -> Expr:
    """A value at its own axes."""
    return Load(name, tuple(map(Axis, dims))) if dims else Local(name, ())


def _with(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """With what reads states, by their names."""
    return transform(expr, lambda n: values.get(n.name, n) if isinstance(n, Local) else n)


def _named(expr: Expr) -> set[str]:
    return {node.name for node in walk(expr) if isinstance(node, Local)}


def _share(op: str, value: Expr, states: Iterable[str]) -> Expr | None:
    """What the part `a` gives to a state, where the merge is `share(a) op share(b)`."""
    if not isinstance(value, Call) or value.fn != COMBINE.get(op, op) or len(value.args) != 2:
        return None
    left, right = value.args
    other = _with(left, {f"{state}_a": Local(f"{state}_b", ()) for state in states})
    same = transform(right, lambda n: Local(n.name, ()) if isinstance(n, Local) else n)
    plain = transform(other, lambda n: Local(n.name, ()) if isinstance(n, Local) else n)
    return left if plain == same and not any(name.endswith("_b") for name in _named(left)) else None


def _steps(items: Sequence[Line | Step], outputs: Sequence[str]) -> tuple[Step, ...]:
    """Lines between two exchanges as one program, without those that nothing reads; tensors that become whole before any
    line do so together."""
    needed, kept = set(outputs), list[tuple[Line | Step, frozenset[str]]]()
    for item in reversed(items):
        if not isinstance(item, Line) or item.name in needed:
            item = _needed(item, needed)
            if isinstance(item, AllGather | AllReduce | AllToAll) and not item.values:
                continue
            kept.append((item, frozenset(needed)))
            needed |= read_by(item)
    first = [item for item, _ in reversed(kept) if isinstance(item, Concatenate | Narrow)]
    made = {line.name for line, _ in kept if isinstance(line, Line)}
    early = [item for item in first if not read_by(item) & made]
    steps: list[Step] = _packed(early)
    lines: list[Line] = []

    def flush(after: frozenset[str]) -> None:
        if lines:
            steps.append(Compute(tuple(lines), tuple(line.name for line in lines if line.name in after)))
            lines.clear()

    for item, after in reversed(kept):
        if isinstance(item, Line):
            lines.append(item)
        elif item not in early:
            flush(after | read_by(item))
            steps.append(item)
    flush(frozenset(outputs))
    return tuple(steps)


def _in_groups(steps: Sequence[Step], others: AbstractSet[str]) -> tuple[Step, ...]:
    """Steps where what one program alone reads becomes whole in groups of an axis that is none of `others`, where each position of
    that is computed apart."""
    found: list[Step] = []
    for at, step in enumerate(steps):
        before = found[-1] if found else None
        if isinstance(step, Compute) and isinstance(before, Concatenate):
            later = set[str]().union(*map(read_by, steps[at + 1 :]))
            alone = later.isdisjoint(name for *_, name in before.tensors)
            grouped = next(
                filter(None, (_grouped(axis, before, step) for axis in _axes_of(step) if axis not in others)),
                None,
            )
            if alone and grouped is not None:
                found[-1] = grouped
                continue
        found.append(step)
    return tuple(found)


def _axes_of(step: Compute) -> list[str]:
    """The axes that all values have which a program gives."""
    lines = [line for line in step.lines if line.name in step.gives]
    return [axis for axis in lines[0].axes if all(axis in line.axes for line in lines)]


def _grouped(axis: str, fetch: Concatenate, compute: Compute) -> Grouped | None:
    """Both in groups of an axis; None where positions of it are not apart."""
    if any(axis not in line.axes for line in compute.lines):
        return None
    made = {line.name for line in compute.lines}
    slices: dict[str, int] = {}
    for node in walk(*(line.value for line in compute.lines)):
        match node:
            case Load(tensor, index) if tensor not in made:
                at = [dimension for dimension, part in enumerate(index) if axis in free_axes(part)]
                if at and (
                    len(at) > 1 or index[at[0]] != Axis(axis) or slices.setdefault(tensor, at[0]) != at[0]
                ):
                    return None
            case Size(own) | Reduce(_, own, _) if own == axis:
                return None
    reads = [node for line in compute.lines for node in walk(line.value) if isinstance(node, Load)]
    apart = {node.tensor for node in reads if axis not in free_axes(node)}
    if apart & slices.keys() or any(Axis(axis) in outside_loads(line.value) for line in compute.lines):
        return None
    operands = [(tensor, slices.get(name)) for tensor, _, _, name in fetch.tensors]
    if any(at is None for _, at in operands):
        return None
    known = {name for *_, name in fetch.tensors}
    given = {(name, at) for name, at in slices.items() if name not in known}
    given |= {(tensor, at) for tensor, at in operands if at is not None}
    return Grouped(axis, fetch, compute, tuple(sorted(given)))


def _needed(item: Line | Step, needed: set[str]) -> Line | Step:
    """A collective of those values alone that something reads."""
    if isinstance(item, AllGather | AllReduce | AllToAll):
        return replace(item, values=tuple(name for name in item.values if f"{name}_all" in needed))
    return item


def _packed(items: Sequence[Concatenate | Narrow]) -> list[Step]:
    """Tensors of the same ranks in one exchange; one whose dimensions become whole one after the other is in two."""
    found: dict[tuple[str, int], list[Operand]] = {}
    depth: dict[str, int] = {}
    for item in items:
        mesh = item.mesh if isinstance(item, Concatenate) else ""
        for operand in item.tensors:
            depth[operand[3]] = depth.get(operand[0], 0) + 1
            found.setdefault((mesh, depth[operand[3]]), []).append(operand)
    ordered = sorted(found.items(), key=lambda each: each[0][1])
    return [Concatenate(m, tuple(each)) if m else Narrow(tuple(each)) for (m, _), each in ordered]
