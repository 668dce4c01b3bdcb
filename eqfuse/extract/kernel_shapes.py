"""What kernels are made of, and their axes: which of them a grid runs along, and which a block keeps whole.

A cluster is what one kernel computes (`partition.py`). Once the merge of each of its passes is known, `Shapes` makes a kernel of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from eqfuse.rules.merge import Group
from eqfuse.terms.folds import rank_axes
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Expr,
    InOrder,
    Load,
    Local,
    Output,
    Reduce,
    children,
    free_axes,
    walk,
)
from eqfuse.terms.prefixes import Prefix

NOMINAL_BLOCK = 64
"""Positions per grid block, as far as deciding what is computed again by every block goes."""

RECOMPUTE_SHARE = 0.25
"""A reduction is materialised when computing it again in every block would add more than this share
of its reader's own work."""

WHOLE_LIMIT = 512
"""Positions of an axis that one block can keep for a state (an accumulator's columns)."""


class AxisPass(NamedTuple):
    """The reductions, in dependency order, that one walk over an axis computes; `suffix` ends the names of their
    states. With a `prefix`, outputs read them as they are for that part of the axis."""

    axis: str
    reduces: tuple[Reduce, ...]
    suffix: str
    prefix: Prefix | None = None


@dataclass(frozen=True)
class Cluster:
    """What one kernel computes: outputs that read the states of its passes, which run one after the other."""

    name: str
    outputs: tuple[Output, ...]
    passes: tuple[AxisPass, ...]
    in_order: InOrder | None = None


Structure = tuple[Cluster, ...]
"""One way to divide a program into kernels."""

Merges = Mapping[AxisPass, Group]
"""The group of every pass, with its merge or why it has none."""


@dataclass(frozen=True)
class KernelShape:
    """A kernel before schedules are chosen: see plans.KernelPlan for the fields."""

    name: str
    outputs: tuple[Output, ...]
    groups: tuple[Group, ...]
    parallel: tuple[str, ...]
    whole: tuple[str, ...]
    in_order: InOrder | None = None


def frontier(*roots: Expr) -> list[Reduce]:
    """The outermost reductions of the roots, in order of appearance."""
    return list(dict.fromkeys(reduce for root in roots for reduce in _frontier(root)))


def _frontier(root: Expr) -> tuple[Reduce, ...]:
    if isinstance(root, Reduce):
        return (root,)
    if root in _FRONTIERS:
        return _FRONTIERS[root]
    found: dict[Reduce, None] = {}
    seen: set[Expr] = set()

    def visit(node: Expr) -> None:
        if node in seen:
            return
        seen.add(node)
        if isinstance(node, Reduce):
            found[node] = None
            return
        for child in children(node):
            visit(child)

    visit(root)
    return _FRONTIERS.setdefault(root, tuple(found))


_FRONTIERS: WeakKeyDictionary[Expr, tuple[Reduce, ...]] = WeakKeyDictionary()


def _folded_in_place(exprs: Iterable[Expr]) -> set[str]:
    """Axes that expressions fold states along: all positions of these states are needed at once."""
    return {
        node.axis
        for node in walk(*exprs)
        if isinstance(node, Reduce)
        and any(isinstance(part, Local) and node.axis in part.dims for part in walk(node.body))
    }


def work(expr: Expr, extents: Mapping[str, int]) -> float:
    """Operations to evaluate an expression once at every position of its free axes."""
    total = 0.0
    for node in walk(expr):
        if isinstance(node, Call | Reduce):
            axes = free_axes(node.body) if isinstance(node, Reduce) else free_axes(node)
            total += math.prod(extents.get(axis, 1) for axis in axes)
    return total


