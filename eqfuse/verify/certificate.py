"""What a verification says, in plain words: what was compared, how surely, and what was not looked at."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal

import numpy as np

from eqfuse.errors import EqfuseError, Span, locate
from eqfuse.fast_dataclass import dataclass

REQUESTED = 2.0**-40
"""Bound that verification goes on for, where a theorem gives one."""

NOT_COVERED = (
    "rounding: written casts and the kernel's precision are identities in the field (float errors are apart)",
    "overflow and underflow of floating-point numbers",
    "most infinities and NaN among the inputs, and what they make (compared in floats, position by position)",
    "orders of values that no trial had; each order seen is decided by the residues",
    "other sizes than those tried: no size is in the mathematics, yet a mistake that shows at others alone is not seen",
    "constants whose difference is a multiple of p or q, and the Triton compiler and the GPU below the tile program",
)
"""What a field cannot see."""

NOT_PROVED = (
    "rounding: a proof is of real numbers, and casts are functions of which it knows nothing",
    "overflow and underflow of floating-point numbers",
    "infinities and NaN among the inputs",
)
"""What a proof does not say of two programs that are written differently."""


SAME_EVERYWHERE = ": the same everywhere at these sizes"
"""How a condition on positions is listed of which one side was not seen."""


NO_THRESHOLDS = "values at thresholds: all such trials left the range of floats, or an order open"
"""What is listed where no trial that looks for a difference could be compared."""
NEVER = " was never "
"""How a branch on data is listed of which one side was not taken: what follows is that side."""


Grade = Literal["proved", "bounded", "tested", "unverified"]
"""What a certificate claims.

