"""`eq.rule` and `eq.rules`: rules as data, tried on numbers before they are used, in force where they are asked for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import product

import numpy as np

from eqfuse.errors import EqfuseError, did_you_mean, require_text
from eqfuse.extend.laws import Draw, Near, differs, gained, numbers_around
from eqfuse.extend.patterns import Pattern, conditions, expression, named_domains, term
from eqfuse.extend.programs import compared, of_rule
from eqfuse.extend.worlds import POSITIONS, SAMPLES, World
from eqfuse.rules.catalogue import EVERY
from eqfuse.rules.rule import PARTS, Rewrite, to_egglog
from eqfuse.rules.scope import Rule, RuleScope, current
from eqfuse.terms.domain import Domain
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.python import parsed
from eqfuse.terms.syntax import Source
from eqfuse.verify.field.choice import primes_for
from eqfuse.verify.field.domain import FieldDomain

ENOUGH = 8
"""Samples that have to meet a rule's condition."""

ROUNDS = 6
"""Times that samples are drawn, at most, to find them."""


def rule(
    name: str,
    left: str,
    right: str,
    *,
    when: str | Sequence[str] = "",
    why: str = "",
    unverified: str | None = None,
) -> Rule:
    """A rule: `left` may be rewritten to `right` wherever `when` holds. It is in force inside `eq.rules(rule)`.

    Both sides are expressions of the language over pattern variables; the axis of a reduction is a variable too, or
    `A`, `B`, `AB`: the two parts of a split axis, and their union. `when` is a list of conditions, with commas or as a sequence: `fixed(c, j)`
    (c does not vary along j), `nonneg(c)`, `le(a, b)`, `factors(e, c, m, j)` (e = c m with c fixed along j),
    `addends(e, c, m, j)` (e = c + m), `state(s)` (s is an accumulator), `p == q`, `p != q`.

    Raises EqfuseError: text that is no pattern (with a caret), variables of `right` that nothing binds, a name that a
    shipped rule has, a condition that no sample meets, and a sample on which the sides differ, with that sample. What
    samples cannot decide must be declared, `unverified="reason"`; certificates of programs that used it say so.
    """
    require_text(name=name, left=left, right=right, why=why)
    for fact in (when,) if isinstance(when, str) or not isinstance(when, Iterable) else when:
        require_text(when=fact)
    facts = when if isinstance(when, str) else ", ".join(when)
    found = Rule(name, left, right, facts, why, unverified, _rewrite(name, left, right, facts, why))
    if unverified is None:
        check_rule(found)
        check_as_programs(found)
    return found


def _rewrite(name: str, left: str, right: str, when: str, why: str) -> Rewrite:
    if not name or not all(part.isalnum() for part in name.replace("_", "-").split("-")):
        raise EqfuseError(f"{name!r} cannot be the name of a rule", hint="use letters, digits and -")
    if name in shipped():
        raise EqfuseError(f"rule {name!r} is shipped already", hint="choose another name")
    sides = [Source.of(text) for text in (left, right)]
    subject, result = (term(source, expression(source)) for source in sides)
    facts = conditions(when)
    if isinstance(expression(sides[0]), ast.Name):
        hint = "it would match everything: write a function or a reduction around it"
        raise EqfuseError(f"the left side of rule {name!r} is a variable", source=left, hint=hint)
    _check_bound(name, sides[1], subject, result, facts)
    made = Rewrite(name, subject.text, result.text, tuple(fact.text for fact in facts), why)
    try:
        to_egglog(made, "registered")
    except ValueError as error:
        raise EqfuseError(str(error), hint="write both sides as expressions of the language") from None
    return made


def _check_bound(name: str, source: Source, left: Pattern, right: Pattern, facts: Sequence[Pattern]) -> None:
    known = left.variables.union(*(fact.variables for fact in facts))
    domains = left.domains.union(*(fact.domains for fact in facts)).union(PARTS)
    for node in ast.walk(expression(source)):
        match node:
            case ast.Name(id=variable) if variable in right.variables - known:
                what = "variable"
            case ast.Name(id=variable) if variable in right.domains - domains:
                what = "axis"
            case _:
                continue
        hint = "every name on the right stands on the left or in the condition"
        raise source.error(f"{what} {variable!r} of rule {name!r} is not bound", node, hint, EqfuseError)
    parts = left.domains & set(PARTS)
    if parts and any(True for _ in named_domains(left)):
        raise EqfuseError(
            f"rule {name!r} mixes parts of an axis with axes",
            hint="write A, B and AB, or an axis of your own",
        )


# -- trying it -------------------------------------------------------------------------------------


def check_rule(rule: Rule, *, defined: bool = True) -> None:
    """Raises EqfuseError for a rule that a sample refutes, or that no sample meets the condition of. Both sides have to
    have values for the same numbers, unless it is not asked that they be `defined` alike."""
    primes = primes_for(_functions_in(rule))
    floats, field_, exact = FloatDomain("float64"), FieldDomain(*primes, seed=1), FieldDomain(*primes, seed=2)
    near = Near(_numbers_in(rule))
    draws: tuple[tuple[Domain, Draw], ...] = (
        (floats, _readable),
        (floats, _plain),
        (field_, _plain),
        (exact, near),
    )
    met = decided = 0
    with np.errstate(all="ignore"):
        for (domain, draw), positions in product(draws, POSITIONS):
            for seed in range(ROUNDS):
                found, known = _tried(rule, World(rule.rewrite, domain, draw, seed, positions), defined)
                met, decided = met + found, decided + known
                if found >= ENOUGH:
                    break
    if met == 0:
        hint = "no sample meets it: look for facts that exclude each other"
        raise EqfuseError(f"the condition of rule {rule.name!r} never holds: {rule.when}", hint=hint)
    if decided == 0:
        hint = 'neither side has a value there; if you are sure, say why: unverified="reason"'
        raise EqfuseError(f"rule {rule.name!r}: no sample decides it", hint=hint)


