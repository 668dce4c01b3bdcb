"""Which values to keep multiplied by log2(e), so that `exp` becomes `exp2` and no multiplication is added.

`exp(x) = exp2(x * log2(e))`. Where everything that flows into the exponents is linear in a product
with a scalar (a scaled score, its maximum, their difference), the scalar takes the constant once, and
the values in between are kept multiplied: the result is rounded as often as before. Values that would
need a multiplication of their own at full size (a tile that is loaded) are left alone: there the
difference of two exact numbers is better taken first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from eqfuse.tile.nodes import (
    Align,
    Carried,
    Constant,
    Elementwise,
    Fill,
    For,
    Kernel,
    Let,
    Op,
    ReduceTile,
    Store,
    Value,
)
from eqfuse.tile.walk import nested, operands

_LINEAR = frozenset(("add", "sub", "neg", "abs", "relu", "maximum", "minimum", "finite"))
"""Functions f with f(c x, c y) = c f(x, y) for every c > 0."""

_TYPICAL_BLOCK = 64
_WORTH = 8
"""How many multiplications have to go for each one that comes."""


def scalar_factor(op: Op) -> int | None:
    """Which operand of a product (or quotient) with a scalar is that scalar."""
    match op:
        case Elementwise("mul", (left, right)):
            return 1 if not right.dims else 0 if not left.dims else None
        case Elementwise("div", (_, right)) if not right.dims:
            return 1
        case _:
            return None


def scaled_operands(op: Op) -> tuple[Value, ...]:
    """The operands that are multiplied if the result is; none where the op has to take the constant itself."""
    match op:
        case Elementwise("where", (_, left, right)):
            return (left, right)
        case Elementwise(fn, args) if fn in _LINEAR:
            return args
        case Align(source) | ReduceTile("max" | "min" | "sum", source, _):
            return (source,)
        case _:
            return ()


def takes_constant(op: Op) -> bool:
    """Whether the result of an op is multiplied by way of its operands; else it is multiplied when it is there."""
    return bool(scaled_operands(op)) or scalar_factor(op) is not None


def log2_scaled(kernel: Kernel) -> frozenset[str]:
    """Names of the values of `kernel` to keep multiplied by log2(e)."""
    flow = _Flow()
    for stmt in nested(kernel.body):
        flow.add(stmt)
    found: set[str] = set()
    for group in flow.groups():
        removed = sum(_elements(arg) for arg in flow.exponents if arg.name in group)
        added = sum(_elements(flow.values[name]) for name in group if flow.costs(name, group))
        if removed >= _WORTH * added:
            found |= group
    return frozenset(found)


def _elements(value: Value) -> int:
    return int(_TYPICAL_BLOCK ** len(value.dims))


@dataclass
class _Flow:
    values: dict[str, Value] = field(default_factory=dict)
    ops: dict[str, Op] = field(default_factory=dict)
    carried: dict[str, Carried] = field(default_factory=dict)
    readers: dict[str, list[str | None]] = field(default_factory=dict)  # None: not scaled, whoever it is
    exponents: list[Value] = field(default_factory=list)

    def add(self, stmt: Let | For | Store) -> None:
        match stmt:
            case Let(value, op):
                self.values[value.name] = value
                self.ops[value.name] = op
                if isinstance(op, Elementwise) and op.fn == "exp" and value.dtype == "f32":
                    self.exponents.append(op.args[0])
                    return
                for operand in operands(op):
                    self._read(operand, value.name)
            case Store(_, index, value, mask):
                for operand in (*index, value, *(() if mask is None else (mask,))):
                    self._read(operand, None)
            case For(carried=items):
                for item in items:
                    self.values[item.value.name] = item.value
                    self.carried[item.value.name] = item
                    self._read(item.init, item.value.name)
                    self._read(item.next, item.value.name)

    def _read(self, value: Value, reader: str | None) -> None:
        self.readers.setdefault(value.name, []).append(reader)

    def _sources(self, name: str) -> tuple[Value, ...]:
        """The values that are multiplied if this one is; none where it takes the constant itself."""
        if name in self.carried:
            return (self.carried[name].init, self.carried[name].next)
        return scaled_operands(self.ops[name])

    def _sources_scaled(self, name: str) -> Iterator[str]:
        for value in self._sources(name):
            if not isinstance(self.ops.get(value.name), (Constant, Fill)):
                yield value.name

    def groups(self) -> Iterator[frozenset[str]]:
        """Sets of values that are multiplied together or not at all, in the order of their exponents."""
        links: dict[str, set[str]] = {}
        stack = [arg.name for arg in self.exponents if arg.dtype == "f32"]
        while stack:
            name = stack.pop()
            if name in links or isinstance(self.ops.get(name), (Constant, Fill)):
                continue
            links[name] = set(self._sources_scaled(name))
            stack += links[name]
        neighbours: dict[str, set[str]] = {name: set(found) for name, found in links.items()}
        for name, found in links.items():
            for source in found:
                neighbours[source].add(name)
        seen: set[str] = set()
        for arg in self.exponents:
            if arg.name in links and arg.name not in seen:
                group = _reached(arg.name, neighbours)
                seen |= group
                if all(self.values[name].dtype == "f32" for name in group):
                    yield frozenset(group)

    def costs(self, name: str, group: frozenset[str]) -> bool:
        """Whether keeping the value multiplied takes a multiplication: to make it, or to undo it for a reader."""
        made = not self._sources(name) and scalar_factor(self.ops[name]) is None
        undone = any(reader not in group for reader in self.readers.get(name, []))
        return made or undone


def _reached(start: str, neighbours: Mapping[str, set[str]]) -> set[str]:
    found, stack = {start}, [start]
    while stack:
        for name in neighbours[stack.pop()] - found:
            found.add(name)
            stack.append(name)
    return found
