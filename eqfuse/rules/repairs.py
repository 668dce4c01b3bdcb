"""How merges print what moves a state from one tag to another: as `ratio(old, new)`, or `shift(old, new)` where it is added.

    finite(exp(finite(m) - finite(m_new)))     ratio(m, m_new)          with  ratio(old, new) = exp(old - new)
    finite(sq(invertible(m) / invertible(n)))  ratio(m, n)                    ratio(old, new) = sq(old / new)
    finite(s / invertible(c)) - finite(n)      shift(s / c, n)                shift(old, new) = old - new
    where(s == 0, 0, f * s)                    f * s                    where f is one of these

Guards stand in neither, as a footnote says what they do. Another form in the same merge is `ratio2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from eqfuse.rules.guards import SCALES, SHIFTS, RepairGroup, accumulates, is_guard
from eqfuse.rules.split import GUARDS, reads_state
from eqfuse.terms.nodes import Call, Expr, Local, call, children, rebuild, transform, walk
from eqfuse.terms.printer import WRITTEN

OLD, NEW = Local("old", ()), Local("new", ())
"""What a form says of its arguments."""

FREE = "any finite number where a part has seen nothing"
"""Of every form: the state of such a part is the identity (docs/repairs.md)."""

_NAME = "repair:{}"
"""The function by which a repair stands in an expression."""

Repair = tuple[Expr, Expr, Expr]
"""A form of `old` and `new`, and what these are."""


@dataclass
class Repairs:
    """The notation of one text: the name of each form."""

    names: dict[Expr, str] = field(default_factory=dict)
    _shown: dict[Expr, Expr] = field(default_factory=dict)

    def shown(self, value: Expr) -> Expr:
        """A value of a merge with its repairs in this notation."""
        if value not in self._shown:
            self._shown[value] = self._show(value)
        return self._shown[value]

    def _show(self, value: Expr) -> Expr:
        for group, name in ((SCALES, "ratio"), (SHIFTS, "shift")):
            if (found := _repair(value, group, within=False)) is not None:
                form, old, new = found
                return Call(_NAME.format(self._name(form, name)), (old, new))
        match value:
            case Call("where", (Call("eq", (state, nothing)), kept, Call("mul", factors) as moved)) if (
                nothing is kept and state in factors and (made := self.shown(moved)) is not moved
            ):
                return made
            case Call("finite", (inner,)) if not accumulates(inner) and (
                (made := self.shown(inner)) is not inner
            ):
                return made
            case _ if is_guard(value) or not reads_state(value):
                return value
        return rebuild(value, tuple(map(self.shown, children(value))))

    def _name(self, form: Expr, stem: str) -> str:
        if form not in self.names:
            taken = sum(name.startswith(stem) for name in self.names.values())
            self.names[form] = f"{stem}{taken + 1}" if taken else stem
        return self.names[form]

    def forms(self, values: Iterable[Expr]) -> list[tuple[str, Expr]]:
        """`ratio(old, new)` and what it is, for each form that these values read."""
        read = {node.fn for node in walk(*values) if isinstance(node, Call)}
        return [
            (f"{name}(old, new)", form) for form, name in self.names.items() if _NAME.format(name) in read
        ]


def written_name(fn: str) -> str:
    """The name that a function is printed with: `ratio`."""
    return fn.removeprefix(_NAME.format(""))


def _repair(value: Expr, group: RepairGroup, within: bool) -> Repair | None:
    """The form and the two sides of a value in a group that is made of one quotient of guarded states, or one difference.
    `within` an exponent, numbers may scale the difference."""
    found: Repair | None = None
    around: Callable[[Expr], Expr]
    match value:
        case Call(group.quotient, (a, b)) if _is_side(a) and _is_side(b) and _is_new(a) is not _is_new(b):
            old, new = (b, a) if _is_new(a) else (a, b)
            form = call(group.quotient, *((NEW, OLD) if _is_new(a) else (OLD, NEW)))
            return form, _unguarded(old), _unguarded(new)
        case Call("finite", (a,)):
            return _repair(a, group, within)
        case Call("exp", (a,)) if group is SCALES:
            found, around = _repair(a, SHIFTS, True), lambda form: call("exp", form)
        case Call(fn, (a,)) if fn in group.functions and (within or group is SCALES):
            found, around = _repair(a, group, within), lambda form: call(fn, form)
        case Call("mul" | "div" as fn, (a, k)) if within and not reads_state(k):
            found, around = _repair(a, group, within), lambda form: call(fn, form, k)
        case Call("mul", (k, a)) if within and not reads_state(k):
            found, around = _repair(a, group, within), lambda form: call("mul", k, form)
    return None if found is None else (around(found[0]), *found[1:])


def _is_side(value: Expr) -> bool:
    """Whether a value is made of guarded states, all of the parts or all of the union."""
    ends = {node.name.endswith("_new") for node in walk(value) if isinstance(node, Local)}
    return len(ends) == 1 and not accumulates(value)


def _is_new(side: Expr) -> bool:
    return any(isinstance(node, Local) and node.name.endswith("_new") for node in walk(side))


def _unguarded(side: Expr) -> Expr:
    def step(node: Expr) -> Expr:
        match node:
            case Call(fn, (a,)) if fn in GUARDS:
                return a
            case Call("where", (Call("eq", (a, b)), c, _)) if a is b is c:  # `finite` of what is NaN at first
                return a
            case _:
                return node

    return transform(side, step)


def _written(node: Expr, text: Callable[[Expr], str]) -> str | None:
    match node:
        case Call(fn, args) if fn.startswith(_NAME.format("")):
            return f"{written_name(fn)}({', '.join(map(text, args))})"
        case _:
            return None


WRITTEN.append(_written)
