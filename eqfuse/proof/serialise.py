"""Derivations as JSON: terms and inferences in tables, each of which refers to earlier entries alone.

    {"format": "eqfuse derivation", "version": 1, "program": {...},
     "terms": [[head, [words], [terms]], ...],
     "inferences": [[rule, {variable: term or word}, [premises]], ...],
     "outputs": [...], "kernels": [...], "gaps": [...]}

A step is [inference, forward, [position], before, after]; a premise ["holds", relation, [arguments],
inference or null, [chains]], ["equal", chain] or ["differ"].
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, TypeVar

from eqfuse.errors import EqfuseError
from eqfuse.proof.nodes import (
    Chain,
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
    Premise,
    Proof,
    StateProof,
    Step,
    Stored,
    Walk,
    inferences,
)
from eqfuse.proof.syntax import Term, term, walk
from eqfuse.rules.constructors import DATATYPE
from eqfuse.terms.python import parsed

FORMAT, VERSION = "eqfuse derivation", 1

SHAPES: Mapping[str, tuple[int, int]] = {
    **{
        head: (sorts.count("String"), sorts.split().count("E"))
        for head, sorts in re.findall(r"\((\w+)((?: String| E)+)\)", DATATYPE)
    },
    "Local": (1, 0),
}
"""How many words and terms each constructor takes."""

Item = TypeVar("Item")


# -- writing ---------------------------------------------------------------------------------------


@dataclass
class _Writer:
    terms: dict[Term, int] = field(default_factory=dict)
    rows: list[list[Any]] = field(default_factory=list)
    numbers: dict[Inference, int] = field(default_factory=dict)
    inferred: list[list[Any]] = field(default_factory=list)

    def term(self, root: Term) -> int:
        for node in walk(root):
            if node not in self.terms:
                self.terms[node] = len(self.rows)
                self.rows.append([node.head, list(node.words), [self.terms[a] for a in node.args]])
        return self.terms[root]

    def optional(self, root: Term | None) -> int | None:
        return None if root is None else self.term(root)

    def argument(self, value: Term | str) -> int | str:
        return value if isinstance(value, str) else self.term(value)

    def chain(self, chain: Chain) -> list[Any]:
        return [
            [self.numbers[s.inference], s.forward, list(s.position), self.term(s.before), self.term(s.after)]
            for s in chain
        ]

    def premise(self, premise: Premise) -> list[Any]:
        match premise:
            case Holds(fact, moves):
                number = None if fact.inference is None else self.numbers[fact.inference]
                args = [self.argument(a) for a in fact.args]
                return ["holds", fact.relation, args, number, [self.chain(c) for c in moves]]
            case Equal(chain):
                return ["equal", self.chain(chain)]
            case Differ():
                return ["differ"]

    def number_all(self, chains: Sequence[Chain]) -> None:
        for inference in inferences(*chains):
            values = {name: self.argument(value) for name, value in inference.values.items()}
            premises = [self.premise(p) for p in inference.premises]
            self.numbers[inference] = len(self.inferred)
            self.inferred.append([inference.rule, values, premises])

    def merged(self, merged: Merged | None) -> dict[str, Any] | None:
        if merged is None:
            return None
        return {
            "definition": self.term(merged.definition),
            "steps": self.chain(merged.steps),
            "value": self.term(merged.value),
        }

    def state(self, s: StateProof) -> dict[str, Any]:
        return {
            "name": s.name,
            "op": s.op,
            "body": self.term(s.body),
            "auxiliary": s.auxiliary,
            "update": self.merged(s.update),
            "combine": self.merged(s.combine),
            "finish": self.optional(s.finish),
        }

    def kernel(self, k: KernelProof) -> dict[str, Any]:
        return {
            "name": k.name,
            "outputs": [
                {"name": o.name, "axes": list(o.axes), "value": self.term(o.value)} for o in k.outputs
            ],
            "leaves": {text: self.term(meaning) for text, meaning in k.leaves.items()},
            "groups": [
                {
                    "axis": g.axis,
                    "states": [self.state(s) for s in g.states],
                    "obstacles": list(g.obstacles),
                }
                for g in k.groups
            ],
            "walks": [{"axis": w.axis, "schedule": w.schedule} for w in k.walks],
        }


def _plain(value: Any) -> int | float:
    """The number as Python's own: JSON has no numpy scalars."""
    return int(value) if isinstance(value, Integral) else float(value)


