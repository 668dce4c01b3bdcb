"""Saturation that writes down every rule that fires, with the values of its variables.

A recording e-graph has the same rules and one thing more: beside each class stands a *quote* of it, a term
of plain syntax that is never merged with another. Each rule also adds a row to a relation of its own:
the quotes and words that its variables stand for. The rows are the instances that fired; with congruence
they imply every equality and fact of the e-graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from eqfuse.proof.syntax import Term, term
from eqfuse.rules.constructors import DATATYPE
from eqfuse.rules.egraph.client import Graphs
from eqfuse.rules.egraph.extract import Extraction
from eqfuse.rules.egraph.saturate import Saturation, session
from eqfuse.rules.engine import Engine
from eqfuse.rules.relations import RELATIONS
from eqfuse.rules.rule import RuleSet, to_egglog
from eqfuse.terms.nodes import Local

SExpr = str | tuple["SExpr", ...]
RuleSets = tuple[RuleSet, ...]

QUOTED = "Quoted"
"""Prefix of the constructors of plain syntax."""


def read(text: str) -> list[SExpr]:
    """The expressions of an egglog text; literals keep their quotation marks."""
    stack: list[list[SExpr]] = [[]]
    for token in re.findall(r'"(?:\\.|[^"\\])*"|[()]|[^\s()]+', text):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = tuple(stack.pop())
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    return stack[0]


def _list(node: SExpr) -> tuple[SExpr, ...]:
    assert isinstance(node, tuple), node
    return node


def write(node: SExpr) -> str:
    return node if isinstance(node, str) else f"({' '.join(map(write, node))})"


def literal(token: str) -> str:
    """The text that a string literal stands for."""
    return re.sub(r"\\(.)", r"\1", token[1:-1])


def _signatures() -> dict[str, tuple[str, ...]]:
    """The argument sorts of every constructor and relation."""
    _, _, *constructors = _list(read(DATATYPE)[0])
    found: dict[str, tuple[str, ...]] = {}
    for constructor in constructors:
        head, *sorts = map(str, _list(constructor))
        found[head] = tuple(sorts)
    return found | {row.name: row.sorts for row in RELATIONS.values()}


SIGNATURES: Mapping[str, tuple[str, ...]] = _signatures()


@dataclass(frozen=True)
class Atom:
    """A fact, an equation (`=`) or a difference (`!=`) with variables: what a rule tests or states."""

    name: str
    args: tuple[Term | str, ...]


@dataclass(frozen=True)
class Clause:
    """A rule as it is run: `conclusion` wherever all `premises` hold; and its variables, terms first."""

    name: str
    conclusion: Atom
    premises: tuple[Atom, ...]
    terms: tuple[str, ...]
    words: tuple[str, ...]


def _pattern(node: SExpr, sort: str, bound: Mapping[str, Term], found: dict[str, str]) -> Term | str:
    """A pattern of a rule's text; `found` collects the sorts of its variables."""
    if isinstance(node, str):
        if node.startswith('"'):
            return literal(node)
        if node in bound:
            return bound[node]
        found[node] = sort
        return term("Var", (node,)) if sort == "E" else f"?{node}"
    head, *rest = node
    assert isinstance(head, str)
    parts = [_pattern(part, s, bound, found) for part, s in zip(rest, SIGNATURES[head], strict=True)]
    return term(
        head, tuple(p for p in parts if isinstance(p, str)), tuple(p for p in parts if isinstance(p, Term))
    )


def _atom(node: SExpr, bound: Mapping[str, Term], found: dict[str, str]) -> Atom:
    assert isinstance(node, tuple)
    name, *rest = node
    assert isinstance(name, str)
    sorts: Sequence[str] = SIGNATURES.get(name, ())
    if not sorts:  # = and != are of terms, or of two words
        sorts = ("String", "String") if any(found.get(str(r)) == "String" for r in rest) else ("E", "E")
    return Atom(
        name, tuple(_pattern(part, sort, bound, found) for part, sort in zip(rest, sorts, strict=True))
    )


def _parts(text: str) -> tuple[list[SExpr], list[SExpr], list[SExpr]]:
    """The tests, the actions and the options of a rule's egglog text."""
    _, body, actions, *options = _list(read(text)[0])
    return list(_list(body)), list(_list(actions)), options


