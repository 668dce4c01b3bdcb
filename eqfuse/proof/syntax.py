"""Plain terms: what a derivation is written in. Two terms are equal only where they are written alike.

    term ::= Term(head, words, args)      head: a constructor of the e-graph's language (rules/constructors.py);
                                          words: its names (a leaf's text, a cast's type, a reduction's
                                          op, axis and part); args: its subterms

The constructors are those of rules/rule.py, and one more: `Local name` is the value of a state. Terms are
interned: written alike is the same object, so that large terms share what they have in common.

A pattern is a term with variables: `Var name` stands for a term, a word that starts with `?` for a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from eqfuse.terms.nodes import INTERNING, post_order

Position = tuple[int, ...]
"""The way from a term to one of its subterms: which argument, at each step."""


@dataclass(eq=False, repr=False)
class Term:
    """One node of plain syntax. Make terms with `term`."""

    __slots__ = ("__weakref__", "args", "head", "words")
    head: str
    words: tuple[str, ...]
    args: tuple[Term, ...]
    pool: ClassVar[WeakValueDictionary[tuple[str, tuple[str, ...], tuple[Term, ...]], Term]] = (
        WeakValueDictionary()
    )

    def __reduce__(self) -> tuple[Any, ...]:
        return term, (self.head, self.words, self.args)

    def __repr__(self) -> str:
        parts = [self.head, *map(repr, self.words), *map(repr, self.args)]
        return f"({' '.join(parts)})"


def term(head: str, words: tuple[str, ...] = (), args: tuple[Term, ...] = ()) -> Term:
    """The term of these parts."""
    key = (head, words, args)
    found = Term.pool.get(key)
    if found is None:
        with INTERNING:
            found = Term.pool.get(key)
            if found is None:
                found = Term.pool[key] = Term(*key)
    return found


def number(value: str) -> Term:
    return term("Num", (value,))


def walk(*roots: Term) -> Iterator[Term]:
    """Every distinct subterm of the roots, arguments before what they are arguments of."""
    return post_order(roots, lambda node: node.args)


def transform(root: Term, step: Callable[[Term], Term]) -> Term:
    """`root` rebuilt bottom-up, `step` applied to every rebuilt node."""
    memo: dict[Term, Term] = {}
    for node in walk(root):
        memo[node] = step(term(node.head, node.words, tuple(memo[arg] for arg in node.args)))
    return memo[root]


def subterm(root: Term, position: Position) -> Term:
    """The subterm at a position. Raises IndexError where there is none."""
    for index in position:
        if not 0 <= index < len(root.args):
            raise IndexError(index)
        root = root.args[index]
    return root


def replaced_at(root: Term, position: Position, new: Term) -> Term:
    """`root` with the subterm at a position replaced."""
    if not position:
        return new
    index, *rest = position
    args = list(root.args)
    args[index] = replaced_at(args[index], tuple(rest), new)
    return term(root.head, root.words, tuple(args))


def instance(pattern: Term, values: Mapping[str, Term | str]) -> Term:
    """`pattern` with its variables replaced. Raises KeyError for a variable without a value."""
    if pattern.head == "Var":
        found = values[pattern.words[0]]
        if isinstance(found, str):
            raise KeyError(pattern.words[0])
        return found
    words = tuple(word_instance(word, values) for word in pattern.words)
    return term(pattern.head, words, tuple(instance(arg, values) for arg in pattern.args))


def word_instance(word: str, values: Mapping[str, Term | str]) -> str:
    """A word of a pattern with its variable replaced. Raises KeyError as `instance` does."""
    if not word.startswith("?"):
        return word
    found = values[word[1:]]
    if not isinstance(found, str):
        raise KeyError(word)
    return found
