"""Groups and their merges as text, one line per state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eqfuse.rules.merge import Group
from eqfuse.terms.printer import show


@dataclass(frozen=True)
class MergeText:
    """The derived merges of a kernel. Prints; `groups` is the data."""

    groups: tuple[Group, ...]

    def __str__(self) -> str:
        return "\n\n".join(show_group(group) for group in self.groups) or "no reduction: nothing to merge"


def show_group(group: Group) -> str:
    """States, then the merge of two partial states, the update of a rolling loop, and final recoveries."""
    lines = [f"over {group.axis}:"]
    for state in group.states:
        note = "    # added to close the merge" if state.auxiliary else ""
        lines.append(f"    {state.name} = {state.op}[{group.axis}]({show(state.body)}){note}")
    if group.merge is None:
        lines.append("  not fused:")
        lines += [f"    {show(o.factor)}: {o.condition}" for o in group.obstacles]
        return "\n".join(lines)
    lines.append("  two parts a and b:")
    lines += [f"    {c.state}_new = {show(c.value)}" for c in group.merge.combine]
    lines.append("  what a loop has seen, and the next tile:")
    for update in group.merge.update:
        lines += [f"    {p.name} = {p.op}[{group.axis}]({show(p.body)})" for p in update.parts]
        lines.append(f"    {update.state}_new = {show(update.value)}")
    if group.merge.finish:
        lines.append("  at the end, where a factor was never invertible:")
        lines += [f"    {f.state} = {show(f.value)}" for f in group.merge.finish]
    return "\n".join(lines)


def why_not(groups: Iterable[Group]) -> tuple[str, ...]:
    """One sentence per obstacle: which reduction, which factor, which condition."""
    return tuple(
        f"{show(o.reduction)} is not fused: in {show(o.factor)}, {o.condition}"
        for g in groups
        for o in g.obstacles
    )