def _clause(name: str, body: Sequence[SExpr], action: SExpr) -> Clause:
    """`it` is the instance that a rule rewrites or states a fact about: it stands for its pattern."""
    found: dict[str, str] = {}
    bound: dict[str, Term] = {}
    tests = list(body)
    match tests[:1]:
        case [("=", "it", pattern)]:
            subject = _pattern(pattern, "E", {}, found)
            assert isinstance(subject, Term)
            bound["it"] = subject
            del tests[0]
    unequal = [t for t in tests if t[0] == "!="]
    atoms = {test: _atom(test, bound, found) for test in tests if test not in unequal}
    atoms |= {test: _atom(test, bound, found) for test in unequal}  # their variables are known by now
    conclusion = _atom(("=", *action[1:]) if action[0] == "union" else action, bound, found)
    return Clause(
        name,
        conclusion,
        tuple(atoms[test] for test in tests),
        tuple(v for v, sort in found.items() if sort == "E"),
        tuple(v for v, sort in found.items() if sort == "String"),
    )


def _quoted(node: SExpr) -> SExpr:
    """The plain syntax of a term whose variables stand for quotes."""
    if isinstance(node, str):
        return node if node.startswith('"') else _quote_name(node)
    head, *rest = node
    sorts = SIGNATURES[str(head)]
    return (
        f"{QUOTED}{head}",
        *(_quoted(part) if sort == "E" else part for part, sort in zip(rest, sorts, strict=True)),
    )


def _quote_name(name: str) -> str:
    return f"$quote_{name[1:]}" if name.startswith("$") else f"quote_{name}"


def _compound(node: SExpr) -> Iterator[SExpr]:
    """Every constructed term in an action or a command."""
    if isinstance(node, tuple) and node:
        for part in node[1:]:
            yield from _compound(part)
        if node[0] in SIGNATURES and node[0] not in RELATIONS:
            yield node


def _set_quotes(node: SExpr) -> list[SExpr]:
    return [("set", ("quote", part), _quoted(part)) for part in dict.fromkeys(_compound(node))]


def _recording_rule(text: str, clause: Clause, number: int) -> str:
    body, actions, options = _parts(text)
    body += [("=", _quote_name(v), ("quote", v)) for v in clause.terms]
    made = [action for action in actions if isinstance(action, tuple) and action[0] != "subsume"]
    actions += [quote for action in made for quote in _set_quotes(action)]
    actions.append((_row(clause), f'"{number}"', *map(_quote_name, clause.terms), *clause.words))
    return write(("rule", tuple(body), tuple(actions), *options))


def _row(clause: Clause) -> str:
    """The relation of the instances of all rules with as many variables: an e-graph takes memory by relations."""
    return f"fired_{len(clause.terms)}_{len(clause.words)}"


@dataclass(frozen=True)
class Recorded:
    """Rule sets in the form that records: the egglog commands, and the rules by their number in the rows."""

    prelude: tuple[str, ...]
    clauses: tuple[Clause, ...]


def recorded(rulesets: RuleSets) -> Recorded:
    """The same rules, each writing down its instances."""
    quoted = DATATYPE.replace("(datatype E", "(datatype Quote").replace(" E", " Quote")
    quoted = re.sub(r"\(([A-Z])", rf"({QUOTED}\1", quoted)
    lines = [DATATYPE, quoted, "(function quote (E) Quote :merge old)"]
    lines += [f"(relation {row.name} ({' '.join(row.sorts)}))" for row in RELATIONS.values()]
    clauses: list[Clause] = []
    rows: dict[str, str] = {}
    rules: list[str] = []
    for ruleset in rulesets:
        lines.append(f"(ruleset {ruleset.name})")
        for rule in ruleset.rules:
            text = to_egglog(rule, ruleset.name)
            body, (action, *_), _ = _parts(text)
            clause = _clause(rule.name, body, action)
            sorts = ["String"] + ["Quote"] * len(clause.terms) + ["String"] * len(clause.words)
            rows[_row(clause)] = f"(relation {_row(clause)} ({' '.join(sorts)}))"
            rules.append(_recording_rule(text, clause, len(clauses)))
            clauses.append(clause)
    return Recorded((*lines, *rows.values(), *rules), tuple(clauses))


@dataclass(frozen=True)
class Firing:
    """A rule that fired, and what its variables stood for."""

    clause: Clause
    values: Mapping[str, Term | str]


