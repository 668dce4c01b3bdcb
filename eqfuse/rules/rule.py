"""Rules as data, and the one place where they become egglog.

A rule is written in the expression language with pattern variables::

    Rewrite("exp-ratio", "ratio(exp(a), exp(b))", "exp(delta(a, b))", why="e^a / e^b = e^(a-b)")
    Infer("fixed-add", "fixed(a + b, X)", when=("fixed(a, X)", "fixed(b, X)"), why="...")

Lower-case names are expression variables. In `sum[D](e)` the name `D` is a domain variable;
`A`, `B` and `AB` are the two parts of a split domain and their union. `fold[R, D](e)` leaves the
reduction open. A condition is a fact of relations.py, `p == q` (p is in the class of q) or `p != q`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from eqfuse.fast_dataclass import dataclass
from eqfuse.rules.constructors import DATATYPE, HEADS
from eqfuse.rules.relations import RELATIONS
from eqfuse.terms.nodes import REDUCTIONS
from eqfuse.terms.python import parsed

PARTS = ("A", "B", "AB", "ALL")
"""The two parts of a split axis, their union, and an unsplit axis; any other domain name is a variable."""


@dataclass(frozen=True)
class Rewrite:
    """`left` and `right` denote the same value wherever `when` holds. `subsume` retires the left form."""

    name: str
    left: str
    right: str
    when: tuple[str, ...] = ()
    why: str = ""
    subsume: bool = False


@dataclass(frozen=True)
class Infer:
    """`fact` holds wherever `when` does."""

    name: str
    fact: str
    when: tuple[str, ...] = ()
    why: str = ""


Rule = Rewrite | Infer


@dataclass(frozen=True)
class RuleSet:
    name: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class _Pattern:
    """Compiles the patterns of one rule. A domain variable `D` stands for two egglog variables: axis and part."""

    rule: str

    def expr(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id="inf"):
                return '(Num "inf")'
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
                return '(Num "-inf")'
            case ast.Name(id=name):
                return name
            case ast.Constant(value=number):
                return f'(Num "{number!r}")'
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=number)) if number:
                return f'(Num "-{number!r}")'
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(Neg {self.expr(operand)})"
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.expr(left), self.expr(right)
                match op:
                    case ast.Add():
                        return f"(Add {a} {b})"
                    case ast.Sub():
                        return f"(Add {a} (Neg {b}))"
                    case ast.Mult():
                        return f"(Mul {a} {b})"
                    case ast.Div():
                        return f"(Mul {a} (Inv {b}))"
            case ast.Call(func=ast.Name(id="apply1"), args=[fn, a]):
                return f"(Apply1 {self.word(fn)} {self.expr(a)})"
            case ast.Call(func=ast.Name(id="apply2"), args=[fn, a, b]):
                return f"(Apply2 {self.word(fn)} {self.expr(a)} {self.expr(b)})"
            case ast.Call(func=ast.Name(id=fn), args=args) if fn in HEADS:
                return f"({HEADS[fn]} {' '.join(map(self.expr, args))})"
            case ast.Call(func=ast.Subscript(value=ast.Name(id=op), slice=domain), args=[body]):
                if op == "fold":
                    assert isinstance(domain, ast.Tuple)
                    return (
                        f"(Red {self.expr(domain.elts[0])} {self.domain(domain.elts[1])} {self.expr(body)})"
                    )
                if op in REDUCTIONS:
                    return f'(Red "{op}" {self.domain(domain)} {self.expr(body)})'
            case ast.Call(func=ast.Subscript(value=ast.Attribute() as op, slice=domain), args=[body]):
                return f'(Red "{ast.unparse(op)}" {self.domain(domain)} {self.expr(body)})'
        raise ValueError(f"rule {self.rule}: {ast.unparse(node)} is not a pattern")

    def word(self, node: ast.expr) -> str:
        """The name of a function: a variable, or spelt out in quotes."""
        match node:
            case ast.Name(id=name):
                return name
            case ast.Constant(value=str(text)):
                return f'"{text}"'
        raise ValueError(f"rule {self.rule}: {ast.unparse(node)} is not the name of a function")

    def domain(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name in PARTS:
                return f'axis "{name}"'
            case ast.Name(id=name):
                return f"{name}_axis {name}"
        raise ValueError(f"rule {self.rule}: {ast.unparse(node)} is not a domain")

    def fact(self, text: str) -> str:
        node = parsed(text)
        match node:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return f"(= {self.expr(left)} {self.expr(right)})"
            case ast.Compare(left=ast.Name(id=a), ops=[ast.NotEq()], comparators=[ast.Name(id=b)]) if a[
                0
            ].isupper():
                return f"(!= {a}_axis {b}_axis)"
            case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
                return f"(!= {self.expr(left)} {self.expr(right)})"
            case ast.Call(func=ast.Name(id=relation), args=args) if relation in RELATIONS:
                sorts = RELATIONS[relation].sorts
                words: list[str] = []
                for sort, arg in zip(sorts, args, strict=False):
                    words.append(self.expr(arg) if sort == "E" else self.axis(arg))
                if len(sorts) == len(args) + 1:  # a domain argument stands for its axis and its part
                    words[-1] = self.domain(args[-1])
                return f"({relation} {' '.join(words)})"
        raise ValueError(f"rule {self.rule}: {text!r} is not a condition")

    def axis(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return "axis" if name in PARTS else f"{name}_axis"
        raise ValueError(f"rule {self.rule}: {ast.unparse(node)} is not an axis")


def to_egglog(rule: Rule, ruleset: str) -> str:
    """The egglog text of one rule."""
    pattern = _Pattern(rule.name)
    body = [pattern.fact(text) for text in rule.when]
    match rule:
        case Rewrite(left=left, right=right):
            lhs = pattern.expr(parsed(left))
            rhs = pattern.expr(parsed(right))
            body.insert(0, f"(= it {lhs})")
            head = f"(union it {rhs})" + (f" (subsume {lhs})" if rule.subsume else "")
        case Infer(fact=fact):
            node = parsed(fact)
            assert isinstance(node, ast.Call)
            subject = node.args[0]
            if not isinstance(subject, ast.Name):  # an inference about a term waits until the term exists
                body.insert(0, f"(= it {pattern.expr(subject)})")
                node.args[0] = ast.Name("it")
            head = pattern.fact(ast.unparse(node))
    return f'(rule ({" ".join(body)}) ({head}) :ruleset {ruleset} :name "{rule.name}")'


def prelude(rulesets: Iterable[RuleSet]) -> tuple[str, ...]:
    """Declarations of the language, the relations and the given rule sets: egglog commands."""
    lines = [DATATYPE]
    lines += [f"(relation {row.name} ({' '.join(row.sorts)}))" for row in RELATIONS.values()]
    for ruleset in rulesets:
        lines.append(f"(ruleset {ruleset.name})")
        lines += [to_egglog(rule, ruleset.name) for rule in ruleset.rules]
    return tuple(lines)
