"""Groups and their merges as text, one line per state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eqfuse.rules.merge import Group
from eqfuse.rules.repairs import FREE, Repairs
from eqfuse.terms.folds import combined, fold_of, ranks_of
from eqfuse.terms.nodes import Call, Const, Expr, Local, Reduce, children, replaced, transform, walk
from eqfuse.terms.printer import show


@dataclass(frozen=True)
class MergeText:
    """The derived merges of a kernel. Prints; `groups` is the data."""

    groups: tuple[Group, ...]

    def __str__(self) -> str:
        return self._shown(loops=True)

    @property
    def of_parts(self) -> str:
        """The merges of two parts alone, without what loops make of them."""
        return self._shown(loops=False)

    def _shown(self, *, loops: bool) -> str:
        shown = "\n\n".join(show_group(group, loops=loops) for group in self.groups)
        return shown or "no reduction: nothing to merge"


def show_group(group: Group, *, loops: bool = True) -> str:
    """States, then the merge of two partial states, the update of a rolling loop, and final recoveries; repairs in
    the notation of rules/repairs.py."""
    lines = [f"over {group.axis}:"]
    for state in group.states:
        note = "    # added to close the merge" if state.auxiliary else ""
        lines.append(f"    {state.name} = {show(Reduce(state.op, group.axis, state.body))}{note}")
    if group.merge is None:
        lines.append("  not fused:")
        lines += [f"    {show(o.factor)}: {o.condition}" for o in group.obstacles]
        return "\n".join(lines)
    repairs = Repairs()
    parts = [(f"{c.state}_new", repairs.shown(_combined(c.value))) for c in group.merge.combine]
    steps: list[tuple[str, Expr]] = []
    for update in group.merge.update:
        steps += [(part.name, Reduce(part.op, group.axis, part.body)) for part in update.parts]
        steps.append((f"{update.state}_new", repairs.shown(_combined(update.value))))
    lines.append("  two parts a and b:")
    lines += _section(parts)
    for name, form in repairs.forms(value for _, value in (*parts, *(steps if loops else ()))):
        lines.append(f"    {name} = {show(form)}    # {FREE}")
    if not loops:
        return "\n".join(lines)
    lines.append("  what a loop has seen, and the next tile:")
    lines += _section(steps)
    if group.merge.finish:
        lines.append("  at the end, where a factor was never invertible:")
        lines += _section([(f.state, f.value) for f in group.merge.finish])
    return "\n".join(lines)


def _combined(value: Expr) -> Expr:
    """With the combinations of registered folds written out; an order is said by its name alone."""

    def step(node: Expr) -> Expr:
        found = fold_of(node.fn) if isinstance(node, Call) else None
        return node if found is None or found[0].order else combined(node)

    return transform(value, step)


def _section(steps: Sequence[tuple[str, Expr]]) -> Iterator[str]:
    """Lines `name = value`; what several of them repeat is written once, before its first use, as r1, r2, ..."""
    lists = {
        part for _, value in steps for node in walk(value) if ranks_of(node) for part in walk(*children(node))
    }
    uses = Counter(part for node in walk(*(value for _, value in steps)) for part in children(node))
    repeated = {
        node for node, count in uses.items() if count > 1 and node not in lists and _joins_states(node)
    }
    names: dict[Expr, Expr] = {}
    for name, value in steps:
        for node in walk(value):
            if node in repeated and node not in names:
                text = show(replaced(node, names))
                names[node] = Local(f"r{len(names) + 1}", ())
                yield f"    {names[node]} = {text}"
        yield f"    {name} = {show(replaced(value, names))}"


def _joins_states(expr: Expr) -> bool:
    """Whether `expr` is made of two states or more, and of nothing that varies."""
    found = list(walk(expr))
    return (
        all(isinstance(n, Call | Local | Const) for n in found)
        and sum(isinstance(n, Local) for n in found) > 1
    )
