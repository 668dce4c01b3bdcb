"""Which kernels a program takes: what is materialised between them, what each computes in one place.

Sizes decide here (a reduction that would be computed again by every block is better stored once), so this runs per
shape. It has two halves: `clusters` says which reductions share a pass, and `shapes` makes kernels of them (`kernel_shapes.py`),
once the merge of every pass is known. Merges are derived between the two, once per program and pass (compiler.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from eqfuse import limits
from eqfuse.extract.kernel_shapes import (
    NOMINAL_BLOCK,
    RECOMPUTE_SHARE,
    WHOLE_LIMIT,
    AxisPass,
    Cluster,
    KernelShape,
    Merges,
    Shapes,
    Structure,
    frontier,
    work,
)
from eqfuse.extract.library_products import with_products
from eqfuse.extract.shape import HALF
from eqfuse.loops.contraction import Product, contraction, factors, unmasked
from eqfuse.names import Names
from eqfuse.rules.states import name_states
from eqfuse.terms.dtypes import FLOAT8
from eqfuse.terms.folds import rank_axes, ranks_of
from eqfuse.terms.functions import CASTS
from eqfuse.terms.masks import zero_without
from eqfuse.terms.nodes import (
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
    children,
    free_axes,
    post_order,
    rebuild,
    reductions,
    replaced,
    transform,
    walk,
    without_names,
)
from eqfuse.terms.prefixes import Extents, Prefix, Scanned, form_of, scanned
from eqfuse.terms.types import kind

STATISTIC_SHARE = 0.125
"""What a statistic may have of the positions of what it reads, or cost of the reduction that reads it, to be worth a kernel
of its own."""

MUCH_LESS = 16
"""How many times as many positions an output has as a prefix that is stored for it, which each block would make again."""

MOST_STATES = 2**15
"""Numbers of a state that one block folds at each position of a walk."""

INNER_LIMIT = 4096
"""Positions of an axis that a cascade inside another loop's body may keep whole."""

LIFT_LIMIT = 64
"""Positions of a reduced axis whose inner producers are computed for all of it beforehand."""


def _stages(members: Collection[Reduce]) -> dict[Reduce, int]:
    """How many changes of axis lie between each reduction of a kernel and the inputs, in dependency order. What
    one pass over an axis computes waits for a later pass over that axis if nothing before reads it: one is left."""
    stages: dict[Reduce, int] = {}
    below: dict[Reduce, list[Reduce]] = {}
    for reduce in reductions(*members):
        if reduce in members:
            below[reduce] = [q for q in frontier(reduce.body) if q in members]
            stages[reduce] = max((stages[q] + (q.axis != reduce.axis) for q in below[reduce]), default=0)
    for stage, axis in sorted({(stages[r], r.axis) for r in stages}, reverse=True):
        late = min((s for r, s in stages.items() if r.axis == axis and s > stage), default=stage)
        waiting = [r for r, s in stages.items() if (s, r.axis) == (stage, axis)]
        readers = [r for r in stages if r not in waiting and not set(below[r]).isdisjoint(waiting)]
        if late > stage and all(stages[r] - (r.axis != axis) >= late for r in readers):
            stages.update(dict.fromkeys(waiting, late))
    return stages


def _makers_first(outputs: Sequence[Output]) -> list[Output]:
    """The outputs, each after those that it reads: one that was found early may read what was cut later. States read each other."""
    by_name = {output.name: output for output in outputs}
    found: dict[str, Output] = {}
    seen: set[str] = set()

    def visit(output: Output) -> None:
        seen.add(output.name)
        for node in walk(output.expr):
            if isinstance(node, Load) and node.tensor in by_name and node.tensor not in seen:
                visit(by_name[node.tensor])
        found.setdefault(output.name, output)

    for output in outputs:
        if output.name not in seen:
            visit(output)
    return list(found.values())


def stem_of(program: Program) -> str:
    """The beginning of the names of what is stored: that of no name in the program."""
    stem = "stored"
    names = [*program.scalars, *(t.name for t in program.tensors), *(o.name for o in program.outputs)]
    while any(name.startswith(stem) for name in names):
        stem += "_"
    return stem


def _needed(makers: Sequence[Output], readers: Sequence[Output]) -> list[Output]:
    """The makers of what is read: a pass that makes a statistic for itself leaves none to store."""
    loaded = {n.tensor for output in (*makers, *readers) for n in walk(output.expr) if isinstance(n, Load)}
    found = [maker for maker in makers if maker.name in loaded]
    return found if len(found) == len(makers) else _needed(found, readers)


def _numbered(clusters: Sequence[Sequence[Output]], program: Collection[str]) -> list[list[Output]]:
    """The clusters, with what they store for each other numbered in the order in which it is made; `program` are the
    outputs of the program, which keep their names."""
    made = [output.name for cluster in clusters for output in cluster if output.name not in program]
    names = {old: new for old, new in zip(made, sorted(made, key=_number), strict=True) if old != new}
    if not names:
        return [list(cluster) for cluster in clusters]

    def renamed(node: Expr) -> Expr:
        return (
            Load(names[node.tensor], node.index) if isinstance(node, Load) and node.tensor in names else node
        )

    return [
        [replace(o, name=names.get(o.name, o.name), expr=transform(o.expr, renamed)) for o in cluster]
        for cluster in clusters
    ]


