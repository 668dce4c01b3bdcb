"""Random inputs whose real shadows come in the orders that matter.

A wrong repair is invisible where nothing needs repairing: when the extreme comes first. So the trials
go through a list of orders (the extreme last, first, in the middle, at random), of signs, ties and
zeros. The residues are random in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eqfuse.terms.nodes import Call, Expr, Program, Scalar, once, walk
from eqfuse.terms.ranges import Ends
from eqfuse.threads import cached
from eqfuse.verify.domains import Interval, brought_within
from eqfuse.verify.field.array import FieldArray
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.field.modular import Reals, Truths
from eqfuse.verify.inputs import InputSpec, small_integers

Places = npt.NDArray[np.int64]


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

SHARES = (0.6, 0.6, 0.1, 0.9)
"""Truth values that are true, where every trial has its own."""

SMALLEST, LARGEST = 0.2, 2.0
"""Range of the magnitudes: exponentials of products of such numbers stay far from overflow."""
EVERY_ANY = 5
"""Where numbers have to be within intervals, every so many trials has any."""


@dataclass(frozen=True)
class Inputs:
    """What a program is run on: `trials` independent inputs at once.

    Real tensors are the domain's arrays, with a leading trial dimension. Integers and truth values are
    plain numpy arrays of the tensor's shape, the same in all trials. Scalars are numbers or domain
    arrays of shape (trials,). The last trials, from `usual` on, look for a difference (see `adversary.hardened`).
    `first` is the pattern of the first one. Where they are `varied`, integers and truth values have a leading trial
    dimension too.
    """

    tensors: Mapping[str, Any]
    scalars: Mapping[str, Any]
    extents: Mapping[str, int]
    trials: int
    usual: int | None = None
    first: int = 0
    varied: bool = False

    def part(self, first: int, stop: int) -> Inputs:
        """Some of the trials."""

        def cut(values: Mapping[str, Any], varied: bool = False) -> dict[str, Any]:
            return {name: _of_trials(value, slice(first, stop), varied) for name, value in values.items()}

        count = len(range(self.trials)[first:stop])
        return replace(
            self,
            tensors=cut(self.tensors, self.varied),
            scalars=cut(self.scalars),
            trials=count,
            usual=None if self.usual is None else min(max(self.usual - first, 0), count),
            first=self.first + first,
        )

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


def _of_trials(value: Any, trials: slice, varied: bool = False) -> Any:
    if isinstance(value, FieldArray):
        return value.each(lambda part: part[trials]) if value.shape else value
    return value[trials] if varied else value


def patterns(trials: int, first: int = 0) -> list[Pattern]:
    """The pattern of every trial, from a `first` one on."""
    return [PATTERNS[trial % len(PATTERNS)] for trial in range(first, first + trials)]


@dataclass(frozen=True)
class Plan:
    """The trials of each order, sign and kind; `ordered` are those of any order but the random one."""

    order: Mapping[str, Places]
    sign: Mapping[str, Places]
    special: Mapping[str, Places]
    ordered: Places

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, trials: int, first: int) -> Plan:
        """Of so many trials, from a first pattern on."""
        plan = patterns(trials, first)

        def places(chosen: Callable[[Pattern], str], values: Iterable[str]) -> dict[str, Places]:
            return {
                value: np.array(
                    [n for n, pattern in enumerate(plan) if chosen(pattern) == value], dtype=np.int64
                )
                for value in values
            }

        order = places(lambda pattern: pattern.order, ("ascending", "descending", "middle"))
        return cls(
            order,
            places(lambda pattern: pattern.sign, ("positive", "negative", "mixed", "signed")),
            places(lambda pattern: pattern.special, ("ties", "zeros", "infinite")),
            np.concatenate(list(order.values())),
        )


def full_entropy(trials: int, first: int = 0) -> int:
    """How many of the trials draw every element independently (no ties, no zeros)."""
    return sum(not pattern.special for pattern in patterns(trials, first))


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
    varied: bool = False,
    within: Mapping[str, Interval] | None = None,
) -> dict[str, Any]:
    """As `draw`, from what is to be drawn; with `infinities`, some trials have -inf in one tensor each. `number` is
    that of the round: integers are the same in all of its trials; `start` is the pattern of its first trial. Real
    values are multiplied by `scale`. Where they are `varied`, every trial has integers and truth values of its own.
    Of most trials, all tensors that have to be `within` an interval are."""
    tensors: dict[str, Any] = {}
    real = [name for name, spec in specs.items() if spec.kind == "real" and spec.shape]
    plan = Plan.of(trials, start % len(PATTERNS))
    infinite = plan.special["infinite"].tolist()
    first = int(rng.integers(len(real))) if real else 0
    inside = np.flatnonzero(np.arange(trials) % EVERY_ANY) if within else None
    holes = {trial: real[(first + k) % len(real)] for k, trial in enumerate(infinite) if infinities and real}
    for spec in specs.values():
        match spec.kind:
            case "real":
                mine = [(k, trial) for k, (trial, name) in enumerate(holes.items()) if name == spec.name]
                interval = (within or {}).get(spec.name)
                inner = None if interval is None or inside is None else (inside, interval)
                tensors[spec.name] = _reals((trials, *spec.shape), domain, rng, mine, plan, scale, inner)
            case "truth":
                shape = (trials, *spec.shape) if varied else spec.shape
                share = rng.choice(SHARES, (trials, *(1,) * len(spec.shape))) if varied else 0.6
                tensors[spec.name] = rng.random(shape) < share
            case "integer":
                numbers = np.arange(trials) % 4 if varied else np.array([number])
                drawn = spec.ordered(_integers(spec, rng, numbers))
                tensors[spec.name] = drawn if varied else drawn[0]
    return tensors


def _integers(spec: InputSpec, rng: np.random.Generator, numbers: Places) -> npt.NDArray[np.int64]:
    """Integers within their range, one draw for each of the `numbers` of rounds. Of the ends of ranges, in the first three
    rounds, every fourth is the least, every fourth the one after it (a range of one position), every fourth the greatest
    (all positions): in the first in ascending order, as lengths that add up are, in the others in any order. Of those that
    are promised to ascend the first half is the least in the second round and the rest the greatest, unless they are ends
    of ranges."""
    low, high = spec.values
    found = rng.integers(low, high, (len(numbers), *spec.shape), endpoint=True)
    if spec.ascending and not spec.delimits:
        found[numbers == 1] = np.where(np.arange(spec.shape[-1]) < (spec.shape[-1] + 1) // 2, low, high)
    if not spec.delimits:
        return found
    flat = found.reshape(len(numbers), -1)
    place = np.arange(flat.shape[1]) + 2 * numbers[:, np.newaxis]
    for turn, end in enumerate((low, min(low + 1, high), high)):
        flat[(place % 4 == turn) & (numbers <= 2)[:, np.newaxis]] = end
    mixed: npt.NDArray[np.int64] = rng.permuted(flat, axis=1).reshape(found.shape)
    if spec.shape:
        mixed[numbers == 0] = np.sort(mixed[numbers == 0], axis=-1)
    return mixed


OF_POSITIVE = frozenset({"sqrt", "rsqrt", "root", "log"})
"""Functions of numbers that are not negative."""


def draw_scalars(
    programs: Sequence[Program],
    given: Mapping[str, object],
    domain: FieldDomain,
    trials: int,
    rng: np.random.Generator,
    ends: Mapping[str, Ends] | None = None,
    number: int = 0,
) -> dict[str, Any]:
    """Values for the scalars: those given, small integers, and random reals, every fourth one negative, unless a root is taken of a
    sum with it, which may have no value then. Those that are `ends` of ranges are, in the rounds after the first, the least of their values, the next, the greatest, and
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
            is_negative = (np.arange(trials) % 4 == 3) & all(
                name not in _under_roots(each) for each in programs
            )
            values[name] = domain.draw(np.where(is_negative, -shadow, shadow), rng)
    return values


