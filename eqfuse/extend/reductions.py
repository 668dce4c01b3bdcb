"""`eq.reduction`: a new reduction from a few expressions, refused where it is none."""

from __future__ import annotations

from collections.abc import Iterable

from eqfuse.errors import EqfuseError, require_text
from eqfuse.extend import laws
from eqfuse.extend.define import SHIPPED_NAMES, Words, define, register
from eqfuse.terms.folds import folds_in
from eqfuse.terms.nodes import Expr
from eqfuse.terms.registry import REGISTERED, Reduction


def reduction(
    name: str,
    *,
    state: str = "",
    lift: str = "",
    identity: str = "",
    combine: str = "",
    result: str = "",
    args: str = "x",
    commutative: bool = False,
    ranks: str = "",
    order: str = "",
    why: str = "",
    unverified: str | None = None,
    replace: bool = False,
) -> Reduction:
    """Registers a reduction; programs may use it at once, as `name[axes](arguments)`.

    `state`: names of the values that it carries, as "v, k". `lift`: what one position makes of them, over `args`
    and the position `j` along the axis. `identity`: the state of no positions, in numbers. `combine`: the state of
    two adjacent parts, from v1, k1 (left) and v2, k2 (right). `result`: what it gives, over the state; several
    expressions are several values, `m[i], s[i] = name[j](x[i, j])`. `commutative` says that the order of the
    parts does not matter, which lets a GPU combine them in any. A reduction without a state is text: its `result`
    is over `args` and other reductions, `sum[j](x) / N(j)`.

    With `ranks`, the state variable that holds the position, the reduction has a second axis, `name[j, k](x)`, the
    extent of which the program declares (`k: axis[8]`): its value is a list of the states that come first, the identity
    where no more are left. It needs an `order`.

    A state variable is an integer, of 64 bits where it is made by shifts, where `lift`, `identity` and `combine` are; `&` and
    `|` of it are of bits. `args="e: i64"` and `state="u: i64"` declare it; other values are real numbers. `finite(x)` is 0 where x
    is infinite, `invertible(x)` 1 where it is infinite or 0, else both are x: they keep a `combine` of empty or masked parts free
    of NaN.

    `order` stands in place of `combine` where one of both states is kept as it is: "v, -k" keeps the one with the
    greater v, and of equal ones that with the lesser k. NaN comes before all numbers. A fold that is said so is
    searched instead of combined two by two where that is faster.

    State variables that a built-in reduction computes (`s1 + s2` with identity 0) become one, so that every rule
    about it applies. The others are combined as they are written, by every schedule.

    The same reduction may be registered again, which changes nothing. Another one under its name replaces it where
    `replace` says so; what was compiled before goes on as it was.

    Raises EqfuseError: names or counts that do not fit (with the text and a caret), a name that is taken, and a
    law (identity, associativity, commutativity where declared) that a sample breaks, with that sample. What exact
    arithmetic cannot decide must be declared, `unverified="reason"`; certificates say so.
    """
    require_text(
        name=name,
        state=state,
        lift=lift,
        identity=identity,
        combine=combine,
        result=result,
        args=args,
        ranks=ranks,
        order=order,
        why=why,
    )
    words = Words(
        name, args, state, lift, identity, combine, result, commutative, why, unverified, ranks, order
    )
    found = define(words)
    known = REGISTERED.get(name)
    if known == found.reduction:
        return known
    if name in SHIPPED_NAMES:
        raise EqfuseError(f"reduction {name!r} is built in", hint="choose another name")
    if known is not None and not replace:
        hint = "choose another name, or replace it: replace=True"
        raise EqfuseError(f"reduction {name!r} is registered already, as another", hint=hint)
    if found.fold is not None:
        verdict = laws.check_laws(found.fold, found.lift, found.whole)
        if verdict.broken is not None:
            raise _refused(name, verdict.broken)
        if verdict.undecided and unverified is None:
            hint = 'floats agree; if that is enough, say why: unverified="reason"'
            raise EqfuseError(f"reduction {name!r}: exact arithmetic cannot decide its laws", hint=hint)
    register(found.reduction)
    return found.reduction


def assumptions(exprs: Iterable[Expr]) -> tuple[str, ...]:
    """What is taken on trust of the reductions that the expressions use, a line each."""
    found: list[str] = []
    for fold in folds_in(*exprs):
        declared = REGISTERED[fold.name].unverified if fold.name in REGISTERED else None
        if declared is not None:
            found.append(f"reduction {fold.name}: {declared}")
        if not laws.keeps_infinities(fold):
            found.append(f"reduction {fold.name}: infinities, for which the grouping of its parts shows")
    return tuple(found)


def _refused(name: str, broken: laws.Broken) -> EqfuseError:
    match broken.law:
        case "identity":
            message, hint = (
                f"the identity of reduction {name!r} is none",
                "combining with it must change nothing",
            )
        case "associative":
            message = f"reduction {name!r} is not associative"
            hint = "parts must combine to the same in any grouping; carry more state, or compute it in steps"
        case _:
            message = f"reduction {name!r} is not commutative"
            hint = "leave commutative=True out: parts are then combined in order"
    return EqfuseError(f"{message}\n{broken}", hint=hint)
