"""Rules in force: the shipped ones, but those that a scope leaves out, and those that it adds."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field

from eqfuse.fast_dataclass import dataclass
from eqfuse.rules.rule import PARTS, Rewrite, RuleSet
from eqfuse.terms.python import parsed


@dataclass(frozen=True)
class Rule:
    """A rule as somebody wrote it: its `name`, the texts `left` and `right`, the conditions of `when`, and `why`, its reason. `rewrite` is what saturation
    runs. `unverified` says why it is taken on trust."""

    name: str
    left: str
    right: str
    when: str
    why: str
    unverified: str | None
    rewrite: Rewrite

    def __str__(self) -> str:
        where = f" where {self.when}" if self.when else ""
        why = f"    # {self.why}" if self.why else ""
        return f"{self.name}: {self.left} = {self.right}{where}{why}"


@dataclass(frozen=True)
class RuleScope:
    """What a program is derived with: `added` rules, and the shipped ones but the rules and sets in `without`."""

    added: tuple[Rule, ...] = ()
    without: frozenset[str] = field(default_factory=frozenset)

    def applied(self, rulesets: tuple[RuleSet, ...]) -> tuple[RuleSet, ...]:
        """The rule sets as this scope has them. Rules about the parts of a split axis are for sets that split."""
        kept = rulesets
        if self.without:
            kept = tuple(
                RuleSet(s.name, tuple(r for r in s.rules if not {r.name, s.name} & self.without))
                for s in rulesets
            )
        splits = any(ruleset.name == "split" for ruleset in rulesets)
        mine = tuple(rule.rewrite for rule in self.added if splits or not _is_of_parts(rule.rewrite))
        return (*kept, RuleSet("registered", mine)) if mine else kept

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers that the right sides of added rules bring in."""
        sides = [parsed(rule.rewrite.right) for rule in self.added]
        found = [node.value for side in sides for node in ast.walk(side) if isinstance(node, ast.Constant)]
        return tuple(dict.fromkeys(value for value in found if isinstance(value, int | float)))

    def blame(self, matches: Mapping[str, int]) -> str:
        """The added rules that matched, most often first, as the end of a sentence about a budget."""
        mine = sorted(
            ((matches.get(r.name, 0), r.name) for r in self.added), key=lambda pair: (-pair[0], pair[1])
        )
        named = [f"{name!r} matched {count} times" for count, name in mine if count]
        return f"; rule {', '.join(named)}" if named else ""

    def taking_part(self, matches: Mapping[str, int]) -> tuple[str, ...]:
        """The added rules that matched, as they were written."""
        return tuple(str(each) for each in self.added if matches.get(each.name))

    def trusted(self, matches: Mapping[str, int]) -> tuple[str, ...]:
        """What was declared of the added rules that matched, a line each."""
        return tuple(
            f"rule {each.name}: {each.unverified}"
            for each in self.added
            if each.unverified is not None and matches.get(each.name)
        )

    @contextmanager
    def entered(self) -> Iterator[RuleScope]:
        """Everything inside is derived, and checked, with these rules."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)


def _is_of_parts(rule: Rewrite) -> bool:
    return any(f"[{part}]" in text for part in PARTS for text in (rule.left, rule.right))


SHIPPED_ALONE = RuleScope()
_CURRENT: ContextVar[RuleScope] = ContextVar("rules", default=SHIPPED_ALONE)


def current() -> RuleScope:
    """The scope that is in force here."""
    return _CURRENT.get()
