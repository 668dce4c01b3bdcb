"""Python's parser, for one thread at a time.

Until 3.11.8 and 3.12.2 Python counts the depth of the trees that it makes for all threads together, and raises
SystemError where two make one at once (gh-106905).
"""

from __future__ import annotations

import ast

from eqfuse.threads import Lock

ATTEMPTS = 8
"""Others may parse too, and do not ask."""

_parsing = Lock()


def parsed(text: str) -> ast.expr:
    """The tree of an expression. Raises what `ast.parse` raises for what is none."""
    tree = _tree(text, "eval")
    assert isinstance(tree, ast.Expression)
    return tree.body


def module(text: str) -> ast.Module:
    """The tree of several statements."""
    tree = _tree(text, "exec")
    assert isinstance(tree, ast.Module)
    return tree


def _tree(text: str, mode: str) -> ast.AST:
    with _parsing:
        for _ in range(ATTEMPTS - 1):
            try:
                return ast.parse(text, mode=mode)
            except SystemError:
                continue
        return ast.parse(text, mode=mode)