@once
def _under_roots(program: Program) -> frozenset[str]:
    """The scalars that are added to something of which a root or a logarithm is taken, as the epsilon of a norm."""

    def terms(expr: Expr) -> Iterator[Expr]:
        match expr:
            case Call("add", args):
                yield from chain.from_iterable(map(terms, args))
            case _:
                yield expr

    nodes = walk(*(output.expr for output in program.outputs))
    found = (node.args[0] for node in nodes if isinstance(node, Call) and node.fn in OF_POSITIVE)
    return frozenset(term.name for each in found for term in terms(each) if isinstance(term, Scalar))


def _reals(
    shape: tuple[int, ...],
    domain: FieldDomain,
    rng: np.random.Generator,
    infinite: Sequence[tuple[int, int]],
    plan: Plan,
    scale: float,
    inside: tuple[Places, Interval] | None,
) -> FieldArray:
    """Random reals in the patterns of a plan. `infinite` are the trials with -inf, each with its number among those of all
    tensors; those `inside` have their numbers within an interval."""
    magnitude = scale * rng.uniform(SMALLEST, LARGEST, shape)
    sign = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
    shadow = _arranged(plan, magnitude, sign)
    rank = len(shape) - 1
    # Consecutive trials take consecutive dimensions: parts of lines, and whole lines.
    for k in range(min(rank, len(plan.special["zeros"]))):
        part = slice(_part(shape[rank - k]))
        at: tuple[Any, ...] = (plan.special["zeros"][k::rank], *[slice(None)] * (rank - 1 - k), part)
        shadow[at] = 0.0
    for number, trial in infinite:
        _make_infinite(shadow[trial], number)
    if inside is not None:
        trials, interval = inside
        shadow[trials] = brought_within(shadow[trials], interval, scale * LARGEST)
    drawn = domain.draw(shadow, rng)
    return _tied(drawn, plan.special["ties"], rng) if len(plan.special["ties"]) else drawn