def _read_at(stored: Output, own: Sequence[str], axes: Sequence[str]) -> Load:
    """What reads a temporary at the positions of `axes`, where `own` are those of what it stores."""
    names = dict(zip(own, axes, strict=True))
    return Load(stored.name, tuple(Axis(names[axis]) for axis in stored.axes))


def _number(stored: str) -> int:
    return int(stored[len(stored.rstrip("0123456789")) :])


def _read(outputs: Sequence[Output], stored: Mapping[Expr, Output]) -> dict[Expr, Output]:
    """What is stored, without reductions that are parts of stored operands alone: what makes these makes those."""
    operands = {expr for expr in stored if not isinstance(expr, Reduce)}

    def parts(node: Expr) -> tuple[Expr, ...]:
        return () if node in operands else children(node)

    read = set(post_order([output.expr for output in outputs], parts))
    return {expr: output for expr, output in stored.items() if expr in operands or expr in read}


def _is_beside(plain: Output, other: Output) -> bool:
    """Whether an output without reductions reads nothing but what another one reads where it is written, along the same
    axes: the residual beside its norm."""
    if set(plain.axes) != set(other.axes) or frontier(plain.expr):
        return False
    return _loads(plain.expr) <= _loads(other.expr)


def _loads(expr: Expr) -> set[Load]:
    """What an expression reads outside of its reductions, at positions of its own axes."""
    folds: dict[Expr, Expr] = {reduce: Const(0.0) for reduce in frontier(expr)}
    return {node for node in walk(replaced(expr, folds)) if isinstance(node, Load)}