proved: the programs are equal by rules, at all lengths and for all values: see `Certificate.proof`.
bounded: a theorem bounds the probability that a wrong stage agreed in all trials, by `Certificate.bound`: at the sizes that were run, for
the orders of values that trials had, under the assumptions of docs/verification.md.
tested: every position was compared and agreed, and no theorem says how sure that is: none applies (`bound` is 1), some elements were
compared in float64 only, or sides of branches were allowed that no trial took.
unverified: `ok` is False, or nothing was run (`verify=False`).
"""


@dataclass(frozen=True)
class Counterexample:
    """Inputs on which a stage and the program differ, at one position of one output.

    `inputs` are float64 arrays (integers where the program wants them) of one trial; `expected` and
    `found` the real values there. Where the real values agree to rounding, `residues` tells the two
    residues apart that decided. `trials` are all in which the stage differed, of the first round in
    which it did (from 1).
    """

    stage: str
    output: str
    position: tuple[int, ...]
    expected: float
    found: float
    inputs: Mapping[str, Any]
    residues: tuple[int, int, str] | None = None
    trials: tuple[int, ...] = ()

    def __str__(self) -> str:
        at = ", ".join(map(str, self.position))
        claim = f"{self.output}[{at}] is {self.found:.6g} in stage {self.stage!r}"
        lines = [f"{claim}, the program gives {self.expected:.6g}"]
        if self.residues is not None:
            found, expected, modulus = self.residues
            lines.append(
                f"equal up to rounding, but not in exact arithmetic: {found} and {expected} modulo {modulus}"
            )
        for name, value in self.inputs.items():
            lines.append(f"  {name} = {_array_text(value)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class StageReport:
    """How one stage was compared with the program. Counts are of output elements over all trials.

    compared: decided by residues, or as equal infinities (`infinite`); floats_only: no residue is known, compared in
    float64;
    twisted: compared where a root was taken of a non-square (no part of the bound);
    undefined: skipped, the field has no value; special: skipped, infinite or NaN in the program;
    signs: skipped, residues and real values disagree by the sign convention of a root.
    """

    name: str
    extents: Mapping[str, int]
    detail: str
    compared: int
    floats_only: int
    undefined: int
    special: int
    twisted: int
    signs: int
    infinite: int = 0

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={extent}" for axis, extent in self.extents.items())
        text = f"{self.name}: {self.compared} elements agree"
        if self.twisted:
            text += f" ({self.twisted} of them with roots of non-squares)"
        if self.infinite:
            text += f" ({self.infinite} of them infinite)"
        if self.floats_only:
            text += f" ({self.floats_only} of them compared in float64 only)"
        skipped = (
            (self.undefined, "that could not be computed exactly"),
            (self.special, "infinite or NaN"),
            (self.signs, "of which rounding does not tell whether they are equal"),
        )
        left_out = [f"{count} {why}" for count, why in skipped if count]
        if left_out:
            text += "; left out: " + ", ".join(left_out)
        return f"{text}\n    at sizes {sizes}" + (f"; {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Certificate:
    """The result of a verification.

    `ok` is True only where every stage agreed and enough was compared; otherwise `reason` tells why. `bound` is the
    probability that a wrong program would have passed, by `theorem` (1.0: none claimed), and `requested` what was asked
    for. It follows from `per_trial`, from `compared` (how often the least compared output element was) and from what
    was counted of both programs: `degree` of their difference, its exponentials `terms`, the degree `exponent` of an
    exponent, `roots`, and `calls` of opaque functions (docs/verification.md). `resampled` counts trials drawn again
    because the field had no value for some element; `extremes` counts where the extremes of max and min reductions fell
    (first position, between, last). `unverified` says what registrations declared, or arithmetic left open, of the
    reductions and rules that were used; `rules` are the added ones that matched. `passes` changed the tile programs
    before they were compared. `cached` says that an earlier process ran the trials: the certificate was read from a
    file (docs/cache.md). `shrunk` says which large constants that positions are compared with were also replaced by which
    small ones, in the program and all stages alike. `searched` are the sizes and integer scalars at which a difference was looked for
    besides, on inputs at the thresholds of both programs; these trials are no part of `trials` nor of the bound.
    `untaken` are sides of branches that no trial took: where there are some, `ok` needs that they were `allowed`.
    `supposed` are such sides where all stages were compared with the order of the numbers said to be the other one.
    `over` says which limit of memory or time ended the trials. `proof` says how two programs were proved equal, with no
    trial: that they are the same program, or by which rules they met in the e-graph. `primes` are the two of the field, `stages` what was compared,
    one after the other, `opaque` the functions that count as unknown ones, and `interpreted` those that do not. `undefined` counts elements that
    had no value and were not compared; `counterexample` is where a stage was first seen to differ. `not_covered` says what no trial tells.
    """

    ok: bool
    trials: int
    primes: tuple[int, int]
    bound: float
    theorem: str
    degree: float
    terms: float
    exponent: float = 0.0
    roots: float = 0.0
    calls: int = 0
    per_trial: float = 1.0
    requested: float = 2.0**-40
    compared: int = 0
    interpreted: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    stages: tuple[StageReport, ...] = ()
    undefined: int = 0
    resampled: int = 0
    extremes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    counterexample: Counterexample | None = None
    reason: str = ""
    not_covered: tuple[str, ...] = NOT_COVERED
    unverified: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    searched: tuple[Mapping[str, int], ...] = ()
    shrunk: str = ""
    cached: bool = False
    untaken: tuple[str, ...] = ()
    supposed: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    over: str = ""
    proof: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @property
    def grade(self) -> Grade:
        """How much this claims (see `Grade`)."""
        if not self.ok:
            return "unverified"
        if self.proof:
            return "proved"
        in_floats = any(stage.floats_only for stage in self.stages)
        return "tested" if self.bound >= 1.0 or in_floats or self.allowed else "bounded"

    @property
    def graded(self) -> str:
        """The grade, with what it is for or how sure it is."""
        more = {"proved": " for all lengths", "bounded": f" ({_probability(self.bound)})"}
        return self.grade + more.get(self.grade, "")

    def located(self, *sources: str) -> Certificate:
        """The same, with the line of what was not covered where it stands in one of the texts as it is said."""

        def said(text: str) -> str:
            condition = text.removesuffix(SAME_EVERYWHERE).partition(NEVER)[0]
            if condition == text:
                return text
            found = (span for source in sources if (span := _located(source, condition)))
            span = next(found, None)
            return text if span is None else f"line {span.line}: {text}"

        lists = (tuple(map(said, texts)) for texts in (self.not_covered, self.untaken, self.supposed))
        not_covered, untaken, supposed = lists
        return replace(self, not_covered=not_covered, untaken=untaken, supposed=supposed)

    def at_sizes(self) -> tuple[str, ...]:
        """Of what no trial took, the conditions on positions and sizes."""
        return tuple(text for text in self.untaken if text.endswith(SAME_EVERYWHERE))

    def accepted(self, allow: Sequence[str] = ()) -> Certificate:
        """What this says where sides of branches that no trial took are those allowed, as `untaken` has them, with or
        without their line, or all of them ("untaken"): if others are left, it is not `ok`."""
        given = {_plain(_LINE.sub("", text)) for text in allow}

        def is_allowed(text: str) -> bool:
            said = _LINE.sub("", text)
            condition = said.removesuffix(SAME_EVERYWHERE).partition(NEVER)[0]
            return bool({_plain(each) for each in (said, condition, ALL_UNTAKEN)} & given)

        allowed = tuple(text for text in self.untaken if is_allowed(text))
        left = [text for text in self.untaken if text not in allowed]
        found = replace(self, allowed=allowed)
        if not self.ok or not left:
            return found
        conditions = [_LINE.sub("", text).removesuffix(SAME_EVERYWHERE).partition(NEVER)[0] for text in left]
        reason = (
            f"no trial took a side of a branch, and nothing shows that none can: {'; '.join(left)}. If it makes no "
            f"difference, or no input takes it, pass allow={conditions}"
        )
        return replace(found, ok=False, bound=1.0, reason=reason)

    def with_shrunk(self, other: Certificate, numbers: str) -> Certificate:
        """This certificate, with what the same stages showed where large numbers that positions meet were small
        `numbers`. What was too far out to be compared here counts as compared there."""
        if not other.ok:
            return self
        if not self.ok:
            return replace(other, shrunk=numbers)
        near = {text for text in other.not_covered if text.endswith(SAME_EVERYWHERE)}
        kept = [text for text in self.not_covered if not text.endswith(SAME_EVERYWHERE)]
        return replace(
            self,
            not_covered=(*kept, *sorted(near)),
            untaken=tuple(text for text in self.untaken if not text.endswith(SAME_EVERYWHERE))
            + other.at_sizes(),
            stages=self.stages + other.stages,
            trials=self.trials + other.trials,
            searched=self.searched + other.searched,
            bound=max(self.bound, other.bound),
            shrunk=numbers,
        )

    def __str__(self) -> str:
        p, q = self.primes
        how = "with no trial" if self.proof else f"in {self.trials} trials"
        lines = [f"verified {how}: {self.graded}" if self.ok else f"not verified: {self.reason}"]
        if self.proof:
            lines.append(f"  {self.proof}")
            lines += ["not covered:", *(f"  {what}" for what in self.not_covered)] if self.not_covered else []
        if self.cached:
            lines.append('  by an earlier process, and kept since: verify="again" runs the trials now')
        if self.counterexample is not None:
            lines += ["  " + line for line in str(self.counterexample).splitlines()]
        if not self.stages:
            return "\n".join(lines)  # nothing was run
        lines.append(
            f"arithmetic: residues modulo p = {p}, inside exponentials modulo q = (p - 1) / {(p - 1) // q} = {q}"
        )
        if self.interpreted:
            lines.append("interpreted: " + " ".join(self.interpreted))
        if self.opaque:
            lines.append(
                "opaque (equal arguments, equal values; nothing else is used): " + ", ".join(self.opaque)
            )
        lines.append("stages:")
        lines += ["  " + line for stage in self.stages for line in str(stage).splitlines()]
        if self.searched:
            lines.append(
                "looked for a difference, at inputs near every number of both programs, at sizes and integers:"
            )
            lines += ["  " + " ".join(f"{name}={n}" for name, n in sizes.items()) for sizes in self.searched]
        if self.shrunk:
            lines.append(
                f"large constants that positions meet, also shrunk, alike in all stages: {self.shrunk}"
            )
        if self.passes:
            lines.append("passes that ran and were verified: " + ", ".join(self.passes))
        for op, (first, between, last) in self.extremes.items():
            lines.append(f"the {op} of an axis was first {first}, between {between}, last {last} times")
        if self.undefined or self.resampled:
            lines.append(f"{self.undefined} elements could not be computed exactly")
            lines.append(f"{self.resampled} further trials were drawn for them")
        if self.ok:
            lines += self._bound_text()
        if self.rules:
            lines.append("added rules that took part:")
            lines += [f"  {rule}" for rule in self.rules]
        if self.unverified:
            lines.append("taken on trust:")
            lines += [f"  {what}" for what in self.unverified]
        if self.supposed:
            lines.append("sides that no trial took, compared with the order of their numbers supposed:")
            lines += [f"  {what}" for what in self.supposed]
        if self.allowed:
            lines.append("sides that no trial took, and that were allowed:")
            lines += [f"  {what}" for what in self.allowed]
        lines.append("not covered:")
        lines += [f"  {what}" for what in self.not_covered]
        return "\n".join(lines)

    @property
    def reached(self) -> bool:
        """Whether the bound is the requested one, or better."""
        return self.ok and self.bound <= self.requested

    def _bound_text(self) -> list[str]:
        verdict = "as requested" if self.reached else "NOT the requested bound"
        counted = (
            f"d = {self.degree:.4g}, m = {self.exponent:.4g}, k = {self.terms:.4g}, r = {self.roots:.4g}"
        )
        chance = f"{_probability(self.bound)} ({verdict}: {_probability(self.requested)})"
        return [
            f"probability of accepting a wrong program: {chance}",
            f"  {self.theorem}",
            f"  counted from both programs: {counted}, {self.calls} values of opaque functions",
            f"  at most {self.per_trial:.2g} in a trial; compared without continued roots {self.compared} times or more",
            "  what this assumes: docs/verification.md",
        ]


ALL_UNTAKEN = "untaken"
"""What allows every side of a branch that no trial took."""


def allowed_texts(allow: object) -> tuple[str, ...]:
    """What `allow=` was given as texts. Raises EqfuseError where it is neither "untaken" nor a list of them."""
    if allow == ALL_UNTAKEN:
        return (ALL_UNTAKEN,)
    if (
        isinstance(allow, str)
        or not isinstance(allow, Sequence)
        or not all(isinstance(t, str) for t in allow)
    ):
        raise EqfuseError(
            "allow is no list of texts", hint='give conditions, as allow=["x[i] > 5"], or allow="untaken"'
        )
    return tuple(allow)


_LINE = re.compile(r"^line \d+: ")


def _plain(text: str) -> str:
    """A condition without blanks."""
    return "".join(text.split())


_MIRRORED = {" < ": " > ", " <= ": " >= ", " == ": " == ", " != ": " != "}


def _located(source: str, condition: str) -> Span | None:
    """Where a condition stands in a program's text: itself, else what it does with its last operand (`> 5`), where what
    comes before is written with names of its own."""
    for operator, mirrored in (*_MIRRORED.items(), *((b, a) for a, b in _MIRRORED.items())):
        left, found, right = condition.rpartition(operator)
        if found:
            tries = (condition, f"{right}{mirrored}{left}", operator + right, mirrored + left)
            return next((span for text in tries if (span := locate(source, text))), None)
    return locate(source, condition)


def _probability(bound: float) -> str:
    if bound == 0.0:
        return "below 1e-300"
    if bound >= 1.0:
        return "no bound claimed"
    return f"at most 1e{math.ceil(math.log10(bound))}" if bound < 1e-3 else f"at most {bound:.3g}"


def _array_text(value: Any) -> str:
    array = np.asarray(value)
    return np.array2string(array, precision=4, separator=", ", threshold=60, max_line_width=100)
