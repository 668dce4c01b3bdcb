"""Random programs of scaled values: each divides or multiplies by what keeps it in range, at any magnitude of its inputs.

A value is scaled by the greatest, the sum, the mean, the range or the norm of its row, by a scale for each row, block or
column that is a tensor, or by a scalar. Programs take sums, means, maxima, norms and deviations of such values, of their
differences, products and squares, in rows or as matrix products, and scale the result back or divide it by other sums.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eqfuse.terms.parser import parse

MAGNITUDES = (1e-45, 1e-40, 1e-38, 1e-30, 1e-10, 1.0, 1e10, 1e18, 1e20, 1e30, 3e37, 1e38)
"""Of the values of a program's inputs."""
SIZES: Mapping[str, int] = {"i": 3, "k": 4, "j": 93}
BLOCK = 8
"""Columns of a block that has a scale of its own."""
LARGEST = 3e38
SHAPES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys("xz", ("i", "j")),
    **dict.fromkeys("pq", ("k", "j")),
    **dict.fromkeys("st", ("i",)),
    "r": ("k",),
    **dict.fromkeys("uv", ("j",)),
    "b": ("i", "block"),
    "c": (),
}
"""Axes of the tensors, and the scalar `c`."""
POWERS: Mapping[str, tuple[int, ...]] = {
    "x": (1,),
    "z": (1, 1, 0),
    "p": (1, 1, 0),
    "q": (1, 0),
    "s": (-1, -1, 1, 0),
    "t": (-1, -1, 1, 0),
    "r": (-1, -1, 1, 0),
    "u": (0, 0, 1, -1),
    "v": (0, 0, 1, -1),
    "b": (-1, -1, 1, 0),
    "c": (-1, 0, 0),
}
"""What a tensor's magnitude is of the program's: the power that one of these is."""


@dataclass(frozen=True)
class Scaled:
    """A program, and the power of the magnitude that each of its inputs has."""

    source: str
    powers: Mapping[str, int]
    seed: int

    def inputs(self, magnitude: float) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """float32 tensors and scalars by name: of either sign where the program has a difference to take, and above 0 else."""
        program = parse(self.source)
        generator = torch.Generator().manual_seed(self.seed)

        def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            values = 0.5 + 0.5 * torch.rand(shape, generator=generator, dtype=torch.float64)
            if name in "xzpq":
                values = torch.where(torch.rand(shape, generator=generator) < 0.3, -values, values)
            return (values * _limited(magnitude, self.powers[name])).float()

        sizes = {**SIZES, "block": math.ceil(SIZES["j"] / BLOCK)}
        tensors = {t.name: drawn(t.name, tuple(sizes[a] for a in SHAPES[t.name])) for t in program.tensors}
        return tensors, {name: float(drawn(name, ())) for name in program.scalars}

    def call(self, kernel: Callable[..., Any], magnitude: float) -> Any:
        """The outputs of a kernel, or another function of the inputs by name."""
        tensors, scalars = self.inputs(magnitude)
        return kernel(**tensors, **scalars)


def _limited(magnitude: float, power: int) -> float:
    return min(magnitude**power, LARGEST)


def scaled_program(seed: int) -> Scaled:
    """The program of a seed."""
    rng = random.Random(seed)
    powers = {name: rng.choice(POWERS[name]) for name in POWERS}
    return Scaled(_Writer(rng).program(), powers, seed)


Value = Callable[[], str]


