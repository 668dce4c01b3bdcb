"""A program with what equality saturation made of it. None of it depends on sizes, so all shapes of a kernel share it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from eqfuse import logs, results
from eqfuse.fast_dataclass import dataclass
from eqfuse.limits import OverLimit
from eqfuse.loops.nodes import Nest
from eqfuse.loops.plan import KernelPlan, Plan
from eqfuse.progress import progress
from eqfuse.rules.egraph.saturate import Report
from eqfuse.rules.merge import Group, Obstacle
from eqfuse.rules.printer import MergeText
from eqfuse.rules.scope import SHIPPED_ALONE, RuleScope
from eqfuse.terms.collapse_axes import CollapsedAxes
from eqfuse.terms.nodes import Output, Program, Reduce, reductions
from eqfuse.terms.segments import Segments
from eqfuse.terms.split_axes import SplitAxes
from eqfuse.terms.types import program_dtypes
from eqfuse.terms.views import Views
from eqfuse.threads import Lock
from eqfuse.verify.certificate import Certificate

if TYPE_CHECKING:  # loaded by those who ask: a start that finds what an earlier one has kept does not
    from eqfuse.extract.kernel_shapes import AxisPass, Merges, Structure
    from eqfuse.extract.unsuited import Unsuited
    from eqfuse.proof.derivation import Derivation
    from eqfuse.tile.nodes import TileProgram
    from eqfuse.tile.roles.nodes import RolesProgram

AS_WRITTEN = "its passes were asked for as the program has them"
"""Why the groups of `prefer="multi_pass"` have no merge."""


def rewritten(
    program: Program, scope: RuleScope, *, apart: bool = False
) -> tuple[tuple[Output, ...], Report]:
    """What `prepare` makes of a program under the rules of `scope`, which are in force: as it is kept, or made now. Raises
    OverLimit."""

    def make() -> tuple[tuple[Output, ...], Report]:
        from eqfuse.rules.prepare import prepare

        return prepare(program, apart=apart)

    return results.kept("rewritten", results.rewriting(program, apart, scope), make)[0]


@dataclass
class Timings:
    """Milliseconds per stage of one compilation."""

    ms: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with progress(name):
                yield
        finally:
            ms = 1e3 * (time.perf_counter() - start)
            self.ms[name] = self.ms.get(name, 0.0) + ms
            logs.note("stages", f"{name}: {ms:.1f} ms")


@dataclass
class Derived:
    """What is derived of a program. Tables are filled at the first request, under `lock`, and kept.

    `program`: as it was written.
    `outputs`: the expressions of its outputs, rewritten.
    `report`, `timings`: of rewriting them.
    `scope`: the rules they were rewritten by.
    `unfinished`: how the budget of rewriting ended; empty where it did not.
    `over`: the limit of memory or time that a derivation reached: nothing more is derived, and the program runs as written.
    `views`: how this program takes the tensors of the one that was written, where it was made of that.
    `groups`: the merges of each pass over an axis.
    `nests`, `derivations`, `certificates`: by plan.
    `specialized`: the kernels of a plan in roles, or why there are none.
    `unsuited`: by tile program and kernel, why that kernel has no roles.
    """

    program: Program
    outputs: tuple[Output, ...]
    report: Report
    timings: Timings
    scope: RuleScope = SHIPPED_ALONE
    unfinished: str = ""
    over: OverLimit | None = None
    views: Views | None = None
    _apart: tuple[Output, ...] | None = None
    _in_order: dict[tuple[Output, ...], tuple[Output, ...]] = field(default_factory=dict)
    groups: dict[AxisPass, Group] = field(default_factory=dict)
    nests: dict[tuple[KernelPlan, ...], Nest] = field(default_factory=dict)
    derivations: dict[tuple[KernelPlan, ...], Derivation] = field(default_factory=dict)
    certificates: dict[Any, Certificate] = field(default_factory=dict)
    specialized: dict[Any, RolesProgram | Unsuited] = field(default_factory=dict, repr=False)
    unsuited: dict[tuple[int, int], tuple[TileProgram, str]] = field(default_factory=dict, repr=False)
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            state = {**self.__dict__, "specialized": {}, "unsuited": {}}
            return {n: dict(v) if isinstance(v, dict) else v for n, v in state.items()}

    @property
    def segments(self) -> Segments | None:
        """How positions were sorted for this program; None where none were."""
        return None if self.views is None else self.views.segments

    @property
    def collapsed(self) -> CollapsedAxes | None:
        """How this program takes tensors as they lie; None where it takes them as the one that was called does."""
        return None if self.views is None else self.views.collapsed

    @property
    def split(self) -> SplitAxes | None:
        """Which axes this program has in chunks; None where it has none so."""
        return None if self.views is None else self.views.split

    @property
    def name(self) -> str:
        """A name for the emitted function: the outputs'."""
        return "fused_" + "_".join(output.name for output in self.program.outputs)

    @property
    def order(self) -> tuple[str, ...]:
        """Every axis, in the order that the dims of values have."""
        from eqfuse.rules.states import axis_order

        prepared = axis_order(replace(self.program, outputs=self.outputs))
        return tuple(dict.fromkeys((*prepared, *axis_order(self.program), *self.program.domains)))

    def form(self, plan: Plan | None) -> tuple[Output, ...]:
        """The outputs in the form that a plan runs."""
        match plan.form if plan is not None else "rewritten":
            case "rewritten":
                return self.outputs
            case "apart":
                return self._apart or ()
            case "reassociated":
                assert plan is not None
                return self.in_order(plan.order)
            case "written":
                return self.program.outputs

    def in_order(self, order: tuple[Output, ...]) -> tuple[Output, ...]:
        """The outputs in another order of sums and products, rewritten."""
        if order not in self._in_order:
            with self.timings.stage("derive"), self.scope.entered():
                found, report = rewritten(replace(self.program, outputs=order), self.scope)
            self.report.add(report)
            self._in_order[order] = found
        return self._in_order[order]

    def taken_apart(self) -> tuple[Output, ...]:
        """The outputs with the terms of sums taken apart; none where that changes nothing."""
        from eqfuse.rules.prepare import is_spread

        if self._apart is None:
            reduces = reductions(*(output.expr for output in self.outputs))
            found: tuple[Output, ...] = ()
            if any(map(is_spread, reduces)):
                with self.timings.stage("derive"), self.scope.entered():
                    found, report = rewritten(self.program, self.scope, apart=True)
                self.report.add(report)
            self._apart = () if found == self.outputs else found
        return self._apart

    def merges(self, structures: Iterable[Structure]) -> Merges:
        """The group of every pass of these structures: merges of new ones are derived now."""
        return {
            each: self.group(each)
            for structure in structures
            for cluster in structure
            for each in cluster.passes
        }

    def group(self, each: AxisPass) -> Group:
        """The group of one pass."""
        if each not in self.groups:
            with self.timings.stage("derive"), self.scope.entered():
                group, report = self._merged(each)
            self.report.add(report)
            self.groups[each] = replace(group, prefix=each.prefix)
            logs.show("merge", f"merge over {each.axis}", lambda: MergeText((group,)))
        return self.groups[each]

    def _merged(self, each: AxisPass) -> tuple[Group, Report]:
        """The group of one pass, as it is kept, or derived now."""
        strict, dtypes, order = self.program.strict_casts, program_dtypes(self.program), self.order

        def make() -> tuple[Group, Report]:
            from eqfuse.rules.merge_search import derive_group

            return derive_group(each.axis, each.reduces, order, strict, each.suffix, dtypes=dtypes)

        folds = results.folds_in_order(*each.reduces)
        subject = results.Merging(
            each.axis, each.reduces, order, strict, each.suffix, dtypes, self.scope, folds
        )
        return results.kept("merged", subject, make)[0]

    def unmerged(self, structure: Structure) -> Merges:
        """The group of every pass of a structure that walks them one by one, which needs no merge."""
        return {each: self._unmerged(each) for cluster in structure for each in cluster.passes}

    def _unmerged(self, each: AxisPass) -> Group:
        from eqfuse.rules.states import name_states

        states = name_states(each.axis, each.reduces, self.order, each.suffix)
        asked = tuple(Obstacle(Reduce(s.op, each.axis, s.body), s.body, AS_WRITTEN) for s in states)
        return Group(each.axis, states, None, asked)
