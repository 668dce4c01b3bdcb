"""A program that every rank runs on its shards: computations, and collectives between them.

All ranks run the same steps. A value is a tensor that a rank holds, by name; a value whose axes are sharded is a rank's part of
it, any other is the same on every rank, or a rank's own partial state until a collective makes one of all. A value without
axes has one element. `mesh` names the dimension of the mesh along which ranks exchange.

What a collective makes of values `x` of all ranks, in the order of the ranks:

    AllGather    x_all[rank, ...]    every rank's x
    AllReduce    x_all               op over the ranks of x
    AllToAll     x_all[rank, ...]    every rank's x, at this rank's positions of an axis
    Tree         x_all               the merge of all x, of two at a time
    Concatenate  x_all               a sharded tensor, whole along a dimension
    Narrow       x_own               a whole tensor, at this rank's positions along a dimension: nothing is sent
    Grouped      the values of a program, whose tensors become whole one group of an axis after the other
    Ring         x                   a state that has seen the operands of all ranks, which are passed on from rank to rank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from eqfuse.fast_dataclass import dataclass
from eqfuse.rules.merge import State
from eqfuse.stream.programs import in_brackets
from eqfuse.terms.nodes import Expr, Load, Local, Program, Scalar, walk
from eqfuse.terms.sizes import places

RANK, PASSED = "rank", "passed"
"""The axis of what every rank has sent; the end of the names of operands that are passed on, and of their axis."""


Operand = tuple[str, int, str, str]
"""A tensor, a dimension of it, the sharded axis along that, and the name of what is made of it."""


@dataclass(frozen=True)
class Line:
    """`name[axes] = value`. A value reads tensors and other values as `Load`, and values without axes as `Local`. It is a reduction
    over the positions up to each one of an axis where it `is_prefix`: a walk over the axis computes all."""

    name: str
    axes: tuple[str, ...]
    value: Expr
    is_prefix: bool = False


@dataclass(frozen=True)
class Compute:
    """A program in the language, and the values of it that are kept."""

    lines: tuple[Line, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class AllGather:
    mesh: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class AllReduce:
    mesh: str
    op: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class AllToAll:
    """`axis` is the one of which every rank gets its positions."""

    mesh: str
    values: tuple[str, ...]
    axis: str


@dataclass(frozen=True)
class Tree:
    """`merge` makes of states `x_a` and `x_b` of two adjacent parts `x_new`."""

    mesh: str
    values: tuple[str, ...]
    merge: tuple[Line, ...]


@dataclass(frozen=True)
class Concatenate:
    """Tensors that become whole along a dimension."""

    mesh: str
    tensors: tuple[Operand, ...]


@dataclass(frozen=True)
class Narrow:
    tensors: tuple[Operand, ...]


@dataclass(frozen=True)
class Ring:
    """`update` makes of states `x` and of the operands of one rank, `t_passed` for each of `tensors`, `x_new`; before any, they are
    the identities of `states`. The first position of these operands is the scalar `start_of(PASSED)`."""

    mesh: str
    states: tuple[State, ...]
    tensors: tuple[Operand, ...]
    update: tuple[Line, ...]


@dataclass(frozen=True)
class Grouped:
    """A program of tensors that have become whole, for one group of positions of `axis` after the other: the next group's tensors are on
    their way meanwhile. `slices` are the dimensions of tensors and values along the axis."""

    axis: str
    fetch: Concatenate
    compute: Compute
    slices: tuple[tuple[str, int], ...]


Step = Grouped | Compute | AllGather | AllReduce | AllToAll | Tree | Concatenate | Narrow | Ring
Exchange = AllGather | AllReduce | AllToAll | Tree | Concatenate | Ring


@dataclass(frozen=True)
class Sharding:
    """Which axes are sharded: `classes` has for each of them the name that all axes of the same extent share, `meshes` for each
    class its dimension of the mesh. Axes of `outputs` are so in outputs alone: tensors that have them are whole."""

    classes: Mapping[str, str]
    meshes: Mapping[str, str]
    outputs: frozenset[str] = frozenset()

    def along(self, program: Program) -> dict[tuple[str, int], str]:
        """The sharded axes, by class, along the dimensions of the program's tensors. A tensor with several axes over one dimension of the
        mesh is sharded along the one that outputs have, else the first; it is whole along the others."""
        rows = {
            self.classes[axis] for output in program.outputs for axis in output.axes if axis in self.classes
        }
        found: dict[tuple[str, int], str] = {}
        places_of = [each for each in places(program) if each[0] in self.classes]
        for axis, tensor, dimension in sorted(places_of, key=lambda each: self.classes[each[0]] not in rows):
            of = self.classes[axis]
            taken = {
                self.meshes[other]
                for (name, at), other in found.items()
                if name == tensor and at != dimension
            }
            if self.meshes[of] not in taken:
                found[tensor, dimension] = of
        return found

    def mesh(self, axis: str) -> str | None:
        """The dimension of the mesh that an axis is sharded over."""
        found = self.classes.get(axis)
        return None if found is None else self.meshes[found]


@dataclass(frozen=True)
class ShardPlan:
    """The steps of all ranks, by one strategy."""

    strategy: str
    steps: tuple[Step, ...]
    dims: Mapping[str, tuple[str, ...]]
    """The axes of every value but the inputs'."""
    every: Mapping[str, str]
    """The sharded axes that are whole in some step, by their names there."""


