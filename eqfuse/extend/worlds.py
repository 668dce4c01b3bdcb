"""Instances of a rule: values for its variables that meet its conditions, in any scalar domain.

Every value is an array of `SAMPLES` independent samples of some positions along two axes, of length one along an axis
that it is fixed in. The rule's own axis is the first (its parts A and B are halves of it), an axis that must differ from
it the second. Conditions say how variables are drawn: `factors(e, c, m, X)` draws c fixed along X and m, and makes e
their product; what cannot be drawn so is drawn freely, and the samples that meet the condition are kept.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eqfuse.extend.laws import drawn_in
from eqfuse.rules.relations import RELATIONS
from eqfuse.rules.rule import Infer, Rule
from eqfuse.terms.domain import Domain
from eqfuse.terms.folds import PAIR, fold_of
from eqfuse.terms.functions import COMPARISONS, LOGICAL
from eqfuse.terms.interpreter import Value, fold_states
from eqfuse.terms.nodes import REDUCTIONS
from eqfuse.terms.python import parsed

SAMPLES = 48
POSITIONS = ((7, 5), (2, 3), (1, 1), (9, 4))
"""Positions along both axes: a rule holds at any."""
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray[Any, Any]]
Truths = np.ndarray[Any, np.dtype[np.bool_]]

DECOMPOSITIONS = ("factors", "addends", "spread", "shifted", "parallel_axis")


class World:
    """The instances of one rule. `values` are drawn when they are first read."""

    def __init__(
        self,
        rule: Rule,
        domain: Domain,
        draw: Draw,
        seed: int = 0,
        positions: tuple[int, int] = POSITIONS[0],
    ) -> None:
        self.domain, self.draw, self.positions = domain, draw, positions
        half = (positions[0] + 1) // 2
        self.parts = {"A": slice(0, half), "B": slice(half, positions[0])}
        self.rng = np.random.default_rng(seed)
        self.values: dict[str, Any] = {}
        self.second: set[str] = set()
        self.mask = _mask_of(rule)
        self.bounds = isinstance(rule, Infer) and rule.fact.startswith("bounded(")
        self.outside = np.zeros(SAMPLES, bool)  # of what a ratio says: its divisor is 0 there
        self.conditions = [parsed(text) for text in rule.when]
        for node in self.conditions:
            match node:
                case ast.Compare(left=ast.Name(id=a), ops=[ast.NotEq()], comparators=[ast.Name(id=b)]):
                    if a[0].isupper():
                        self.second.add(b)
        self.facts = [
            (node.func.id, node.args)
            for node in self.conditions
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        for name, args in self.facts:
            match name, args:
                case "reference_shift", [_, ast.Name(id=shift), ast.Name(id=axis)]:
                    self._assign(shift, along=axis)
        for name, args in self.facts:
            if name in DECOMPOSITIONS:
                self._define_parts([arg.id for arg in args if isinstance(arg, ast.Name)])
                self._decompose(name, [arg.id for arg in args if isinstance(arg, ast.Name)])
        for name, args in self.facts:
            match name, args:
                case "le" | "within", [small, ast.Name(id=large)] if large not in self.values:
                    gap = self.domain.call("sq", [self._drawn(self.positions)])
                    least = self.value(small) if name == "le" else self._applied("abs", [self.value(small)])
                    self.values[large] = self.domain.call("add", [least, gap])
        self._define_moments()
        self._define_masks()
        for name, args in self.facts:
            match name, args:
                case "renamed", [fold, ast.Name(id=other)]:
                    self.values[other] = self.value(fold)
        for node in self.conditions:
            match node:
                case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[right]):
                    if name not in self.values:
                        self.values[name] = self.value(right)

    def _define_parts(self, names: Sequence[str]) -> None:
        """The fixed part of a decomposition, where a condition says what it is: `c == inv(n)`."""
        for node in self.conditions:
            match node:
                case ast.Compare(left=ast.Name(id=part), ops=[ast.Eq()], comparators=[right]) if (
                    part == names[1] and part not in self.values
                ):
                    functions = {id(call.func) for call in ast.walk(right) if isinstance(call, ast.Call)}
                    for name in ast.walk(right):
                        if isinstance(name, ast.Name) and id(name) not in functions:
                            self._assign(name.id, along=names[-1])
                    self.values[part] = self.value(right)

    def _define_moments(self) -> None:
        """Sums of what a condition says that they are sums of, and their quotients."""
        equal = {
            node.left.id: node.comparators[0]
            for node in self.conditions
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name)
        }
        for name, args in self.facts:
            match name, args:
                case "count", [ast.Name(id=count), ast.Name(id=axis)]:
                    self.values[count] = self._full(self.positions[self.axis(axis)])
        for name, args in self.facts:
            if name == "moment":
                total, weight, body, count, axis = (arg.id for arg in args if isinstance(arg, ast.Name))
                if body in equal:
                    self.values[body] = self.value(equal[body])
                product = self.domain.call("mul", [self.variable(weight), self.variable(body)])
                self.values[total] = self._reduced("sum", axis, product)
                self.values[count] = self._reduced("sum", axis, self.variable(weight))
        for name, args in self.facts:
            if name == "quotient":
                quotient, above, below = (arg.id for arg in args if isinstance(arg, ast.Name))
                if above in equal:
                    self.values[above] = self.value(equal[above])
                parts = [self.variable(above), self.variable(below)]
                self.values[quotient] = self.domain.call("div", parts)

    def _define_masks(self) -> None:
        """Masks that hold where two others do, or at one position of an axis or none; sums over an axis."""
        for name, args in self.facts:
            names = [arg.id for arg in args if isinstance(arg, ast.Name)]
            match name, names:
                case "both", [both, *others]:
                    self.values[both] = self._applied("minimum", list(map(self.variable, others)))
                case "either", [either, one, other]:
                    apart = [self.variable(other), self.domain.call("neg", [self.variable(one)])]
                    self.values[other] = self._applied("minimum", apart)
                    self.values[either] = self._applied("maximum", [self.variable(one), self.values[other]])
                case "totals", [value, total, axis]:
                    self.values[total] = self._reduced("sum", axis, self.variable(value))
                case ("selects", [mask, value, *_, read, axis]) | ("selects_one", [mask, value, read, axis]):
                    place, shape = self.axis(axis), [1, 1]
                    shape[place] = count = self.positions[place]
                    chosen = self.rng.integers(0, count + (name == "selects"), (SAMPLES, 1, 1))
                    numbers = np.where(np.arange(count).reshape(shape) == chosen, 1.0, -1.0)
                    self.values[mask] = drawn_in(self.domain, self.draw, numbers, self.rng)
                    if name == "selects":
                        self.values[names[2]] = self._reduced("max", axis, self.values[mask])
                    kept = self.domain.where(
                        self._truth(self.values[mask]), self.variable(value), self._full(0.0)
                    )
                    self.values[read] = self._reduced("sum", axis, kept)

    def _decompose(self, relation: str, names: Sequence[str]) -> None:
        """The first variable, made as the relation says of the others; the axis comes last."""
        whole, *parts, axis = names
        fixed = {"factors": parts[:1], "addends": parts[:1], "shifted": parts[1:], "parallel_axis": parts[2:]}
        for name in fixed.get(relation, []):
            self._assign(name, along=axis)
        a, b, *rest = (self.variable(name) for name in parts)
        call = self.domain.call
        match relation:
            case "factors":
                self.values[whole] = call("mul", [a, b])
            case "addends" | "spread":
                self.values[whole] = call("add", [a, b])
            case "shifted":
                self.values[whole] = call("mul", [call("exp", [b]), a])
            case "parallel_axis":
                moved = call("mul", [call("sub", rest), b])
                self.values[whole] = call("add", [a, moved])

    def variable(self, name: str) -> Any:
        self._assign(name)
        return self.values[name]

    def _holds(self, relation: str, name: str) -> bool:
        return any(
            fact == relation and isinstance(args[0], ast.Name) and args[0].id == name
            for fact, args in self.facts
        )

    def _assign(self, name: str, along: str = "") -> None:
        if name in self.values:
            return
        shape = list(self.positions)
        for fact, args in self.facts:
            match fact, args:
                case "fixed", [ast.Name(id=about), ast.Name(id=axis)] if about == name:
                    shape[self.axis(axis)] = 1
        if along:
            shape[self.axis(along)] = 1
        if self._holds("constant", name) or self._holds("scalar", name):
            shape = [1, 1]
        shapes: dict[str, Callable[[Any], Any]] = {
            "bounded": np.tanh,
            "nonneg": np.abs,
            "positive": lambda x: np.abs(x) + 0.5,
            "nonpos": lambda x: -np.abs(x),
        }
        shaped = next((change for fact, change in shapes.items() if self._holds(fact, name)), None)
        drawn = self._drawn(tuple(shape), shaped)
        if self.bounds and self._holds("constant", name):
            drawn = self._full(1.0)
        if self.mask not in ("", name) and not self._holds("masked", name):
            drawn = self.domain.where(self._truth(self.variable(self.mask)), drawn, self._full(np.inf))
        self.values[name] = drawn

    def _drawn(self, shape: tuple[int, ...], change: Callable[[Any], Any] | None = None) -> Any:
        numbers = self.draw(self.rng, (SAMPLES, *shape))
        numbers = numbers if change is None else change(numbers)
        return drawn_in(self.domain, self.draw, numbers, self.rng)

    def axis(self, name: str) -> int:
        return 1 if name in self.second else 0

    # Values ---------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        """The value of a pattern."""
        call = self.domain.call
        match node:
            case ast.Name(id="inf"):
                return self._full(np.inf)
            case ast.Name(id=name):
                return self.variable(name)
            case ast.Constant(value=int() | float() as number):
                return self._full(float(number))
            case ast.UnaryOp(operand=operand):
                return call("neg", [self.value(operand)])
            case ast.BinOp(left=left, op=op, right=right):
                name = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}[type(op)]
                return call(name, [self.value(left), self.value(right)])
            case ast.Call(func=ast.Name(id="apply1" | "apply2"), args=[ast.Constant(value=fn), *args]):
                return self._applied(str(fn), [self.value(arg) for arg in args])
            case ast.Call(func=ast.Name(id="apply1" | "apply2"), args=[ast.Name(), first, *rest]):
                found = self.value(first)  # of any function: one that no rule knows anything about
                for arg in rest:
                    found = call("add", [found, call("sin", [self.value(arg)])])
                return call("tanh", [found])
            case ast.Call(func=ast.Name(id="cast"), args=[_, arg]):
                return self.value(arg)
            case ast.Call(func=ast.Name(id=fn), args=args):
                return self._applied(fn, [self.value(arg) for arg in args])
            case ast.Call(func=ast.Subscript(value=ast.Name(id=op), slice=ast.Name(id=axis)), args=[body]):
                return self._reduced(op, axis, self.value(body))
            case ast.Call(
                func=ast.Subscript(value=ast.Name(id="fold"), slice=ast.Tuple([_, ast.Name(id=axis)])),
                args=[body],
            ):
                return self._reduced(
                    "sum", axis, self.value(body)
                )  # of any reduction: this one has a value in each domain
            case ast.Call(
                func=ast.Subscript(value=ast.Attribute() as op, slice=ast.Name(id=axis)), args=[body]
            ):
                return self._folded(ast.unparse(op), axis, [self.value(part) for part in _packed(body)])
        raise ValueError(f"{ast.unparse(node)} has no value")

    def _folded(self, op: str, axis: str, parts: Sequence[Any]) -> Any:
        """A state variable of a registered fold."""
        found = fold_of(op)
        assert found is not None  # the pattern names it
        fold, place = found
        dims = ("%trial", "%first", "%second")
        whole = [Value(dims, self._whole(part, axis)) for part in parts]
        along = dims[1 + self.axis(axis)]
        return self._kept(fold_states(fold, whole, along, self.domain)[place].data, axis)

    def _full(self, number: float) -> Any:
        return self.domain.reshape(self.domain.full((), number), (1, 1, 1))

    def _applied(self, fn: str, args: list[Any]) -> Any:
        domain = self.domain
        match fn:
            case "inv":
                return domain.call("div", [self._full(1.0), args[0]])
            case "ratio":
                divisor = np.asarray(getattr(args[1], "shadow", args[1]))
                self.outside |= np.broadcast_to(divisor == 0, (SAMPLES, *self.positions)).any((1, 2))
                return domain.call("div", args)
            case "delta":
                return domain.call("sub", args)
            case "where":
                condition, left, right = args
                return domain.where(self._truth(condition), left, right)
        if fn in COMPARISONS:
            return domain.compare(fn, args[0], args[1])
        if fn in LOGICAL:
            truths = [self._truth(arg) for arg in args]
            return {"and": np.logical_and, "or": np.logical_or}.get(fn, np.logical_not)(*truths)
        return domain.call(fn, args)

    def _truth(self, value: Any) -> Truths:
        """A mask: a comparison as it is, a variable as whether it is positive."""
        if isinstance(value, np.ndarray) and value.dtype == np.bool_:
            return value
        return self.domain.compare("gt", value, self._full(0.0))

    def _reduced(self, op: str, axis: str, body: Any) -> Any:
        if op not in REDUCTIONS:
            raise ValueError(f"{op} has no value")
        folded = self.domain.reduce(op, self._whole(body, axis), 1 + self.axis(axis))
        return self._kept(folded, axis)

    def _whole(self, body: Any, axis: str) -> Any:
        """A body at every position of a domain."""
        full = self.domain.broadcast(body, (SAMPLES, *self.positions))
        return self.domain.take(full, (slice(None), self.parts[axis])) if axis in self.parts else full

    def _kept(self, folded: Any, axis: str) -> Any:
        """What a reduction gives, with one position of its axis."""
        shape = [SAMPLES, *self.positions]
        shape[1 + self.axis(axis)] = 1
        return self.domain.reshape(folded, tuple(shape))

    # Conditions -----------------------------------------------------------------------------------

    def met(self) -> Truths:
        """Which samples meet every condition that says something about values; asked once both sides have one."""
        met = ~self.outside
        for node in self.conditions:
            met &= self.holds(node)
        return met

    def holds(self, node: ast.expr) -> Truths:
        """Of which samples a fact is true; of all, where it claims nothing about values."""
        match node:
            case ast.Call(func=ast.Name(id=relation), args=args) if RELATIONS[relation].is_claim:
                return self._meets(relation, args)
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return _every(_close(self._real(left), self._real(right)))
            case _:
                return np.ones(SAMPLES, bool)

    def _real(self, node: ast.expr) -> np.ndarray[Any, Any]:
        found = self.value(node)
        real = getattr(found, "shadow", found)
        return np.broadcast_to(np.asarray(real, float), (SAMPLES, *self.positions))

    def _meets(self, relation: str, args: Sequence[ast.expr]) -> Truths:
        *about, last = args
        along = self.axis(last.id) + 1 if isinstance(last, ast.Name) else 1

        def fixed(value: np.ndarray[Any, Any]) -> Truths:
            return _every(_close(value, np.broadcast_to(np.take(value, [0], along), value.shape)))

        with np.errstate(all="ignore"):
            match (
                relation,
                [self._real(arg) for arg in (about if RELATIONS[relation].is_along_axis else args)],
            ):
                case "fixed", [value]:
                    return fixed(value)
                case "constant", [value]:
                    return _every(_close(value, np.broadcast_to(value[:, :1, :1], value.shape)))
                case "nonneg", [value]:
                    return ~_some(value < 0)
                case "positive", [value]:
                    return _every(value > 0)
                case "nonpos", [value]:
                    return ~_some(value > 0)
                case "bounded", [value]:  # by some number: by 1, where every constant is 1
                    return ~_some(np.abs(value) > 1)
                case "le", [small, large]:
                    return ~_some(small > large)
                case "within", [value, limit]:
                    return ~_some(np.abs(value) > limit)
                case "vanishes_with", [value, weight]:
                    return ~_some((value == 0) & (weight != 0))
                case "pole_safe", [value, weight]:
                    return ~_some(np.isinf(value) & (weight != 0))
                case "quotient", [value, above, below]:
                    return _agree(value, above / below)
                case "count", [value]:
                    return _every(value == value.shape[along])
                case "moment", [total, weight, value, count]:
                    sums = [np.sum(part, along, keepdims=True) for part in (weight * value, weight)]
                    return _agree(total, sums[0]) & _agree(count, sums[1])
                case "both", [mask, one, other]:
                    return _every((mask > 0) == ((one > 0) & (other > 0)))
                case "either", [mask, one, other]:
                    is_apart = ~((one > 0) & (other > 0))
                    return _every(is_apart & ((mask > 0) == ((one > 0) | (other > 0))))
                case "selects", [mask, value, inside, read]:
                    count = np.sum(mask > 0, along, keepdims=True)
                    return _every((count == (inside > 0)) & (~(mask > 0) | _close(value, read)))
                case "renamed", [fold, other]:
                    return _agree(fold, other)
                case "selects_one", [mask, value, read]:
                    count = np.sum(mask > 0, along, keepdims=True)
                    return _every((count == 1) & (~(mask > 0) | _close(value, read)))
                case "totals", [value, total]:
                    return _agree(total, np.sum(value, along, keepdims=True))
                case "masked", [value, mask]:
                    return ~_some(np.isinf(value) & (mask > 0).any(1, keepdims=True))
                case "factors", [whole, c, m]:
                    return fixed(c) & _agree(whole, c * m)
                case "addends", [whole, c, m]:
                    return fixed(c) & _agree(whole, c + m)
                case "spread", [whole, f, g]:
                    return _agree(whole, f + g)
                case "shifted", [whole, m, shift]:
                    return fixed(shift) & _agree(whole, np.exp(shift) * m)
                case "parallel_axis", [whole, s, d, c, k]:
                    return fixed(c) & fixed(k) & _agree(whole, s + (c - k) * d)
        raise ValueError(f"{relation} of {len(args)} has no meaning among values")


def _mask_of(rule: Rule) -> str:
    """The mask of a rule that infers `masked`: what it drops is drawn infinite."""
    match rule:
        case Infer(fact=fact) if fact.startswith("masked("):
            *_, mask = parsed(fact).args  # type: ignore[attr-defined]
            return str(mask.id)
    return ""


def _packed(body: ast.expr) -> tuple[ast.expr, ...]:
    """The parts of a fold's body."""
    match body:
        case ast.Call(func=ast.Name(id="apply2"), args=[ast.Constant(value=name), left, right]) if (
            name == PAIR
        ):
            return (left, *_packed(right))
        case _:
            return (body,)


def _every(elements: Truths) -> Truths:
    return np.asarray(elements.reshape(SAMPLES, -1).all(1))


def _some(elements: Truths) -> Truths:
    return np.asarray(elements.reshape(SAMPLES, -1).any(1))


def _agree(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> Truths:
    """Which samples are equal wherever the left side is a number."""
    return _every(np.isnan(left) | _close(left, right))


def _close(left: Any, right: Any) -> Truths:
    return np.asarray(np.isclose(left, right, rtol=1e-9, atol=1e-9, equal_nan=True))
