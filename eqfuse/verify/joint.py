"""Sizes and inputs for two programs at once: what both read has one shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eqfuse.terms.extents import with_computed
from eqfuse.terms.nodes import Axis, Program
from eqfuse.terms.parser import axes_of, sized_axes
from eqfuse.verify.inputs import InputSpec, indexing_tensors, input_specs, loads
from eqfuse.verify.sizes import (
    CHOICES,
    LARGEST_WORK,
    AxisClasses,
    Choice,
    axes_of_dimensions,
    join_axes,
    joint_extents,
    short_axes,
    volume,
    work,
)

LARGEST_DECLARED = 16
"""Axes that a program declares to be no longer are so long: of others any length will do."""
_ATTEMPTS = 6
"""Rounds of enlarging axes of one program to what the other reads."""


@dataclass(frozen=True)
class JointSizes:
    """Extents of both programs' axes, and the tensors that either reads."""

    first: Program
    second: Program
    left: Mapping[str, int]
    right: Mapping[str, int]
    specs: Mapping[str, InputSpec]

    @classmethod
    def of(
        cls,
        first: Program,
        second: Program,
        scalars: Mapping[str, object],
        choices: Iterable[Choice] = CHOICES,
        least: Sequence[Mapping[str, int]] = (),
        pinned: Mapping[str, int] | None = None,
    ) -> JointSizes:
        """Small sizes at which a dimension of a tensor is the same for both programs; the first of the choices that is
        small enough. Axes that are declared to be short have that length. `least` are extents at least, by axis, of the first and of the second program, `pinned` those that
        axes of this name have in either."""
        found: list[JointSizes] = []
        for choice in choices:
            found.append(cls._fitting(first, second, scalars, choice, least, pinned or {}))
            if found[-1].work <= LARGEST_WORK:
                break
        return min(found, key=lambda each: each.work)

    @property
    def work(self) -> int:
        """Elements of all values of either program for one trial."""
        return max(work(self.first, self.left), work(self.second, self.right))

    @property
    def volume(self) -> int:
        """Elements of the largest value of either program for one trial."""
        return max(volume(self.first, self.left), volume(self.second, self.right))

    @classmethod
    def _fitting(
        cls,
        first: Program,
        second: Program,
        scalars: Mapping[str, object],
        choice: Choice,
        least: Sequence[Mapping[str, int]],
        pinned: Mapping[str, int],
    ) -> JointSizes:
        programs = (("first", first), ("second", second))
        classes = joined_axes(first, second)
        reached: dict[object, int] = {}
        for (label, _), axes in zip(programs, least, strict=False):
            for axis, extent in axes.items():
                key = classes.find((label, axis))
                reached[key] = max(reached.get(key, 0), extent)
        sizes = [
            {**pinned, **{axis: n for axis, n in program.lengths.items() if n <= LARGEST_DECLARED}}
            for _, program in programs
        ]
        fixed = {
            classes.find((label, axis)): extent
            for (label, program), own in zip(programs, sizes, strict=True)
            for axis, extent in own.items()
            if axis in sized_axes(program) or axis in program.domains.values()
        }
        for _ in range(_ATTEMPTS):
            extents = joint_extents(classes, programs, scalars, reached, choice, pinned=fixed)
            left, right = ({a: n for (at, a), n in extents.items() if at == label} for label, _ in programs)
            specs = _specs(first, second, left, right, scalars)
            is_short = _enlarge(classes, programs, specs, extents, reached)
            if not _reach(classes, programs, specs, extents, scalars, reached) and not is_short:
                break
        return cls(first, second, left, right, specs)

    def at(self, extents: Mapping[str, int], scalars: Mapping[str, object]) -> JointSizes:
        """The same with axes of these names, in either program, at these sizes."""
        left, right = (
            with_computed(program, {axis: extents.get(axis, extent) for axis, extent in side.items()})
            for program, side in ((self.first, self.left), (self.second, self.right))
        )
        specs = _specs(self.first, self.second, left, right, scalars)
        return JointSizes(self.first, self.second, left, right, specs)

    def output_difference(self) -> str:
        """Why the outputs cannot be the same, from their shapes; empty where they agree."""
        axes = {output.name: output.axes for output in self.second.returned}
        for output in self.first.returned:
            other = axes[output.name]
            one = [self.left[axis] for axis in output.axes]
            two = [self.right[axis] for axis in other]
            if one != two:
                return (
                    f"output {output.name!r} has axes [{', '.join(output.axes)}] in one program and "
                    f"[{', '.join(other)}] in the other, which are dimensions of different inputs"
                )
        return ""


