"""Expressions of the source text, read into terms."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import reduce
from typing import ClassVar

from eqfuse.errors import EqfuseError, ParseError, TypeCheckError, did_you_mean, source_lines
from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.folds import FOLDS, MAX_RANKS, fold_of, merged, packed, ranked, whole_identity
from eqfuse.terms.functions import (
    ABBREVIATIONS,
    APART,
    ARITY,
    BITWISE,
    CALLABLE,
    CONSTANTS,
    FUNCTIONS,
    ROUNDINGS,
    VARIADIC,
)
from eqfuse.terms.inline import Inliner, SizeOfComputedIndex
from eqfuse.terms.integers import BITS, fits
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Axis,
    Call,
    Const,
    Expr,
    Fold,
    InOrder,
    Load,
    Reduce,
    Scalar,
    Size,
    call,
    free_axes,
    replaced,
    transform,
    walk,
)
from eqfuse.terms.python import parsed
from eqfuse.terms.recurrences import MOST_BEFORE, Law, itself, prefix_of, step_of
from eqfuse.terms.registry import ARGUMENT, REGISTERED, Reduction, instance, reducers
from eqfuse.terms.syntax import Declaration, Definition, Source, axis_names, selections
from eqfuse.terms.types import TIGHT, kinds

BINARY: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "bitxor",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
}
COMPARE: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
MAX_EXPONENT = 16
LARGEST_REAL = sys.float_info.max
SMALLEST_INTEGER = -(2**63)
Number = float | int | bool


@dataclass(frozen=True)
class ProgramNames:
    """What the names of one program are, known before its expressions are read.

    `axes`: every name that some definition, reduction or declaration binds; `subscripted`: every name
    that is indexed somewhere; `constants`: scalars given at compile time; `lengths`: extents that are declared.
    """

    axes: frozenset[str]
    subscripted: frozenset[str]
    definitions: Mapping[str, Definition]
    declared: Mapping[str, Declaration]
    constants: Mapping[str, Number]
    lengths: Mapping[str, int] = field(default_factory=dict)

    def is_scalar(self, name: str) -> bool:
        """Whether the name was declared or given as a scalar."""
        declaration = self.declared.get(name)
        return name in self.constants or (declaration is not None and declaration.axes is None)


@dataclass(frozen=True)
class Bindings:
    """The axes bound here; inside the text of a registered reduction also its arguments, by name, the axis of its
    ranks, and the conditions on the axes that it reduces."""

    axes: frozenset[str]
    arguments: Mapping[str, Expr] = field(default_factory=dict)
    ranks: tuple[str, ...] = ()
    selected: Mapping[str, Expr] = field(default_factory=dict)

    def bind(self, axes: tuple[str, ...]) -> Bindings:
        """This scope inside a reduction over `axes`."""
        return replace(self, axes=self.axes.union(axes))


@dataclass(frozen=True)
class Before:
    """What a step reads of a state at another position: along which axes, and whether that is after."""

    load: Load
    ways: tuple[tuple[str, bool], ...]
    node: ast.expr


@dataclass
class Reader:
    """Reads expressions of `current`, a definition. `done` holds the definitions read so far,
    `read_names` every name that some definition read, `ranks` the ranks of the tensors met, `mutual` the definitions that each one and
    which read each other, `before` what each reads of itself or of these at other positions, `steps` what is computed in order, `spans` dimensions that have the extent of an axis, but are not read along it.

    `stop(x)` is read as `x`, and so is each function `apart`; readers for derivatives keep them (`keeps_stops`)."""

    keeps_stops: ClassVar[bool] = False

    source: Source
    names: ProgramNames
    inliner: Inliner
    current: str = ""
    done: dict[str, Expr] = field(default_factory=dict)
    read_names: set[str] = field(default_factory=set)
    ranks: dict[str, int] = field(default_factory=dict)
    mutual: Mapping[str, frozenset[str]] = field(default_factory=dict)
    before: dict[str, list[Before]] = field(default_factory=dict)
    steps: dict[str, InOrder] = field(default_factory=dict)
    spans: dict[str, tuple[str, int]] = field(default_factory=dict)

    def read(self, node: ast.expr, scope: Bindings) -> Expr:
        """The term that `node` stands for. Raises ParseError and TypeCheckError."""
        match node:
            case ast.Constant():
                return self._constant(node)
            case ast.Name():
                return self._name(node, scope)
            case ast.Subscript():
                return self._load(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.BinOp(op=ast.Pow()):
                return self._power(node, scope)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                return self._binary(BINARY[type(op)], self.read(left, scope), self.read(right, scope))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(int(value))) if value == -SMALLEST_INTEGER:
                return Const(SMALLEST_INTEGER)
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(op, self.read(operand, scope), node)
            case ast.Compare():
                return self._comparison(node, scope)
            case ast.BoolOp(op=op, values=values):
                fn = "and" if isinstance(op, ast.And) else "or"
                return reduce(lambda a, b: call(fn, a, b), [self.read(value, scope) for value in values])
            case _:
                raise self._not_in_language(node)

    def _error(
        self, message: str, node: ast.AST, hint: str = "", kind: type[EqfuseError] = ParseError
    ) -> EqfuseError:
        return self.source.error(message, node, hint, kind)

    def _not_in_language(self, node: ast.AST) -> EqfuseError:
        hints: Mapping[type[ast.AST], str] = {
            ast.IfExp: "write where(condition, a, b)",
            ast.Slice: "write an axis name for each dimension",
            ast.Attribute: "write functions without a module, exp(x), and a transpose by its indices, x[j, i]",
        }
        hint = hints.get(type(node), "")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            hint = "write a product of matrices as sum[k](a[i, k] * b[k, j])"
        return self._error("this is not part of the language", node, hint)

    def _constant(self, node: ast.Constant) -> Expr:
        value = node.value
        if not isinstance(value, int | float):
            raise self._error("this is not a number", node, "numbers, True and False are constants")
        return self._number(value, node)

    def _number(self, value: Number, node: ast.AST) -> Expr:
        if not fits(value):
            hint = (
                f"write {float(value)!r}" if value <= LARGEST_REAL else "it is beyond all numbers: write inf"
            )
            raise self._error("this integer does not fit 64 bits", node, hint)
        return Const(value)

    def _unary(self, op: ast.unaryop, operand: Expr, node: ast.AST) -> Expr:
        match op, operand:
            case ast.UAdd(), _:
                return operand
            case ast.USub(), Const(value) if not isinstance(value, bool):
                return self._number(-value, node)
            case ast.USub(), _:
                return call("neg", operand)
            case ast.Invert(), _ if self._kinds(operand) == {"int"}:
                return call(BITWISE["not"], operand, Const(-1))
            case _:
                return call("not", operand)

    def _binary(self, fn: str, left: Expr, right: Expr) -> Expr:
        """`&` and `|` join truth values, or the bits of integers: where one side is known to be an integer."""
        if fn == "bitxor" and "bool" in self._kinds(left, right):
            return call("ne", left, right)
        if fn in BITWISE:
            found = self._kinds(left, right)
            fn = BITWISE[fn] if "int" in found and "bool" not in found else fn
        return call(fn, left, right)

    def _kinds(self, *exprs: Expr) -> set[str]:
        """The kinds of expressions, as far as declarations tell: what nothing is known of counts as real."""
        dtypes = {name: declaration.dtype for name, declaration in self.names.declared.items()}
        found = kinds(exprs, dtypes)
        return {found[expr] for expr in exprs}

    def _check_tight(self, part: ast.expr) -> None:
        """Raises TypeCheckError for `a > 0 & b > 0`, which compares with `0 & b`: nobody means that but in parentheses."""
        match part:
            case ast.BinOp(ast.Constant() as number, ast.BitAnd() | ast.BitOr() as op):
                span = self.source.span(part)
                before = source_lines(self.source.text)[span.line - 1][: span.column].rstrip()
                if not before.endswith("("):
                    message = f"{BINARY[type(op)]!r} takes truth values, this is an integer"
                    raise self._error(message, number, TIGHT, TypeCheckError)

    def _comparison(self, node: ast.Compare, scope: Bindings) -> Expr:
        for part in node.comparators:
            self._check_tight(part)
        parts = [self.read(part, scope) for part in (node.left, *node.comparators)]
        links: list[Expr] = []
        for op, left, right in zip(node.ops, parts, parts[1:], strict=False):
            if type(op) not in COMPARE:
                raise self._error("this comparison is not part of the language", node, "use < <= > >= == !=")
            links.append(call(COMPARE[type(op)], left, right))
        return _all(links)

    def _power(self, node: ast.BinOp, scope: Bindings) -> Expr:
        base, exponent = self.read(node.left, scope), self.read(node.right, scope)
        if not isinstance(exponent, Const) or isinstance(exponent.value, bool):
            hint = "write exp(y * log(x)) for an exponent that is not a constant"
            raise self._error("an exponent must be a constant", node.right, hint)
        if exponent.value == -0.5:
            return call("rsqrt", base)
        if exponent.value != exponent.value or abs(exponent.value) > MAX_EXPONENT or exponent.value % 0.5:
            hint = f"exponents are integers and halves up to {MAX_EXPONENT}; write exp(y * log(x)) for others"
            raise self._error(f"unsupported exponent {exponent.value!r}", node.right, hint)
        power = power_of(base, abs(exponent.value))
        return power if exponent.value >= 0 else call("div", Const(1), power)

    def _name(self, node: ast.Name, scope: Bindings) -> Expr:
        name, names = node.id, self.names
        if name in scope.arguments:
            return scope.arguments[name]
        if name in scope.axes:
            return Axis(name)
        if name in names.definitions:
            return self._definition(node, (), node)
        if name in names.constants:
            self.read_names.add(name)
            return Const(names.constants[name])
        if name in CONSTANTS:
            return Const(CONSTANTS[name])
        if name in names.axes:
            raise self._unbound(node)
        if name in names.subscripted or (name in names.declared and not names.is_scalar(name)):
            raise self._error(
                f"{name!r} is a tensor", node, f"write its indices: {name}[...]", TypeCheckError
            )
        if name not in names.declared and (name in CALLABLE or name in reducers()):
            hint = f"write {name}[j](...)" if name in reducers() else f"write {name}(...)"
            raise self._error(f"{name!r} is a function", node, hint)
        self.read_names.add(name)
        return Scalar(name)

    def _unbound(self, node: ast.Name) -> EqfuseError:
        axis = node.id
        hint = f"reduce over it, as in sum[{axis}](...), or add it to the axes on the left side"
        return self._error(f"axis {axis!r} is not bound here", node, hint)

    def _load(self, node: ast.Subscript, scope: Bindings) -> Expr:
        match node.value:
            case ast.Name(id=name) if name in self.names.axes or self.names.is_scalar(name):
                what = "an axis" if name in self.names.axes else "a scalar"
                raise self._error(f"{name!r} is {what} and has no axes", node)
            case ast.Name(id=name):
                pass
            case ast.Attribute():
                raise self._not_in_language(node.value)
            case _:
                hint = "give the expression a name on a line of its own, and index that"
                raise self._error("only names can be indexed", node, hint)
        known = name in self.names.definitions or name in self.names.declared
        if name in reducers() and not known:
            text = ast.unparse(node)
            raise self._error(f"{text} reduces nothing", node, f"write {text}(...)")
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        index = tuple([self._index(part, scope) for part in parts])
        if name in self.names.definitions:
            return self._definition(node, index, node.value)
        self._check_rank(name, len(index), node)
        self.read_names.add(name)
        return Load(name, index)

    def _index(self, node: ast.expr, scope: Bindings) -> Expr:
        if isinstance(node, ast.Name) and node.id not in scope.axes:
            names = self.names
            if node.id not in names.definitions and not names.is_scalar(node.id):
                if node.id in names.axes or node.id in CONSTANTS:
                    raise self._unbound(node)
                hint = (
                    f"reduce over it, as in sum[{node.id}](...), or add it to the axes on the left side; "
                    f"if it is a number, declare it: {node.id}: i32"
                )
                raise self._error(f"axis {node.id!r} is not bound here", node, hint)
        expr = self.read(node, scope)
        expr = transform(expr, _divided)
        if not is_index(expr):
            hint = "an index adds, scales by sizes, divides (//, %) by sizes, clamps (min, max), or reads a tensor"
            raise self._error("this cannot be an index", node, hint)
        return expr

    def _check_rank(self, name: str, rank: int, node: ast.AST) -> None:
        declaration = self.names.declared.get(name)
        if declaration is not None and declaration.axes is not None:
            expected, origin = len(declaration.axes), f"it is declared {name}: {_declared_text(declaration)}"
        else:
            expected, origin = self.ranks.setdefault(name, rank), "it is read with that many before"
        if rank != expected:
            raise self._error(
                f"{name!r} has {_count(expected, 'axis')}, {rank} given", node, origin, TypeCheckError
            )

    def _definition(self, node: ast.expr, index: tuple[Expr, ...], name_node: ast.expr) -> Expr:
        name = getattr(name_node, "id", "")
        definition = self.names.definitions[name]
        own = self.mutual.get(self.current, frozenset((self.current,)))
        if name in own and (name not in self.done or self._ways(definition, index)):
            return self._before(definition, index, node)
        if name not in self.done:
            hint = f"it is defined on line {definition.line}; move that definition up"
            raise self._error(f"{name!r} is read before it is defined", node, hint)
        self.read_names.add(name)
        self._check_axes(definition, index, node)
        if name in self.steps and name not in own:
            return self._state(definition, index)
        try:
            return self.inliner.replace(self.done[name], dict(zip(definition.axes, index, strict=True)))
        except SizeOfComputedIndex as error:
            hint = f"give the size a name: write a scalar in place of N({error.axis})"
            message = f"N({error.axis}) in {name!r} has no meaning where {error.axis!r} is a computed index"
            raise self._error(message, node, hint, TypeCheckError) from None

    def _check_axes(self, definition: Definition, index: tuple[Expr, ...], node: ast.expr) -> None:
        if len(index) != len(definition.axes):
            name = definition.name
            left = f"{name}[{', '.join(definition.axes)}]" if definition.axes else name
            hint = f"it is defined as {left} on line {definition.line}"
            message = f"{name!r} has {_count(len(definition.axes), 'axis')}, {len(index)} given"
            raise self._error(message, node, hint, TypeCheckError)

    def _state(self, definition: Definition, index: tuple[Expr, ...]) -> Load:
        """What reads a state. An axis that it is read along has the extent of its own one."""
        domains = self.inliner.domains
        for own, at in zip(definition.axes, index, strict=True):
            if isinstance(at, Axis):
                base, of = domains.get(at.name, at.name), domains.get(own, own)
                if base != of and base not in self.names.lengths:
                    domains |= {axis: of for axis, known in domains.items() if known == base}
                    domains[base] = of
        return Load(definition.name, index)

    def _ways(self, definition: Definition, index: tuple[Expr, ...]) -> tuple[tuple[str, bool], ...]:
        """The axes of a definition along which an index is some positions before, or after, that of the definition that reads it."""
        here = self.names.definitions[self.current].axes
        return tuple(
            (axis, after)
            for axis, at in zip(definition.axes, index, strict=False)
            for after in (False, True)
            if axis in here and distance_of(at, axis, after)
        )

    def _before(self, definition: Definition, index: tuple[Expr, ...], node: ast.expr) -> Expr:
        """What a recurrence reads of a state: its value some positions before or after, along one axis."""
        name = definition.name
        if name != self.current:
            self._check_axes(definition, index, node)
        ways = self._ways(definition, index)
        if not ways or len(index) != len(definition.axes):
            if name != self.current:
                hint = f"it is defined on line {definition.line}, and reads this one: read it at the position before"
                raise self._error(f"{name!r} is read before it is defined", node, hint)
            hint = "a definition reads earlier ones"
            if definition.axes:
                before = ", ".join((*definition.axes[:-1], f"{definition.axes[-1]}-1"))
                hint += f", or in a recurrence itself at the position before or after: {name}[{before}]"
            raise self._error(f"{name!r} is defined by itself", node, hint)
        load = self._state(definition, index)
        self.before.setdefault(self.current, []).append(Before(load, ways, node))
        return load

    def recurrence(self, definition: Definition, expr: Expr) -> Expr:
        """The value of a definition. One that reads itself is a reduction over the positions up to each where its steps merge, and else
        computed in order, as those are that read each other."""
        reads, name = self.before.get(definition.name, []), definition.name
        together = self.mutual.get(name, frozenset((name,)))
        if not reads and len(together) == 1:
            return expr
        axis, after = self._way(together, reads)
        found = self._merged(definition, expr, reads, axis, after) if len(together) == 1 else None
        if found is None:
            self._check_order(definition, axis)
            self.steps[name] = InOrder(axis, after, tuple(n for n in self.names.definitions if n in together))
            return self._renamed(self._within(expr, axis, after, reads), definition.axes)
        if after:  # what is read from the end on is read nowhere at the position itself
            places = [
                (node.tensor, place)
                for node in walk(expr)
                if isinstance(node, Load) and node.tensor != name
                for place, at in enumerate(node.index)
                if at is Axis(axis)
            ]
            self.spans |= {axis: places[0]} if places else {}
        k = self.inliner.fresh(axis, free_axes(expr))
        return prefix_of(*found, axis, k, after, self.inliner.replace)

    def _way(self, together: frozenset[str], reads: Sequence[Before]) -> tuple[str, bool]:
        """The axis, and the direction, in which all reads of states are at positions before."""
        members = [name for name in self.names.definitions if name in together]
        every = [each for name in members for each in self.before.get(name, ())]
        known = [self.steps[name] for name in members if name in self.steps]
        ways = ((known[0].axis, known[0].backwards),) if known else every[0].ways
        for way in ways:
            if all(way in each.ways for each in every):
                return way
        hint = "a recurrence goes one way along one axis"
        raise self._error(f"{self.current!r} reads itself in two directions", (reads or every)[-1].node, hint)

    def _merged(
        self, definition: Definition, expr: Expr, reads: Sequence[Before], axis: str, after: bool
    ) -> tuple[Law, tuple[Expr, ...]] | None:
        """The step of a definition that reads itself, where such steps merge."""
        distances = range(1, MOST_BEFORE + 1)
        places: dict[Expr, Expr] = {
            Load(
                definition.name,
                tuple(
                    call("add" if after else "sub", Axis(each), Const(far)) if each == axis else Axis(each)
                    for each in definition.axes
                ),
            ): itself(definition.name, axis, after, far)
            for far in distances
        }
        if any(each.load not in places for each in reads):
            return None
        return step_of(
            replaced(expr, places), [itself(definition.name, axis, after, far) for far in distances]
        )

    def _check_order(self, definition: Definition, axis: str) -> None:
        if axis not in definition.axes:
            hint = f"states that read each other have the axis along which they do: {definition.name}[..., {axis}]"
            raise self._error(f"{definition.name!r} has no axis {axis!r}", definition.node, hint)

    def _renamed(self, expr: Expr, axes: Sequence[str]) -> Expr:
        """A step whose reductions are over other names than those of its own axes."""

        def step(node: Expr) -> Expr:
            match node:
                case Reduce(op, axis, body) if axis in axes:
                    fresh = self.inliner.fresh(axis, free_axes(body))
                    return Reduce(op, fresh, self.inliner.replace(body, {axis: Axis(fresh)}))
            return node

        return transform(expr, step)

    def _within(self, expr: Expr, axis: str, after: bool, reads: Sequence[Before]) -> Expr:
        """A step that reads 0 where there is no position before."""
        values: dict[Expr, Expr] = {}
        for each in reads:
            place = self.names.definitions[each.load.tensor].axes.index(axis)
            far = Const(distance_of(each.load.index[place], axis, after))
            there = (
                call("lt", Axis(axis), call("sub", Size(axis), far)) if after else call("ge", Axis(axis), far)
            )
            values[each.load] = call("where", there, each.load, Const(0))
        return replaced(expr, values)

    def _call(self, node: ast.Call, scope: Bindings) -> Expr:
        for argument in (*node.args, *node.keywords):
            if isinstance(argument, ast.keyword | ast.Starred):
                raise self._error("arguments are given by position, one by one", node)
        match node.func:
            case ast.Name(id=name):
                return self._function(name, node, scope)
            case ast.Subscript(value=ast.Name(id=name), slice=axes):
                return self._reduction(name, axes, node, scope)
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr=variable), slice=axes):
                return self._variable(name, variable, axes, node, scope)
            case ast.Attribute():
                raise self._not_in_language(node.func)
            case _:
                raise self._error("only names can be called", node)

    def _function(self, name: str, node: ast.Call, scope: Bindings) -> Expr:
        if name == "N":
            return self._size(node, scope)
        if name in VARIADIC:
            if len(node.args) < 2:
                hint = f"{name}[j](x) reduces over an axis; {name}(a, b) compares"
                raise self._error(f"{name} takes two or more arguments, {len(node.args)} given", node, hint)
            args = [self.read(arg, scope) for arg in node.args]
            return reduce(lambda a, b: call(VARIADIC[name], a, b), args)
        if name in ABBREVIATIONS:
            arguments, text = ABBREVIATIONS[name]
            self._check_count(name, len(arguments), node)
            given = dict(zip(arguments, (self.read(arg, scope) for arg in node.args), strict=True))
            return self.read(ast.parse(text, mode="eval").body, Bindings(frozenset(), given))
        if name in reducers():
            raise self._error(f"{name} needs the axes that it reduces", node, f"write {name}[j](...)")
        if name not in CALLABLE:
            guess = did_you_mean(name, (*CALLABLE, *ABBREVIATIONS, *reducers(), "N"))
            hint = guess or "functions: " + " ".join(sorted({*CALLABLE, *VARIADIC, *ABBREVIATIONS, "N"}))
            raise self._error(f"unknown function {name!r}", node.func, hint)
        self._check_count(name, ARITY[name], node)
        args = [self.read(arg, scope) for arg in node.args]
        if name in APART and not self.keeps_stops:
            given = dict(zip(FUNCTIONS[name].args, args, strict=True))
            return self.read(parsed(FUNCTIONS[name].definition), Bindings(frozenset(), given))
        return call(name, *args)

    def _check_count(self, name: str, count: int, node: ast.Call) -> None:
        if len(node.args) != count:
            message = f"{name} takes {_count(count, 'argument')}, {len(node.args)} given"
            hint = "write where(condition, value if true, value if false)" if name == "where" else ""
            raise self._error(message, node, hint)

    def _size(self, node: ast.Call, scope: Bindings) -> Expr:
        match node.args:
            case [ast.Name(id=axis)] if axis in scope.selected:
                return Reduce("sum", axis, call("where", scope.selected[axis], Const(1), Const(0)))
            case [ast.Name(id=axis)] if axis in self.names.axes:
                return Size(axis)
            case [ast.Name(id=name)]:
                hint = did_you_mean(name, self.names.axes) or "N(j) is the number of positions of axis 'j'"
                raise self._error(f"{name!r} is not an axis", node.args[0], hint)
            case _:
                hint = "N(j) is the number of positions of axis 'j', N(x, 1) the size of dimension 1 of a declared tensor"
                raise self._error("N takes the name of one axis", node, hint)

    def _reduction(self, name: str, index: ast.expr, node: ast.Call, scope: Bindings) -> Expr:
        if name in REGISTERED:
            values = self._registered(REGISTERED[name], index, node, scope)
            if len(values) > 1:
                names = ", ".join(f"a{place + 1}[...]" for place in range(len(values)))
                hint = f"name them on a line of their own: {names} = {name}[...](...)"
                raise self._error(f"{name} gives {len(values)} values", node, hint)
            return values[0]
        if name not in REDUCTIONS:
            if name in CALLABLE:
                raise self._error(f"{name!r} does not reduce", node.func, f"write {name}(...) without axes")
            hint = did_you_mean(name, reducers()) or "reductions: " + " ".join(reducers())
            raise self._error(f"unknown reduction {name!r}", node.func, hint)
        axes, selected = self._over(index, scope)
        self._check_count(f"{name}[{', '.join(axes)}]", 1, node)
        body = self.read(node.args[0], scope.bind(axes))
        if selected:
            body = call("where", _all(selected.values()), body, whole_identity(name))
        return reduce(lambda inner, axis: Reduce(name, axis, inner), reversed(axes), body)

    def _over(self, index: ast.expr, scope: Bindings) -> tuple[tuple[str, ...], Mapping[str, Expr]]:
        """The axes that a reduction is over, and the conditions on them: `k <= j` leaves the positions up to j."""
        parts = list(selections(index))
        named: list[ast.expr] = []
        for axis, condition in parts:  # several conditions of one axis are joined
            if condition is None or ast.dump(axis) not in map(ast.dump, named):
                named.append(axis)
        over = ast.copy_location(ast.Tuple(named), index)
        axes = axis_names(self.source, over, "a reduction")
        inside = scope.bind(axes)
        selected = {axis: on for axis, on in scope.selected.items() if axis in axes}
        for axis, condition in parts:
            if condition is not None and isinstance(axis, ast.Name):
                also = self.read(condition, inside)
                selected[axis.id] = also if axis.id not in selected else call("and", selected[axis.id], also)
        return axes, selected

    def values(self, node: ast.expr, scope: Bindings) -> tuple[Expr, ...]:
        """The terms of what may be a reduction with several values."""
        match node:
            case ast.Call(func=ast.Subscript(value=ast.Name(id=name), slice=index)) if name in REGISTERED:
                return self._registered(REGISTERED[name], index, node, scope)
            case _:
                return (self.read(node, scope),)

    def _registered(
        self, reduction: Reduction, index: ast.expr, node: ast.Call, scope: Bindings
    ) -> tuple[Expr, ...]:
        axes, selected = self._over(index, scope)
        self._check_count(f"{reduction.name}[{', '.join(axes)}]", len(reduction.args), node)
        ranks: tuple[str, ...] = ()
        if reduction.is_ranked:
            if not isinstance(index, ast.Tuple) or len(axes) != 2:
                hint = f"write {reduction.name}[j, k](...): the axis that it reduces, and that of the ranks"
                raise self._error(f"{reduction.name} takes 2 axes, {len(axes)} given", node.func, hint)
            (*over, last) = axes
            self._check_ranks(reduction.name, last, index.elts[1], scope)
            axes, ranks = tuple(over), (last,)
        if len(axes) != 1 and reduction.reads_position:
            raise self._error(f"{reduction.name} takes one axis, {len(axes)} given", node.func)
        inside = scope.bind(axes)
        given = [self.read(arg, inside) for arg in node.args]
        for value, arg in zip(given, node.args, strict=True):
            self._check_same_along(ranks, value, arg)
        arguments = {ARGUMENT + name: value for name, value in zip(reduction.args, given, strict=True)}
        text = Bindings(inside.axes, arguments, ranks, selected)
        return tuple(self.read(instance(result, reduction.args, axes), text) for result in reduction.results)

    def _check_ranks(self, name: str, ranks: str, node: ast.AST, scope: Bindings) -> None:
        """Raises ParseError for an axis along which there can be no list."""
        if ranks not in scope.axes:
            raise self._unbound(ast.copy_location(ast.Name(ranks), node))
        count = self.names.lengths.get(self.inliner.domains.get(ranks, ranks))
        if count is None:
            hint = f"declare it: {ranks}: axis[8]"
            raise self._error(f"nothing says how many positions axis {ranks!r} has", node, hint)
        if count > MAX_RANKS:
            hint = f"{name} keeps a list of at most {MAX_RANKS}"
            raise self._error(f"axis {ranks!r} has {count} ranks", node, hint)

    def _check_same_along(self, ranks: Sequence[str], value: Expr, node: ast.AST) -> None:
        for axis in free_axes(value).intersection(ranks):
            hint = f"all ranks list the same values: leave {axis!r} out"
            raise self._error(f"this depends on {axis!r}, the axis of its ranks", node, hint)

    def _variable(self, name: str, variable: str, index: ast.expr, node: ast.Call, scope: Bindings) -> Expr:
        """A state variable of a fold, from what a position contributes to each of them."""
        found = fold_of(f"{name}.{variable}")
        if found is None:
            known = FOLDS[name].state if name in FOLDS else ()
            hint = f"its state is {', '.join(known)}" if known else "write functions without a module, exp(x)"
            raise self._error(f"{name!r} has no state variable {variable!r}", node.func, hint)
        fold, place = found
        own = REGISTERED[name].fold if name in REGISTERED else None
        if own is not None and own.name != name:  # replaced: the name alone would mean its old states
            message = f"{name!r} was registered again: its states are those of {own.name!r}"
            raise self._error(message, node.func, f"write {own.name}.{variable}[...](...)")
        axes, selected = self._over(index, scope)
        text = f"{name}.{variable}[{', '.join(axes)}]"
        if not fold.ranks:
            self._check_count(text, len(fold.state), node)
            parts = tuple(self.read(arg, scope.bind(axes)) for arg in node.args)
            parts = _selected(fold, parts, axes, selected)
            for axis in reversed(axes):
                body = packed(parts)
                parts = tuple(Reduce(op, axis, body) for op in fold.ops)
            return parts[place]
        if scope.ranks:  # the text of a registered reduction has the axis that it reduces alone
            axes = (*axes, *scope.ranks)
        *over, ranks = axes
        if len(over) > 1:
            raise self._error(f"{name}.{variable} takes 2 axes, {len(axes)} given", node.func)
        self._check_ranks(name, ranks, node.func, scope)
        self._check_count(text, len(fold.state) * (1 if over else 2), node)
        parts = tuple(self.read(arg, scope.bind(tuple(over))) for arg in node.args)
        parts = _selected(fold, parts, axes, selected)
        if not over:
            return merged(fold.ops[place], ranks, parts[: len(fold.state)], parts[len(fold.state) :])
        for part, arg in zip(parts, node.args, strict=True):
            self._check_same_along((ranks,), part, arg)
        position = fold.state.index(fold.ranks)
        if not is_position(parts[position], over[0]):
            hint = f"its {fold.ranks} is the position, {over[0]}: another for every element"
            raise self._error("this is not the position", node.args[position], hint)
        return Reduce(fold.ops[place], over[0], ranked(ranks, parts))


def distance_of(index: Expr, axis: str, after: bool) -> int:
    """How many positions before that of an axis an index is, or after it; 0 where it is not."""
    match index:
        case Call("sub" | "add" as fn, (Axis(name), Const(int(far)))) if name == axis:
            return far if far > 0 and (fn == "add") == after else 0
        case _:
            return 0


def _all(conditions: Iterable[Expr]) -> Expr:
    return reduce(lambda a, b: call("and", a, b), conditions)


def _selected(
    fold: Fold, parts: tuple[Expr, ...], axes: Sequence[str], selected: Mapping[str, Expr]
) -> tuple[Expr, ...]:
    """What positions contribute to a fold, those that a condition leaves out the identity. A position stays what it is: what is kept
    of two states, the other variables say."""
    if not selected:
        return parts
    condition = _all(selected.values())
    return tuple(
        part
        if fold.order and any(is_position(part, axis) for axis in axes)
        else call("where", condition, part, none)
        for part, none in zip(parts, fold.identity, strict=True)
    )


def is_position(expr: Expr, axis: str) -> bool:
    """Whether an expression is the position along an axis, counted from anywhere."""
    match expr:
        case Axis(name):
            return name == axis
        case Call("add", (left, right)):
            return is_position(left, axis) and axis not in free_axes(right)
        case _:
            return False


def power_of(base: Expr, exponent: float) -> Expr:
    """A power by squaring, for an exponent that is a multiple of a half and not negative."""
    if exponent % 1:
        root = call("sqrt", base)
        return root if exponent < 1 else call("mul", power_of(base, exponent - 0.5), root)
    if exponent == 0:
        return Const(1)
    if exponent == 1:
        return base
    half = call("sq", power_of(base, exponent // 2))
    return call("mul", half, base) if exponent % 2 else half


def is_index(expr: Expr) -> bool:
    """Whether a term has the form of an index: affine, // and % by sizes, clamps, and reads of tensors."""
    match expr:
        case Axis() | Size() | Scalar() | Load() | Reduce():
            return True
        case Call(fn, _) if fn in ROUNDINGS:
            return True
        case Const(value):
            return type(value) is int
        case Call("neg" | "abs" | "add" | "sub" | "maximum" | "minimum", args):
            return all(map(is_index, args))
        case Call("mul", (left, right)):
            return is_index(left) and is_index(right) and (_is_uniform(left) or _is_uniform(right))
        case Call("floordiv" | "mod", (left, right)):
            return is_index(left) and is_index(right) and _is_uniform(right)
        case _:
            return False


