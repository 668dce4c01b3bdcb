"""What is verified, and where its inputs come from: stages of the compiler, and the programs that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eqfuse.terms.bounds import reads_outside
from eqfuse.terms.domain import Domain
from eqfuse.terms.interpreter import evaluate_together
from eqfuse.terms.nodes import Expr, Program
from eqfuse.terms.ranges import Ends
from eqfuse.threads import cached
from eqfuse.verify.adversary import counted
from eqfuse.verify.bound import Bound, Difference, Side
from eqfuse.verify.comparison import Defined, Special
from eqfuse.verify.degrees import Counted, count
from eqfuse.verify.domains import domains
from eqfuse.verify.field.choice import FieldChoice
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.inputs import InputSpec, delimiting_scalars, indexing_tensors, small_integers
from eqfuse.verify.sampling import Inputs, draw_scalars, draw_specs
from eqfuse.verify.solve import LARGEST, Variable

Run = Callable[[Inputs, Domain], Mapping[str, Any]]
"""Outputs by name: domain arrays (or numpy integers) with a leading trial dimension."""


@dataclass(frozen=True)
class Stage:
    """One form of the program: how to run it, at which extents (all axes), and what to say about it
    (tile and shard sizes). A form in terms is a `program` too; one with named values has calls `written_out`."""

    name: str
    run: Run
    extents: Mapping[str, int]
    detail: str = ""
    program: Program | None = None
    written_out: Callable[[], Mapping[Expr, Expr]] = dict

    @classmethod
    def of_program(cls, name: str, program: Program, extents: Mapping[str, int]) -> Stage:
        """A program, run as written."""

        def run(inputs: Inputs, domain: Domain) -> Mapping[str, Any]:
            return _evaluated([program], extents, inputs, domain)[0]

        return cls(name, run, extents, program=program)


def _evaluated(
    programs: Sequence[Program], extents: Mapping[str, int], inputs: Inputs, domain: Domain
) -> list[dict[str, Any]]:
    return evaluate_together(programs, inputs.tensors, inputs.scalars, extents, domain, batch=inputs.trials)


@dataclass(frozen=True)
class Source:
    """Where a group's inputs come from, and what the stages are compared with: the first program, where `expected` is
    none."""

    sides: tuple[Side, ...]
    specs: Mapping[str, InputSpec]
    scalars: Mapping[str, object]
    extents: Mapping[str, int]
    special: Special
    expected: Stage | None = None
    defined: Defined = "reference"

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(side.program for side in self.sides)

    @cached
    def variables(self) -> Mapping[str, Variable]:
        """What the numbers of tensors and scalars may be, by their dtypes."""
        dtypes = {tensor.name: tensor.dtype for program in self.programs for tensor in program.tensors}
        integers = {name for program in self.programs for name in program.integers}
        found = {name: Variable.of_dtype(None, "integer") for name in integers}
        return found | {
            name: Variable.of_dtype(dtypes.get(name), spec.kind) for name, spec in self.specs.items()
        }

    @cached
    def solvable(self) -> Mapping[str, Variable]:
        """The same of numbers that programs can be run on: what indices are made of stays inside, and integers stay such that floats
        have them."""
        indices = {name for program in self.programs for name in indexing_tensors(program)}
        integers = {name for program in self.programs for name in program.integers}
        positive = integers - counted(*self.programs)
        ends = {name: (1.0 if name in positive else -(2.0**31), 2.0**31 - 1) for name in integers}
        for name, spec in self.specs.items():
            if spec.kind == "integer" and (spec.delimits or name in indices):
                ends[name] = float(spec.values[0]), float(spec.values[1])
        return {
            name: each.within(*ends.get(name, (-LARGEST, LARGEST))) for name, each in self.variables.items()
        }

    @property
    def fixed(self) -> Mapping[str, float]:
        """Scalars that have one value in all trials."""
        return {name: value for name, value in self.scalars.items() if isinstance(value, int | float)}

    @property
    def reference(self) -> Stage:
        """What the stages are compared with."""
        return self.expected or Stage.of_program("program", self.sides[0].program, self.sides[0].extents)

    def bounds(self, stages: Sequence[Stage], field: FieldChoice) -> list[Bound]:
        """What one trial can miss, for every stage."""
        expected = self._counted(self.reference, field)
        difference = Difference.of(self.sides, expected, field.q, strict_casts=field.strict_casts)
        alone = difference.worst(expected)
        if alone.per_trial >= 1.0:  # nor is it told from another, which need not be counted
            return [alone] * len(stages)
        return [difference.worst(self._counted(stage, field)) for stage in stages]

    def elements(self, stages: Sequence[Stage], field: FieldChoice) -> int:
        """How many elements the largest of the forms holds at once in one trial."""
        return max(self._counted(form, field).elements for form in (self.reference, *stages))

    def _counted(self, form: Stage, field: FieldChoice) -> Counted:
        if form.name not in self._counts:
            integers = small_integers(*self.programs)
            names = dict.fromkeys(name for program in self.programs for name in program.scalars)
            scalars = {name: self.scalars.get(name, integers.get(name)) for name in names}
            found = count(form.run, self.specs, scalars, self.extents, strict_casts=field.strict_casts)
            self._counts[form.name] = found
        return self._counts[form.name]

    @cached
    def _counts(self) -> dict[str, Counted]:
        return {}

    def evaluate(
        self, stages: Sequence[Stage], inputs: Inputs, domain: Domain
    ) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
        """The outputs of the reference, and by name of those stages that are programs of the same axes and
        integers: what they share is evaluated once."""
        if self.expected is not None:
            return self.expected.run(inputs, domain), {}
        first = self.sides[0]
        same = {
            stage.name: stage.program
            for stage in stages
            if stage.program is not None
            and stage.program.integers == first.program.integers
            and stage.extents == first.extents
        }
        expected, *others = _evaluated([first.program, *same.values()], first.extents, inputs, domain)
        return expected, dict(zip(same, others, strict=True))

    def draw(
        self,
        domain: FieldDomain,
        trials: int,
        rng: np.random.Generator,
        number: int,
        *,
        start: int = 0,
        scale: float = 1.0,
        varied: bool = False,
        within: bool = False,
    ) -> Inputs:
        """The inputs of a round, by the patterns from `start` on; real values of tensors are multiplied by `scale`. Where
        they are `varied`, every trial has integers of its own. `within`: tensors are where all functions of the first
        program have values, in most trials."""
        infinities = self.special != "ignored"
        domain.trials = trials
        tensors = draw_specs(
            self.specs,
            domain,
            trials,
            rng,
            infinities=infinities,
            number=number,
            start=start,
            scale=scale,
            varied=varied,
            within=domains(self.programs[0]) if within else None,
        )
        scalars = draw_scalars(self.programs, self.scalars, domain, trials, rng, self.ends_of_ranges, number)
        return Inputs(tensors, scalars, self.extents, trials, first=start, varied=varied)

    @cached
    def ends_of_ranges(self) -> Mapping[str, Ends]:
        """The scalars that positions are compared with in every program that has them, and what they may be."""
        found: dict[str, Ends] = {}
        each = [
            (program, delimiting_scalars(program, extents, self.scalars))
            for program, extents in ((side.program, side.extents) for side in self.sides)
        ]
        for name in dict.fromkeys(name for _, ends in each for name in ends):
            ranges = [ends.get(name) for program, ends in each if name in program.scalars]
            known = [values for values in ranges if values is not None]
            if len(known) == len(ranges):
                values = min(low for low, _ in known), max(high for _, high in known)
                if all(self._reads_inside({name: end}) for end in range(values[0], values[1] + 1)):
                    found[name] = values
        return found

    def _reads_inside(self, integers: Mapping[str, int]) -> bool:
        """Whether all programs read within their tensors where these scalars have these values."""
        given = {**small_integers(*self.programs), **self.scalars, **integers}
        shapes = {name: spec.shape for name, spec in self.specs.items()}
        return not any(
            any(True for _ in reads_outside(side.program, shapes, side.extents, given)) for side in self.sides
        )

    def least_rounds(self) -> int:
        """Integers are the same in all trials of a round, so they get a second one, ends of ranges a third, and
        scalars that end ranges one for each kind of length."""
        if self.ends_of_ranges:
            return 4
        if any(spec.delimits for spec in self.specs.values()):
            return 3
        return 2 if any(spec.kind != "real" for spec in self.specs.values()) else 1
