"""Derivations as JSON, by the codec: terms and inferences in tables, each of which refers to earlier entries alone.

    {"format": "eqfuse derivation", "version": 2, "program": {...},
     "outputs": [...], "kernels": [...], "gaps": [...],
     "terms": [[head, [words], [terms]], ...],
     "inferences": [[rule, {variable: term or word}, [premises]], ...]}

A step is [inference, forward, [position], before, after]; a premise {"fact": [relation, [arguments], inference or null],
"moves": [chains]}, {"chain": chain} where two terms are equal, or {} where they differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from eqfuse.codec import Codec, Malformed
from eqfuse.errors import EqfuseError
from eqfuse.proof.nodes import (
    Differ,
    Equal,
    Fact,
    GroupProof,
    Holds,
    Inference,
    KernelProof,
    Merged,
    Origin,
    OutputProof,
    Proof,
    StateProof,
    Step,
    Stored,
    Walk,
)
from eqfuse.proof.syntax import Term, term
from eqfuse.rules.constructors import DATATYPE
from eqfuse.terms.python import parsed

FORMAT, VERSION = "eqfuse derivation", 2

SHAPES: Mapping[str, tuple[int, int]] = {
    **{
        head: (sorts.count("String"), sorts.split().count("E"))
        for head, sorts in re.findall(r"\((\w+)((?: String| E)+)\)", DATATYPE)
    },
    "Local": (1, 0),
}
"""How many words and terms each constructor takes."""


@dataclass(frozen=True)
class _Content:
    """What a text holds beside its tables."""

    program: Origin
    outputs: tuple[OutputProof, ...]
    kernels: tuple[KernelProof, ...]
    gaps: tuple[str, ...]


def _term(head: str, words: tuple[str, ...], args: tuple[Term, ...]) -> Term:
    if SHAPES.get(head) != (len(words), len(args)):
        raise Malformed(f"there is no {head!r:.40} of {len(words)} words and {len(args)} terms")
    if head == "Num" and not _is_number(words[0]):
        raise Malformed(f"{words[0]!r:.40} is no number")
    if head == "Leaf" and not _is_expression(words[0]):
        raise Malformed(f"{words[0]!r:.40} is no expression")
    return term(head, words, args)


_CODEC = Codec(
    {"terms": (Term,), "inferences": (Inference,)},
    objects=(_Content, Origin, OutputProof, KernelProof, Stored, GroupProof, StateProof, Merged, Walk)
    + (Holds, Equal, Differ),
    lists=(Step, Fact),
    make={Term: _term},
)


def to_json(proof: Proof) -> str:
    """The text of a proof; the same proof gives the same text."""
    scalars = {name: _plain(value) for name, value in proof.origin.scalars.items()}
    content = _Content(replace(proof.origin, scalars=scalars), proof.outputs, proof.kernels, proof.gaps)
    data = _CODEC.encode(content)
    return json.dumps(
        {"format": FORMAT, "version": VERSION, **data.pop("root"), **data}, separators=(",", ":")
    )


def from_json(text: str) -> Proof:
    """The proof that a text holds. Raises EqfuseError, naming the place, for what is not one; whether it proves
    anything is for the checker to say."""
    hint = f"give the text that Derivation.to_json wrote, in version {VERSION}; an older one has to be derived anew"
    try:
        return _proof(json.loads(text, object_pairs_hook=_once))
    except (
        ValueError,
        TypeError,
        RecursionError,
    ) as error:  # an integer of thousands of digits is a ValueError
        raise EqfuseError(f"the derivation is not JSON: {error}", hint=hint) from None
    except Malformed as error:
        raise EqfuseError(f"the derivation is malformed: {error}", hint=hint) from None


def _proof(data: Any) -> Proof:
    if not isinstance(data, dict):
        raise Malformed("an object was expected")
    form, version = data.pop("format", None), data.pop("version", None)
    if form != FORMAT or type(version) is not int or version != VERSION:
        was = f"version {version!r:.40} of " if form == FORMAT else ""
        raise Malformed(f"this is {was}the format {form!r:.40}, not version {VERSION} of {FORMAT!r}")
    tables = {name: data.pop(name) for name in _CODEC.tables if name in data}
    content, unread = _CODEC.opened({**tables, "root": data}, _Content)
    rows = [json.dumps(row) for row in tables["inferences"]]
    if len(set(rows)) < len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        raise Malformed(f"{twice:.60} is there twice", "inferences")
    return Proof(content.program, content.outputs, content.kernels, content.gaps, unread)


def _plain(value: Any) -> int | float:
    """The number as Python's own: JSON has no numpy scalars."""
    return int(value) if isinstance(value, Integral) else float(value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose keys are there once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Malformed(f"an object has {next(k for k in keys if keys.count(k) > 1)!r:.40} twice")
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_expression(text: str) -> bool:
    try:
        parsed(text.rstrip("'"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
