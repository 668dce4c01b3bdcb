"""Machine code of Hopper kernels: uniform registers that may be read before they are set.

Descriptors of matrix products and addresses of copies are in uniform registers. An assembler that moves what sets one behind
a branch, and not all that reads it, leaves a register that some path reads unset: definite assignment, as compilers of
languages check it for variables, finds that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?PT?\d?\s+)?(\S+)\s*([^;]*);", re.MULTILINE)
_GUARDED = re.compile(r"\*/\s+@")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_PREDICATE = re.compile(r"!?U?P(?:T|\d)$")
_WRITERS = re.compile(r"(?:U(?!TMA|BLKCP|SETMAXREG|ISETP|PLOP3)|R2UR|S2UR|LDCU|VOTEU|REDUX|CREDUX)")
_PAIR = re.compile(r"\.(?:64|WIDE)\b")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")


@dataclass(frozen=True)
class _Instruction:
    """One instruction: what it sets and reads of uniform registers, and which ones may come after it, by their number."""

    text: str
    sets: frozenset[int]
    reads: frozenset[int]
    after: tuple[int, ...]


def unset_registers(listing: str) -> list[str]:
    """The instructions of a kernel (`cuobjdump -sass`) that read a uniform register that is not set on every way to them."""
    code = _instructions(listing)
    known: list[frozenset[int] | None] = [None] * len(code)
    waiting = []
    if code:
        known[0], waiting = frozenset(), [0]
    while waiting:
        place = waiting.pop()
        here = known[place]
        assert here is not None
        for after in code[place].after:
            before = known[after]
            both = here | code[place].sets if before is None else before & (here | code[place].sets)
            if both != before:
                known[after] = both
                waiting.append(after)
    return [
        each.text
        for each, set_here in zip(code, known, strict=True)
        if set_here is not None and each.reads - set_here
    ]


def _instructions(listing: str) -> list[_Instruction]:
    found = list(_LINE.finditer(listing))
    places = {int(match[1], 16): n for n, match in enumerate(found)}
    made = []
    for n, match in enumerate(found):
        op, arguments = match[2], [part.strip() for part in match[3].split(",")]
        sets, reads = _registers(op, arguments)
        made.append(_Instruction(match[0].strip(), sets, reads, _after(n, match, places)))
    return made


def _after(n: int, match: re.Match[str], places: dict[int, int]) -> tuple[int, ...]:
    kind, guarded = match[2].split(".")[0], _GUARDED.search(match[0]) is not None
    follows = (n + 1,) if n + 1 < len(places) else ()
    target = _TARGET.search(match[3])
    if kind in ("BRA", "CALL") and target:
        to = places[int(target[1], 16)]
        conditional = guarded or kind == "CALL" or "," in match[3] or "U" in match[2].split(".")[1:]
        return (to, *follows) if conditional else (to,)
    return () if kind in ("EXIT", "RET") and not guarded else follows


def _registers(op: str, arguments: Sequence[str]) -> tuple[frozenset[int], frozenset[int]]:
    """Those that an instruction sets, and those that it reads."""
    sets: set[int] = set()
    rest = list(arguments)
    if _WRITERS.match(op):
        while rest and _PREDICATE.match(rest[0]):
            rest.pop(0)
        first = _UNIFORM.match(rest[0]) if rest else None
        if first:
            sets = {int(first[1]) + more for more in range(2 if _PAIR.search(op) else 1)}
            rest.pop(0)
    reads = set()
    for place, argument in enumerate(rest):
        descriptor = _DESCRIPTOR.search(argument)
        if descriptor:  # of the left operand, unless it is in registers, and of the right one
            reads |= {int(descriptor[1]) + more for more in range(0 if place == 1 else 2, 4)}
        else:
            reads |= {int(number) for number in _UNIFORM.findall(argument)}
    return frozenset(sets), frozenset(reads)
