"""What compiling keeps between processes: rewritten programs, derived merges, certificates (docs/cache.md).

An entry is found by everything that its value follows from: the program as it was parsed, the rules in force, the folds
that it reads, eqfuse's own source files and the version of Python. The version of egglog stands beside: an entry that
another one made is no hit, unless none is installed here. What is read is checked, and any fault is a miss.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from eqfuse import limits, logs
from eqfuse.cache import entries, files, sources
from eqfuse.cache.entries import Key
from eqfuse.cache.files import Unfit, searched, write_whole
from eqfuse.codec import Codec, Malformed, Uncodable
from eqfuse.environment import installed
from eqfuse.extract.candidates import Candidate
from eqfuse.fast_dataclass import dataclass
from eqfuse.loops import nodes as loops
from eqfuse.loops import plan as plans
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Nest
from eqfuse.loops.plan import Roles
from eqfuse.rules import merge
from eqfuse.rules.egraph.saturate import Report
from eqfuse.rules.merge import Group
from eqfuse.rules.rule import Rewrite
from eqfuse.rules.scope import Rule, RuleScope
from eqfuse.terms import nodes as terms
from eqfuse.terms.collapse_axes import CollapsedAxes
from eqfuse.terms.folds import folds_in
from eqfuse.terms.nodes import Expr, Fold, Output, Program, Reduce
from eqfuse.terms.prefixes import Prefix
from eqfuse.terms.segments import Ends, Segments, Sort
from eqfuse.terms.views import Views
from eqfuse.verify.certificate import Certificate, StageReport

Value = TypeVar("Value")


@dataclass(frozen=True)
class Rewriting:
    """What the outputs of a program are rewritten from."""

    program: Program
    apart: bool
    scope: RuleScope
    folds: tuple[Fold, ...]


@dataclass(frozen=True)
class Merging:
    """What the merge of one pass is derived from: the arguments of `merge_search.derive_group`."""

    axis: str
    reduces: tuple[Reduce, ...]
    order: tuple[str, ...]
    strict_casts: bool
    suffix: str
    dtypes: Mapping[str, str]
    scope: RuleScope
    folds: tuple[Fold, ...]


@dataclass(frozen=True)
class Certifying:
    """What is verified: the nest, and the outputs that it was made of, against the program. `single` are for each kernel
    the axes that have one position per program instance; `loses_infinities` is the plan's, or that of axes in chunks; `trusted` is declared of rules
    that were used, `added` are those that somebody added; `roles` are the plan's; `views` have the program as it was asked for,
    where this one was made of it; `limits` are the megabytes and seconds that it may take."""

    program: Program
    outputs: tuple[Output, ...]
    nest: Nest
    dtypes: Mapping[str, str]
    device: str
    single: tuple[tuple[str, ...], ...]
    loses_infinities: bool
    trusted: tuple[str, ...]
    added: tuple[str, ...]
    trials: int
    bound: float
    scalars: Mapping[str, float]
    folds: tuple[Fold, ...]
    roles: tuple[Roles | None, ...] = ()
    views: Views | None = None
    limits: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Planning:
    """What a plan is chosen for: the arguments of `compiler.choose`."""

    program: Program
    extents: Mapping[str, int]
    dtypes: Mapping[str, str]
    device: str
    prefer: str | None
    scope: RuleScope
    folds: tuple[Fold, ...]


@dataclass(frozen=True)
class Reaching:
    """Key of how far a plan's region extends: the plan that is chosen by `plan`, at whose extents `begins` the region starts."""

    plan: Planning
    begins: Mapping[str, int]

    @property
    def folds(self) -> tuple[Fold, ...]:
        return self.plan.folds


@dataclass(frozen=True)
class Pricing:
    """What the back end of torch prices, taken or not: what the plan of its choice is predicted to take, or
    why it has none."""

    program: Program
    extents: Mapping[str, int]
    dtypes: Mapping[str, str]
    device: str
    scope: RuleScope
    folds: tuple[Fold, ...]


