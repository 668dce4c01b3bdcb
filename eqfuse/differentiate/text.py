"""Steps as a source text: what the outputs need, in order, with the declarations that it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from eqfuse.differentiate.steps import Step, Steps, index_of, name_of
from eqfuse.names import Names
from eqfuse.terms.expressions import distance_of
from eqfuse.terms.nodes import (
    Axis,
    Expr,
    Load,
    Reduce,
    Scalar,
    Size,
    children,
    free_axes,
    post_order,
    rebuild,
    walk,
)
from eqfuse.terms.printer import show
from eqfuse.terms.promises import ascends

LONGEST_INLINED = 48
"""Letters of a value that is written where it is read, if it is read once."""


_NOTHING: Mapping[str, str] = MappingProxyType({})


def text_of(
    steps: Steps,
    outputs: Sequence[Step],
    notes: Sequence[str] = (),
    *,
    given: Collection[str] = (),
    at_most: Sequence[tuple[Expr, Expr]] = (),
    dtypes: Mapping[str, str] = _NOTHING,
) -> str:
    """The text of a program with these outputs, made of all other steps that they need but for those that are `given`,
    as inputs. `at_most` are pairs of values of which it says that the first is at most the second; `dtypes` are those of
    some outputs."""
    known = {step.name: step for step in steps.steps if step.name not in given}
    needed = needed_steps(known, outputs, [each.axis for each in steps.program.in_order])
    names, domains = Names(steps.names.taken), dict(steps.domains)
    moved: dict[str, str] = {}
    written = _inlined(needed, outputs, [side for pair in at_most for side in pair])
    if any(map(_is_computed, written)):
        written = [_with_sizes(step, names, domains, moved) for step in written]
    at_most = [
        (_with_known_sizes(a, domains, moved), _with_known_sizes(b, domains, moved)) for a, b in at_most
    ]
    exprs = [step.value for step in written]
    axes = {axis for step in written for axis in step.axes}
    axes |= {node.axis for node in walk(*exprs) if isinstance(node, Reduce)}
    promised = [side for pair in at_most for side in pair]
    sizes = {node.axis: None for node in walk(*exprs, *promised) if isinstance(node, Size)}
    # The size of an axis that nothing runs along: a copy of the axis makes its name known.
    copies = {
        names.numbered(axis): axis
        for axis in sizes
        if domains.get(axis, axis) not in axes and axis not in moved.values()
    }
    axes |= sizes.keys()
    reads = {name_of(node) for node in walk(*exprs)}
    lines = [text for name, text in steps.declared.items() if name in reads]
    lines += [
        f"{s.name}: {dtypes[s.name]}" + (f"[{', '.join(s.axes)}]" if s.axes else "")
        for s in outputs
        if s.name in dtypes
    ]
    lines += [f"{axis}: axis[{of}]" for axis, of in domains.items() if axis in axes]
    lines += [f"{copy}: axis[{domains.get(axis, axis)}]" for copy, axis in copies.items()]
    used = axes | {domains.get(axis, axis) for axis in axes}
    lines += [f"{axis}: axis[{count}]" for axis, count in steps.lengths.items() if axis in used]
    lines += [f"{axis}: axis[{show(count)}]" for axis, count in steps.computed.items() if axis in used]
    lines += map(_line, written)
    ascending = [pair for pair in steps.program.at_most if _ascends_in(pair, reads, axes)]
    lines += [f"assert {show(left)} <= {show(right)}" for left, right in (*at_most, *ascending)]
    lines += [f"# {note}" for note in dict.fromkeys(notes)]
    return "\n".join([*lines, f"return {', '.join(step.name for step in outputs)}"])


def _ascends_in(pair: tuple[Expr, Expr], reads: Collection[str | None], axes: Collection[str]) -> bool:
    """Whether a promise is that a tensor ascends which a text with these axes reads."""
    found = ascends(*pair)
    return found is not None and found[0] in reads and free_axes(pair[0]) <= set(axes)


def _is_computed(step: Step) -> bool:
    """Whether a step reads something at a computed position."""
    reads = (node for node in walk(step.body) if isinstance(node, Load))
    return any(not isinstance(part, Axis) for read in reads for part in read.index)


def _with_sizes(step: Step, names: Names, domains: dict[str, str], moved: dict[str, str]) -> Step:
    """The step with sizes read from copies of their axes: these have the size that is meant, whatever is put for the axis
    where the step, or one that reads it, is read."""
    sizes = {node.axis for node in walk(step.body) if isinstance(node, Size)}
    for axis in sorted(sizes - moved.keys()):
        base = domains.get(axis, axis)
        moved[axis] = names.numbered(base)
        domains[moved[axis]] = base
    values: dict[Expr, Expr] = {Size(axis): Size(moved[axis]) for axis in sizes}
    return replace(step, body=_replaced(step.body, values)) if sizes else step


def _with_known_sizes(expr: Expr, domains: Mapping[str, str], moved: Mapping[str, str]) -> Expr:
    """A side of a promise with sizes read from axes that the text has."""
    sizes = {node.axis for node in walk(expr) if isinstance(node, Size)}
    known: dict[Expr, Expr] = {Size(axis): Size(moved.get(axis, domains.get(axis, axis))) for axis in sizes}
    return _replaced(expr, known) if sizes else expr


def _line(step: Step) -> str:
    left = f"{step.name}[{', '.join(step.axes)}]" if step.axes else step.name
    return f"{left} = {show(step.value)}"


def needed_steps(
    known: Mapping[str, Step], outputs: Sequence[Step], in_order: Collection[str] = ()
) -> list[Step]:
    """The steps that the outputs are made of, and the outputs: what is read comes first, but for what steps of a recurrence read of
    each other at other positions of an axis that it goes along `in_order`."""
    below: dict[str, list[Step]] = {}

    def reads(step: Step) -> list[Step]:
        if step.name not in below:
            names = dict.fromkeys(name_of(node) or "" for node in walk(step.value))
            below[step.name] = [known[name] for name in names if name in known and known[name] is not step]
        return below[step.name]

    found = list(post_order(outputs, reads))
    places = {step.name: place for place, step in enumerate(found)}
    if all(places[read.name] < places[step.name] for step in found for read in reads(step)):
        return found
    after_it = {step.name: {each.name for each in post_order(reads(step), reads)} for step in found}

    def reads_here(step: Step) -> list[Step]:
        """What a step reads but for what comes after it and is read at another position."""
        moved = {
            name_of(node)
            for node in walk(step.value)
            for at in index_of(node)
            if any(distance_of(at, axis, after) for axis in in_order for after in (False, True))
        }
        return [r for r in reads(step) if r.name not in moved or step.name not in after_it[r.name]]

    return list(post_order(found, reads_here))


def _inlined(steps: Sequence[Step], outputs: Sequence[Step], beside: Sequence[Expr]) -> list[Step]:
    """The steps with what is short, read once and nobody's own name written where it is read. `beside` are read too."""
    final = {step.name for step in outputs}
    reads: Counter[str] = Counter()
    for expr in beside:
        reads.update(dict.fromkeys(_occurrences(expr), 2))
    for step in steps:
        reads.update(_occurrences(step.value))
    kept: list[Step] = []
    short: dict[Expr, Expr] = {}
    for step in steps:
        body = _replaced(step.body, short)
        made = replace(step, body=body)
        once = reads[step.name] == 1 and not step.written and step.name not in final
        is_all = once and any(reader.body is step.itself for reader in steps)
        if is_all or (once and len(show(made.value)) <= LONGEST_INLINED and _is_read_plainly(step, steps)):
            short[step.itself] = made.value
        else:
            kept.append(made)
    return kept


def _is_read_plainly(step: Step, steps: Sequence[Step]) -> bool:
    """Whether the one read of a step is at its own axes, and a sum is not made again for every position of another."""
    for reader in steps:
        if step.itself in walk(reader.body):
            return not (step.over and reader.over) and not set(step.over) & set(reader.loops)
    return False


def _occurrences(expr: Expr) -> Counter[str]:
    """How often each name is written."""
    found: Counter[str] = Counter()
    stack = [expr]
    while stack:
        node = stack.pop()
        if isinstance(node, Load | Scalar):
            found[name_of(node) or ""] += 1
        stack.extend(children(node))
    return found


def _replaced(expr: Expr, values: dict[Expr, Expr]) -> Expr:
    memo: dict[Expr, Expr] = {}
    for node in walk(expr):
        memo[node] = values.get(node) or rebuild(node, tuple(memo[part] for part in children(node)))
    return memo[expr]