def check_as_programs(rule: Rule) -> None:
    """Raises EqfuseError for a rule whose sides are told apart as programs are, and for one with a branch of which no inputs take a
    side."""
    pair = of_rule(rule)
    found = compared(pair) if pair is not None else None
    if found is None:
        return
    if found.counterexample is not None:
        lines = "".join(f"\n    {line}" for line in str(found.counterexample).splitlines())
        raise EqfuseError(f"rule {rule.name!r} is not true{lines}", hint=_EQUAL)
    if found.untaken:
        hint = 'no inputs were found that take it; if you are sure, say why: unverified="reason"'
        sides = "; ".join(found.untaken)
        raise EqfuseError(f"rule {rule.name!r}: no sample decides a side of a branch: {sides}", hint=hint)


_EQUAL = "the sides must be equal wherever the condition holds"


def _numbers_in(rule: Rule) -> tuple[float, ...]:
    sides = (ast.walk(parsed(text)) for text in (rule.rewrite.left, rule.rewrite.right))
    constants = (node.value for side in sides for node in side if isinstance(node, ast.Constant))
    return numbers_around(float(value) for value in constants if isinstance(value, int | float))


def _functions_in(rule: Rule) -> set[str]:
    sides = (ast.walk(parsed(text)) for text in (rule.rewrite.left, rule.rewrite.right))
    calls = (node.func for side in sides for node in side if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _tried(rule: Rule, world: World, defined: bool) -> tuple[int, int]:
    """How many samples met the condition, and how many of those had values to compare."""
    sides = [parsed(text) for text in (rule.rewrite.left, rule.rewrite.right)]
    try:
        left, right = (world.value(side) for side in sides)
        met = world.met()
    except ValueError as error:
        hint = 'state variables of registered reductions are not tried; if you are sure, say why: unverified="reason"'
        raise EqfuseError(f"rule {rule.name!r} cannot be tried: {error}", hint=hint) from None
    wrong, known = differs(world.domain, left, right, of_numbers=isinstance(world.draw, Near))
    wrong, known = wrong & met[:, None, None], known & met[:, None, None]
    if wrong.any():
        raise _refused(rule, world, left, right, wrong)
    if defined and isinstance(world.domain, FloatDomain):
        alone = gained(left, right) & met[:, None, None]
        if alone.any():
            raise _refused(rule, world, left, right, alone, _ALONE)
    return int(met.sum()), int(known.reshape(SAMPLES, -1).any(1).sum())


def _refused(
    rule: Rule,
    world: World,
    left: object,
    right: object,
    wrong: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    hint: str = _EQUAL,
) -> EqfuseError:
    at = tuple(int(k) for k in np.argwhere(wrong)[0])
    values = [_number(side, at) for side in (left, right)]
    if not world.values:
        return EqfuseError(
            f"rule {rule.name!r} proves {values[0]} = {values[1]}", hint="the two sides must be equal"
        )
    lines = [f"    {rule.left} = {values[0]}", f"    {rule.right} = {values[1]}"]
    given = [f"{name} = {_line(value, at[0])}" for name, value in sorted(world.values.items())]
    lines += [f"    for {given[0]}", *(f"        {each}" for each in given[1:])]
    return EqfuseError(f"rule {rule.name!r} is not true\n" + "\n".join(lines), hint=hint)


_ALONE = (
    "only the right side has a value there: a condition may exclude it, as nonneg(a), positive(a) or a != 0"
)


def _number(value: object, at: tuple[int, ...]) -> str:
    shown = np.asarray(getattr(value, "shadow", value))
    place = tuple(k if extent > 1 else 0 for k, extent in zip(at, shown.shape, strict=True))
    return f"{float(shown[place]):.6g}"


def _line(value: object, sample: int) -> str:
    """One sample of a variable along the rule's axis, at the first position of the other."""
    shown = np.asarray(getattr(value, "shadow", value), float)
    line = shown[sample if len(shown) > 1 else 0, :, 0]
    numbers = ", ".join(f"{number:.4g}" for number in line)
    return numbers if len(line) == 1 else f"[{numbers}]"


def _readable(
    rng: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return rng.integers(-3, 4, shape).astype(float)


def _plain(
    rng: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.round(rng.standard_normal(shape) * 1.5, 3)


# -- where it is in force --------------------------------------------------------------------------


def shipped() -> dict[str, str]:
    """Names of the shipped rules, with the rule set that each is in."""
    return {rule.name: ruleset.name for ruleset in EVERY for rule in ruleset.rules}


def rules(*added: Rule, without: Sequence[str] = ()) -> AbstractContextManager[RuleScope]:
    """A scope: what is compiled inside has these rules too, and not the shipped ones (or sets of them) in `without`.

    Scopes nest. A kernel keeps the rules that it was compiled with. Raises EqfuseError for two rules of one name
    and for names in `without` that no shipped rule or set has.
    """
    outer = current()
    names = [each.name for each in (*outer.added, *added)]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise EqfuseError(f"rule {name!r} is there twice", hint="give each rule a name of its own")
    known = shipped()
    for name in without:
        if name not in known and name not in known.values():
            hint = did_you_mean(name, (*known, *known.values())) or "`eqfuse rules` lists them"
            raise EqfuseError(f"there is no shipped rule {name!r}", hint=hint)
    return RuleScope((*outer.added, *added), outer.without.union(without)).entered()