@dataclass(frozen=True)
class Differentiating:
    """The arguments of `eq.grad`."""

    source: str
    wrt: tuple[str, ...]
    folds: tuple[Fold, ...]


Subject = Rewriting | Merging | Planning | Reaching | Pricing | Differentiating | Certifying

KINDS: Mapping[str, tuple[type[Subject], Any]] = {
    "rewritten": (Rewriting, tuple[tuple[Output, ...], Report]),
    "merged": (Merging, tuple[Group, Report]),
    "planned": (Planning, Candidate),
    "reached": (Reaching, tuple[tuple[str, int], ...]),
    "priced": (Pricing, float | str),
    "differentiated": (Differentiating, str),
    "certified": (Certifying, Certificate),
}
"""Kinds of entries: what each is found by, and the type of what it holds."""

_TERMS = (
    terms.Axis,
    terms.Call,
    terms.Const,
    terms.Load,
    terms.Local,
    terms.Reduce,
    terms.Scalar,
    terms.Size,
)
_LOOPS = (
    loops.Buffer,
    loops.Carried,
    loops.Kernel,
    loops.Let,
    loops.Loop,
    loops.Nest,
    loops.Slots,
    loops.Store,
)
_MERGES = (
    merge.Combine,
    merge.Finish,
    merge.Group,
    merge.Merge,
    merge.Obstacle,
    merge.Part,
    Prefix,
    merge.State,
)
CODEC = Codec(
    {
        "rows": (
            *_TERMS,
            terms.InOrder,
            terms.Output,
            terms.Program,
            terms.Tensor,
            *_LOOPS,
            *_MERGES,
            merge.Update,
        )
        + (
            Candidate,
            CollapsedAxes,
            Ends,
            plans.Cost,
            plans.GroupPlan,
            plans.KernelConfig,
            plans.KernelPlan,
            plans.Plan,
            plans.Range,
            plans.Term,
            Segments,
            Sort,
            Views,
        )
        + (Block, Roles, Fold, Report, Rewrite, Rule, RuleScope, Certificate, StageReport)
        + (Rewriting, Merging, Planning, Reaching, Pricing, Differentiating, Certifying)
    }
)


def rewriting(program: Program, apart: bool, scope: RuleScope) -> Rewriting:
    """The program apart from how it is written: spaces, comments, and names of temporaries."""
    exprs = (output.expr for output in program.outputs)
    return Rewriting(replace(program, source=""), apart, scope, folds_in_order(*exprs))


def planning(
    program: Program,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    device: str,
    prefer: str | None,
    scope: RuleScope,
) -> Planning:
    """The program apart from how it is written, and what a plan is chosen for."""
    exprs = (output.expr for output in program.outputs)
    plain = replace(program, source="")
    return Planning(plain, extents, dtypes, device, prefer, scope, folds_in_order(*exprs))


def pricing(
    program: Program, extents: Mapping[str, int], dtypes: Mapping[str, str], device: str, scope: RuleScope
) -> Pricing:
    """The program apart from how it is written, and what it is priced for."""
    folds = folds_in_order(*(output.expr for output in program.outputs))
    return Pricing(replace(program, source=""), extents, dtypes, device, scope, folds)


def folds_in_order(*exprs: Expr) -> tuple[Fold, ...]:
    """The folds that expressions read, by name."""
    return tuple(sorted(folds_in(*exprs), key=lambda fold: fold.name))


_anew: ContextVar[bool] = ContextVar("anew", default=False)


@contextmanager
def anew() -> Iterator[None]:
    """Inside, nothing is kept, nor read."""
    token = _anew.set(True)
    try:
        yield
    finally:
        _anew.reset(token)


def is_off() -> bool:
    """Whether nothing is kept, nor read."""
    return _anew.get() or files.is_off()


