"""Random inputs whose real shadows come in the orders that matter.

A wrong repair is invisible where nothing needs repairing: when the extreme comes first. So the trials
go through a list of orders (the extreme last, first, in the middle, at random), of signs, ties and
zeros. The residues are random in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eqfuse.terms.intervals import Range
from eqfuse.terms.nodes import Program
from eqfuse.threads import cached
from eqfuse.verify.field.domain import FieldArray, FieldDomain
from eqfuse.verify.field.modular import Reals, Truths
from eqfuse.verify.sizes import InputSpec, input_specs, small_integers


@dataclass(frozen=True)
class Pattern:
    """How one trial's shadows lie along every dimension of every tensor.

    order: of the magnitudes (of the values, for `signed`); sign: of the values; special: `ties` repeats
    three values everywhere, `zeros` makes the first half along one dimension 0, `infinite` makes it -inf
    in one of the tensors (where infinities are wanted).
    """

    order: Literal["random", "ascending", "descending", "middle"]
    sign: Literal["positive", "negative", "mixed", "signed"]
    special: Literal["", "ties", "zeros", "infinite"] = ""


PATTERNS = (
    Pattern("random", "mixed"),
    Pattern("ascending", "positive"),
    Pattern("descending", "positive"),
    Pattern("middle", "positive"),
    Pattern("random", "mixed", "zeros"),
    Pattern("ascending", "mixed"),
    Pattern("ascending", "signed"),
    Pattern("random", "mixed", "ties"),
    Pattern("random", "negative"),
    Pattern("middle", "mixed"),
    Pattern("random", "mixed", "zeros"),
    Pattern("descending", "signed"),
    Pattern("random", "negative", "infinite"),
    Pattern("middle", "signed"),
    Pattern("random", "positive", "ties"),
    Pattern("random", "mixed", "infinite"),
)
"""Trial t uses pattern t modulo their number."""

SMALLEST, LARGEST = 0.2, 2.0
"""Range of the magnitudes: exponentials of products of such numbers stay far from overflow."""


@dataclass(frozen=True)
class Inputs:
    """What a program is run on: `trials` independent inputs at once.

    Real tensors are the domain's arrays, with a leading trial dimension. Integers and truth values are
    plain numpy arrays of the tensor's shape, the same in all trials. Scalars are numbers or domain
    arrays of shape (trials,). The last trials, from `usual` on, look for a difference (see `adversary.hardened`).
    `first` is the pattern of the first one.
    """

    tensors: Mapping[str, Any]
    scalars: Mapping[str, Any]
    extents: Mapping[str, int]
    trials: int
    usual: int | None = None
    first: int = 0

    @cached
    def independent(self) -> Truths:
        """Trials that draw every element independently: no ties, no zeros, nothing at a threshold."""
        plain = [not pattern.special for pattern in patterns(self.trials, self.first)]
        return np.array(plain) & ~self.hard

    @cached
    def hard(self) -> Truths:
        """Trials that look for a difference."""
        found: Truths = np.arange(self.trials) >= (self.trials if self.usual is None else self.usual)
        return found

    @cached
    def finite(self) -> Truths:
        """Trials without an infinity in any tensor."""
        found = np.ones(self.trials, dtype=bool)
        for tensor in self.tensors.values():
            if isinstance(tensor, FieldArray):
                found &= np.isfinite(tensor.shadow).reshape(self.trials, -1).all(1)
        return found


def patterns(trials: int, first: int = 0) -> list[Pattern]:
    """The pattern of every trial, from a `first` one on."""
    return [PATTERNS[trial % len(PATTERNS)] for trial in range(first, first + trials)]


def full_entropy(trials: int, first: int = 0) -> int:
    """How many of the trials draw every element independently (no ties, no zeros)."""
    return sum(not pattern.special for pattern in patterns(trials, first))


def draw(
    program: Program,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str] | None,
    domain: FieldDomain,
    trials: int,
    rng: np.random.Generator,
    scalars: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Input tensors by name, as `Inputs` has them; shapes and ranges as `sizes.input_specs` finds them."""
    specs = input_specs(program, extents, scalars, dtypes)
    return draw_specs(specs, domain, trials, rng)


def draw_specs(
    specs: Mapping[str, InputSpec],
    domain: FieldDomain,
    trials: int,
    rng: np.random.Generator,
    *,
    infinities: bool = False,
    number: int = 0,
    start: int = 0,
    scale: float = 1.0,
) -> dict[str, Any]:
    """As `draw`, from what is to be drawn; with `infinities`, some trials have -inf in one tensor each. `number` is
    that of the round: integers are the same in all of its trials; `start` is the pattern of its first trial. Real
    values are multiplied by `scale`."""
    tensors: dict[str, Any] = {}
    real = [name for name, spec in specs.items() if spec.kind == "real" and spec.shape]
    plan = patterns(trials, start)
    infinite = [trial for trial, pattern in enumerate(plan) if pattern.special == "infinite"]
    first = int(rng.integers(len(real))) if real else 0
    holes = {trial: real[(first + k) % len(real)] for k, trial in enumerate(infinite) if infinities and real}
    for spec in specs.values():
        match spec.kind:
            case "real":
                mine = [trial for trial, name in holes.items() if name == spec.name]
                tensors[spec.name] = _reals((trials, *spec.shape), domain, rng, mine, plan, scale)
            case "truth":
                tensors[spec.name] = rng.random(spec.shape) < 0.6
            case "integer":
                tensors[spec.name] = _integers(spec, rng, number)
    return tensors


