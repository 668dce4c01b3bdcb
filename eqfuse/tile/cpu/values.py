"""What the CPU code generator knows about a value: where it is, which parts of it exist, who shares its memory.

Values of the tile program become Python ints (scalar integers), Python bools (scalar truths) or torch
tensors (everything else), of the rank of their dims; a dim that a tensor does not vary along has
extent 1 in it until a reduction, a dot or a carried value needs the whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from eqfuse.terms.dtypes import INTEGERS as WIDE
from eqfuse.tile.dtypes import INTEGERS

TORCH: Mapping[str, str] = {
    "f8e4m3": "torch.float8_e4m3fn",
    "f8e5m2": "torch.float8_e5m2",
    "f16": "torch.float16",
    "bf16": "torch.bfloat16",
    "f32": "torch.float32",
    "f64": "torch.float64",
    **dict.fromkeys(WIDE, "torch.int64"),
    "bool": "torch.bool",
}
"""How each dtype is spelt on chip; integers are computed in 64 bits, which holds both."""


@dataclass(eq=False)
class Storage:
    """Memory that one operation allocated. `names` are the values in it, `texts` the variables."""

    depth: int
    names: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Affine:
    """The integer ``constant + sum(step * offset in the block of axis)``, all Python expressions.

    `pure` names the axis if this is exactly the position along it. `data` marks integers that come
    from a tensor, whose range nothing but a look can tell.
    """

    constant: str
    steps: Mapping[str, str] = field(default_factory=dict)
    pure: str | None = None
    data: bool = False

    def plus(self, other: Affine, sign: str) -> Affine:
        steps = dict(self.steps)
        for axis, step in other.steps.items():
            steps[axis] = join(steps[axis], sign, step) if axis in steps else signed(sign, step)
        return Affine(join(self.constant, sign, other.constant), steps, None, self.data or other.data)

    def times(self, other: Affine) -> Affine | None:
        left, right = (other, self) if self.steps == {} else (self, other)
        if right.steps:
            return None
        steps = {axis: join(step, "*", right.constant) for axis, step in left.steps.items()}
        return Affine(join(left.constant, "*", right.constant), steps, None, left.data or right.data)


def join(left: str, operator: str, right: str) -> str:
    """``left operator right`` as an atom, the trivial cases folded."""
    if operator in "+-" and right == "0":
        return left
    if operator == "+" and left == "0":
        return right
    if operator == "*" and "0" in (left, right):
        return "0"
    if operator == "*" and "1" in (left, right):
        return right if left == "1" else left
    return f"({left} {operator} {right})"


def signed(sign: str, text: str) -> str:
    return text if sign == "+" else f"(-{text})"


@dataclass(frozen=True)
class Item:
    """A value of the tile program in generated code.

    `text` is a variable or an atomic expression. `full` are the dims along which the tensor has its
    whole extent. `fresh` says that an operation allocated `storage`, so that the tensor may be
    overwritten once nothing else reads it; a value may share several storages (a choice). `number` is
    the known value of a constant, `truth` of a condition that always or never holds; `wide` is the
    same value in the accumulation dtype; `head` marks a scalar that the head of the kernel computes.
    """

    text: str
    dims: tuple[str, ...]
    dtype: str
    full: frozenset[str] = frozenset()
    storage: frozenset[Storage] = frozenset()
    fresh: bool = False
    affine: Affine | None = None
    number: float | None = None
    truth: bool | None = None
    wide: Item | None = None
    head: bool = False

    @property
    def is_python(self) -> bool:
        """A Python int or bool, not a tensor."""
        return not self.dims and self.dtype in INTEGERS

    @property
    def is_real(self) -> bool:
        return self.dtype not in INTEGERS


@dataclass
class Line:
    """A line of generated code. One with a `target` is dropped if nothing needs the target; a block
    (with `body`) if nothing is left in it; `forgets` lists variables that the line deletes."""

    text: str
    target: str | None = None
    body: list[Line] | None = None
    forgets: tuple[str, ...] = ()


_NAME = re.compile(r"[A-Za-z_]\w*")


def names_in(text: str) -> set[str]:
    """Every identifier that occurs in a piece of code."""
    return set(_NAME.findall(text))


def needed(lines: list[Line]) -> list[Line]:
    """The lines without those that compute what nothing reads."""
    wanted: set[str] = set()
    flat = list(_flat(lines))
    pending = [line for line in flat if line.target is None and line.body is None and not line.forgets]
    blocks = [line for line in flat if line.body is not None]
    kept: set[int] = set()
    while pending:
        for line in pending:
            kept.add(id(line))
            wanted |= names_in(line.text)
        for block in blocks:
            assert block.body is not None
            if id(block) not in kept and any(id(line) in kept for line in _flat(block.body)):
                kept.add(id(block))
                wanted |= names_in(block.text)
        pending = [line for line in flat if id(line) not in kept and line.target in wanted]
    made = {line.target for line in flat if line.target and id(line) in kept}
    return _filtered(lines, kept, made)


def _flat(lines: list[Line]) -> list[Line]:
    return [inner for line in lines for inner in (line, *(_flat(line.body) if line.body else ()))]


def _filtered(lines: list[Line], kept: set[int], made: set[str]) -> list[Line]:
    result = []
    for line in lines:
        if line.forgets:
            present = tuple(name for name in line.forgets if name in made)
            if present:
                result.append(Line(f"del {', '.join(present)}", forgets=present))
        elif id(line) in kept:
            body = None if line.body is None else _filtered(line.body, kept, made)
            result.append(Line(line.text, line.target, body))
    return result


def rendered(lines: list[Line], indent: int = 1) -> list[str]:
    """The lines as text, blocks indented."""
    result = []
    for line in lines:
        result.append("    " * indent + line.text)
        if line.body is not None:
            result += rendered(line.body, indent + 1)
    return result