def to_json(proof: Proof) -> str:
    """The text of a proof; the same proof gives the same text."""
    writer = _Writer()
    writer.number_all([chain for _, chain in proof.chains()])
    outputs = [
        {
            "name": o.name,
            "axes": list(o.axes),
            "definition": writer.term(o.definition),
            "steps": writer.chain(o.steps),
        }
        for o in proof.outputs
    ]
    kernels = [writer.kernel(k) for k in proof.kernels]
    data = {
        "format": FORMAT,
        "version": VERSION,
        "program": {
            "source": proof.origin.source,
            "scalars": {name: _plain(value) for name, value in proof.origin.scalars.items()},
            "strict_casts": proof.origin.strict_casts,
        },
        "terms": writer.rows,
        "inferences": writer.inferred,
        "outputs": outputs,
        "kernels": kernels,
        "gaps": list(proof.gaps),
    }
    return json.dumps(data, separators=(",", ":"))


# -- reading ---------------------------------------------------------------------------------------


@dataclass
class _Malformed(Exception):
    where: str
    why: str


@dataclass
class _Reader:
    """Every value is checked before it is used; `where` says what is being read."""

    terms: list[Term] = field(default_factory=list)
    inferred: list[Inference] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    used: set[tuple[str, int]] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)

    def fail(self, why: str) -> _Malformed:
        return _Malformed(", ".join(reversed(self.where)) or "the text", why)

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        self.where.append(place)
        yield
        self.where.pop()

    def as_list(self, value: Any, length: int | None = None) -> list[Any]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise self.fail("a list" + (f" of {length}" if length is not None else "") + " was expected")
        return value

    def as_text(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.fail(f"a text was expected, not {value!r}")
        return value

    def as_flag(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.fail(f"true or false was expected, not {value!r}")
        return value

    def as_number(self, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fail(f"a number was expected, not {value!r}")
        return value

    def record(self, value: Any, *keys: str) -> tuple[Any, ...]:
        """The values of an object that has these keys, and no others."""
        if not isinstance(value, dict):
            raise self.fail("an object was expected")
        for key in (*keys, *value):
            if key not in value or key not in keys:
                raise self.fail(f"there is no {key!r}" if key in keys else f"{key!r:.40} means nothing")
        return tuple(value[key] for key in keys)

    def entry(self, value: Any, table: Sequence[Item], what: str) -> Item:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(table):
            raise self.fail(f"{value!r} is no {what} before it")
        self.used.add((what, value))
        return table[value]

    def term(self, value: Any) -> Term:
        return self.entry(value, self.terms, "term")

    def argument(self, value: Any) -> Term | str:
        return value if isinstance(value, str) else self.term(value)

    def each(self, value: Any, what: str, read: Callable[[Any], Item]) -> tuple[Item, ...]:
        found: list[Item] = []
        for number, item in enumerate(self.as_list(value), start=1):
            with self.at(f"{what} {number}"):
                found.append(read(item))
        return tuple(found)

    def words(self, value: Any) -> tuple[str, ...]:
        return tuple(map(self.as_text, self.as_list(value)))

    def mapping(self, value: Any, read: Callable[[Any], Item]) -> dict[str, Item]:
        if not isinstance(value, dict):
            raise self.fail("an object was expected")
        return {name: read(item) for name, item in value.items()}

    def read_term(self, row: Any) -> None:
        head, words, args = self.as_list(row, 3)
        found = term(self.as_text(head), self.words(words), tuple(map(self.term, self.as_list(args))))
        if SHAPES.get(found.head) != (len(found.words), len(found.args)):
            raise self.fail(
                f"there is no {found.head!r:.40} of {len(found.words)} words and {len(found.args)} terms"
            )
        if found.head == "Num" and not _is_number(found.words[0]):
            raise self.fail(f"{found.words[0]!r:.40} is no number")
        if found.head == "Leaf" and not _is_expression(found.words[0]):
            raise self.fail(f"{found.words[0]!r:.40} is no expression")
        self.terms.append(found)

    def read_inference(self, row: Any) -> None:
        self.once(row)
        rule, values, premises = self.as_list(row, 3)
        self.inferred.append(
            Inference(
                self.as_text(rule),
                self.mapping(values, self.argument),
                self.each(premises, "condition", self.premise),
            )
        )

    def inference(self, value: Any) -> Inference:
        return self.entry(value, self.inferred, "inference")

    def premise(self, row: Any) -> Premise:
        match self.as_list(row):
            case ["holds", relation, args, number, moves]:
                inference = None if number is None else self.inference(number)
                given = tuple(map(self.argument, self.as_list(args)))
                return Holds(
                    Fact(self.as_text(relation), given, inference),
                    tuple(map(self.chain, self.as_list(moves))),
                )
            case ["equal", chain]:
                return Equal(self.chain(chain))
            case ["differ"]:
                return Differ()
        raise self.fail(f"{row!r:.60} is no proof of a condition")

    def chain(self, rows: Any) -> Chain:
        return self.each(rows, "step", self.step)

    def step(self, row: Any) -> Step:
        number, forward, position, before, after = self.as_list(row, 5)
        for index in self.as_list(position):
            if not isinstance(index, int) or isinstance(index, bool):
                raise self.fail(f"{index!r} is no position")
        return Step(
            self.inference(number),
            self.as_flag(forward),
            tuple(position),
            self.term(before),
            self.term(after),
        )

    def merged(self, value: Any, what: str) -> Merged | None:
        if value is None:
            return None
        with self.at(what):
            definition, steps, run = self.record(value, "definition", "steps", "value")
            return Merged(self.term(definition), self.chain(steps), self.term(run))

    def output(self, value: Any) -> OutputProof:
        name, axes, definition, steps = self.record(value, "name", "axes", "definition", "steps")
        with self.at(f"output {self.as_text(name)}"):
            return OutputProof(name, self.words(axes), self.term(definition), self.chain(steps))

    def state(self, value: Any) -> StateProof:
        keys = "name", "op", "body", "auxiliary", "update", "combine", "finish"
        name, op, body, auxiliary, update, combine, finish = self.record(value, *keys)
        with self.at(f"state {self.as_text(name)}"):
            return StateProof(
                name,
                self.as_text(op),
                self.term(body),
                self.as_flag(auxiliary),
                self.merged(update, "update"),
                self.merged(combine, "combine"),
                None if finish is None else self.term(finish),
            )

    def group(self, value: Any) -> GroupProof:
        axis, states, obstacles = self.record(value, "axis", "states", "obstacles")
        return GroupProof(self.as_text(axis), self.each(states, "state", self.state), self.words(obstacles))

    def walk(self, value: Any) -> Walk:
        axis, schedule = self.record(value, "axis", "schedule")
        return Walk(self.as_text(axis), self.as_text(schedule))

    def stored(self, value: Any) -> Stored:
        name, axes, run = self.record(value, "name", "axes", "value")
        return Stored(self.as_text(name), self.words(axes), self.term(run))

    def kernel(self, value: Any) -> KernelProof:
        name, outputs, leaves, groups, walks = self.record(
            value, "name", "outputs", "leaves", "groups", "walks"
        )
        with self.at(self.as_text(name)):
            return KernelProof(
                name,
                self.each(outputs, "output", self.stored),
                self.mapping(leaves, self.term),
                self.each(groups, "group", self.group),
                self.each(walks, "walk", self.walk),
            )

    def origin(self, value: Any) -> Origin:
        with self.at("the program"):
            source, scalars, strict_casts = self.record(value, "source", "scalars", "strict_casts")
            return Origin(
                self.as_text(source), self.mapping(scalars, self.as_number), self.as_flag(strict_casts)
            )

    def proof(self, value: Any) -> Proof:
        keys = "format", "version", "program", "terms", "inferences", "outputs", "kernels", "gaps"
        if isinstance(value, dict) and "format" in value and "version" in value:
            form, version = value["format"], value["version"]
            if form != FORMAT or type(version) is not int or version != VERSION:
                raise self.fail(f"this is not version {VERSION} of the format {FORMAT!r}")
        _, _, origin, terms, inferred, outputs, kernels, gaps = self.record(value, *keys)
        self.each(terms, "term", self.read_term)
        self.each(inferred, "inference", self.read_inference)
        proof = Proof(
            self.origin(origin),
            self.each(outputs, "output", self.output),
            self.each(kernels, "kernel", self.kernel),
            self.words(gaps),
        )
        tables = ("term", self.terms), ("inference", self.inferred)
        unread = [
            (what, n) for what, table in tables for n in range(len(table)) if (what, n) not in self.used
        ]
        return replace(proof, unread=tuple(f"{what} {number}" for what, number in unread))

    def once(self, row: Any) -> None:
        """That an inference is in its table once."""
        text = json.dumps(row)
        if text in self.rows:
            raise self.fail(f"{text:.60} is there twice")
        self.rows.add(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose keys are there once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Malformed(
            "the text", f"an object has {next(k for k in keys if keys.count(k) > 1)!r:.40} twice"
        )
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


def from_json(text: str) -> Proof:
    """The proof that a text holds. Raises EqfuseError, naming the place, for what is not one; whether it proves
    anything is for the checker to say."""
    hint = "give the text that Derivation.to_json wrote"
    try:
        return _Reader().proof(json.loads(text, object_pairs_hook=_once))
    except (
        ValueError,
        TypeError,
        RecursionError,
    ) as error:  # an integer of thousands of digits is a ValueError
        raise EqfuseError(f"the derivation is not JSON: {error}", hint=hint) from None
    except _Malformed as error:
        raise EqfuseError(f"the derivation is malformed: {error.where}: {error.why}", hint=hint) from None
