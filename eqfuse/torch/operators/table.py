"""The table of operators, and what its entries are made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from eqfuse.terms.nodes import Call, Const, Expr, call
from eqfuse.torch.positions import Position, Size, is_real_size
from eqfuse.torch.values import Layout, Value, Writer, constant

Made = Value | tuple[Value, ...]


class Unsupported(Exception):
    """An operator that the language cannot express, or not with these arguments."""


@dataclass(frozen=True)
class Node:
    """One call of an operator: its arguments by name, resolved to values, numbers and sizes, and what it returns."""

    writer: Writer
    given: Mapping[str, Any]
    shapes: tuple[tuple[Size, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.shapes[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    def get(self, name: str, default: Any = None) -> Any:
        found = self.given.get(name, default)
        return default if found is None else found

    def value(self, name: str) -> Value:
        """An argument that is a tensor, or a number as one."""
        found = self.given[name]
        if isinstance(found, Value):
            return found
        if isinstance(found, bool | int | float):
            kind = torch.bool if type(found) is bool else torch.int64 if type(found) is int else torch.float32
            return constant(found, kind)
        kind = torch.float32 if is_real_size(found) else torch.int64
        return Value((), kind, (), lambda _: self.writer.size_text(found))

    def has(self, name: str) -> bool:
        return self.given.get(name) is not None

    def dimensions(self, name: str, rank: int, default: Sequence[int] = ()) -> tuple[int, ...]:
        """Dimensions, counted from 0; all where none are given and there is no default."""
        found = self.given.get(name)
        if found is None or (isinstance(found, list | tuple) and not found):
            return tuple(default) or tuple(range(rank))
        found = [found] if isinstance(found, int) else list(found)
        return tuple(sorted(d % rank if rank else 0 for d in found)) if rank else ()


Entry = Callable[[Node], Made]

TABLE: dict[str, Entry] = {}
"""By the operator's name, without overload: `aten.add`, `higher_order.scan`."""


def packet(target: Any) -> str:
    """The name of an operator in the table, without overload; nothing for what is none."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    is_known = isinstance(target, torch._ops.HigherOrderOperator)
    name = f"higher_order.{target}" if is_known else ""
    return name if name in TABLE else ""


def argument_names(target: Any) -> list[str]:
    """The names of an operator's arguments, in order."""
    if isinstance(target, torch._ops.OpOverload):
        return [argument.name for argument in target._schema.arguments]
    return list(signature(target).parameters)


def operator(*names: str, space: str = "aten") -> Callable[[Entry], Entry]:
    """Enters a function for these operators."""

    def enter(entry: Entry) -> Entry:
        for name in names:
            TABLE[f"{space}.{name}"] = entry
        return entry

    return enter


# -- expressions of values -------------------------------------------------------------------------


def number(value: Value, expr: Expr) -> Expr:
    """What stands in a value, as a number."""
    return call("where", expr, Const(1), Const(0)) if value.is_truth else expr


def truth(value: Value, expr: Expr) -> Expr:
    """What stands in a value, as a truth value."""
    return expr if value.is_truth else call("ne", expr, Const(0))


def stored(dtype: torch.dtype, expr: Expr) -> Expr:
    """A number as what a dtype holds: whether it is not 0, of truth values."""
    return call("ne", expr, Const(0)) if dtype == torch.bool else expr


def both(one: Expr, other: Expr) -> Expr:
    """Whether both hold."""
    match one, other:
        case (Const(True), kept) | (kept, Const(True)):
            return kept
        case (Const(False), _) | (_, Const(False)):
            return Const(False)
        case _:
            return call("and", one, other)


def either(one: Expr, other: Expr) -> Expr:
    """Whether one of them holds."""
    match one, other:
        case (Const(False), kept) | (kept, Const(False)):
            return kept
        case (Const(True), _) | (_, Const(True)):
            return Const(True)
        case _:
            return call("or", one, other)


def negated(truth: Expr) -> Expr:
    """Whether it does not hold. Comparisons are kept, for a NaN is neither."""
    match truth:
        case Const(bool(value)):
            return Const(not value)
        case Call("not", (inner,)):
            return inner
        case _:
            return call("not", truth)


def check_broadcast(own: Size, size: Size) -> None:
    """Raises Unsupported where a dimension can be no broadcast of another: an operator that reads tensors in its own way
    would be translated into another one."""
    if isinstance(own, int) and isinstance(size, int) and own not in (1, size) and size != 1:
        raise Unsupported(f"it reads {own} positions of a dimension as {size}")


def broadcast(
    value: Value, shape: Sequence[Size]
) -> tuple[Layout, Callable[[Sequence[Position]], Sequence[Position]]]:
    """The layout of a value that is broadcast to a shape, and the positions of it that positions there stand for."""
    behind = len(shape) - value.rank
    for own, size in zip(value.shape, shape[behind:], strict=True):
        check_broadcast(own, size)
    layout: Layout = (None,) * behind + tuple(
        None if own == 1 and size != 1 else digits
        for own, size, digits in zip(value.shape, shape[behind:], value.layout, strict=True)
    )

    def moved(positions: Sequence[Position]) -> Sequence[Position]:
        kept = positions[behind:]
        return [() if own == 1 else p for own, p in zip(value.shape, kept, strict=True)]

    return layout, moved


def finest(layouts: Sequence[Layout]) -> Layout:
    """For each dimension the finest of several layouts."""
    found = []
    for choices in zip(*layouts, strict=True):
        known = [digits for digits in choices if digits is not None]
        found.append(max(known, key=len) if known else None)
    return tuple(found)


def elementwise(
    shape: Sequence[Size], dtype: torch.dtype, values: Sequence[Value], compute: Callable[..., Expr]
) -> Value:
    """A function of what stands at the same position of several values, broadcast to a shape."""
    pairs = [broadcast(value, shape) for value in values]
    layout = finest([layout for layout, _ in pairs]) if pairs else (None,) * len(shape)

    def read(positions: tuple[Position, ...]) -> Expr:
        return compute(*(value.at(moved(positions)) for value, (_, moved) in zip(values, pairs, strict=True)))

    return Value(tuple(shape), dtype, layout, read)
