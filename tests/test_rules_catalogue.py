"""Every rule is true of numbers, and every rule is of use.

A small interpreter evaluates patterns on arrays of 9 x 8 positions: a rule's axis is the first (its parts A
and B are 5 and 4 positions), an axis that must differ from it the second. Conditions say how the pattern
variables are drawn: `factors(e, c, m, X)` draws c fixed along X and m, and makes e their product.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from rules_merges import derivation
from rules_programs import EXTENTS, FUSED, RULE_PROGRAMS, UNFUSED

from eqfuse.rules.catalogue import MERGE, PREPARE
from eqfuse.rules.derive import axis_order, derive_group
from eqfuse.rules.rule import RELATIONS, Infer, Rewrite, Rule, RuleSet, to_egglog
from eqfuse.terms.nodes import REDUCTIONS, reductions
from eqfuse.terms.parser import parse

Array = np.ndarray[Any, Any]

POSITIONS = (9, 8)
PARTS = {"A": slice(0, 5), "B": slice(5, 9)}
FOLDS: Mapping[str, Callable[..., Any]] = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "sq": np.square,
    "inv": np.reciprocal,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "where": lambda p, a, b: np.where(p > 0, a, b),
    "finite": lambda a: np.where(np.isinf(a), 0, a),
    "invertible": lambda a: np.where((a == 0) | np.isinf(a), 1, a),
    "ratio": np.divide,
    "delta": np.subtract,
}
BINARY: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
}

RULES: Mapping[str, Rule] = {
    rule.name: rule for ruleset in dict.fromkeys(PREPARE + MERGE) for rule in ruleset.rules
}
WITHOUT_NUMBERS = {
    "want", "state", "unproved", "varies", "cascaded", "plain", "aggregate", "partner", "factor", "scalar",
    "settled", "written"
}  # fmt: skip
"""Relations that guide the search and claim nothing about values."""


def parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _mask_of(rule: Rule) -> str:
    """The mask of a rule that infers `masked`: what it drops is drawn infinite."""
    match rule:
        case Infer(fact=fact) if fact.startswith("masked("):
            mask = parsed(fact).args[-1]  # type: ignore[attr-defined]
            return str(mask.id)
    return ""


class World:
    """One instance of a rule: numbers for its pattern variables that meet its conditions."""

    def __init__(self, rule: Rule, seed: int, fold: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.fold = fold
        self.values: dict[str, Array] = {}
        self.mask = _mask_of(rule)
        self.second = {"F"}  # axes other than the rule's own
        conditions = [parsed(text) for text in rule.when]
        for node in conditions:
            match node:
                case ast.Compare(left=ast.Name(), ops=[ast.NotEq()], comparators=[ast.Name(id=name)]) if name[
                    0
                ].isupper():
                    self.second.add(name)
        facts = [
            (c.func.id, c.args)
            for c in conditions
            if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)
        ]
        self.given = {name: [a for n, a in facts if n == name] for name in RELATIONS}
        for args in self.given["le"]:
            if isinstance(args[1], ast.Name):
                self.values[args[1].id] = self.expr(args[0]) + np.abs(self.rng.standard_normal(POSITIONS))
        for args in self.given["partner"]:
            assert isinstance(args[1], ast.Name) and isinstance(args[2], ast.Name)
            self._draw(args[1].id, along=args[2].id)
        for relation in ("shifted", "recentred", "factors", "addends"):
            for args in self.given[relation]:
                self._decompose(relation, [a.id for a in args if isinstance(a, ast.Name)])
        for node in conditions:
            match node:
                case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[right]):
                    self.values[name] = self.expr(right)

    def _decompose(self, relation: str, names: list[str]) -> None:
        """`names[0]` as the relation says that it is made of the others."""
        whole, *parts, axis = names
        fixed = {"factors": parts[:1], "addends": parts[:1], "shifted": parts[1:], "recentred": parts[2:]}[
            relation
        ]
        for name in fixed:
            self._draw(name, along=axis)
        values = [self.variable(name) for name in parts]
        match relation:
            case "factors":
                self.values[whole] = values[0] * values[1]
            case "addends":
                self.values[whole] = values[0] + values[1]
            case "shifted":
                self.values[whole] = np.exp(values[1]) * values[0]
            case "recentred":
                self.values[whole] = values[0] + (values[2] - values[3]) * values[1]

    def axis(self, name: str) -> int:
        return 1 if name in self.second else 0

    def variable(self, name: str) -> Array:
        if name not in self.values:
            self._draw(name)
        return self.values[name]

    def _draw(self, name: str, along: str = "") -> None:
        if name in self.values:
            return

        def holds(relation: str) -> bool:
            return any(isinstance(a[0], ast.Name) and a[0].id == name for a in self.given[relation])

        shape = list(POSITIONS)
        for args in self.given["fixed"]:
            if isinstance(args[0], ast.Name) and args[0].id == name and isinstance(args[1], ast.Name):
                shape[self.axis(args[1].id)] = 1
        if along:
            shape[self.axis(along)] = 1
        value = np.asarray(self.rng.standard_normal(shape))
        if holds("constant"):
            value = np.ones((1, 1))
        if holds("bounded"):
            value = np.tanh(value)
        if holds("nonneg") or holds("positive"):
            value = np.abs(value)
        if holds("nonpos"):
            value = -np.abs(value)
        if self.mask and name != self.mask and not holds("masked"):
            value = np.where(self.variable(self.mask) > 0, value, np.inf)
        self.values[name] = value

    def expr(self, node: ast.expr) -> Array:
        """The value of a pattern: an array that broadcasts to POSITIONS."""
        match node:
            case ast.Name(id="inf"):
                return np.full((1, 1), np.inf)
            case ast.Name(id=name):
                return self.variable(name)
            case ast.Constant(value=int() | float() as number):
                return np.full((1, 1), float(number))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.expr(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return np.asarray(BINARY[type(op)](self.expr(left), self.expr(right)))
            case ast.Call(func=ast.Name(id="cast"), args=[_, a]):
                return self.expr(a)
            case ast.Call(func=ast.Name(id="apply1"), args=[_, a]):
                return np.tanh(self.expr(a))
            case ast.Call(func=ast.Name(id="apply2"), args=[_, a, b]):
                return np.asarray(np.arctan2(self.expr(a), self.expr(b)))
            case ast.Call(func=ast.Name(id=fn), args=args):
                return np.asarray(FUNCTIONS[fn](*map(self.expr, args)))
            case ast.Call(func=ast.Subscript(value=ast.Name(id=op), slice=domain), args=[body]):
                if op == "fold":
                    assert isinstance(domain, ast.Tuple)
                    op, domain = self.fold, domain.elts[1]
                assert isinstance(domain, ast.Name)
                full = np.broadcast_to(self.expr(body), POSITIONS)
                if domain.id in PARTS:
                    full = full[PARTS[domain.id]]
                return np.asarray(FOLDS[op](full, axis=self.axis(domain.id), keepdims=True))
        raise AssertionError(f"{ast.unparse(node)} is not a pattern")

    def same(self, left: Array, right: Array) -> bool:
        """Equal wherever the left side is a number; somewhere it has to be one."""
        left, right = np.broadcast_to(left, POSITIONS), np.broadcast_to(right, POSITIONS)
        defined = ~np.isnan(left)
        return bool(defined.any()) and bool(np.allclose(left[defined], right[defined], rtol=1e-9, atol=1e-9))

    def holds(self, fact: ast.expr) -> bool:
        """Whether an inferred fact is true of these numbers."""
        assert isinstance(fact, ast.Call) and isinstance(fact.func, ast.Name)
        relation, args = fact.func.id, fact.args
        if relation in WITHOUT_NUMBERS:
            return True
        width = sum(sort == "E" for sort in RELATIONS[relation])
        values = [self.expr(arg) for arg in args[:width]]
        axis = self.axis(args[-1].id) if isinstance(args[-1], ast.Name) else 0

        def fixed(value: Array) -> bool:
            full = np.broadcast_to(value, POSITIONS)
            return bool(np.allclose(full, np.take(full, [0], axis), equal_nan=True))

        match relation:
            case "fixed":
                return fixed(values[0])
            case "constant":
                return values[0].size == 1
            case "nonneg":
                return not (values[0] < 0).any()
            case "nonpos":
                return not (values[0] > 0).any()
            case "positive":
                return bool((values[0] > 0).all())
            case "null":
                return not ((values[0] == 0) & (values[1] != 0)).any()
            case "tame":
                return not (np.isinf(values[0]) & (values[1] != 0)).any()
            case "masked":
                keeps = (values[1] > 0).any(axis, keepdims=True)
                return not (np.isinf(values[0]) & keeps).any()
            case "bounded":
                return bool((np.abs(values[0]) <= 1).all())
            case "le":
                return bool((values[0] <= values[1]).all())
            case "factors":
                return fixed(values[1]) and self.same(values[0], values[1] * values[2])
            case "addends":
                return fixed(values[1]) and self.same(values[0], values[1] + values[2])
            case "shifted":
                return fixed(values[2]) and self.same(values[0], np.exp(values[2]) * values[1])
            case "recentred":
                moved = values[1] + (values[3] - values[4]) * values[2]
                return fixed(values[3]) and fixed(values[4]) and self.same(values[0], moved)
        raise AssertionError(f"{relation} has no meaning here")


def holds(rule: Rule, seed: int, fold: str = "sum") -> bool:
    """Whether one random instance of a rule is true."""
    with np.errstate(all="ignore"):
        world = World(rule, seed, fold)
        match rule:
            case Rewrite(left=left, right=right):
                return world.same(world.expr(parsed(left)), world.expr(parsed(right)))
            case Infer(fact=fact):
                return world.holds(parsed(fact))


@pytest.mark.parametrize("name", RULES)
def test_rule_is_true_of_numbers(name: str) -> None:
    for fold in FOLDS if "fold[" in str(RULES[name]) else ("sum",):
        for seed in range(8):
            assert holds(RULES[name], seed, fold), f"{name}, seed {seed}, {fold}"


WRONG = (
    Rewrite("max-scaled", "max[D](e)", "c * max[D](m)", ("factors(e, c, m, D)",)),  # c may be negative
    Rewrite(
        "sum-shifted", "sum[D](e)", "c + sum[D](m)", ("addends(e, c, m, D)",)
    ),  # c counts once per position
    Rewrite(
        "swapped-repair",
        "sum[P](e)",
        "ratio(k, c) * sum[P](f)",
        ("factors(e, c, m, P)", "factors(f, k, m, P)"),
    ),
    Rewrite("split-twice", "sum[AB](e)", "sum[A](e) + sum[A](e)"),
    Rewrite("exp-ratio", "ratio(exp(a), exp(b))", "exp(delta(b, a))"),
    Rewrite("plain-cancel", "sum[P](g * (x - sum[P](w * x) * inv(sum[P](w))))", "0"),  # g is not w
    Infer("le-backwards", "le(max[AB](e), max[A](e))"),
    Infer("nonneg-difference", "nonneg(a - b)", ("nonneg(a)", "nonneg(b)")),
    Infer("factor-of-sum", "factors(a + b, c * d, m + n, X)", ("factors(a, c, m, X)", "factors(b, d, n, X)")),
    Infer("masked-less", "masked(sum[P](a), p)", ("r == sum[P](where(p, a, 0))",)),
    Infer("masked-max-0", "masked(max[P](where(p, 0, a)), p)"),
    Infer("fixed-either", "fixed(a * b, X)", ("fixed(a, X)",)),
)


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.name)
def test_wrong_rules_are_seen(rule: Rule) -> None:
    assert not all(holds(rule, seed) for seed in range(8))


# -- rules as data ------------------------------------------------------------------------------------


def test_rules_have_names_of_their_own_and_reasons() -> None:
    rules = [rule for ruleset in dict.fromkeys(PREPARE + MERGE) for rule in ruleset.rules]
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(rule.why for rule in rules)


@pytest.mark.parametrize(
    "word", ["softmax", "attention", "norm", "variance_of_softmax", "flash", "online", "gemm"]
)
def test_no_rule_knows_a_workload(word: str) -> None:
    assert not [rule.name for rule in RULES.values() if word in to_egglog(rule, "any").lower()]


@pytest.mark.parametrize(
    "rule",
    [
        Rewrite("bad", "median[D](e)", "e"),
        Rewrite("bad", "a if b else c", "a"),
        Rewrite("bad", "a", "b", ("likes(a, b)",)),
        Infer("bad", "fixed(a, 3)"),
    ],
    ids=["reduction", "syntax", "relation", "axis"],
)
def test_a_malformed_rule_is_refused_by_name(rule: Rule) -> None:
    with pytest.raises(ValueError, match="rule bad: "):
        to_egglog(rule, "any")


UNPREPARED = {
    "max_centred": "n[i] = max[j](x[i,j] - max[j](x[i,j]))",
    "max_shifted": "n[i] = max[j](x[i,j] - (max[j](x[i,j]) + v[i]))",
    "min_centred": "n[i] = min[j](x[i,j] - max[j](x[i,j]))",
}
"""Groups as they are written: what could leave a reduction is still inside."""


@pytest.fixture(scope="module")
def fired() -> dict[str, int]:
    """Matches of every rule over all programs of these tests."""
    total: dict[str, int] = {}
    unfused = {name: source for name, (source, _) in UNFUSED.items()}
    for source in [*FUSED.values(), *unfused.values(), *RULE_PROGRAMS.values()]:
        found = derivation(source, EXTENTS)
        for name, count in found.derived.report.matches.items():
            total[name] = total.get(name, 0) + count
    for source in UNPREPARED.values():
        program = parse(source)
        reduces = reductions(*(output.expr for output in program.outputs))
        group, report = derive_group("j", reduces, axis_order(program))
        assert group.merge is not None
        for name, count in report.matches.items():
            total[name] = total.get(name, 0) + count
    return total


@pytest.mark.parametrize("ruleset", dict.fromkeys(PREPARE + MERGE), ids=lambda ruleset: ruleset.name)
def test_every_rule_fires(ruleset: RuleSet, fired: Mapping[str, int]) -> None:
    assert [rule.name for rule in ruleset.rules if not fired.get(rule.name)] == []


def test_folds_of_this_file_are_those_of_the_language() -> None:
    assert FOLDS.keys() == REDUCTIONS.keys()