def _part(length: int) -> int:
    """Two whole tiles of two, and a position that is not; or half."""
    return max(1, min(length - 1, max(4, length // 2)))


def _make_infinite(values: Reals, number: int) -> None:
    """Makes parts of lines -inf along one dimension or another. The number of the trial tells which; where there are three
    dimensions or more, thirds of the first differ in it: the start, the end, which masks of early positions rule out, and one
    tile alone."""
    parts = np.array_split(values, 3) if values.ndim > 2 else [values]
    inner = values.ndim - (values.ndim > 2)
    for turn, each in enumerate(parts, start=number):
        lines = np.moveaxis(each, -1 - (turn + 1) // 2 % inner, -1)
        length = lines.shape[-1]
        match turn % 3:
            case 0:
                lines[..., : _part(length)] = -np.inf
            case 1:
                lines[..., length - _part(length) :] = -np.inf
            case _:
                lines[..., : min(2, max(1, length - 1))] = -np.inf


def _arranged(plan: Plan, magnitude: Reals, sign: Reals) -> Reals:
    """Every trial in the order, and with the signs, of its pattern."""
    dims = tuple(range(1, magnitude.ndim))
    signs = sign.copy()
    signs[plan.sign["positive"]], signs[plan.sign["negative"]], signs[plan.sign["signed"]] = 1.0, -1.0, 1.0
    values = magnitude
    values[plan.sign["signed"]] *= sign[plan.sign["signed"]]
    if dims and max(magnitude.shape[1:]) > 1:
        lines = values[plan.ordered]
        for dim in dims:
            # Sorting along one dimension keeps the order along those sorted before.
            lines.sort(axis=dim)
        values[plan.ordered] = lines
        down, middle = plan.order["descending"], plan.order["middle"]
        values[down] = np.flip(values[down], dims)
        values[middle] = np.roll(values[middle], [(values.shape[dim] + 1) // 2 for dim in dims], dims)
    return values * signs


def _tied(drawn: FieldArray, trials: Places, rng: np.random.Generator) -> FieldArray:
    """In the given trials every element becomes one of the first three, residues and shadow alike."""
    size = int(np.prod(drawn.shape[1:]))
    source = rng.integers(0, min(3, size), (len(trials), size))

    def tied(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        flat = part.reshape(part.shape[0], -1).copy()
        flat[trials] = np.take_along_axis(flat[trials], source, 1)
        return flat.reshape(part.shape)

    return drawn.each(tied)
