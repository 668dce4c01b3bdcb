"""Sums that are known already, found inside of others by interchanging sums.

    sum[j](p[i,j] * sum[e](g[i,e] * v[j,e]))  =  sum[e](g[i,e] * sum[j](p[i,j] * v[j,e]))  =  sum[e](g[i,e] * y[i,e])

where `y[i,e] = sum[j](p[i,j] * v[j,e])` is known. What stands inside is matched as products of factors, whatever the
names of the axes are. Factors that are products themselves count as what they multiply, and under a mask as what is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse.differentiate.polynomial import UNIT, Monomial, product, written
from eqfuse.differentiate.steps import Step, Steps, index_of, name_of, plain
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Scalar,
    Size,
    call,
    children,
    free_axes,
    substitute_axes,
)

Places = Mapping[str, Expr]
"""Positions that are put for axes."""


@dataclass(frozen=True)
class KnownSum:
    """The sum over `over` of a product, which is read as `name` at `axes`."""

    name: str
    axes: tuple[str, ...]
    over: tuple[str, ...]
    term: Monomial

    @staticmethod
    def of(step: Step, name: str, by_name: Mapping[str, Step]) -> KnownSum | None:
        """What a step sums, where that is a product; it is read as `name`."""
        if step.op != "sum":
            return None
        return KnownSum(name, step.axes, step.over, _multiplied(_term(step.body), by_name))


@dataclass(frozen=True)
class _Sum:
    """`term` summed over `over`."""

    over: tuple[str, ...]
    term: Monomial


def interchanged(
    step: Step, steps: Steps, by_name: Mapping[str, Step], known: Sequence[KnownSum]
) -> Step | None:
    """A sum made of a known one; None where there is none in it. Sums that are factors of it count as what they sum."""
    if step.op != "sum":
        return None
    own = _Sum(step.over, _multiplied(_term(step.body), by_name))
    for opened, whole in (("", own), *_expansions(own, step, steps, by_name)):
        for candidate in known:
            found = None if candidate.name == opened else _with(whole, candidate)
            if found is not None:
                value = _guarded(found.term)
                over = tuple(axis for axis in found.over if axis in free_axes(value))
                if len(over) == len(found.over):
                    return replace(step, body=value, over=over, op="sum" if over else "")
    return None


def _term(body: Expr) -> Monomial:
    """A product under masks to 0, as one term."""
    match body:
        case Call("where", (condition, part, Const(0))):
            return _term(part).masked(condition)
        case _:
            return product(body)


def _multiplied(term: Monomial, by_name: Mapping[str, Step]) -> Monomial:
    """A product with what its factors multiply in their place."""
    for factor, exponent in term.powers.items():
        inner = by_name.get(name_of(factor) or "")
        if exponent != 1 or inner is None or inner.op:
            continue
        made = _term(inner.body)
        if len(made.powers) > 1 or made.masks:
            at = dict(zip(inner.axes, index_of(factor), strict=True))
            made = made.mapped(lambda expr, at=at: substitute_axes(expr, at))  # type: ignore[misc]
            return _multiplied(term.with_factors_of(factor, made), by_name)
    return term


def _guarded(term: Monomial) -> Expr:
    value = written(replace(term, masks=()))
    for mask in reversed(term.masks):
        value = call("where", mask, value, Const(0))
    return value


def _expansions(
    whole: _Sum, step: Step, steps: Steps, by_name: Mapping[str, Step]
) -> Iterator[tuple[str, _Sum]]:
    """The sum, with what one of its factors sums put for that factor, whose name comes first."""
    for factor, exponent in whole.term.powers.items():
        inner = by_name.get(name_of(factor) or "")
        if exponent != 1 or inner is None or inner.op != "sum":
            continue
        apart = {axis: steps.another(axis) for axis in inner.over if axis in step.loops}
        at: dict[str, Expr] = dict(zip(inner.axes, index_of(factor), strict=True))
        at |= {axis: Axis(name) for axis, name in apart.items()}
        term = _multiplied(_term(inner.body), by_name).mapped(lambda expr, at=at: substitute_axes(expr, at))  # type: ignore[misc]
        rest = whole.term.times(Monomial(UNIT.number, {factor: -1}))
        over = (*whole.over, *(apart.get(axis, axis) for axis in inner.over))
        yield inner.name, _Sum(over, rest.times(term))


def _with(whole: _Sum, known: KnownSum) -> _Sum | None:
    """The sum with a known one put for the factors that make it."""
    for places in _matches(list(known.term.powers.items()), whole.term, {}, {*known.axes, *known.over}):
        over = [places[axis] for axis in known.over]
        names = [place.name for place in over if isinstance(place, Axis) and place.name in whole.over]
        if len(set(names)) < len(known.over):
            continue
        inside = known.term.mapped(lambda expr, places=places: substitute_axes(expr, places))  # type: ignore[misc]
        if not set(inside.masks) <= set(whole.term.masks):
            continue
        rest = whole.term.times(
            Monomial(1 / known.term.number, {factor: -n for factor, n in inside.powers.items()})
        )
        rest = replace(rest, masks=tuple(mask for mask in rest.masks if mask not in inside.masks))
        if rest.axes & set(names):
            continue
        value = substitute_axes(plain(known.name, known.axes), places)
        left = tuple(axis for axis in whole.over if axis not in names)
        return _Sum(left, rest.times(Monomial(UNIT.number, {value: 1})))
    return None


def _matches(
    pattern: Sequence[tuple[Expr, int]], term: Monomial, places: Places, holes: set[str]
) -> Iterator[Places]:
    """Every way to find the factors of a pattern among those of a term."""
    if not pattern:
        if holes <= places.keys():
            yield places
        return
    (factor, exponent), *rest = pattern
    for other, power in term.powers.items():
        if exponent * power > 0 and abs(power) >= abs(exponent):
            found = _unified(factor, other, places, holes)
            if found is not None:
                yield from _matches(rest, term, found, holes)


def _unified(pattern: Expr, expr: Expr, places: Places, holes: set[str]) -> Places | None:
    """The positions at which a pattern is an expression."""
    match pattern, expr:
        case (Axis(name), _) if name in holes:
            known = places.get(name)
            if known is None:
                return {**places, name: expr}
            return places if known is expr else None
        case (Load(name, _), Load(other, _)) | (Call(name, _), Call(other, _)) if name == other:
            found: Places | None = places
            for part, at in zip(children(pattern), children(expr), strict=True):
                found = None if found is None else _unified(part, at, found, holes)
            return found
        case (Const() | Scalar() | Axis() | Size(), _) if pattern is expr:
            return places
        case _:
            return None