def _integers(spec: InputSpec, rng: np.random.Generator, number: int) -> npt.NDArray[np.int64]:
    """Integers within their range. Of the ends of ranges, in the first three rounds, every fourth is the least, every
    fourth the one after it (a range of one position), every fourth the greatest (all positions): in the first in
    ascending order, as lengths that add up are, in the others in any order. Those that are promised to ascend do in every
    round; in the second the first half of
    them is the least and the rest the greatest, unless they are ends of ranges."""
    return spec.ordered(_any_order(spec, rng, number))


def _any_order(spec: InputSpec, rng: np.random.Generator, number: int) -> npt.NDArray[np.int64]:
    low, high = spec.values
    found = rng.integers(low, high, spec.shape, endpoint=True)
    if spec.ascending and not spec.delimits and number == 1:
        found[...] = np.where(np.arange(spec.shape[-1]) < (spec.shape[-1] + 1) // 2, low, high)
    if not spec.delimits or number > 2:
        return found
    flat, place = found.reshape(-1), np.arange(found.size) + 2 * number
    for turn, end in enumerate((low, min(low + 1, high), high)):
        flat[place % 4 == turn] = end
    mixed: npt.NDArray[np.int64] = rng.permutation(flat).reshape(spec.shape)
    return np.sort(mixed, axis=-1) if number == 0 and spec.shape else mixed


def draw_scalars(
    programs: Sequence[Program],
    given: Mapping[str, object],
    domain: FieldDomain,
    trials: int,
    rng: np.random.Generator,
    ends: Mapping[str, Range] | None = None,
    number: int = 0,
) -> dict[str, Any]:
    """Values for the scalars: those given, small integers, and random reals, every fourth one negative. Those that
    are `ends` of ranges are, in the rounds after the first, the least of their values, the next, the greatest, and
    any."""
    integers = small_integers(*programs)
    for name, (low, high) in (ends or {}).items() if number else ():
        known = {1: low, 2: min(low + 1, high), 3: high}
        integers[name] = known[number] if number in known else int(rng.integers(low, high + 1))
    values: dict[str, Any] = {}
    for name in dict.fromkeys(name for program in programs for name in program.scalars):
        value = given.get(name, integers.get(name))
        if isinstance(value, int):
            values[name] = value
        elif isinstance(value, float):
            values[name] = domain.full((), value)
        else:
            shadow = rng.uniform(0.5, 2.0, trials)
            values[name] = domain.draw(np.where(np.arange(trials) % 4 == 3, -shadow, shadow), rng)
    return values


def _reals(
    shape: tuple[int, ...],
    domain: FieldDomain,
    rng: np.random.Generator,
    infinite: Sequence[int],
    plan: Sequence[Pattern],
    scale: float,
) -> FieldArray:
    magnitude = scale * rng.uniform(SMALLEST, LARGEST, shape)
    sign = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
    shadow = _arranged(plan, magnitude, sign)
    zero = [trial for trial, pattern in enumerate(plan) if pattern.special == "zeros"]
    for trials, value in ((zero, 0.0), (infinite, -np.inf)):
        for k, trial in enumerate(trials if shape[1:] else ()):
            # Consecutive trials take consecutive dimensions: parts of lines, and whole lines.
            lines = np.moveaxis(shadow[trial], -1 - k % (len(shape) - 1), 0)
            # Two whole tiles of two, and a position that is not.
            lines[: max(1, min(len(lines) - 1, max(4, len(lines) // 2)))] = value
    drawn = domain.draw(shadow, rng)
    ties = [trial for trial, pattern in enumerate(plan) if pattern.special == "ties"]
    return _tied(drawn, ties, rng) if ties else drawn


def _arranged(plan: Sequence[Pattern], magnitude: Reals, sign: Reals) -> Reals:
    """Every trial in the order, and with the signs, of its pattern."""
    rest = (1,) * (magnitude.ndim - 1)

    def where(chosen: Callable[[Pattern], bool]) -> Truths:
        return np.array([chosen(pattern) for pattern in plan]).reshape(-1, *rest)

    values = np.where(where(lambda pattern: pattern.sign == "signed"), magnitude * sign, magnitude)
    dims = tuple(range(1, values.ndim))
    of_order = {
        order: [trial for trial, pattern in enumerate(plan) if pattern.order == order]
        for order in ("ascending", "descending", "middle")
    }
    ordered = [trial for trials in of_order.values() for trial in trials]
    lines = values[ordered]
    for dim in dims:
        # Sorting along one dimension keeps the order along those sorted before.
        lines.sort(axis=dim)
    values[ordered] = lines
    down, middle = of_order["descending"], of_order["middle"]
    values[down] = np.flip(values[down], dims)
    values[middle] = np.roll(values[middle], [(values.shape[dim] + 1) // 2 for dim in dims], dims)
    mixed = where(lambda pattern: pattern.sign == "mixed")
    negative = where(lambda pattern: pattern.sign == "negative")
    return np.asarray(values * np.where(mixed, sign, np.where(negative, -1.0, 1.0)))


def _tied(drawn: FieldArray, trials: list[int], rng: np.random.Generator) -> FieldArray:
    """In the given trials every element becomes one of the first three, residues and shadow alike."""
    size = int(np.prod(drawn.shape[1:]))
    source = rng.integers(0, min(3, size), (len(trials), size))

    def tied(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        flat = part.reshape(part.shape[0], -1).copy()
        flat[trials] = np.take_along_axis(flat[trials], source, 1)
        return flat.reshape(part.shape)

    return drawn.each(tied)
