"""From a plan to the loop nest that it stands for: one schedule, one way to walk a group's axis.

    rolling     one loop; after each tile the states stand for what was seen, repaired by the merge
    multi_pass  one loop per dependency level; each reads the exact states of earlier ones
    resident    no loop; the whole axis at once
    scan        one loop, position by position, that stores outputs of prefixes at each
    scan_tiles  the same tile by tile (scans.py)
    in_order    one loop, position by position, that stores the states of a recurrence at each: the next step loads them
    scan_split  the same with shards at the same time: a kernel for their states, one for those before each, one that goes on
    split_k     a kernel whose instances each roll over one shard, then one that merges their states; with `even`, a kernel
                before both deals instances out to rows (slots.py)

A kernel of the plan becomes several where it splits an axis: `<name>_partial` for each group that is
split, `<name>` or `<name>_merge` for the rest, and `<name>_map` for outputs along a split axis, which merges
the states itself where they are numbers and each instance has few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from eqfuse.errors import ScheduleError
from eqfuse.loops.builder import Builder
from eqfuse.loops.check import check
from eqfuse.loops.nodes import Buffer, Carried, Kernel, Let, Nest, Slots
from eqfuse.loops.plan import SCANS, GroupPlan, KernelPlan, Plan
from eqfuse.loops.scans import Order, prefixes, rolled, scanned
from eqfuse.loops.share import named, pruned, rename_locals, shared
from eqfuse.loops.slots import counting, instance, quotient_up
from eqfuse.loops.unify import unified
from eqfuse.loops.walk import axes_of, defined, loaded, rewritten, statements
from eqfuse.names import Names
from eqfuse.rules.assignments import combines, finishes, updates
from eqfuse.rules.merge import Group, Merge, State
from eqfuse.terms.folds import contribution, fold_of, identity, over_union, rank_axes
from eqfuse.terms.masks import masked, on_factors
from eqfuse.terms.nodes import (
    COMBINE,
    Axis,
    Call,
    Const,
    Expr,
    InOrder,
    Load,
    Local,
    Output,
    Program,
    Reduce,
    Size,
    call,
    free_axes,
    substitute_axes,
    transform,
    walk,
)
from eqfuse.terms.prefixes import Prefix
from eqfuse.terms.promises import ascending, longer


def lower(plan: Plan, program: Program) -> Nest:
    """The loop nest of `plan`. Raises ScheduleError where a group has no merge for its schedule."""
    context = _Context.of(plan, program)
    kernels = [kernel for plan_ in plan.kernels for kernel in _KernelLowering(plan_, context).kernels()]
    nest = _tidied(kernels, context, program)
    check(nest, program)
    return nest


def _tidied(kernels: list[Kernel], context: _Context, program: Program) -> Nest:
    """The nest of raw kernels: temporaries that nobody reads dropped, values shared and named."""
    outputs = {buffer.name for buffer in context.buffers if buffer.is_output}
    read: set[str] = set()
    result: list[Kernel] = []
    for kernel in reversed(kernels):
        unread = {buffer.name for buffer in context.buffers} - outputs - read - loaded(kernel.body)
        body = unified(kernel.body, kernel.parallel, context.inputs)
        values = {stmt.name: stmt.expr for stmt in statements(body) if isinstance(stmt, Let)}
        body = rewritten(rewritten(body, on_factors(program, values)), masked(program, values))
        body = pruned(shared(body, kernel.parallel), frozenset(unread))
        read |= loaded(body)
        if kernel.slots is not None:
            read |= {kernel.slots.first, kernel.slots.last}
        taken = frozenset(defined(body)) | context.axes | context.tensors | context.scalars
        if body:
            result.append(replace(kernel, body=named(body, taken)))
    used = {axis for kernel in result for axis in axes_of(kernel)}
    used |= {axis for buffer in context.buffers if buffer.is_output for axis in buffer.axes}
    order = iter(context.in_order())
    kept = [next(order) if buffer.is_output else buffer for buffer in context.buffers]
    buffers = tuple(buffer for buffer in kept if buffer.is_output or buffer.name in read)
    domains = tuple((axis, of) for axis, of in context.aliases.items() if axis in used)
    shards = tuple((shard, axis) for axis, shard in context.shards.items() if shard in used)
    return Nest(tuple(reversed(result)), buffers, domains, shards)


def _end_with(maps: Mapping[tuple[str, ...], list[Output]], axes: AbstractSet[str]) -> bool:
    """Whether the last axis of all outputs is one of these: an instance that stores a tile of them has few rows."""
    return all(output.axes[-1] in axes for outputs in maps.values() for output in outputs)


@dataclass
class _Context:
    """What the kernels of one nest share: the names in use, and what was added so far.

    `aliases` maps an axis to the one whose extent it has, `shards` an axis to the axis of its shards; `known` are what
    every kernel has of tensors that ascend.
    """

    inputs: frozenset[str]
    outputs: tuple[str, ...]
    tensors: set[str]
    scalars: frozenset[str]
    axes: set[str]
    aliases: dict[str, str]
    known: tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int, str, int], ...]]
    shards: dict[str, str] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)

    @staticmethod
    def of(plan: Plan, program: Program) -> _Context:
        outputs = [output for kernel in plan.kernels for output in kernel.outputs]
        tensors = {tensor.name for tensor in program.tensors} | {output.name for output in outputs}
        own = {axis for kernel in plan.kernels for axis in _plan_axes(kernel)}
        return _Context(
            inputs=frozenset(tensor.name for tensor in program.tensors),
            outputs=tuple(output.name for output in program.returned),
            tensors=tensors,
            scalars=frozenset(program.scalars),
            axes={*own, *program.domains},
            aliases={axis: of for axis, of in program.domains.items() if axis in own},
            known=(ascending(program), longer(program)),
        )

    def shard_axis(self, axis: str) -> str:
        if axis not in self.shards:
            self.shards[axis] = Names(self.axes, between="").fresh(f"{axis}_shard")
            self.axes.add(self.shards[axis])
        return self.shards[axis]

    def alias(self, axis: str, what: str = "all") -> str:
        """A new name for an axis."""
        found = Names(self.axes, between="").fresh(f"{axis}_{what}")
        self.axes.add(found)
        self.aliases[found] = self.aliases.get(axis, axis)
        return found

    def temporary(self, name: str, axes: tuple[str, ...]) -> Load:
        """A new tensor in the type that sums are kept in, and how to read it."""
        tensor = Names(self.tensors, between="").fresh(name)
        self.tensors.add(tensor)
        self.buffers.append(Buffer(tensor, axes, "acc", is_output=False))
        return Load(tensor, tuple(map(Axis, axes)))

    def output(self, output: Output) -> None:
        is_output = output.name in self.outputs
        dtype = output.dtype if is_output else output.dtype or "acc"
        self.buffers.append(Buffer(output.name, output.axes, dtype, is_output))

    def in_order(self) -> list[Buffer]:
        """The outputs as the program has them, whichever kernel stores them first."""
        made = {buffer.name: buffer for buffer in self.buffers if buffer.is_output}
        return [made[name] for name in self.outputs]


class _KernelLowering:
    """Lowers one kernel of the plan.

    `_exact` names the value of each state whose group is done in the kernel being built;
    `_partials` and `_finals` are the temporaries that hold states per shard, and for good.
    """

    def __init__(self, plan: KernelPlan, context: _Context) -> None:
        self._plan = plan
        self._context = context
        self._exact: dict[str, str] = {}
        self._partials: dict[str, Load] = {}
        self._finals: dict[str, Load] = {}
        self._slots: dict[Group, Slots] = {}

    def kernels(self) -> Iterator[Kernel]:
        """The kernels, unshared and unpruned, in the order in which they run."""
        plan = self._plan
        if plan.in_order is not None:
            yield self._steps(plan.in_order)
            return
        if any(group.schedule in SCANS for group in plan.groups):
            yield from self._scans()
            return
        split = [index for index, group in enumerate(plan.groups) if group.schedule == "split_k"]
        for number, index in enumerate(split):
            if plan.groups[index].even is not None:
                yield self._counting(index, _numbered(f"{plan.name}_slots", number))
            yield self._partial(index, _numbered(f"{plan.name}_partial", number))
        maps: dict[tuple[str, ...], list[Output]] = {}
        local: dict[tuple[str, ...], list[Output]] = {}
        divided = {plan.groups[index].group.axis for index in split}
        for output in plan.outputs:
            self._context.output(output)
            axes = self._walked(output)
            (maps if divided & set(axes) else local).setdefault(axes, []).append(output)
        alone = len(split) == len(plan.groups) and self._states_are_numbers() and _end_with(maps, divided)
        if local or not (maps and alone):
            mapped = () if alone else maps.values()
            yield self._rest(f"{plan.name}_merge" if split else plan.name, local, mapped)
        for number, (axes, outputs) in enumerate(maps.items()):
            yield self._map(_numbered(f"{plan.name}_map", number), axes, outputs, merges=alone)

    def _steps(self, steps: InOrder) -> Kernel:
        """The kernel that walks an axis and stores the states of a recurrence at each position, of those that it has stored before."""
        build, axis = self._builder(self._plan.parallel), steps.axis
        at = {axis: steps.place}
        whole = {axis, *self._plan.parallel, *self._plan.whole}
        tiled: dict[tuple[str, ...], list[Output]] = {}
        for output in self._plan.outputs:
            self._context.output(output)
            tiled.setdefault(tuple(each for each in output.axes if each not in whole), []).append(output)
        with build.loop(axis, Const(0), Size(axis), unit=True):
            for axes, outputs in tiled.items():
                with ExitStack() as loops:
                    for each in axes:
                        loops.enter_context(build.loop(each, Const(0), Size(each)))
                    for output in outputs:
                        index = tuple(at.get(each, Axis(each)) for each in output.axes)
                        build.store(output.name, output.axes, substitute_axes(output.expr, at), index)
        return Kernel(self._plan.name, build.parallel, build.body, *self._context.known)

    def _scans(self) -> Iterator[Kernel]:
        """The kernels that walk an axis and store outputs at each position, from the states before or after it."""
        plan, context = self._plan, self._context
        (place,) = (place for place, each in enumerate(plan.groups) if each.schedule in SCANS)
        scan = plan.groups[place]
        group, merge, others = scan.group, _merge_of(scan), (*plan.groups[:place], *plan.groups[place + 1 :])
        assert group.prefix is not None
        if scan.schedule == "scan":
            yield self._by_position(group, merge, group.prefix, others)
            return
        order = Order.of(group.axis, group.prefix, group.prefix.behind)
        name = f"{plan.name}_{group.axis}"
        if scan.schedule == "scan_tiles":
            build = self._builder(plan.parallel)
            self._groups(build, others)
            self._by_tile(
                build, group, merge, order, name, _carried(build, group.states), Const(0), Size(group.axis)
            )
            yield Kernel(plan.name, build.parallel, build.body, *context.known)
            return
        shard = context.shard_axis(group.axis)
        start, stop = _shard_ends(group.axis, shard)
        build = self._builder((*plan.parallel, shard))
        self._groups(build, others)
        with build.loop(group.axis, start, stop, _carried(build, group.states), shard=shard):
            rolled(build, group, merge, order, self._exactly)
        self._store_partials(build, group, shard)
        yield Kernel(f"{plan.name}_partial", build.parallel, build.body, *context.known)
        build = self._builder(plan.parallel)
        before = self._before_shards(build, group, merge, shard)
        yield Kernel(f"{plan.name}_shards", build.parallel, build.body, *context.known)
        build = self._builder((*plan.parallel, shard))
        self._groups(build, others)
        carried = tuple(replace(each, init=before[each.name]) for each in _carried(build, group.states))
        self._by_tile(build, group, merge, order, name, carried, start, stop, shard)
        yield Kernel(plan.name, build.parallel, build.body, *context.known)

    def _by_position(self, group: Group, merge: Merge, prefix: Prefix, others: Iterable[GroupPlan]) -> Kernel:
        """The kernel that walks the axis position by position."""
        build = self._builder(self._plan.parallel)
        self._groups(build, others)
        axis, order = group.axis, Order.of(group.axis, prefix, prefix.behind if prefix.lag else 0)
        is_before = prefix.exclusive and not prefix.lag

        def update() -> None:
            for each in updates(group, merge):
                value, dims = each.value, each.dims
                if isinstance(value, Reduce):
                    # A part is read with the axes of all that it packs, of which this variable may have fewer.
                    part = Reduce(value.op, axis, order.read(value.op, self._exactly(value.body)))
                    dims = tuple(a for a in dims if a in free_axes(part))
                    build.let(each.name, dims, contribution(part))
                else:
                    build.let(each.name, dims, order.placed(self._exactly(value)))

        with build.loop(axis, Const(0), Size(axis), _carried(build, group.states), unit=True):
            if not is_before:
                update()
            seen = {s.name: s.name if is_before else f"{s.name}_new" for s in group.states}
            exact, before = dict(seen), self._exact
            for final in finishes(group, merge):
                exact[final.state] = final.name
                value = rename_locals(self._exactly(final.value), seen)
                build.let(final.name, final.dims, order.placed(value))
            self._exact = {**before, **exact}
            for output in self._plan.outputs:
                self._context.output(output)
                value = order.placed(self._exactly(output.expr))
                build.store(output.name, output.axes, value, order.index(output.axes))
            if is_before:  # last, so that a state is added to where it stands
                self._exact = before
                update()
        return Kernel(self._plan.name, build.parallel, build.body, *self._context.known)

    def _by_tile(
        self,
        build: Builder,
        group: Group,
        merge: Merge,
        order: Order,
        name: str,
        carried: tuple[Carried, ...],
        start: Expr,
        stop: Expr,
        shard: str | None = None,
    ) -> None:
        """The loop that walks the axis, or a shard of it, tile by tile."""
        with build.loop(group.axis, start, stop, carried, shard=shard):
            rolled(build, group, merge, order, self._exactly)
            seen = prefixes(build, group, merge, order, self._exactly, name)
            for output in self._plan.outputs:
                self._context.output(output)
                axes = tuple(group.axis if axis in order.at else axis for axis in output.axes)
                build.store(output.name, axes, seen(output.expr), order.index(output.axes))

    def _before_shards(self, build: Builder, group: Group, merge: Merge, shard: str) -> dict[str, Load]:
        """Stores the states of all shards before each; where they are."""
        previous = {shard: call("maximum", call("sub", Axis(shard), Const(1)), Const(0))}
        states = tuple(substitute_axes(self._partials[state.name], previous) for state in group.states)
        upto = scanned(build, group, merge, shard, f"{self._plan.name}_{shard}", states, first=1)
        found: dict[str, Load] = {}
        for state in group.states:
            axes = (*self._plan.parallel, shard)
            found[state.name] = self._context.temporary(f"{self._plan.name}_{state.name}_before", axes)
            build.store(
                found[state.name].tensor,
                axes,
                Local(upto[f"{state.name}_b"], (*build.dims(state.dims), shard)),
            )
        return found

    def _states_are_numbers(self) -> bool:
        """Whether the states are so small that every instance of a later kernel may merge them itself."""
        return not any(self._dims(state) for plan in self._plan.groups for state in plan.group.states)

    def _walked(self, output: Output) -> tuple[str, ...]:
        """Axes of an output that groups reduce tile by tile: its values need another walk along them."""
        groups = self._plan.groups
        tiled = {plan.group.axis for plan in groups if plan.schedule != "resident"}
        held = {plan.group.axis for plan in groups if plan.schedule == "resident"}
        return tuple(axis for axis in output.axes if axis in tiled - held - set(self._plan.parallel))

    def _partial(self, index: int, name: str) -> Kernel:
        """The kernel that rolls the group `index` over each shard and stores its states."""
        group = self._plan.groups[index].group
        shard = self._context.shard_axis(group.axis)
        build = self._builder((*self._plan.parallel, shard))
        self._groups(build, self._plan.groups[:index])
        start, stop = _shard_ends(group.axis, shard)
        self._roll(build, group, _merge_of(self._plan.groups[index]), start, stop, shard)
        self._store_partials(build, group, shard)
        ascending, longer = self._context.known
        slots = self._slots.get(group)
        if slots is not None and len(slots.axes) == 1:  # so that the row is searched for
            ascending = (*ascending, (slots.first, 0), (slots.last, 0))
        return Kernel(name, build.parallel, build.body, ascending, longer, slots)

    def _store_partials(self, build: Builder, group: Group, shard: str) -> None:
        """Stores the states of a shard. Those of products lie next to each other along the last parallel axis, of which an instance has
        a tile; others along their own dims, or shard by shard as the merge reads them."""
        parallel = self._plan.parallel
        tiled = parallel and not any(map(self._dims, group.states)) and _shares_operands(group, parallel[-1])
        for state in group.states:
            axes = (*parallel[:-1], shard, parallel[-1]) if tiled else (*parallel, shard, *self._dims(state))
            partial = self._context.temporary(f"{self._plan.name}_{state.name}", axes)
            build.store(partial.tensor, axes, Local(state.name, state.dims))
            self._partials[state.name] = partial

    def _counting(self, index: int, name: str) -> Kernel:
        """The kernel that deals the program instances of the next one out to rows."""
        group, even = self._plan.groups[index].group, self._plan.groups[index].even
        assert even is not None
        context = self._context
        names = [tuple(context.alias(axis) for axis in even.axes) for _ in range(3)]
        first, last = (
            context.temporary(f"{self._plan.name}_{end}", even.axes).tensor for end in ("first", "last")
        )
        rows = tuple(context.alias(axis, "row") for axis in even.axes)
        slots = Slots(even.axes, context.shard_axis(group.axis), rows, names[0], first, last)
        self._slots[group] = slots
        return counting(name, group.axis, even, slots, names)

    def _rest(
        self, name: str, local: Mapping[tuple[str, ...], list[Output]], mapped: Collection[list[Output]]
    ) -> Kernel:
        """The kernel that ends every group, and stores outputs and the states that `mapped` outputs need."""
        build = self._builder((*self._plan.parallel, *(() if mapped else self._spread(local))))
        self._groups(build, self._plan.groups)
        for axes, outputs in local.items():
            with ExitStack() as loops:
                for axis in axes:
                    loops.enter_context(build.loop(axis, Const(0), Size(axis)))
                for output in outputs:
                    build.store(output.name, output.axes, self._exactly(output.expr))
        for state in self._read_by([output for outputs in mapped for output in outputs]):
            axes = (*self._plan.parallel, *self._dims(state))
            final = self._context.temporary(f"{self._plan.name}_{state.name}_final", axes)
            build.store(final.tensor, axes, Local(self._exact[state.name], state.dims))
            self._finals[state.name] = final
        return Kernel(name, build.parallel, build.body, *self._context.known, library=self._plan.library)

    def _spread(self, local: Mapping[tuple[str, ...], list[Output]]) -> tuple[str, ...]:
        """Axes of merged states that instances of the merging kernel can share out: every output has them,
        nothing folds them."""
        plans = self._plan.groups
        if set(local) != {()} or not all(plan.schedule == "split_k" for plan in plans):
            return ()
        merges = [_merge_of(plan) for plan in plans]
        values = [combine.value for merge in merges for combine in merge.combine]
        values += [finish.value for merge in merges for finish in merge.finish]
        nodes = walk(*values, *(output.expr for output in local[()]))
        folded = {node.axis for node in nodes if isinstance(node, Reduce)} | rank_axes(*values)
        axes = dict.fromkeys(
            axis for plan in plans for state in plan.group.states for axis in self._dims(state)
        )
        return tuple(
            axis for axis in axes if axis not in folded and all(axis in output.axes for output in local[()])
        )

    def _map(self, name: str, axes: tuple[str, ...], outputs: list[Output], *, merges: bool) -> Kernel:
        """The kernel that computes outputs at every position of split axes: from the stored states, or, if it
        `merges`, from those of all shards."""
        build = self._builder((*self._plan.parallel, *axes, *self._alike(axes, outputs)))
        if merges:
            self._groups(build, self._plan.groups)
        else:
            for state in self._read_by(outputs):
                build.let(state.name, state.dims, self._finals[state.name])
        for output in outputs:
            build.store(output.name, output.axes, self._exactly(output.expr))
        return Kernel(name, build.parallel, build.body, *self._context.known)

    def _alike(self, axes: tuple[str, ...], outputs: list[Output]) -> tuple[str, ...]:
        """The other axes that every output has and nothing here folds: a block of all their positions may be beyond any chip."""
        folded = {n.axis for n in walk(*(output.expr for output in outputs)) if isinstance(n, Reduce)}
        folded |= {axis for plan in self._plan.groups for state in plan.group.states for axis in state.dims}
        known = folded.union(axes, self._plan.parallel)
        return tuple(a for a in outputs[0].axes if a not in known and all(a in o.axes for o in outputs))

    def _read_by(self, outputs: list[Output]) -> list[State]:
        names = {node.name for node in walk(*(output.expr for output in outputs)) if isinstance(node, Local)}
        return [state for plan in self._plan.groups for state in plan.group.states if state.name in names]

    def _builder(self, parallel: tuple[str, ...]) -> Builder:
        self._exact = {}
        return Builder(parallel, self._context.axes, self._context.aliases)

    def _dims(self, state: State) -> tuple[str, ...]:
        return tuple(axis for axis in state.dims if axis not in self._plan.parallel)

    def _exactly(self, expr: Expr) -> Expr:
        """`expr` reading the exact values of the states of finished groups."""
        return rename_locals(expr, self._exact)

    # Groups ---------------------------------------------------------------------------------------

    def _groups(self, build: Builder, plans: Iterable[GroupPlan]) -> None:
        for plan in plans:
            group = plan.group
            match plan.schedule:
                case "rolling":
                    merge = _merge_of(plan)
                    self._roll(build, group, merge, Const(0), Size(group.axis))
                    self._finish(build, group, merge)
                case "split_k":
                    merge = _merge_of(plan)
                    self._merge(build, group, merge)
                    self._finish(build, group, merge)
                case "multi_pass":
                    self._passes(build, group)
                    self._exact.update({state.name: state.name for state in group.states})
                case "resident" | "library":
                    for state in group.states:
                        build.fold(state.name, state.dims, state.op, group.axis, self._exactly(state.body))
                        self._exact[state.name] = state.name

    def _roll(
        self,
        build: Builder,
        group: Group,
        merge: Merge,
        start: Expr,
        stop: Expr,
        shard: str | None = None,
    ) -> None:
        with build.loop(group.axis, start, stop, _carried(build, group.states), shard=shard):
            for each in updates(group, merge):
                match self._exactly(each.value):
                    case Reduce(op, axis, body):
                        build.fold(each.name, each.dims, op, axis, body)
                    case value:
                        build.let(each.name, each.dims, value)

    def _merge(self, build: Builder, group: Group, merge: Merge) -> None:
        """Folds the stored states of all shards: at once where each adds to a state what it alone holds and
        the states have one dim here at most (a tile of them fits on chip), else one after the other."""
        shard = self._context.shard_axis(group.axis)
        shares = _shares(merge, group.states)
        if any(len(build.dims(state.dims)) > 1 for state in group.states):
            shares = None
        slots = self._slots.get(group)
        if slots is not None and any(fold_of(state.op) is not None for state in group.states):
            shares = None
        if slots is not None:
            self._merge_slots(build, group, merge, slots, shares)
        elif shares is None:
            with build.loop(shard, Const(0), Size(shard), _carried(build, group.states), unit=True):
                self._merge_one(build, group, merge, {}, {state.name: state.name for state in group.states})
        else:
            states = {state.name: state for state in group.states}
            for name, (_, share) in shares.items():
                body = self._exactly(self._loaded(share, group, {}))
                build.fold(name, states[name].dims, states[name].op, shard, body)

    def _merge_one(
        self, build: Builder, group: Group, merge: Merge, at: Mapping[str, Expr], names: Mapping[str, str]
    ) -> None:
        """Merges the states that are stored at a position into those that a loop carries, by `names`; `at` are other names
        of axes."""
        carried = {f"{name}_a": of for name, of in names.items()}
        for state in group.states:
            build.let(f"{state.name}_b", state.dims, substitute_axes(self._partials[state.name], at))
        for each in combines(group, merge):
            build.let(each.name, each.dims, rename_locals(self._exactly(each.value), carried))

    def _merge_slots(
        self, build: Builder, group: Group, merge: Merge, slots: Slots, shares: Mapping[str, _Share] | None
    ) -> None:
        """Folds what the instances of a row have stored, position by position of the axes that count instances: all shards of one
        at once, where that is possible."""
        row = tuple(map(Axis, slots.axes))
        ends = Load(slots.first, row), Load(slots.last, row)
        at: Mapping[str, Expr] = dict(zip(slots.axes, map(Axis, slots.others), strict=True))
        number = instance(slots.others, slots.shard)
        is_mine = call("and", call("le", ends[0], number), call("lt", number, ends[1]))

        def merged(names: Mapping[str, str]) -> None:
            if shares is None:
                self._merge_one(build, group, merge, at, names)
                return
            carried = {f"{name}_a": of for name, of in names.items()}
            states = {state.name: state for state in group.states}
            for name, (rest, share) in shares.items():
                state = states[name]
                body = call("where", is_mine, self._loaded(share, group, at), identity(state.op))
                build.fold(f"{state.name}_tile", state.dims, state.op, slots.shard, self._exactly(body))
                tile = Local(f"{state.name}_tile", state.dims)
                rest = self._exactly(rename_locals(rest, carried))
                build.let(f"{state.name}_new", state.dims, Call(COMBINE[state.op], (rest, tile)))

        axes = (*slots.others, *((slots.shard,) if shares is None else ()))
        counted = [Size(axis) for axis in (*slots.others, slots.shard)]
        self._positions(build, group, axes, counted[1:], ends, None, merged)

    def _positions(
        self,
        build: Builder,
        group: Group,
        axes: Sequence[str],
        inner: Sequence[Expr],
        ends: tuple[Expr, Expr],
        outside: Mapping[str, str] | None,
        body: Callable[[Mapping[str, str]], None],
    ) -> None:
        """Loops over those positions of `axes` of which instances from the first to before the last of `ends` are; each has as many
        as the product of the `inner` sizes. States are carried, from those of the loop `outside` on."""
        axis, (first, last) = axes[0], ends
        each: Expr = Const(1)
        for size in inner:
            each = size if each is Const(1) else call("mul", each, size)
        if outside is not None:
            first = call("maximum", first, Const(0))
            last = call("minimum", last, call("mul", Size(axis), each))
        start, stop = call("floordiv", first, each), quotient_up(last, each)
        names = {
            state.name: state.name if outside is None else f"{state.name}_{axis}" for state in group.states
        }
        following = "new" if len(axes) == 1 else f"after_{axis}"
        carried = tuple(
            Carried(
                names[state.name],
                build.dims(state.dims),
                identity(state.op) if outside is None else Local(outside[state.name], build.dims(state.dims)),
                f"{state.name}_{following}",
            )
            for state in group.states
        )
        with build.loop(axis, start, stop, carried, unit=True):
            if len(axes) == 1:
                body(names)
                return
            before = call("mul", Axis(axis), each)
            rest = call("sub", ends[0], before), call("sub", ends[1], before)
            self._positions(build, group, axes[1:], inner[1:], rest, names, body)
            for state in group.states:
                value = Local(f"{state.name}_{axes[1]}", state.dims)
                build.let(f"{state.name}_{following}", state.dims, value)

    def _loaded(self, share: Expr, group: Group, at: Mapping[str, Expr]) -> Expr:
        """What a shard adds to a state, read from where its states are stored; merged states by their names."""
        stored = {state.name: substitute_axes(self._partials[state.name], at) for state in group.states}
        read: dict[str, Expr] = {f"{name}_b": load for name, load in stored.items()}
        if not at:
            read |= {f"{state.name}_new": Local(state.name, state.dims) for state in group.states}
        return transform(share, lambda node: read.get(node.name, node) if isinstance(node, Local) else node)

    def _finish(self, build: Builder, group: Group, merge: Merge) -> None:
        exact = {state.name: state.name for state in group.states}
        for each in finishes(group, merge):
            exact[each.state] = each.name
            build.let(each.name, each.dims, self._exactly(each.value))
        self._exact |= exact

    def _passes(self, build: Builder, group: Group) -> None:
        """A loop for the states that read no other, a loop for those that read these, and so on."""
        for states in _levels(group.states):
            with build.loop(group.axis, Const(0), Size(group.axis), _carried(build, states)):
                folded: set[str] = set()
                for state in states:
                    together = _folded_with(state, states)
                    for other in together:
                        if other.name not in folded:
                            tile, body = f"{other.name}_tile", self._exactly(other.body)
                            build.fold(tile, other.dims, other.op, group.axis, body)
                            folded.add(other.name)
                    seen = {other.op: Local(other.name, other.dims) for other in together}
                    tiles = {other.op: Local(f"{other.name}_tile", other.dims) for other in together}
                    new = over_union(Reduce(state.op, group.axis, state.body), seen, tiles)
                    build.let(f"{state.name}_new", state.dims, new)


_Share = tuple[Expr, Expr]
"""What the parts before make of a state, over its `_a` values, and what one part adds to it, over its `_b` values."""


def _shares(merge: Merge, states: Iterable[State]) -> dict[str, _Share] | None:
    """The shares of all states, in the order in which they are merged, where each `state_new` folds that of two parts with
    the state's own reduction; None where one is anything else."""
    by_name = {state.name: state for state in states}
    there = {f"{name}_a": f"{name}_b" for name in by_name}
    back = {b: a for a, b in there.items()}
    found: dict[str, _Share] = {}
    for combine in merge.combine:
        match combine.value:
            case Call(fn, (left, right)) if fn == _combining(by_name[combine.state].op) and (
                rename_locals(left, there) is right and rename_locals(right, back) is left
            ):
                found[combine.state] = left, right
            case _:
                return None
    return found