def has_any(kind: str) -> bool:
    """Whether there may be entries of a kind."""
    return not is_off() and any((folder / kind).is_dir() for folder in searched())


def kept(
    kind: str, subject: Subject, make: Callable[[], Value], *, again: bool = False
) -> tuple[Value, bool]:
    """The value of an entry, or what `make` gives, which is kept then unless a limit cut it short; and whether it was there. With `again` it is
    made in any case."""
    if is_off():
        return make(), False
    try:
        key = _key(subject)
    except Uncodable as why:
        logs.note("cache", f"{kind}: not kept: {why}")
        return make(), False
    if not again:
        try:
            content = entries.read(kind, key)
            if content is not None:
                return _value(kind, content), True
        except Unfit as why:
            logs.note("cache", f"{kind}: an entry is not used: {why}")
    value = make()
    if limits.was_cut():
        return value, False
    try:
        _keep(kind, key, value)
    except (OSError, Uncodable) as why:
        logs.note("cache", f"{kind}: not kept: {why}")
    return value, False


def decoded(kind: str, content: Mapping[str, Any]) -> tuple[Subject, Any]:
    """What an entry was found by, and its value. Raises Unfit."""
    key, value = content["key"], _value(kind, content)
    if {name: part for name, part in key.items() if name != "subject"} != _made_here():
        raise Unfit("another version of eqfuse or Python made it")
    try:
        return CODEC.decode(json.loads(key["subject"]), KINDS[kind][0]), value
    except (Malformed, KeyError, TypeError, ValueError, RecursionError) as why:
        raise Unfit(f"its key cannot be read: {why}") from None


def _key(subject: Subject) -> Key:
    """The subject is a text: keys are compared with the names in their objects sorted, and mappings have an order."""
    return {**_made_here(), "subject": json.dumps(CODEC.encode(subject))}


def _made_here() -> dict[str, Any]:
    return {"eqfuse": source_digest(), "python": platform.python_version()}


def _keep(kind: str, key: Key, value: object) -> None:
    entries.keep(kind, key, {"egglog": egglog_here(), "value": CODEC.encode(value)})


def _value(kind: str, content: Mapping[str, Any]) -> Any:
    here = egglog_here()
    if here is not None and content.get("egglog") != here:
        raise Unfit(f"egglog {content.get('egglog')} made it, and {here} is installed")
    try:
        return CODEC.decode(content.get("value"), KINDS[kind][1])
    except Malformed as why:
        raise Unfit(f"it cannot be read: {why}") from None


@lru_cache(maxsize=1)
def source_digest() -> str:
    """The digest of eqfuse's own source files, as they are at the first call."""
    return sources.digest_of(os.path.dirname(__file__))


@lru_cache(maxsize=1)
def egglog_here() -> str | None:
    """The version of egglog that is installed."""
    return installed("egglog")


def found(kind: str) -> Iterator[tuple[Path, Subject | None, Any, str]]:
    """Every entry of a kind, in the order of the search path: its file, what it was found by, its value, and why it is not
    used, where it is not (the others are then None)."""
    for folder in searched():
        for path in entries.files(kind, folder):
            try:
                content = entries.read_file(path)
                if content is not None:
                    yield path, *decoded(kind, content), ""
            except Unfit as why:
                yield path, None, None, str(why)


def pack(target: Path) -> tuple[int, int]:
    """Copies the entries that would be used here into a folder for `$EQFUSE_CACHE_PATH`: how many, and how many others
    were left. Raises OSError."""
    copied: set[str] = set()
    left = 0
    for kind in KINDS:
        (target / kind).mkdir(parents=True, exist_ok=True)
        for path, _, _, fault in found(kind):
            if fault:
                left += 1
            elif f"{kind}/{path.name}" not in copied:
                write_whole(target / kind / path.name, path.read_bytes())
                copied.add(f"{kind}/{path.name}")
    return len(copied), left
