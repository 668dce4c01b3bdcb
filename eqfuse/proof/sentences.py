"""Conditions of rules as a person would say them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eqfuse.proof.check import Statement, read_rule
from eqfuse.proof.nodes import Inference
from eqfuse.proof.notation import Notation
from eqfuse.proof.syntax import Term, term
from eqfuse.rules.rule import Rewrite, Rule

SENTENCES: Mapping[str, str] = {
    "fixed": "{0} does not vary with {1}",
    "varies": "{0} varies with {1}",
    "plain": "{0} has no reduction over {1} inside",
    "cascaded": "{0} has a reduction over {1} inside",
    "constant": "{0} is a constant",
    "scalar": "{0} is a run-time number",
    "positive": "{0} > 0",
    "nonneg": "{0} >= 0",
    "nonpos": "{0} <= 0",
    "le": "{0} <= {1}",
    "within": "|{0}| <= {1}",
    "bounded": "{0} is bounded",
    "settled": "exp({0}) cannot overflow",
    "aggregate": "{0} is a sum",
    "factor": "{1} is a factor of {0}",
    "spread": "{0} = {1} + {2}",
    "null": "{0} is 0 only where {1} is 0 all along {2}",
    "tame": "{0} is infinite only where {1} is 0 all along {2}",
    "masked": "{0} is made of what the mask {1} keeps",
    "partner": "a state has {0} shifted by {1}",
    "state": "{0} is a state",
    "written": "{0} is written so in the program",
    "unproved": "nothing bounds {0}",
    "want": "{0} is part of a body",
    "!=": "{0} and {1} differ",
    "==": "{0} = {1}",
}

CONTROL = frozenset({"state", "written", "unproved", "want", "varies", "cascaded", "partner", "!=", "=="})
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
        case "recentred", (Term() as e, Term() as s, Term() as d, Term() as c, Term() as k, *_):
            shift = term("Add", (), (c, term("Neg", (), (k,))))
            return f"{show(e)} = {show(term('Add', (), (s, term('Mul', (), (shift, d)))))}"
        case "shifted", (Term() as e, Term() as s, Term() as m, *_):
            return f"{show(e)} = {show(term('Mul', (), (term('Exp', (), (m,)), s)))}"
    shown = [show(a) if isinstance(a, Term) else a for a in statement.args]
    return SENTENCES[statement.relation].format(*shown)


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