def joined_axes(first: Program, second: Program) -> AxisClasses:
    """The axes of both programs, as `("first", axis)` and `("second", axis)`, those that are as long in one class."""
    classes = AxisClasses()
    for label, program in (("first", first), ("second", second)):
        join_axes(classes, program, label)
    _join_undetermined(classes, first, second)
    return classes


def _join_undetermined(classes: AxisClasses, first: Program, second: Program) -> None:
    """Axes of which no tensor sizes both are the same where they have one name, or one place in an output."""
    sized = {
        classes.find(("dim", load.tensor, k))
        for program in (first, second)
        for load in loads(program)
        if load.tensor not in program.states
        for k, index in enumerate(load.index)
        if isinstance(index, Axis)
    }
    names = [
        dict.fromkeys(program.domains.get(axis, axis) for axis in axes_of(program.outputs))
        for program in (first, second)
    ]
    pairs = [(axis, axis) for axis in axes_of(first.outputs) if axis in axes_of(second.outputs)]
    pairs += [(axis, axis) for axis in names[0] if axis in names[1]]
    axes = {output.name: output.axes for output in second.returned}
    for output in first.returned:
        pairs += zip(output.axes, axes[output.name], strict=True)
    for one, two in pairs:
        left, right = classes.find(("first", one)), classes.find(("second", two))
        if left not in sized or right not in sized:
            classes.join(left, right)


def _specs(
    first: Program,
    second: Program,
    left: Mapping[str, int],
    right: Mapping[str, int],
    scalars: Mapping[str, object],
) -> dict[str, InputSpec]:
    """The tensors that either program reads, at these extents."""
    dtypes, read_at = _dtypes(first, second), indexing_tensors(first) | indexing_tensors(second)
    return _merged(
        input_specs(first, left, scalars, dtypes, read_at),
        input_specs(second, right, scalars, dtypes, read_at),
    )


def _dtypes(*programs: Program) -> dict[str, str]:
    return {tensor.name: tensor.dtype for program in programs for tensor in program.tensors if tensor.dtype}


def _merged(left: Mapping[str, InputSpec], right: Mapping[str, InputSpec]) -> dict[str, InputSpec]:
    """What both programs can read: the larger shape, integers where one of them needs integers."""
    merged = {**left, **right}
    for name in left.keys() & right.keys():
        one, two = left[name], right[name]
        exact = [spec for spec in (one, two) if spec.kind != "real"]
        values = exact[0].values if exact else (0, 1)
        if len(exact) == 2:
            narrow = (max(one.values[0], two.values[0]), min(one.values[1], two.values[1]))
            values = narrow if narrow[0] <= narrow[1] else values
        shape = tuple(max(a, b) for a, b in zip(one.shape, two.shape, strict=True))
        kind = exact[0].kind if exact else "real"
        merged[name] = InputSpec(
            name,
            shape,
            kind,
            values,
            one.delimits or two.delimits,
            tuple(dict.fromkeys((*one.ascending, *two.ascending))),
        )
    return merged


def _enlarge(
    classes: AxisClasses,
    programs: tuple[tuple[str, Program], ...],
    specs: Mapping[str, InputSpec],
    extents: Mapping[tuple[str, str], int],
    reached: dict[object, int],
) -> bool:
    """Notes axes that index a dimension plainly and are shorter than it; True if there were any."""
    found = False
    for label, program in programs:
        for (name, k), axis in axes_of_dimensions(program).items():
            if name in specs and extents[label, axis] < specs[name].shape[k]:
                reached[classes.find((label, axis))] = specs[name].shape[k]
                found = True
    return found


def _reach(
    classes: AxisClasses,
    programs: tuple[tuple[str, Program], ...],
    specs: Mapping[str, InputSpec],
    extents: Mapping[tuple[str, str], int],
    scalars: Mapping[str, object],
    reached: dict[object, int],
) -> bool:
    """Notes axes whose dimension is read beyond their end at computed positions; True if there were any."""
    found = False
    shapes = {name: spec.shape for name, spec in specs.items()}
    for label, program in programs:
        own = {axis: n for (at, axis), n in extents.items() if at == label}
        for axis, length in short_axes(program, shapes, own, scalars).items():
            key = classes.find((label, axis))
            reached[key] = max(length, reached.get(key, 0))
            found = True
    return found
