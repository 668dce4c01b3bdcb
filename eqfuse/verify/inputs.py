"""What a program reads, at given extents: the shapes of its tensors, and the integers that make sense in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from eqfuse.terms.bounds import longer_dimensions
from eqfuse.terms.dtypes import LIMITS, STORED
from eqfuse.terms.functions import COMPARISONS, ON_BITS
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Program,
    Scalar,
    call,
    children,
    once,
    post_order,
    transform,
    walk,
)
from eqfuse.terms.promises import ascending
from eqfuse.terms.ranges import Affine, Box, Ends, Range, integer
from eqfuse.terms.types import truths
from eqfuse.verify.facts import facts

Kind = Literal["real", "integer", "truth"]
_KIND_OF_DTYPE: Mapping[str, Kind] = {**dict.fromkeys(LIMITS, "integer"), "bool": "truth"}

GATHERED = 3
"""Positions that a gather chooses from, where no axis fixes their number."""


def roots(program: Program) -> tuple[Expr, ...]:
    """The expressions of the outputs."""
    return tuple(output.expr for output in program.outputs)


@once
def loads(program: Program) -> tuple[Load, ...]:
    """Every distinct access, inner ones first."""
    return tuple(node for node in walk(*roots(program)) if isinstance(node, Load))


@once
def plain_indices(program: Program) -> tuple[tuple[Load, int, Axis], ...]:
    """The indices of accesses that are an axis and nothing else, where the dimension has its extent."""
    return tuple(_plain_indices(program))


def _plain_indices(program: Program) -> Iterator[tuple[Load, int, Axis]]:
    longer = longer_dimensions(program)
    for load in loads(program):
        for k, index in enumerate(load.index):
            if isinstance(index, Axis):
                axis = program.domains.get(index.name, index.name)
                if axis not in longer.get((load.tensor, k), ()):
                    yield load, k, index


@once
def strides(program: Program) -> tuple[tuple[str, Expr], ...]:
    """Axes that count within a step of what is added to them, and that step: `q` and 4 of `x[g*4 + q]`."""
    return tuple(_steps(program))


def _steps(program: Program) -> Iterator[tuple[str, Expr]]:
    for load in loads(program):
        for node in walk(*load.index):
            match node:
                case Call("add", (Call("mul", steps), Axis(axis))) | Call(
                    "add", (Axis(axis), Call("mul", steps))
                ):
                    yield from ((axis, step) for step in steps if isinstance(step, Const | Scalar))


def small_integers(*programs: Program) -> dict[str, int]:
    """Values for the integer scalars: 2, 3, 4, ... in order, and for a step of as many positions as an axis is
    declared to have their number."""
    names = dict.fromkeys(name for program in programs for name in program.integers)
    steps = {
        step.name: program.lengths[axis]
        for program in programs
        for axis, step in strides(program)
        if isinstance(step, Scalar) and axis in program.lengths
    }
    return {name: 2 + k for k, name in enumerate(names)} | steps


def delimiting_scalars(
    program: Program, extents: Mapping[str, int], scalars: Mapping[str, object] | None = None
) -> dict[str, Ends]:
    """The integer scalars that are not given and that nothing but comparisons reads, with what they may be: the
    positions that they are compared with, and the one behind."""
    compared = [node for node in walk(*roots(program)) if isinstance(node, Call) and node.fn in COMPARISONS]
    rest = (
        transform(root, lambda node: Const(True) if node in compared else node) for root in roots(program)
    )
    indices = (index for node in walk(*compared) if isinstance(node, Load) for index in node.index)
    fixed = {node.name for node in walk(*rest, *indices) if isinstance(node, Scalar)}
    free = [name for name in program.integers if name not in fixed and name not in (scalars or {})]
    known = {name: n for name, n in small_integers(program).items() if name not in free}
    gathered = dict.fromkeys((*program.integer_tensors, *free), (0, GATHERED - 1))
    positions = Positions(extents, {**known, **integers_in(scalars or {})}, gathered)
    found: dict[str, Ends] = {}
    for node in compared:
        for name, (low, high), positional in positions.compared(*node.args):
            if positional and name in free:
                before = found.get(name, (low, high + 1))
                found[name] = (min(low, before[0]), max(high + 1, before[1]))
    return found


def integers_in(scalars: Mapping[str, object]) -> dict[str, int]:
    return {name: value for name, value in scalars.items() if isinstance(value, int)}


class Positions(Box):
    """What integers can be at given extents; `gathered` are the values of integer tensors, and of scalars that are
    left open, by name: each is one integer, wherever it is read."""

    def __init__(
        self, extents: Mapping[str, int], integers: Mapping[str, int], gathered: Mapping[str, Ends]
    ) -> None:
        super().__init__({axis: (0, extent - 1) for axis, extent in extents.items()}, extents, integers)
        self._gathered = gathered

    def leaf(self, node: Expr) -> Range:
        match node:
            case Load(name, _) | Scalar(name) | Local(name, _) if name in self._gathered:
                return integer(Local(name, ()), *self._gathered[name])
        return super().leaf(node)

    def _names_in(self, atom: Expr) -> dict[str, None]:
        """The gathered values that an atom is made of."""
        nodes = post_order([atom], lambda node: () if isinstance(node, Load) else children(node))
        leaves = [self.of(node).affine for node in nodes if isinstance(node, Load | Scalar | Local)]
        return {part.name: None for form in leaves if form for part in form.terms if isinstance(part, Local)}

    def compared(self, left: Expr, right: Expr) -> Iterator[tuple[str, Ends, bool]]:
        """The gathered values in a comparison of integers, by name; for each what it is where both sides are equal,
        the others taken to be 0, and whether the comparison is with positions."""
        form = self.affine(call("sub", left, right))
        if form is None:
            return
        ours = {atom: self._names_in(atom) for atom in form.terms}
        others = Affine({atom: n for atom, n in form.terms.items() if not ours[atom]})
        bounds = self.bounds(others)
        if not all(isinstance(end, int) for end in bounds):
            return
        for atom, count in form.terms.items():
            low, high = bounds if count < 0 else (-bounds[1], -bounds[0])
            for name in ours[atom]:
                yield name, (-int(-low // abs(count)), int(high // abs(count))), bool(others.atoms)


@dataclass(frozen=True)
class InputSpec:
    """One tensor to draw: its shape and, for integers, the values that make sense. `delimits`: positions are compared
    with them, so that they are ends of ranges. Along the dimensions `ascending` they do not fall."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    values: Ends = (0, 1)
    delimits: bool = False
    ascending: tuple[int, ...] = ()

    def ordered(self, integers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The integers, of one trial or of several, in the order that is promised."""
        for place in self.ascending:
            integers = np.sort(integers, axis=place - len(self.shape))
        return integers


def input_specs(
    program: Program,
    extents: Mapping[str, int],
    scalars: Mapping[str, object] | None = None,
    dtypes: Mapping[str, str] | None = None,
    read_at: frozenset[str] = frozenset(),
) -> dict[str, InputSpec]:
    """What to draw for each tensor of the program at these extents.

    A dimension that an axis indexes plainly has that axis's extent, any other reaches as far as its
    indices do. Integers stay within what they gather from or are compared with; `read_at` are tensors of integers at which
    another program reads.
    """
    integers = {**small_integers(program), **integers_in(scalars or {})}
    dtypes = {t.name: t.dtype for t in program.tensors if t.dtype is not None} | dict(dtypes or {})
    kinds = _kinds(program, dtypes)
    values, delimiting = _integer_values(program, extents, integers, kinds, dtypes, read_at)
    shapes = _shapes(program, extents, integers, values)
    places: dict[str, tuple[int, ...]] = {}
    for name, place in ascending(program):
        places[name] = (*places.get(name, ()), place)
    return {
        name: InputSpec(
            name,
            shapes[name],
            kinds[name],
            values.get(name, (0, 1)),
            name in delimiting,
            places.get(name, ()),
        )
        for name in (tensor.name for tensor in program.tensors)
    }


def small_shapes(
    program: Program, extents: Mapping[str, int], scalars: Mapping[str, object] | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of the input tensors at these extents (see `input_specs`)."""
    return {name: spec.shape for name, spec in input_specs(program, extents, scalars).items()}


def _kinds(program: Program, dtypes: Mapping[str, str]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {tensor.name: "real" for tensor in program.tensors}
    for name in truths(program):
        kinds[name] = "truth"
    for name in program.integer_tensors:
        kinds[name] = "integer"
    for tensor in program.tensors:
        dtype = dtypes.get(tensor.name, tensor.dtype)
        if dtype is not None:
            kinds[tensor.name] = _KIND_OF_DTYPE.get(dtype, "real")
    return kinds


def _whole_range(program: Program, dtypes: Mapping[str, str]) -> Iterator[tuple[str, Ends]]:
    """Tensors whose integers may be any that their dtype has: narrow ones that are in no index, and those whose bits are
    taken."""
    indices, bits = indexing_tensors(program), _of_bits(program)
    for tensor in program.tensors:
        dtype = dtypes.get(tensor.name, "i64")
        if tensor.name not in indices and (dtype in STORED or (tensor.name in bits and dtype in LIMITS)):
            yield tensor.name, LIMITS[dtype]


@once
def indexing_tensors(program: Program) -> frozenset[str]:
    """Tensors that stand in an index."""
    return frozenset(
        part.tensor for load in loads(program) for part in walk(*load.index) if isinstance(part, Load)
    )


@once
def _of_bits(program: Program) -> frozenset[str]:
    return frozenset(
        part.tensor
        for node in walk(*roots(program))
        if isinstance(node, Call) and node.fn in ON_BITS
        for part in walk(*node.args)
        if isinstance(part, Load)
    )


def _integer_values(
    program: Program,
    extents: Mapping[str, int],
    integers: Mapping[str, int],
    kinds: Mapping[str, Kind],
    dtypes: Mapping[str, str],
    read_at: frozenset[str],
) -> tuple[dict[str, Ends], set[str]]:
    """What the integers of tensors may be, and the tensors that are ends of ranges of positions. Keys that positions are compared with for equality
    may also be the integers next to these positions, unless they are read at: they select none."""
    integer = [name for name, kind in kinds.items() if kind == "integer"]
    values: dict[str, Ends] = dict.fromkeys(integer, (0, GATHERED - 1))
    values |= {name: ends for name, ends in _whole_range(program, dtypes) if name in values}
    delimiting, positional_keys = set[str](), set[str]()
    numbers: dict[str, Ends] = {}
    indices = indexing_tensors(program) | read_at
    for node in facts(program).comparisons if values else ():
        positions = Positions(extents, integers, values)
        for name, (low, high), positional in positions.compared(*node.args):
            if positional and node.fn in ("eq", "ne"):
                beyond = name not in indices
                values[name] = (low - beyond, high + beyond)
                positional_keys |= {name}
            elif positional:
                values[name] = (low, high + 1)
                delimiting |= {name}
            elif name not in delimiting | positional_keys and (low >= 0 or name not in indices):
                # What it is compared with, and beyond; no position is below 0.
                before = numbers.get(name, (low, high))
                numbers[name] = (min(low, before[0]), max(high, before[1]))
                values[name] = (numbers[name][0], numbers[name][1] + GATHERED - 1)
    plain = _plain_dimensions(program, extents)
    gathered: dict[str, int] = {}
    for load in loads(program):
        for k, index in enumerate(load.index):
            if isinstance(index, Load) and (load.tensor, k) in plain and index.tensor in values:
                size = plain[load.tensor, k]
                gathered[index.tensor] = min(size, gathered.get(index.tensor, size))
    values |= {name: (0, size - 1) for name, size in gathered.items()}
    delimiting -= gathered.keys()
    least, most = LIMITS["i64"]
    within = {
        name: (max(least, min(low, most)), max(least, min(high, most)))
        for name, (low, high) in values.items()
    }
    return within, delimiting


def _plain_dimensions(program: Program, extents: Mapping[str, int]) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    for tensor in program.tensors:
        for k, axis in enumerate(tensor.axes):
            if axis is not None and axis in extents:
                found[tensor.name, k] = extents[axis]
    for load, k, index in plain_indices(program):
        found[load.tensor, k] = extents[index.name]
    return found


def _shapes(
    program: Program, extents: Mapping[str, int], integers: Mapping[str, int], values: Mapping[str, Ends]
) -> dict[str, tuple[int, ...]]:
    plain = _plain_dimensions(program, extents)
    reach: dict[tuple[str, int], int] = {}
    for load in loads(program):
        for k, index in enumerate(load.index):
            if (load.tensor, k) in plain:
                continue
            bound = Positions(extents, integers, values).whole(index)
            reach[load.tensor, k] = max(reach.get((load.tensor, k), 1), 1 if bound is None else bound[1] + 1)
    return {
        tensor.name: tuple(
            plain.get((tensor.name, k), reach.get((tensor.name, k), GATHERED)) for k in range(tensor.rank)
        )
        for tensor in program.tensors
    }