@dataclass(frozen=True)
class Partition:
    """Splits a program's outputs into kernels for given extents. `recompute_share` is the work that blocks
    may do again, relative to the reader's, before a reduction is materialised; `lift_limit` the positions of
    a reduced axis up to which inner producers are computed for all of it beforehand; `inner_limit` those up to which a
    cascade inside another loop's body is not materialised. With `stores_operands`,
    factors of products that were cast are stored in that dtype instead of being made by every block; with
    `stores_statistics`, every reduction that is no larger than what it reads, and that blocks would compute again, or that
    at most `few` blocks would compute, which leave the device mostly idle. With `scans`, prefixes are scanned: each has a kernel
    that stores it, or the output that alone reads it; with `at_positions`, short folds beside it are made anew at each position of its
    walk, so that its states are in that kernel alone. `alike` are the extents of axes, as far as two have the same, `dtypes`
    those of tensors and scalars. What is stored is called `stem` and a number, and is contiguous along `tiled` axes, where matrix
    products read it in tiles. Where the device `has_library`, products that it computes have kernels of their own, as the outputs `alone` have.
    `layouts` are the axes of the program's outputs, `recurrences` what is computed in order."""

    order: Sequence[str]
    extents: Mapping[str, int]
    alike: Extents = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    recompute_share: float = RECOMPUTE_SHARE
    lift_limit: int = LIFT_LIMIT
    inner_limit: int = INNER_LIMIT
    stores_operands: bool = False
    stores_statistics: bool = False
    few: int = 0
    scans: bool = False
    at_positions: bool = False
    stem: str = "stored"
    has_library: bool = False
    alone: frozenset[str] = frozenset()
    tiled: frozenset[str] = frozenset()
    layouts: tuple[tuple[str, ...], ...] = ()
    recurrences: tuple[InOrder, ...] = ()

    def structures(self, outputs: Sequence[Output]) -> list[Structure]:
        """The ways to divide a program that are priced: what blocks would compute again stored between kernels,
        everything computed in place, that but for cascades over long axes inside of other loops, each of them with
        statistics stored, operands of matrix products stored, and what a longer axis folds computed for all of it
        beforehand."""
        variants = [
            self,
            replace(self, recompute_share=math.inf),
            replace(self, recompute_share=math.inf, inner_limit=WHOLE_LIMIT, lift_limit=0),
        ]
        variants += [replace(variant, stores_statistics=True) for variant in variants]
        variants.append(replace(self, stores_operands=True))
        if self.lift_limit:
            variants.append(replace(self, lift_limit=WHOLE_LIMIT))
        if any(self._scanned(r) for r in reductions(*(o.expr for o in outputs))):
            variants.append(replace(self, scans=True))
            variants.append(replace(self, scans=True, at_positions=True, recompute_share=math.inf))
        found = [variant.clusters(outputs) for variant in variants]
        if self.has_library and not self.recurrences:
            made, alone = with_products(outputs, self.stem, self.extents, self.dtypes)
            found.append(replace(self, alone=alone).clusters(made))
        return list(dict.fromkeys(found))

    def walking(self) -> Partition:
        """The partition that computes nothing beforehand: an axis that is kept whole for that cannot be walked."""
        return replace(self, lift_limit=0)

    def clusters(self, outputs: Sequence[Output]) -> Structure:
        """What each kernel computes, producers first."""
        limits.check()
        stored: dict[Expr, Output] = {}
        seen: set[tuple[Expr, frozenset[str], bool]] = set()
        if self.at_positions:
            outputs = self._read_elsewhere(outputs, stored)
        if self.scans:
            self._find_scans(outputs, stored)
        for output in outputs:
            steps = self._in_order(output)
            if steps is None:
                self._find_cuts(output.expr, output.axes, stored, seen)
            else:
                self._find_before(output.expr, steps, stored, seen)
        beside: set[Expr] = set()
        if self.stores_operands:
            walked = [output for output in outputs if self._in_order(output) is None]
            for output in (*walked, *stored.values()):
                beside |= self._find_operands(output, stored)
            stored = _read(outputs, stored)
        stored, reads = self._stored_once(stored, [*stored, *(output.expr for output in outputs)])
        # Inner cuts first: a stored reduction may itself read stored ones, but not itself, nor what its own pass makes.
        makers = [
            replace(o, expr=replaced(r, {q: load for q, load in reads.items() if q not in beside | own}))
            for r, o in stored.items()
            for own in [set(self._cascade(r)) if isinstance(r, Reduce) else {r}]
        ]
        readers = [replace(o, expr=replaced(o.expr, reads)) for o in outputs]
        clusters = _numbered(
            self._cluster(_makers_first(self._apart([*_needed(makers, readers), *readers]))),
            {o.name for o in outputs},
        )
        written = [output.name for output in outputs]
        return tuple(self._passes(f"kernel{i + 1}", cluster, written) for i, cluster in enumerate(clusters))

    def shapes(self, clusters: Sequence[Cluster], merges: Merges) -> tuple[KernelShape, ...]:
        """The kernels of these clusters."""
        made = Shapes(self.order, self.extents)
        return tuple(made.of(cluster, [merges[each] for each in cluster.passes]) for cluster in clusters)

    def _in_order(self, output: Output) -> InOrder | None:
        """The recurrence that an output is a state of."""
        return next((each for each in self.recurrences if output.name in each.states), None)

    def _find_before(
        self,
        expr: Expr,
        steps: InOrder,
        stored: dict[Expr, Output],
        seen: set[tuple[Expr, frozenset[str], bool]],
    ) -> None:
        """Adds what a step folds at each position that reads no state: it is made for all positions at the same time."""
        states = {node for node in walk(expr) if isinstance(node, Load) and node.tensor in steps.states}
        reads: set[Expr] = set(states)
        for node in walk(expr):
            if not reads.isdisjoint(children(node)):
                reads.add(node)
        for reduce in frontier(
            *(() if expr in reads else (expr,)), *(c for n in reads for c in children(n) if c not in reads)
        ):
            if steps.axis in free_axes(reduce) and reduce not in stored:
                self._find_cuts(reduce, self._laid_out(reduce), stored, seen)
                self._store(reduce, stored)

    # -- what is materialised ----------------------------------------------------------------------

    def _stored_once(
        self, stored: Mapping[Expr, Output], exprs: Sequence[Expr]
    ) -> tuple[dict[Expr, Output], dict[Expr, Load]]:
        """What is stored, without what another one is but for the names of axes; and how all of it is read."""
        known: dict[object, tuple[Output, tuple[str, ...]]] = {}
        kept, reads = dict[Expr, Output](), dict[Expr, Load]()
        for expr, output in stored.items():
            form, axes = form_of(expr, self.alike)
            first, of = known.setdefault((form, output.dtype), (output, axes))
            if first is output:
                kept[expr] = output
            reads[expr] = _read_at(first, of, axes)
        if self.at_positions and stored:
            tags = self._tags(exprs)
            for reduce in reductions(*exprs):
                form, axes = form_of(reduce, self.alike)
                if reduce not in reads and reduce not in tags and (form, None) in known:
                    reads[reduce] = _read_at(*known[form, None], axes)
        return kept, reads

    def _tags(self, exprs: Sequence[Expr]) -> set[Reduce]:
        """The prefixes that others along the same axis read, which are states of one walk with them."""
        found: set[Reduce] = set()
        for reduce in reductions(*exprs):
            if (own := self._scanned(reduce)) is not None:
                found |= {
                    inner
                    for inner in reductions(reduce.body)
                    if (s := self._scanned(inner)) is not None and s.prefix == own.prefix
                }
        return found

    def _read_elsewhere(self, outputs: Sequence[Output], stored: dict[Expr, Output]) -> list[Output]:
        """Adds what outputs round of a walk where others read it too, under whatever names of axes; the outputs that read it stored."""
        walked = [output for output in outputs if self._prefix(output) is not None]
        known: dict[object, tuple[Output, tuple[str, ...]]] = {}
        for output in walked:
            made = output.expr
            while isinstance(made, Call) and made.fn in CASTS:
                (made,) = made.args
            is_fold = not isinstance(made, Reduce) or self._scanned(made) is None
            if is_fold and set(output.axes) == free_axes(made):
                form, axes = form_of(made, self.alike)
                known.setdefault(form, (replace(output, expr=made), axes))
        if not known:
            return list(outputs)
        memo: dict[Expr, Expr] = {}

        def visit(node: Expr) -> Expr:
            if node not in memo:
                form, axes = form_of(node, self.alike) if isinstance(node, Call | Reduce) else (None, ())
                if form in known:
                    made, names = known[form]
                    kept = replace(made, name=f"{self.stem}{len(stored) + 1}", dtype=None)
                    memo[node] = _read_at(stored.setdefault(made.expr, kept), names, axes)
                else:
                    memo[node] = rebuild(node, tuple(map(visit, children(node))))
            return memo[node]

        return [
            output if output in walked else replace(output, expr=visit(output.expr)) for output in outputs
        ]

    def _scanned(self, reduce: Reduce) -> Scanned | None:
        """How a reduction is a prefix. An axis of ranks is at hand as a whole, and none is walked; an empty prefix of integers has no
        infinity, which the program may have put there."""
        found = scanned(reduce, self.alike)
        if found is None or {found.prefix.at, reduce.axis} & rank_axes(reduce):
            return None
        if not found.prefix.exclusive:
            return found
        return found if kind(found.whole, self.dtypes) == kind(reduce, self.dtypes) else None

    def _find_scans(self, outputs: Sequence[Output], stored: dict[Expr, Output]) -> None:
        """Adds the prefixes that are stored: all but those that are read by outputs alone which read no other reduction, along the
        axis of whose positions they are prefixes."""
        apart = [output for output in outputs if self._prefix(output) is None]
        kept = {r for output in outputs if output not in apart for r in self._prefixes([output.expr])}
        kept -= set(reductions(*(output.expr for output in apart)))
        seen: dict[Reduce, None] = {}

        def visit(roots: Iterable[Expr], above: Scanned | None) -> None:
            for reduce in frontier(*roots):
                found = self._scanned(reduce)
                shares = above is not None and found is not None and found.prefix == above.prefix
                whole = above is not None and found is None and reduce.axis == above.whole.axis
                if reduce in seen:
                    continue
                seen[reduce] = None
                made = Output("", self._laid_out(reduce), reduce)
                walked = self.at_positions and found is None and self._prefix(made) is not None
                if walked:
                    walk_along(reduce)
                else:
                    visit([reduce.body], found)
                if whole or walked or (found is not None and not shares and reduce not in kept):
                    self._store(reduce, stored)

        def walk_along(expr: Expr) -> None:
            prefixes = self._prefixes([expr])
            for reduce in self._reductions_beside(expr, prefixes) if self.at_positions else ():
                is_small = MUCH_LESS * self._positions(reduce) <= self._positions(expr)
                if is_small and self._scanned(reduce) is not None and reduce not in stored:
                    self._store(reduce, stored)
            for reduce in prefixes:
                seen[reduce] = None
                visit([reduce.body], self._scanned(reduce))

        for output in outputs:
            if output in apart or not kept.issuperset(self._prefixes([output.expr])):
                visit([output.expr], None)
            else:
                walk_along(output.expr)
        self._store_summed(seen, stored)

    def _store_summed(self, seen: Iterable[Reduce], stored: dict[Expr, Output]) -> None:
        """Adds the sums that several prefixes fold at each position, one of them in a kernel of its own: then all of these fold the same numbers, and
        differences of prefixes are what lies between."""
        readers: dict[Expr, dict[Expr, list[Reduce]]] = {}
        apart: set[Expr] = set()
        for reduce in seen:
            if reduce.op != "sum" or self._scanned(reduce) is None:
                continue
            own, _ = without_names(reduce)
            apart |= {own} if reduce in stored else set()
            for inner in frontier(reduce.body):
                while isinstance(inner.body, Reduce) and inner.op == inner.body.op:
                    inner = inner.body
                if inner.op == "sum" and self._scanned(inner) is None:
                    readers.setdefault(without_names(inner)[0], {}).setdefault(own, []).append(inner)
        for of in readers.values():
            if len(of) > 1 and not apart.isdisjoint(of):
                for inner in dict.fromkeys(each for found in of.values() for each in found):
                    if inner not in stored:
                        self._store(inner, stored)

    def _store(self, reduce: Reduce, stored: dict[Expr, Output]) -> None:
        stored[reduce] = Output(f"{self.stem}{len(stored) + 1}", self._laid_out(reduce), reduce)

    @staticmethod
    def _reductions_beside(expr: Expr, prefixes: Sequence[Reduce]) -> list[Reduce]:
        """The reductions of an expression that are not inside of these."""
        return reductions(replaced(expr, dict.fromkeys(prefixes, Const(0))))

    def _prefix(self, output: Output) -> Prefix | None:
        """The prefix that an output reads all its reductions of, in one walk along it; None where there are others, or none."""
        if not self.scans:
            return None
        found = {
            s.prefix if (s := self._scanned(r)) is not None else None for r in self._prefixes([output.expr])
        }
        match list(found):
            case [Prefix() as prefix] if prefix.at in output.axes:
                return prefix
        return None

    def _prefixes(self, exprs: Sequence[Expr]) -> list[Reduce]:
        """The outermost prefixes of expressions, and the other outermost reductions, apart from those over short axes that fold
        prefixes: such a fold is made at each position of the walk."""
        found: dict[Reduce, None] = {}
        for reduce in frontier(*exprs):
            inner = self._prefixes([reduce.body]) if self._scanned(reduce) is None else []
            axes = {
                self.alike.get(s.prefix.at, s.prefix.at) for r in inner if (s := self._scanned(r)) is not None
            }
            if (
                axes
                and self._is_short_fold(reduce, inner)
                and self.alike.get(reduce.axis, reduce.axis) not in axes
            ):
                found |= dict.fromkeys(inner)
            else:
                found[reduce] = None
        beside = self._beside(found)
        return [reduce for reduce in found if reduce not in beside]

    def _is_short_fold(self, reduce: Reduce, prefixes: Sequence[Reduce]) -> bool:
        """Whether one block folds states of a walk at each position: all of what it contracts with one tensor, and of the states."""
        folded = {r.axis for r in reductions(reduce) if not set(prefixes).isdisjoint(reductions(r.body))}
        beside = replaced(reduce, dict.fromkeys(prefixes, Const(0)))
        operands = [folded & free_axes(node) for node in walk(beside) if isinstance(node, Load)]
        return (
            self._size([reduce.axis]) <= WHOLE_LIMIT
            and max(map(self._size, operands), default=1) <= WHOLE_LIMIT
            and self._size(folded) <= MOST_STATES
        )

    def _beside(self, found: Collection[Reduce]) -> set[Reduce]:
        """Which of these are folded anew at each position of the walk along which the one with the most work is a prefix."""
        prefixes = [(reduce, s) for reduce in found if (s := self._scanned(reduce)) is not None]
        if not self.at_positions or not prefixes:
            return set()
        _, most = max(prefixes, key=lambda each: work(each[0], self.extents))
        walked = {reduce.axis for reduce, s in prefixes if s.prefix == most.prefix}
        return {
            reduce
            for reduce in found
            if ((s := self._scanned(reduce)) is None or s.prefix != most.prefix)
            and self.extents.get(reduce.axis, 1) <= WHOLE_LIMIT
            and most.prefix.at in free_axes(reduce)
            and walked.isdisjoint(inner.axis for inner in reductions(reduce))
            and not any(self._is_as_long(inner.axis, most.prefix.at) for inner in reductions(reduce.body))
        }

    def _is_as_long(self, axis: str, other: str) -> bool:
        return self.alike.get(axis, axis) == self.alike.get(other, other)

    def _apart(self, outputs: Sequence[Output]) -> list[Output]:
        """The outputs, with what cannot be walked in one kernel stored by another."""
        made = list(outputs)
        names = Names((output.name for output in outputs), between="")
        index = 0
        while index < len(made):
            steps = self._in_order(made[index])
            cut = None if steps else next(iter(self._walked_and_kept([made[index].expr])), None)
            if cut is None:
                index += 1
                continue
            free = tuple(axis for axis in self.order if axis in free_axes(cut))
            name = names.numbered(self.stem)
            read = {cut: Load(name, tuple(map(Axis, free)))}
            made = [Output(name, free, cut), *(replace(o, expr=replaced(o.expr, read)) for o in made)]
            index = 0
        return made

    def _walked_and_kept(self, exprs: Sequence[Expr]) -> list[Reduce]:
        """Reductions over a long axis, all positions of which a reduction over another axis would keep meanwhile."""
        members = self._members(exprs)
        return [
            r
            for r in members
            if not self._is_short(r) and any(r.axis in free_axes(q) for q in members if q.axis != r.axis)
        ]

    def _find_operands(self, output: Output, stored: dict[Expr, Output]) -> set[Expr]:
        """Adds the computed factors of an output's sums that blocks would make again, and that end in a cast or are made of sums
        at each position of the axis; and the reductions that they share with the output, which are given back: one kernel makes both."""
        shared: set[Expr] = set()
        tops = frontier(output.expr)
        for reduce in tops:
            product = factors(reduce.body)
            for factor in product.over if reduce.op == "sum" else ():
                factor, _ = unmasked(factor, free_axes)
                if not isinstance(factor, Call) or self._again(factor, output.axes) <= 1:
                    continue
                inside = list[Reduce]()
                match factor:
                    case Call(dtype, (Call() as made,)) if dtype in CASTS and not self._is_outer(factor):
                        inside = [
                            r for r in reductions(made) if r in tops and self._again(r, output.axes) > 1
                        ]
                        axes = tuple(axis for axis in self.order if axis in free_axes(factor))
                        operand = Output("", axes, factor, dtype)
                    case _ if self._is_made_of_sums(factor, reduce.axis):
                        factor = self._with_others(reduce.body, factor)
                        narrow = self._multiplied_in(product, factor, reduce.axis)
                        operand = Output("", self._laid_out(factor), factor, narrow)
                    case _:
                        continue
                shared.update(inside)
                for each in inside:
                    axes = tuple(axis for axis in self.order if axis in free_axes(each))
                    stored.setdefault(each, Output(f"{self.stem}{len(stored) + 1}", axes, each))
                stored.setdefault(factor, replace(operand, name=f"{self.stem}{len(stored) + 1}"))
        return shared

    def _with_others(self, body: Expr, factor: Expr) -> Expr:
        """The largest product inside of a sum's body that a factor is in with others along no axis that it lacks: what reads it reads
        one tensor, which is rounded once."""
        axes = free_axes(factor)
        found = [
            node
            for node in walk(body)
            if factor in (part := factors(node)).over
            and all(free_axes(each) <= axes for each in (*part.over, *part.under))
        ]
        return found[-1] if found else factor  # a negation under a mask is none of the factors

    def _is_made_of_sums(self, factor: Expr, axis: str) -> bool:
        """Whether a factor has a sum of its own at each position of an axis, and no more positions than a tensor that it reads. One that a
        mask makes 0 stays in the loop that the mask cuts: who reads what is stored knows of no mask."""
        inside = (inner for inner in frontier(factor) if inner.axis != axis and axis in free_axes(inner))
        if not any(inner.op == "sum" for inner in inside) or self._expands(factor):
            return False
        return not any(zero_without(factor, lambda condition: axis in free_axes(condition)))

    def _multiplied_in(self, product: Product, factor: Expr, axis: str) -> str | None:
        """The narrow dtype to which a matrix product rounds a computed operand: that of its other one, where that is loaded. None
        where it rounds it to none, or the operand has more factors."""
        found = contraction(
            product, axis, free_axes, lambda axes: tuple(each for each in self.order if each in axes)
        )
        if found is None or not (found.rows and found.columns):
            return None
        own = factors(factor)
        sides = ((found.left, found.right), (found.right, found.left))
        other = next((b for a, b in sides if {*a.over} == {*own.over} and {*a.under} == {*own.under}), None)
        if other is None:
            return None
        dtype = self.dtypes.get(other.read.tensor, "f32") if other.read is not None else "f32"
        if dtype not in HALF or "f64" in self.dtypes.values():
            return None
        return "bf16" if dtype in FLOAT8 else dtype

    def _expands(self, expr: Expr) -> bool:
        """Whether an expression has more positions than each tensor that it reads (as an outer product has)."""
        loads = [node for node in walk(expr) if isinstance(node, Load)]
        return self._positions(expr) > max((self._positions(load) for load in loads), default=0)

    def _is_outer(self, expr: Expr) -> bool:
        """Whether an expression has more positions than each tensor that it reads, and than what it is reduced from."""
        inside = (self._positions(reduce) for reduce in frontier(expr))
        return self._expands(expr) and self._positions(expr) > max(inside, default=0)

    def _positions(self, expr: Expr) -> int:
        return self._size(free_axes(expr))

    def _find_cuts(
        self,
        expr: Expr,
        axes: Iterable[str],
        stored: dict[Expr, Output],
        seen: set[tuple[Expr, frozenset[str], bool]],
        *,
        nested: bool = False,
    ) -> None:
        """Adds the reductions below `expr` that are stored; `axes` are the reader's parallel axes, and `nested` it is where it
        is inside another loop. What was `seen` there adds nothing again: layers read those before them several times."""
        parallel = frozenset(axes) - {r.axis for r in frontier(expr)}
        if (expr, parallel, nested) in seen:
            return
        seen.add((expr, parallel, nested))
        for reduce in frontier(expr):
            statistics = self._statistics(reduce, parallel)
            read = self._inner(self._cascade(reduce, statistics))
            cut = [each for each in read if self._is_cut(each, reduce, parallel, nested=nested)]
            beside = [
                each for one in cut for each in self._cascade(one)
            ]  # made by the pass of what is stored
            stores = {*statistics, *cut, *beside}
            for inner in (*statistics, *read):
                if inner in stored:
                    continue
                if inner in stores:
                    self._find_cuts(inner, self._laid_out(inner), stored, seen)
                    self._store(inner, stored)
                else:
                    self._find_cuts(inner, parallel | {reduce.axis}, stored, seen, nested=True)

    def _laid_out(self, expr: Expr) -> tuple[str, ...]:
        """The axes of what is stored. Made of one tensor, it has that one's order, in which a reader walks both; made of several, the order
        of the output that shares most axes with it. The axes of tiles come last, unless the tensor's contiguous axis is kept."""
        free = [axis for axis in self.order if axis in free_axes(expr)]
        loads = (node for node in walk(expr) if isinstance(node, Load) and free_axes(node) >= set(free))
        if (load := next(loads, None)) is not None:
            places = {a: place for place, at in reversed([*enumerate(load.index)]) for a in free_axes(at)}
            axes = tuple(sorted(free, key=places.__getitem__))
            if not free_axes(load.index[-1]).isdisjoint(axes):
                return axes
        else:
            like = max(self.layouts, key=lambda axes: len(set(free).intersection(axes)), default=())
            shared = iter([axis for axis in like if axis in free])
            axes = tuple(next(shared) if axis in like else axis for axis in free)
        return tuple(sorted(axes, key=self.tiled.__contains__))

    def _statistics(self, reduce: Reduce, parallel: frozenset[str]) -> list[Reduce]:
        """Reductions of the cascade of `reduce` that blocks would each compute again, although they cost little beside it: the
        means of a covariance. Stored beforehand, they leave one plain sum."""
        if not self.stores_statistics:
            return []
        return [
            each
            for each in self._cascade(reduce)[1:]
            if self._again(each, parallel - {reduce.axis}) > 1
            and not self._expands(each)
            and work(each, self.extents) < STATISTIC_SHARE * work(reduce, self.extents)
        ]

    def _again(self, expr: Expr, parallel: Iterable[str]) -> int:
        """Blocks along parallel axes that compute the same positions of an expression."""
        missing = [axis for axis in parallel if axis not in free_axes(expr)]
        return math.prod(math.ceil(self.extents.get(axis, 1) / NOMINAL_BLOCK) for axis in missing)

    def _cascade(self, reduce: Reduce, but: Collection[Reduce] = ()) -> list[Reduce]:
        """The reduction and those over the same axis that it reads directly, but for some and what they read."""
        found: dict[Reduce, None] = {}

        def visit(node: Reduce) -> None:
            if node not in found and node not in but:
                found[node] = None
                for inner in frontier(node.body):
                    if inner.axis == node.axis:
                        visit(inner)

        visit(reduce)
        return list(found)

    def _inner(self, group: Sequence[Reduce]) -> list[Reduce]:
        """Reductions over other axes that the bodies of a group read directly."""
        return list(
            dict.fromkeys(q for r in group for q in frontier(r.body) if q.axis != r.axis and q not in group)
        )

    def _is_cut(self, inner: Reduce, reader: Reduce, parallel: frozenset[str], *, nested: bool) -> bool:
        if (
            not self._is_lifted(inner, reader)
            and reader.axis in free_axes(inner)
            and any(r.axis == reader.axis for r in reductions(inner.body))
        ):
            return True  # it folds the whole of the axis that the reader's loop has only a tile of, unless that is kept whole
        again = self._again(inner, parallel - {reader.axis})
        allowed = self.recompute_share * work(reader, self.extents)
        if again > 1 and (again - 1) * work(inner, self.extents) > allowed:
            return True
        if (
            self.stores_statistics
            and not self._expands(inner)
            and (again > 1 or self._is_alone(inner, parallel))
        ):
            return True
        if not self._is_cascade(inner) or self.extents.get(inner.axis, 1) <= self.inner_limit:
            return False
        return nested or not self._is_lifted(inner, reader)  # what is lifted has a loop of its own

    def _is_alone(self, inner: Reduce, parallel: frozenset[str]) -> bool:
        """Whether few blocks would compute a reduction, one position after the other, that many could."""
        few = self.few * NOMINAL_BLOCK
        read = max((self._positions(node) for node in walk(inner.body) if isinstance(node, Load)), default=0)
        return self._size(parallel) < few < read and self._positions(inner) <= STATISTIC_SHARE * read

    def _size(self, axes: Iterable[str]) -> int:
        return math.prod(self.extents.get(axis, 1) for axis in axes)

    def _is_cascade(self, reduce: Reduce) -> bool:
        return len(self._cascade(reduce)) > 1 or bool(self._inner([reduce]))

    # -- what shares a kernel ----------------------------------------------------------------------

    def _cluster(self, outputs: Sequence[Output]) -> list[list[Output]]:
        """Outputs that share a reduction share a kernel, and so does one without any that reads, along the same axes, what the
        other reads already; unless one reads what the other stores."""
        clusters: list[list[Output]] = []
        folds = {output.name: set(reductions(output.expr)) for output in outputs}
        signatures = {
            output.name: (frozenset(output.axes), frozenset(r.axis for r in frontier(output.expr)))
            for output in outputs
        }
        for output in outputs:
            reads = {n.tensor for n in walk(output.expr) if isinstance(n, Load)}
            home = None
            if output.name in self.alone:
                clusters.append([output])
                continue
            for index in range(len(clusters) - 1, -1, -1):
                cluster = clusters[index]
                steps = self._in_order(cluster[0])
                if steps is not None and steps is self._in_order(output):
                    home = cluster
                    break
                if any(o.name in reads for o in cluster):
                    break
                if (
                    steps is not None
                    or self._in_order(output) is not None
                    or not self.alone.isdisjoint(o.name for o in cluster)
                ):
                    continue
                shares = any(folds[output.name] & folds[o.name] for o in cluster)
                alike = any(signatures[output.name] == signatures[o.name] for o in cluster)
                beside = any(_is_beside(output, o) or _is_beside(o, output) for o in cluster)
                walks = {self._prefix(o) for o in cluster} == {self._prefix(output)}
                if (
                    walks
                    and (shares or alike or beside)
                    and not self._walked_and_kept([o.expr for o in (*cluster, output)])
                ):
                    home = cluster
            if home is None:
                clusters.append([output])
            else:
                home.append(output)
        return clusters

    # -- what one kernel looks like ----------------------------------------------------------------

    def _passes(self, name: str, outputs: Sequence[Output], written: Sequence[str]) -> Cluster:
        if (steps := self._in_order(outputs[0])) is not None:
            return Cluster(name, tuple(sorted(outputs, key=lambda o: written.index(o.name))), (), steps)
        prefix = self._prefix(outputs[0])
        scans: dict[Expr, Scanned] = {
            reduce: scan
            for reduce in self._prefixes([o.expr for o in outputs])
            if prefix is not None and (scan := self._scanned(reduce)) is not None
        }
        scanned_axes = {scan.whole.axis for scan in list(scans.values())[:1]}  # its name is that of all
        wholes: dict[Expr, Expr] = {r: scan.along(axis) for r, scan in scans.items() for axis in scanned_axes}
        outputs = [replace(o, expr=replaced(o.expr, wholes)) for o in outputs]
        passes: dict[tuple[int, str], list[Reduce]] = {}
        members: Collection[Reduce] = self._members(list(wholes.values()) or [o.expr for o in outputs])
        walked = scanned_axes | {scan.prefix.at for scan in scans.values()}
        members = {r: None for r in members if r.axis in scanned_axes or walked.isdisjoint(free_axes(r))}
        for reduce, stage in _stages(members).items():
            passes.setdefault((stage, reduce.axis), []).append(reduce)
        found: list[AxisPass] = []
        values: dict[Reduce, Local] = {}
        named: set[str] = set()
        for (_, axis), reduces in sorted(passes.items(), key=lambda item: item[0][0]):
            again = sum(1 for each in found if each.axis == axis)
            plain = tuple(r for r in (replaced(r, values) for r in reduces) if isinstance(r, Reduce))
            for number in count(again + 1):  # the second sum over j is no sum over an axis j2 or j_2
                suffix = f"_{number}" if number > 1 else ""
                states = name_states(axis, plain, self.order, suffix)
                if named.isdisjoint(state.name for state in states):
                    break
            named |= {state.name for state in states}
            found.append(AxisPass(axis, plain, suffix, prefix if axis in scanned_axes else None))
            for reduce, state in zip(reduces, states, strict=False):
                values[reduce] = Local(state.name, state.dims)
        rewritten = tuple(Output(o.name, o.axes, replaced(o.expr, values), o.dtype) for o in outputs)
        return Cluster(name, rewritten, tuple(found))

    def _members(self, exprs: Sequence[Expr]) -> Collection[Reduce]:
        """The reductions that a kernel of these expressions has states for; others are inside their bodies."""
        tops = dict.fromkeys([*self._lifted(exprs), *frontier(*exprs)])
        return dict.fromkeys(r for top in tops for r in self._cascade(top))

    def _lifted(self, exprs: Sequence[Expr]) -> list[Reduce]:
        """Inner reductions computed before their reader's loop: those that do not depend on its axis, and
        those over all of a short axis that are a cascade, or share a pass with another over theirs. Each follows those that
        are computed before its own loop, which are found once however many read it."""
        found: dict[Reduce, None] = {}
        seen: set[Reduce] = set()

        def visit(tops: Sequence[Reduce]) -> None:
            walked = {top.axis for top in tops}
            for top in tops:
                for inner in self._inner(self._cascade(top)):
                    if self._is_lifted(inner, top) or (inner.axis in walked and self._is_short(top)):
                        if inner not in seen:
                            seen.add(inner)
                            visit([inner])
                        found[inner] = None

        visit(frontier(*exprs))
        return list(found)

    def _is_lifted(self, inner: Reduce, reader: Reduce) -> bool:
        if reader.axis not in free_axes(inner) or reader.axis == ranks_of(inner):
            return True
        return self._is_short(reader) and self._is_cascade(inner)

    def _is_short(self, reduce: Reduce) -> bool:
        """Whether an axis may be whole while another is walked; one of ranks always is."""
        return self.extents.get(reduce.axis, 1) <= self.lift_limit or reduce.axis in rank_axes(reduce.body)