def _divided(expr: Expr) -> Expr:
    """Shifts by a constant and masks of low bits as an index has them: products with, quotients and remainders by powers
    of two. What is divided by 1 is itself, as groups of one head."""
    match expr:
        case Call("stop", (part,)) | Call("floordiv" | "mul", (part, Const(1))):
            return part
        case Call("rshift", (part, Const(int(count)))) if 0 <= count < BITS - 1:
            return call("floordiv", part, Const(1 << count))
        case Call("lshift", (part, Const(int(count)))) if 0 <= count < BITS - 1:
            return call("mul", part, Const(1 << count))
        case Call("bitand", (part, Const(int(mask))) | (Const(int(mask)), part)) if _is_low(mask):
            return call("mod", part, Const(mask + 1))
        case _:
            return expr


def _is_low(mask: int) -> bool:
    """Whether a mask is of the lowest bits, however many."""
    return 0 <= mask < 1 << (BITS - 2) and mask & (mask + 1) == 0


def _is_uniform(expr: Expr) -> bool:
    return not any(isinstance(node, Axis | Load | Reduce) for node in walk(expr))


def _declared_text(declaration: Declaration) -> str:
    return f"{declaration.dtype}[{', '.join(declaration.axes or ())}]"


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {'axes' if noun == 'axis' else noun + 's'}"