@dataclass
class Tape:
    """One recorded saturation: the terms that were named, the facts that were given, every firing."""

    names: dict[str, Term] = field(default_factory=dict)
    given: list[Atom] = field(default_factory=list)
    firings: list[Firing] = field(default_factory=list)
    choices: dict[str, Term] = field(default_factory=dict)
    """What was extracted from it, by purpose; states are `Local`."""

    def command(self, node: SExpr) -> list[SExpr]:
        """A command together with the quotes of the terms in it."""
        assert isinstance(node, tuple)
        commands: list[SExpr] = [node]
        if node[0] == "let":
            _, name, value = node
            assert isinstance(name, str)
            self.names[name] = self._term(value)
            commands += _set_quotes(value)
            commands.append(("let", _quote_name(name), _quoted(value)))
            return commands
        if node[0] in RELATIONS:
            atom = _atom(node, self.names, {})
            self.given.append(atom)
        return commands + _set_quotes(node)

    def _term(self, node: SExpr) -> Term:
        found = _pattern(node, "E", self.names, {})
        assert isinstance(found, Term)
        return found

    def collect(self, graphs: Graphs, clauses: Sequence[Clause]) -> None:
        """Reads the firings of a saturated recording e-graph."""
        functions = {name: (sorts, sort, rows) for name, sorts, sort, _, rows in graphs.ask("read")}
        nodes: dict[int, tuple[str, tuple[str, ...], tuple[int, ...]]] = {}
        terms: dict[int, Term] = {}

        def build(key: int) -> Term:
            if key not in terms:
                head, words, args = nodes[key]
                terms[key] = term(head, words, tuple(map(build, args)))
            return terms[key]

        for name, (_, sort, rows) in functions.items():
            if sort == "Quote" and name.startswith(QUOTED):
                for arguments, key, _ in rows:
                    words = tuple(x for x in arguments if isinstance(x, str))
                    args = tuple(x for x in arguments if isinstance(x, int))
                    nodes[key] = name.removeprefix(QUOTED), words, args
        for name in sorted(dict.fromkeys(map(_row, clauses))):
            for arguments, _, _ in functions[name][2]:
                number, *values = (x if isinstance(x, str) else build(x) for x in arguments)
                clause = clauses[int(str(number))]
                found = zip((*clause.terms, *clause.words), values, strict=True)
                self.firings.append(Firing(clause, dict(found)))


@dataclass
class Recording(Saturation):
    """A saturation on a recording e-graph."""

    tape: Tape = field(default_factory=Tape)

    def commands(self, program: Sequence[str]) -> Sequence[str]:
        return [write(c) for node in read("\n".join(program)) for c in self.tape.command(node)]


def _extracted(best: Extraction, key: int) -> Term:
    """The best term of a class, as it stands in the e-graph."""
    memo: dict[int, Term] = {}

    def build(k: int) -> Term:
        if k not in memo:
            known, node = best.known.get(k), best.best[k][1]
            if isinstance(known, Local):
                memo[k] = term("Local", (known.name,))
            else:
                assert node is not None
                memo[k] = term(node.head, node.words, tuple(map(build, node.args)))
        return memo[k]

    return build(key)


@dataclass
class Recorder:
    """Opens recording sessions in the place of plain ones; `tapes` has one for each, in order.

    `change` makes the rules that are run of those that are asked for.
    """

    change: Callable[[RuleSets], RuleSets] = lambda rulesets: rulesets
    tapes: list[Tape] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return Engine(self.session, self.chose)

    @contextmanager
    def session(self, rulesets: RuleSets) -> Iterator[Saturation]:
        rulesets = self.change(rulesets)
        record = _recorded.get(rulesets)
        if record is None:
            record = _recorded[rulesets] = recorded(rulesets)
        with session(rulesets, record.prelude) as plain:
            recording = Recording(plain.graphs, rulesets)
            self.tapes.append(recording.tape)
            yield recording
            recording.tape.collect(recording.graphs, record.clauses)

    def chose(self, purpose: str, best: Extraction, key: int) -> None:
        self.tapes[-1].choices[purpose] = _extracted(best, key)


_recorded: dict[tuple[RuleSet, ...], Recorded] = {}


__all__ = ["Atom", "Clause", "Firing", "Recorder", "Tape"]