@dataclass
class _Writer:
    """Writes one program; `lines` are its definitions so far, which later values may use again."""

    rng: random.Random

    def __post_init__(self) -> None:
        self.lines: list[str] = []
        self.scales: dict[str, list[str]] = {"i": [], "k": []}

    def program(self) -> str:
        result = self.product() if self.rng.random() < 0.25 else self.row()
        return "\n".join((*self.lines, result))

    def row(self) -> str:
        return f"y[i] = {self.finished(self.reduced(self.body('i')))}"

    def product(self) -> str:
        left, right = self.scaled("i"), self.scaled("k")
        total = self.pick(
            lambda: f"sum[j]({left} * {right})",
            lambda: f"sum[j](sq({left} - {right}))",
            lambda: f"sum[j](abs({left} - {right}))",
            lambda: f"sum[j](({left}) * ({right} * {self.weight()}))",
        )
        return self.pick(
            lambda: f"y[i,k] = {self.finished(total)}",
            lambda: f"y[i] = max[k]({total})",
            lambda: f"y[i] = sum[k]({total})",
        )

    def finished(self, total: str) -> str:
        return self.pick(
            lambda: total,
            lambda: total,
            lambda: f"{self.scale('i')} * {total}",
            lambda: f"{total} / {self.scale('i')}",
            lambda: f"{total} * s[i]",
            lambda: f"{total} / sum[j](abs({self.scaled('i')}))",
        )

    def reduced(self, body: str) -> str:
        return self.pick(
            lambda: f"sum[j]({body})",
            lambda: f"sum[j]({body})",
            lambda: f"mean[j]({body})",
            lambda: f"max[j]({body})",
            lambda: f"sqrt(sum[j](sq({body})))",
            lambda: f"sqrt(mean[j](sq({body})))",
            lambda: f"std[j]({body})",
            lambda: f"sum[j](where(j <= 50, {body}, 0))",
        )

    def body(self, row: str) -> str:
        one = self.scaled(row)
        return self.pick(
            lambda: one,
            lambda: f"sq({one})",
            lambda: f"({one}) * ({self.scaled(row)})",
            lambda: f"({one}) * ({self.scaled(row)})",
            lambda: f"sq({one} - {self.scaled(row)})",
            lambda: f"abs({one} - {self.scaled(row)})",
            lambda: f"({one} - {self.scaled(row)}) * ({self.scaled(row)})",
            lambda: f"({one}) * {self.weight()}",
            lambda: f"({one}) / sum[j](abs({one}))",
            lambda: f"exp({one} - max[j]({one})) * ({self.scaled(row)})",
        )

    def scaled(self, row: str) -> str:
        base = self.base(row)
        return self.pick(
            lambda: f"{base} / {self.scale(row)}",
            lambda: f"{base} / {self.scale(row)}",
            lambda: f"{base} / {self.scale(row)} * {self.weight()}",
            lambda: f"{base} * (1 / {self.scale(row)})",
            lambda: f"{base} * {self.given(row)}",
            lambda: f"{base} * {self.given(row)}",
            lambda: f"abs({base}) / {self.scale(row)}",
            lambda: f"{base} / N(j)",
        )

    def base(self, row: str) -> str:
        one, other = ("x", "z") if row == "i" else ("p", "q")
        value = self.pick(lambda: f"{one}[{row},j]", lambda: f"{one}[{row},j]", lambda: f"{other}[{row},j]")
        return self.pick(
            lambda: value,
            lambda: value,
            lambda: value,
            lambda: f"({value} - {value.replace('j]', '0]')})",
            lambda: f"({value} - mean[j]({value}))",
            lambda: f"({value} - min[j]({value}))",
            lambda: f"({one}[{row},j] - {other}[{row},j])",
        )

    def scale(self, row: str) -> str:
        """What a row is divided by: one that there is, or another."""
        known = self.scales[row]
        if known and self.rng.random() < 0.5:
            return self.rng.choice(known)
        base = self.base(row)
        value = self.pick(
            lambda: f"max[j](abs({base}))",
            lambda: f"max[j](abs({base}))",
            lambda: f"(max[j](abs({base})) + 1e-30)",
            lambda: f"max(max[j](abs({base})), 1e-30)",
            lambda: f"sum[j](abs({base}))",
            lambda: f"mean[j](abs({base}))",
            lambda: f"(max[j]({base}) - min[j]({base}))",
            lambda: f"sqrt(mean[j](sq({base})))",
        )
        if self.rng.random() < 0.5:
            return value
        name = f"{'nm'[row == 'k']}{len(known)}"
        self.lines.append(f"{name}[{row}] = {value}")
        known.append(f"{name}[{row}]")
        return known[-1]

    def given(self, row: str) -> str:
        """A scale that is a tensor's."""
        return self.rng.choice(("s[i]", "t[i]", f"b[i, j//{BLOCK}]", "c") if row == "i" else ("r[k]", "c"))

    def weight(self) -> str:
        return self.rng.choice(("u[j]", "v[j]", "sigmoid(u[j])", "c"))

    def pick(self, *values: Value) -> str:
        return self.rng.choice(values)()
