"""`eqfuse bench grad`: gradients of random programs against torch's autograd over the float64 reference.

A program counts as
  right        every gradient by every tensor of real numbers is autograd's, wherever that is a number, and so is the one
               that reads what its forward has saved
  refused      a reduction has no gradient: the reason is told
  constant     no output is a real number, or no tensor is
and fails where a gradient is another one (mismatch), or something breaks. Gradients of reads at loaded positions are sums by key, which also run in the order of the key
(eqfuse/terms/segments.py). `--only gathers` takes programs with such reads alone. Written casts are left out: to a gradient they
are the identity, and autograd rounds on the way. Infinities and NaN among the inputs are made 0: what they spread to is
decided by the order of operations. hypothesis shrinks what fails.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from bench.autograd import Differentiated
from bench.fuzz_report import is_of_what_is_behind
from bench.measure import time_limit
from bench.programs import Example, programs, registered
from bench.report import Column, Options, Report, chosen_names
from eqfuse.differentiate.gradient import grad, real_outputs, saving_gradient
from eqfuse.errors import BindError, EqfuseError
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import Load, Program, walk
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.segments import Segments, segments

TITLE = "Gradients of random programs, against autograd of the float64 reference"
COLUMNS = (
    Column("outcome", lambda row: str(row["outcome"])),
    Column("programs", lambda row: str(row["programs"])),
)

PHASES = (Phase.generate, Phase.shrink)
BATCH = 50
MOST_SECONDS = 60
MOST_ELEMENTS = 2_000
"""Of the axes together: autograd keeps every value of the unfused program."""
ROUNDING = 1e-6
"""Relative to the largest element of a gradient."""
LAST_DIGITS = 512
"""In units of the last digit."""
MOVES = 8
"""How often last digits are moved, those of inputs and those that operations give: what is rounding alone has few values, and the same
one now and then."""
FAILED = ("mismatch", "broken")


@dataclass(frozen=True)
class Outcome:
    kind: str
    why: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in FAILED


def check(example: Example) -> Outcome:
    """The gradient of one program, and autograd's."""
    registered(example.source)
    try:
        return _judged(example)
    except EqfuseError as error:
        if isinstance(error, BindError) and is_of_what_is_behind(error, example):
            return Outcome("refused", str(error))
        return Outcome("refused" if "keeps one of two states" in error.message else "broken", str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (whatever it is, a valid program must not cause it)
        return Outcome("broken", f"{type(error).__name__}: {error}")


def _judged(example: Example) -> Outcome:
    source = re.sub(rf"\b({'|'.join(CASTS)})\(", "(", example.source)
    program = parse(source)
    names = {tensor.name for tensor in program.tensors}
    tensors = {
        name: np.nan_to_num(tensor.double().numpy(), nan=0.0, posinf=0.0, neginf=0.0)
        if tensor.is_floating_point()
        else tensor.numpy()
        for name, tensor in example.tensors().items()
        if name in names
    }
    wrt = [name for name, value in tensors.items() if value.dtype.kind == "f"]
    if not wrt or not real_outputs(program):
        return Outcome("constant")
    axes = {*axes_of(program.outputs), *program.domains.values()}
    sizes = {axis: size for axis, size in example.sizes.items() if axis in axes}
    scalars = {name: number for name, number in example.scalars.items() if name in program.scalars}
    with np.errstate(all="ignore"):
        known = Differentiated.of(source, tensors, scalars, sizes, wrt, seed=example.seed)
        texts = {"": grad(source, wrt), " that reads what is saved": saving_gradient(source, wrt).whole}
        made: dict[str, tuple[Program, Segments | None]] = {}
        for which, text in texts.items():
            gradient = parse(text)
            made[which] = gradient, None
            if (form := segments(gradient)) is not None:
                made[f"{which} in the order of its keys"] = gradient, form
        errors = {which: known.error(*each) for which, each in made.items()}
        is_steady = max(errors.values()) <= ROUNDING
        if not is_steady:
            rng = np.random.default_rng(example.seed)
            moves = [tensors | {name: _moved(tensors[name], rng) for name in wrt} for _ in range(MOVES)]
            beside = [
                Differentiated.of(source, moved, scalars, sizes, wrt, seed=example.seed) for moved in moves
            ]
            beside += [
                Differentiated.of(source, tensors, scalars, sizes, wrt, seed=example.seed, noise=number)
                for number in range(MOVES)
            ]
            errors = {which: known.error(*each, beside) for which, each in made.items()}
    for which, error in errors.items():
        if error > ROUNDING:
            return Outcome("mismatch", f"a gradient{which} is off by {error:.2g} of the largest one")
    return Outcome("right" if is_steady else "unsteady")


def _moved(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The array with other last digits."""
    return np.asarray(value + rng.integers(-LAST_DIGITS, LAST_DIGITS, value.shape) * np.spacing(value))


def _small(example: Example) -> bool:
    count = 1
    for size in example.sizes.values():
        count *= size
    return 0 < count <= MOST_ELEMENTS


def gathers(example: Example) -> bool:
    """Whether the program reads something at positions that a tensor says."""
    registered(example.source)
    nodes = walk(*(output.expr for output in parse(example.source).outputs))
    indices = (index for node in nodes if isinstance(node, Load) for index in node.index)
    return any(isinstance(part, Load) for index in indices for part in walk(index))


ANY = "any"
DRAWN: Mapping[str, SearchStrategy[Example]] = {
    ANY: programs().filter(_small),
    "gathers": programs(gathers=True).filter(_small).filter(gathers),
}
"""Which programs are drawn, by what `--only` says."""


def run(options: Options, report: Report) -> None:
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    kinds = chosen_names(options.only or ANY, tuple(DRAWN))
    batches = (
        (DRAWN[kind], options.seed + batch, min(BATCH, options.count() - start))
        for kind in kinds
        for batch, start in enumerate(range(0, options.count(), BATCH))
    )
    for drawn, seed, examples in batches:
        if time.monotonic() - started > options.seconds:
            break
        _batch(drawn, seed, examples, outcomes, report)
        print(
            f"{sum(outcomes.values())} programs, {len(report.failures)} failed", file=sys.stderr, flush=True
        )
    report.add(*({"outcome": kind, "programs": count} for kind, count in sorted(outcomes.items())))
    report.summary.append(f"{sum(outcomes.values())} programs of seed {options.seed}")


def _batch(
    drawn: SearchStrategy[Example], seed: int, examples: int, outcomes: Counter[str], report: Report
) -> None:
    """One run of hypothesis; the first failure of it is shrunk and reported."""
    failing: list[tuple[Example, Outcome]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @hypothesis.given(drawn)
    def is_right(example: Example) -> None:
        with time_limit(MOST_SECONDS):
            outcome = check(example)
        if not failing:
            outcomes[outcome.kind] += 1
        if outcome.failed:
            failing.append((example, outcome))
            raise AssertionError(outcome.kind)

    try:
        is_right()
    except AssertionError:
        example, outcome = failing[-1]
        report.failures.append(f"seed {seed}, {outcome.kind}: {outcome.why}\n{example}")