@dataclass(frozen=True)
class Shapes:
    """Kernels of clusters for given extents; `order` are all axes in theirs."""

    order: Sequence[str]
    extents: Mapping[str, int]

    def of(self, cluster: Cluster, groups: Sequence[Group]) -> KernelShape:
        """The kernel of a cluster, of whose passes these are the groups."""
        if cluster.in_order is not None:
            parallel = self._apart_in_steps(cluster.outputs, cluster.in_order)
            whole = tuple(a for a in self.order if any(a in o.axes for o in cluster.outputs))
            rest = tuple(a for a in whole if a not in (*parallel, cluster.in_order.axis))
            return KernelShape(cluster.name, cluster.outputs, (), parallel, rest, cluster.in_order)
        walked = {g.axis for g in groups} | {g.prefix.at for g in groups if g.prefix is not None}
        parallel, whole = self._axes(cluster.outputs, groups, walked)
        return KernelShape(cluster.name, cluster.outputs, tuple(groups), parallel, whole)

    def _apart_in_steps(self, outputs: Sequence[Output], steps: InOrder) -> tuple[str, ...]:
        """The axes of all states at each position of which a step reads states at that position alone."""
        axes = {output.name: output.axes for output in outputs}
        loads = [
            node
            for output in outputs
            for node in walk(output.expr)
            if isinstance(node, Load) and node.tensor in steps.states
        ]

        def is_apart(axis: str) -> bool:
            return all(axis in own for own in axes.values()) and all(
                load.index[axes[load.tensor].index(axis)] is Axis(axis) for load in loads
            )

        return tuple(axis for axis in self.order if axis != steps.axis and is_apart(axis))

    def _axes(
        self, outputs: Sequence[Output], groups: Sequence[Group], group_axes: set[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        made = [o.expr for o in outputs] + [s.body for g in groups for s in g.states]
        lists = rank_axes(*made).union(
            *(rank_axes(Reduce(s.op, g.axis, s.body)) for g in groups for s in g.states)
        )
        kept = [frozenset(s.dims) for g in groups for s in g.states]
        holders = [frozenset(o.axes) - group_axes for o in outputs]
        holders += [
            frozenset(s.dims) - group_axes
            for g in groups
            for s in g.states
            if not s.auxiliary
            # each block of a scan counts positions itself, and walks what has few values beside what has many
            and (
                not self._is_beside_scan(g, groups)
                or (s.dims and not any(set(s.dims) < dims for dims in kept))
            )
        ]
        used = [a for a in self.order if any(a in h for h in holders)]
        everywhere = [a for a in used if all(a in h for h in holders)]
        folded = _folded_in_place(made)
        whole = []
        for axis in used:
            if axis in lists or axis in folded:
                whole.append(axis)
                continue
            if axis in everywhere and not self._is_made_again(axis, groups):
                continue
            in_outputs = all(axis in o.axes for o in outputs)
            if not in_outputs or self.extents.get(axis, 1) <= WHOLE_LIMIT:
                whole.append(axis)
        parallel = tuple(a for a in used if a not in whole)
        return parallel, tuple(whole)

    def _is_beside_scan(self, group: Group, groups: Sequence[Group]) -> bool:
        """Whether a group is a scan, or a short fold that one reads."""
        is_short = self.extents.get(group.axis, 1) <= WHOLE_LIMIT
        return group.prefix is not None or (is_short and any(g.prefix is not None for g in groups))

    def _is_made_again(self, axis: str, groups: Sequence[Group]) -> bool:
        """Whether blocks of an axis would each compute again what states are made of, and much of it; or load again what the
        one that there is has: where states are made of sums over the same axis."""
        again = math.ceil(self.extents.get(axis, 1) / NOMINAL_BLOCK)
        inner_axes = {
            inner.axis for group in groups for state in group.states for inner in frontier(state.body)
        }
        if again <= 1:
            return axis in inner_axes
        return any(
            axis not in free_axes(inner)
            and (again - 1) * work(inner, self.extents)
            > RECOMPUTE_SHARE * work(Reduce(state.op, group.axis, state.body), self.extents)
            for group in groups
            for state in group.states
            for inner in frontier(state.body)
        )