def flat(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps without groups."""
    for step in steps:
        yield from (step.fetch, step.compute) if isinstance(step, Grouped) else (step,)


def start_of(axis: str) -> str:
    """The scalar that has the position of a rank's first element along an axis."""
    return f"start_{axis}"


def total_of(axis: str) -> str:
    """The scalar that has the extent of a sharded axis over all ranks."""
    return f"total_{axis}"


def own_rank(mesh: str) -> str:
    """The scalar that has a rank's number along a dimension of the mesh."""
    return f"{RANK}_{mesh}"


def read_by(step: Line | Step) -> set[str]:
    """The names of tensors, values and scalars that a line or a step reads."""
    match step:
        case Line(_, _, value, _):
            nodes = list(walk(value))
            found = {node.tensor for node in nodes if isinstance(node, Load)}
            return found | {node.name for node in nodes if isinstance(node, Local | Scalar)}
        case Compute(lines, _):
            return set().union(*map(read_by, lines)) - {line.name for line in lines}
        case Concatenate(_, tensors) | Narrow(tensors):
            return {tensor for tensor, *_ in tensors}
        case Grouped(_, fetch, compute, _):
            return read_by(fetch) | (read_by(compute) - {name for *_, name in fetch.tensors})
        case Ring(_, states, tensors, update):
            inner = set().union(*map(read_by, update))
            inner -= {line.name for line in update} | {state.name for state in states}
            return (inner - {name for *_, name in tensors}) | {tensor for tensor, *_ in tensors}
        case _:
            return set(step.values)


def shown(steps: Sequence[Step]) -> str:
    """Steps as text."""
    lines: list[str] = []
    for step in steps:
        match step:
            case Grouped(axis, fetch, compute, _):
                inner = shown([fetch, compute]).splitlines()
                lines += [
                    f"for each group of {axis}, the next one on its way:",
                    *(f"    {each}" for each in inner),
                ]
            case Compute(own, gives):
                lines += [f"compute {', '.join(gives)}", *(f"    {_line(line)}" for line in own)]
            case AllGather(mesh, values):
                lines.append(f"all-gather over {mesh}: {', '.join(values)}")
            case AllReduce(mesh, op, values):
                lines.append(f"all-reduce by {op} over {mesh}: {', '.join(values)}")
            case AllToAll(mesh, values, axis):
                lines.append(f"all-to-all over {mesh} along {axis}: {', '.join(values)}")
            case Tree(mesh, values, merge):
                lines.append(f"merge by pairs over {mesh}: {', '.join(values)}")
                lines += [f"    {_line(line)}" for line in merge]
            case Concatenate(mesh, tensors):
                lines.append(f"all-gather over {mesh}: {_named(tensors)}")
            case Narrow(tensors):
                lines.append(f"own part of {_named(tensors)}")
            case Ring(mesh, _, tensors, update):
                lines.append(f"for the operands of each rank, passed on over {mesh}: {_named(tensors)}")
                lines += [f"    {_line(line)}" for line in update]
    return "\n".join(lines)


def _line(line: Line) -> str:
    return f"{line.name}{in_brackets(line.axes)} = {line.value}"


def _named(tensors: Sequence[Operand]) -> str:
    return ", ".join(f"{name} along {axis}" for name, _, axis, _ in tensors)
