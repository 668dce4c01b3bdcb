"""Conditions of rules as a person would say them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eqfuse.proof.check import Statement, read_rule
from eqfuse.proof.nodes import Inference
from eqfuse.proof.notation import Notation
from eqfuse.proof.syntax import Term, term
from eqfuse.rules.relations import RELATIONS
from eqfuse.rules.rule import Rewrite, Rule

EQUATIONS: Mapping[str, str] = {"!=": "{0} and {1} differ", "==": "{0} = {1}"}

CONTROL = frozenset(
    {"state", "written", "unproved", "want", "varies", "reduces", "reference_shift", "!=", "=="}
)
"""Conditions that say when a rule is tried, not when it is true: the short form leaves them out."""


@dataclass(frozen=True)
class Condition:
    """One condition of an instance: its sentence, and whether the rule's truth depends on it."""

    text: str
    is_control: bool


def sentence(statement: Statement, notation: Notation) -> str:
    """A ground statement in words."""
    show = notation.show
    match statement.relation, statement.args:
        case (("factors" | "addends" as relation), (Term() as e, Term() as c, Term() as m, str(axis))):
            parts = term("Mul" if relation == "factors" else "Add", (), (c, m))
            return f"{show(e)} = {show(parts)}, where {show(c)} does not vary with {axis}"
        case "parallel_axis", (Term() as e, Term() as s, Term() as d, Term() as c, Term() as k, *_):
            shift = term("Add", (), (c, term("Neg", (), (k,))))
            return f"{show(e)} = {show(term('Add', (), (s, term('Mul', (), (shift, d)))))}"
        case "shifted", (Term() as e, Term() as s, Term() as m, *_):
            return f"{show(e)} = {show(term('Mul', (), (term('Exp', (), (m,)), s)))}"
    shown = [show(a) if isinstance(a, Term) else a for a in statement.args]
    known = RELATIONS.get(statement.relation)
    return (known.meaning if known else EQUATIONS[statement.relation]).format(*shown)


def conditions(inference: Inference, rules: Mapping[str, Rule], notation: Notation) -> tuple[Condition, ...]:
    """The conditions of an instance, in the order in which its rule has them."""
    rule = rules[inference.rule]
    when = read_rule(rule).when
    found: list[Condition] = []
    for statement in when:
        ground = statement.at(inference.values)
        found.append(Condition(sentence(ground, notation), statement.relation in CONTROL))
    return tuple(found)


def rule_text(rule: Rule) -> str:
    """A rule: what it says, and where."""
    says = f"{rule.left} = {rule.right}" if isinstance(rule, Rewrite) else rule.fact
    return says + (f"\n  where {', '.join(rule.when)}" if rule.when else "")