def _combining(op: str) -> str:
    """What combines two states of a reduction, in any order; none for lists, and where the order of parts tells."""
    found = fold_of(op)
    if found is None:
        return COMBINE.get(op, "")
    return op if found[0].commutative and not found[0].ranks else ""


def _carried(build: Builder, states: Iterable[State]) -> tuple[Carried, ...]:
    return tuple(
        Carried(state.name, build.dims(state.dims), identity(state.op), f"{state.name}_new")
        for state in states
    )


def _folded_with(state: State, states: Iterable[State]) -> list[State]:
    """The state variables of the same fold over the same body; of a built-in reduction, the state alone."""
    found = fold_of(state.op)
    ops = (state.op,) if found is None else found[0].ops
    return [other for other in states if other.op in ops and other.body is state.body]


def _shard_ends(axis: str, shard: str) -> tuple[Expr, Expr]:
    """The positions of an axis that a shard begins at, and ends before."""
    chunk = call("floordiv", call("sub", call("add", Size(axis), Size(shard)), Const(1)), Size(shard))
    start = call("minimum", call("mul", Axis(shard), chunk), Size(axis))
    return start, call("minimum", call("add", start, chunk), Size(axis))


def _shares_operands(group: Group, axis: str) -> bool:
    """Whether the states of a group read something that is the same at all positions of an axis, and something that is not."""
    loads = [node for node in walk(*(state.body for state in group.states)) if isinstance(node, Load)]
    return len({axis in free_axes(load) for load in loads}) == 2


