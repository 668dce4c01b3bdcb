"""Lines of a sharded program as a program in the language, which a rank compiles as any other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf

from eqfuse.sharding.nodes import (
    AllGather,
    AllReduce,
    AllToAll,
    Compute,
    Concatenate,
    Line,
    Narrow,
    Operand,
    Ring,
    ShardPlan,
    Tree,
    flat,
    read_by,
    total_of,
)
from eqfuse.stream.programs import in_brackets
from eqfuse.terms.extents import axes_along
from eqfuse.terms.nodes import (
    Call,
    Const,
    Expr,
    Load,
    Local,
    Output,
    Program,
    Scalar,
    Size,
    call,
    replaced,
    transform,
    walk,
)
from eqfuse.terms.printer import show
from eqfuse.terms.types import kind, program_dtypes, result_dtype

FARTHEST = 2**62
"""The largest integer that stands for an infinity: sums of it and positions fit 64 bits."""


@dataclass(frozen=True)
class Text:
    """A program, what it returns, and which values without axes it reads as tensors of one element."""

    source: str
    gives: tuple[str, ...]
    single: frozenset[str]


class Texts:
    """The texts of a program's steps for tensors of some dtypes: values that are kept have the accumulator's dtype, outputs those of
    the program."""

    def __init__(self, program: Program, plan: ShardPlan, dtypes: Mapping[str, str]) -> None:
        self.program = program
        known = {**program_dtypes(program), **dtypes}
        wide = "f64" in dtypes.values()
        self.kept = {"real": "f64" if wide else "f32", "int": "i64", "bool": "bool"}
        self.dtypes = {
            output.name: output.dtype or result_dtype(output.expr, known) for output in program.outputs
        }
        self.copies: dict[str, str] = {}
        self.whole: dict[str, dict[int, str]] = {}
        self.given = dict(dtypes)
        self.exprs: dict[str, Expr] = {}
        self.kinds = self._kinds(plan, known)

    def text(self, lines: Sequence[Line], gives: Sequence[str]) -> Text:
        """The program of some lines."""
        defined = {line.name for line in lines}
        single: set[str] = set()

        used = set[str]().union(*map(read_by, lines))
        exact = {name: f"{name}_exact" for name in gives if name in used and name not in self.dtypes}
        """What other lines read of values that are kept: as it is computed, not in the dtype in which it is kept."""

        def read(node: Expr) -> Expr:
            match node:
                case Load(name, index):
                    return Load(exact.get(name, name), index)
                case Local(name, _) if name in defined:
                    return Scalar(exact.get(name, name))
                case Local(name, _):
                    single.add(name)
                    return Load(name, (Const(0),))
            return node

        exprs = [transform(self.exprs[line.name], read) for line in lines]
        nodes = list(walk(*exprs))
        tensors = {node.tensor: len(node.index) for node in nodes if isinstance(node, Load)}
        sizes = {
            Scalar(total_of(axis)): Size(f"{axis}_whole")
            for name in tensors
            for axis in self.whole.get(name, {}).values()
        }
        sized = {sizes[node] for node in nodes if node in sizes}
        exprs = [replaced(expr, sizes) for expr in exprs]
        nodes = list(walk(*exprs))
        defined |= {*exact.values()}
        heads = [self._head(name, rank, sized) for name, rank in tensors.items() if name not in defined]
        integers = {*self.program.integers} | {n.name for n in nodes if isinstance(n, Scalar)}
        integers -= {*self.program.scalars} - {*self.program.integers}
        used = {node.name for node in nodes if isinstance(node, Scalar)} - defined
        heads += [f"{name}: i64" for name in sorted(integers & used)]
        for line in lines:
            if line.name in gives:
                dtype = self.dtypes.get(line.name) or self.kept[self.kinds[line.name]]
                heads.append(f"{line.name}: {dtype}{in_brackets(line.axes)}")
        axes = axes_along([Output(line.name, line.axes, e) for line, e in zip(lines, exprs, strict=True)], ())
        domains = self.program.domains.items()
        heads += [f"{axis}: axis[{of}]" for axis, of in domains if axis in axes and of in axes]
        heads += [f"{axis}: axis[{n}]" for axis, n in self.program.lengths.items() if axis in axes]
        body: list[str] = []
        for line, expr in zip(lines, exprs, strict=True):
            own = exact.get(line.name, line.name)
            body.append(f"{own}{in_brackets(line.axes)} = {show(expr)}")
            if own != line.name:
                body.append(f"{line.name}{in_brackets(line.axes)} = {own}{in_brackets(line.axes)}")
        source = "\n".join([*filter(None, heads), *body, f"return {', '.join(gives)}"])
        return Text(source, tuple(gives), frozenset(single))

    def _head(self, name: str, rank: int, sized: AbstractSet[Expr]) -> str:
        """The declaration of a tensor that holds no floats, or is whole along a dimension whose size is read; or nothing."""
        of = self.copies.get(name, name)
        declared = next((tensor for tensor in self.program.tensors if tensor.name == of), None)
        whole = {dimension: f"{axis}_whole" for dimension, axis in self.whole.get(name, {}).items()}
        whole = {dimension: axis for dimension, axis in whole.items() if Size(axis) in sized}
        axes = [whole.get(dimension, f"{name}_{dimension}") for dimension in range(rank)]
        if declared is None:
            found = self.kinds[name]
            return "" if found == "real" and not whole else f"{name}: {self.kept[found]}{in_brackets(axes)}"
        if whole:
            return f"{name}: {declared.dtype or self.given[of]}{in_brackets(axes)}"
        if declared.dtype is None:
            return (
                f"{name}: i64{in_brackets(axes)}" if of in self.program.integer_tensors and of != name else ""
            )
        if of == name:
            axes = [axis or own for axis, own in zip(declared.axes, axes, strict=False)]
        return f"{name}: {declared.dtype}{in_brackets(axes)}"

    def _kinds(self, plan: ShardPlan, dtypes: Mapping[str, str]) -> dict[str, str]:
        """Whether values are reals, integers or truth values, by name; `exprs` gets the lines, `copies` what tensors are parts of, or
        wholes."""
        known = dict(dtypes)
        found: dict[str, str] = {}

        def note(name: str, of: str) -> None:
            found[name] = of
            known[name] = {"int": "i64", "bool": "bool"}.get(of, "acc")

        def lines(each: Iterable[Line]) -> None:
            for line in each:
                own = {n.name for n in walk(line.value) if isinstance(n, Scalar)} - {*self.program.scalars}
                dtypes = known | dict.fromkeys(own, "i64")
                self.exprs[line.name] = expr = _of_integers(line.value, dtypes)
                note(line.name, kind(expr, dtypes))

        def copied(tensors: Iterable[Operand], whole: bool = False) -> None:
            for tensor, dimension, axis, name in tensors:
                also = {dimension: axis} if whole else {}
                self.whole[name] = {**self.whole.get(tensor, {}), **also}
                if tensor in found:
                    note(name, found[tensor])
                else:
                    self.copies[name] = self.copies.get(tensor, tensor)
                    known.update({name: known[tensor]} if tensor in known else {})

        for step in flat(plan.steps):
            match step:
                case Compute(own, _):
                    lines(own)
                case Concatenate(_, tensors) | Narrow(tensors):
                    copied(tensors, isinstance(step, Concatenate))
                case Ring(_, states, tensors, update):
                    copied(tensors)
                    for state in states:
                        note(state.name, "int")  # if what is merged into it is
                    lines(update)
                    for state in states:
                        note(state.name, found[f"{state.name}_new"])
                    lines(update)
                case AllGather() | AllReduce() | AllToAll() | Tree():
                    if isinstance(step, Tree):
                        for name in step.values:
                            note(f"{name}_a", found[name])
                            note(f"{name}_b", found[name])
                        lines(step.merge)
                    for name in step.values:
                        note(f"{name}_all", found[name])
        return found


def _of_integers(expr: Expr, dtypes: Mapping[str, str]) -> Expr:
    """With the farthest integer for an infinity beside integers: what positions contribute that a mask excludes stays exact."""

    def step(node: Expr) -> Expr:
        match node:
            case Call("where", (condition, value, Const(number))) if (
                abs(number) == inf and kind(value, dtypes) == "int"
            ):
                return call("where", condition, value, Const(FARTHEST if number > 0 else -FARTHEST))
        return node

    return transform(expr, step)
