"""Kept results, made once more: what the files say is derived and verified again. Other files, as compiled libraries: whether they
are as they were kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eqfuse import results
from eqfuse.cache import entries
from eqfuse.cache.files import Unfit, read_plain, read_whole, searched
from eqfuse.calls.specialization import Specializations
from eqfuse.certification import Checks, examined
from eqfuse.compiled import Asked
from eqfuse.compiler import chosen_now, predicted, rederived
from eqfuse.devices import Target
from eqfuse.differentiate.gradient import grad
from eqfuse.errors import EqfuseError
from eqfuse.extract.machine import known_device
from eqfuse.results import (
    Certifying,
    Differentiating,
    Merging,
    Planning,
    Pricing,
    Reaching,
    Rewriting,
    Subject,
)
from eqfuse.rules.merge_search import derive_group
from eqfuse.rules.prepare import prepare
from eqfuse.terms.folds import FOLDS
from eqfuse.terms.nodes import Fold
from eqfuse.tile.triton.launch import module_path


@dataclass(frozen=True)
class Finding:
    """Of one file. `fault` is why it is never used, `wrong` what was found to be otherwise than it says; both are empty
    where it is right: made once more, or, where not `again`, as it was kept."""

    kind: str
    path: Path
    fault: str = ""
    wrong: str = ""
    again: bool = True


def audit() -> Iterator[Finding]:
    """Every file of the search path; entries are derived or verified again."""
    for kind in results.KINDS:
        for path, subject, value, fault in results.found(kind):
            if subject is None:
                yield Finding(kind, path, fault=fault)
                continue
            try:
                wrong = _wrong(subject, value)
            except EqfuseError as error:
                wrong = f"it cannot be made again: {error}"
            yield Finding(kind, path, wrong=wrong)
    for kind in entries.KINDS.keys() - results.KINDS.keys():
        for folder in searched():
            for path in entries.files(kind, folder):
                yield Finding(kind, path, fault=_fault(path), again=False)


def _fault(path: Path) -> str:
    """Why a file is not used that is not made once more; empty where it is."""
    try:
        if path.suffix == ".py":
            text = read_plain(path)
            return "" if text is None or path == module_path(path.parent, text) else "its text is another one"
        if path.suffix == ".json":
            entries.read_file(path)
        else:
            read_whole(path)
    except Unfit as why:
        return str(why)
    return ""


def _wrong(subject: Subject, value: Any) -> str:
    _know(subject.folds)
    match subject:
        case Rewriting(program, apart, scope):
            with scope.entered():
                again, _ = prepare(program, apart=apart)
            return "" if again == value[0] else "the program is rewritten to something else"
        case Merging(axis, reduces, order, strict_casts, suffix, dtypes, scope):
            with scope.entered():
                group, _ = derive_group(axis, reduces, order, strict_casts, suffix, dtypes=dtypes)
            return "" if group == value[0] else "another merge is derived"
        case Planning(program, extents, dtypes, device, prefer, scope):
            if (found := known_device(device)) is None:
                return f"no device here is named {device!r}"
            with scope.entered(), results.anew():
                derived = rederived(program)
                chosen = chosen_now(derived, Asked(extents, dtypes, found, prefer))[1]
            return "" if chosen == value else "another plan is chosen"
        case Reaching(plan, begins):
            if (found := known_device(plan.device)) is None:
                return f"no device here is named {plan.device!r}"
            with plan.scope.entered(), results.anew():
                target = Target(found, auto=False)
                shapes = Specializations(
                    rederived(plan.program), target, plan.prefer, False, Checks(trials=1)
                )
                far = shapes.reach(shapes.compile(plan.extents, plan.dtypes, found), begins)
            return "" if far == value else "the plan reaches another size"
        case Pricing(program, extents, dtypes, device, scope):
            if (found := known_device(device)) is None:
                return f"no device here is named {device!r}"
            with scope.entered(), results.anew():
                try:
                    price: float | str = predicted(rederived(program), Asked(extents, dtypes, found))
                except EqfuseError as error:
                    price = error.message
            return "" if price == value else "another time is predicted"
        case Differentiating(source, wrt):
            return "" if grad(source, wrt) == value else "it has another gradient"
        case Certifying(device=device):
            if (found := known_device(device)) is None:
                return f"no device here is named {device!r}"
            certificate = examined(subject, found)
            if not certificate.ok:
                return f"it is not verified: {certificate.reason}"
            same = certificate.bound == value.bound and certificate.stages == value.stages
            return "" if same else "the certificate is another one"


def _know(folds: tuple[Fold, ...]) -> None:
    """Makes the folds of an entry known. Raises EqfuseError where a name stands for another one here."""
    for fold in folds:
        if FOLDS.setdefault(fold.name, fold) != fold:
            raise EqfuseError(
                f"the fold {fold.name!r} is not the one registered here", hint="register the same one"
            )