def _levels(states: tuple[State, ...]) -> list[list[State]]:
    """The states by the length of the longest chain of states that each depends on."""
    depth: dict[str, int] = {}
    levels: list[list[State]] = []
    for state in states:
        read = {node.name for node in walk(state.body) if isinstance(node, Local)}
        depth[state.name] = max((depth[name] + 1 for name in read & depth.keys()), default=0)
        if depth[state.name] == len(levels):
            levels.append([])
        levels[depth[state.name]].append(state)
    return levels


def _merge_of(plan: GroupPlan) -> Merge:
    group = plan.group
    if group.merge is not None:
        return group.merge
    why = [f"{obstacle.factor} in {obstacle.reduction}: {obstacle.condition}" for obstacle in group.obstacles]
    raise ScheduleError(
        f"the reductions over {group.axis!r} cannot be walked as {plan.schedule!r}: they have no merge",
        hint="; ".join([*why, "the schedules 'multi_pass' and 'resident' need none"]),
    )


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name}{number + 1}"


def _plan_axes(plan: KernelPlan) -> Iterator[str]:
    """Every axis name that a kernel of the plan mentions."""
    yield from (*plan.parallel, *plan.whole)
    exprs: list[Expr] = []
    for output in plan.outputs:
        yield from output.axes
        exprs.append(output.expr)
    for group in (group.group for group in plan.groups):
        yield group.axis
        for state in group.states:
            yield from state.dims
            exprs.append(state.body)
        if group.merge is not None:
            exprs += [part.body for update in group.merge.update for part in update.parts]
            exprs += [update.value for update in group.merge.update]
            exprs += [combine.value for combine in group.merge.combine]
            exprs += [finish.value for finish in group.merge.finish]
    for node in walk(*exprs):
        match node:
            case Axis(name) | Size(name) | Reduce(_, name, _):
                yield name
