"""eqfuse: reduction programs as expression strings in, one verified fused kernel out.

import eqfuse as eq
kernel = eq.compile("y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))")
y = kernel(x=tensor)
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

_collects = gc.isenabled()
gc.disable()  # modules make no garbage, and a collection here would walk all that torch has made: 70 ms
try:
    from eqfuse import compiler
    from eqfuse.devices import device_named
    from eqfuse.errors import EqfuseError, did_you_mean
    from eqfuse.extend.shipped import register_shipped
    from eqfuse.kernel import Kernel
    from eqfuse.operator.registered import register_operator
    from eqfuse.rules.scope import Rule
    from eqfuse.terms.parser import parse
    from eqfuse.threads import deep, uncollected
    from eqfuse.tile.modes import mode_named
    from eqfuse.verify.certificate import REQUESTED, Certificate, allowed_texts
finally:
    if _collects:
        gc.enable()

if TYPE_CHECKING:
    from eqfuse.differentiate.certify import certify_gradient, certify_jvp
    from eqfuse.differentiate.gradient import grad, jvp
    from eqfuse.extend.reductions import reduction
    from eqfuse.extend.rules import rule, rules
    from eqfuse.ops.patch import patch
    from eqfuse.proof.derivation import Derivation
    from eqfuse.sharding.sharded import shard
    from eqfuse.torch.program import from_torch
    from eqfuse.verify.equivalence import equivalent

__version__ = "0.1.0"

_AT_FIRST_USE = {
    "Derivation": "proof.derivation",
    "certify_gradient": "differentiate.certify",
    "certify_jvp": "differentiate.certify",
    "equivalent": "verify.equivalence",
    "from_torch": "torch.program",
    "grad": "differentiate.gradient",
    "jvp": "differentiate.gradient",
    "patch": "ops.patch",
    "reduction": "extend.reductions",
    "rule": "extend.rules",
    "rules": "extend.rules",
    "shard": "sharding.sharded",
}
"""Public names that a start does not wait for, and the modules that have them."""

# Importing a package sets its name here, once: afterwards the function of that name may.
import_module("eqfuse.rules")
del globals()["rules"]


def __getattr__(name: str) -> Any:
    if name in ("ops", "torch"):
        return import_module(f"eqfuse.{name}")
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module 'eqfuse' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"eqfuse.{_AT_FIRST_USE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def compile(
    source: str,
    *,
    scalars: Mapping[str, float] | None = None,
    target: str = "auto",
    prefer: str | None = None,
    verify: bool | Literal["again"] = True,
    strict_casts: bool = False,
    assume_finite: bool = False,
    reassociate: Literal["exact", "bounded", "free"] = "bounded",
    trials: int = 16,
    bound: float = REQUESTED,
    native: str | None = None,
    allow: Sequence[str] | Literal["untaken"] = (),
    visible: bool = False,
    sizes: Mapping[str, int] | None = None,
    constants: Collection[str] = (),
    at_once: bool = True,
) -> Kernel:
    """Derive, choose, lower and verify a fused kernel for a program.

    `scalars` are constants known now (others are given at each call). `target` is "auto" (the CPU, or
    the GPU that the tensors are on), "cpu", "sm_80", "sm_90", "h200", "sm_100" or "gfx942". `prefer`
    forces a schedule: "rolling", "split_k", "resident", "multi_pass"; of prefixes "scan", and on
    a GPU "scan_tiles" or "scan_split", and "library" for products of float32 and float64; recurrences whose steps do not
    merge have "in_order". `verify=False` skips the
    field test until `certificate` is asked for, and `verify="again"` runs it where an earlier process did too, and kept
    the certificate; `trials` are drawn at a time, until the probability of
    accepting a wrong kernel is at most `bound` (2**-40), where a theorem gives one. `strict_casts` makes casts
    opaque to the rules. What a mask excludes never reaches the output, be it NaN; `assume_finite` promises that it is a
    finite number, which spares matrix products on a GPU a test of it. `reassociate` is which orders of sums and products may be
    chosen, by cost: "bounded" those of which the bound of rounding is no worse than twice that of the order written, "exact" those
    of integers alone, "free" any that is equal for real numbers (docs/reassociation.md). `native` is whether
    kernels on the CPU are compiled to C++: "background" (calls run as torch calls until that is done), "wait" (the first
    call waits), or "off"; `$EQFUSE_NATIVE`, else "background", where it is not given. `allow` has sides of branches that
    verification need not have seen taken, as its error writes them: conditions that no input meets, or "untaken" for all.
    `visible`: compilers of torch see what a call launches, instead of one operator, so that AOTInductor's packages need no
    eqfuse (docs/pytorch.md). `sizes` are those of axes that the plan before any call is made for, which `plan`, `explain()`,
    `triton` and the like show; every other axis counts as 256 there. `constants` are names of tensors that stay the same over many
    calls, as weights do: what is made of them alone is computed once for each value of them, and kept (docs/reassociation.md).
    With `at_once=False` no plan is made and verified before the first call, which raises what is found then: for a program that is
    known to compile, and is called next.

    Raises EqfuseError: ParseError and TypeCheckError for the source, ScheduleError where `prefer` is
    impossible (the text says which factor is in the way), BudgetError where a program is too large
    once its temporaries are written out, VerificationError with a counterexample where a stage is wrong, and
    where no trial took a side of a branch that is not shown to make no difference and not in `allow`.
    """
    if verify not in (True, False, "again"):
        raise EqfuseError(f"verify is {verify!r}", hint='give True, False, or "again"')
    if not isinstance(trials, int) or trials < 1:
        raise EqfuseError(f"trials is {trials!r}", hint="give a positive integer")
    if not isinstance(bound, int | float) or not 0 < bound < 1:
        raise EqfuseError(f"bound is {bound!r}", hint="give a probability between 0 and 1, as 1e-12")
    if reassociate not in ("exact", "bounded", "free"):
        raise EqfuseError(f"reassociate is {reassociate!r}", hint='give "exact", "bounded" or "free"')
    if isinstance(constants, str) or not isinstance(constants, Collection):
        raise EqfuseError(f"constants is {constants!r}", hint='give a collection of names, as {"w"}')
    if constants and prefer is not None:
        raise EqfuseError(
            "a schedule is of a whole program, constants divide it", hint="leave out prefer= or constants="
        )
    mode_named(native)
    allowed = allowed_texts(allow)
    device = device_named("cpu" if target == "auto" else target)
    with deep(), uncollected():
        derived = compiler.derive(
            source, scalars, strict_casts, assume_finite=assume_finite, reassociate=reassociate
        )
        known = [tensor.name for tensor in derived.program.tensors]
        for name in constants:
            if name not in known:
                hint = did_you_mean(name, known) or "tensors: " + " ".join(known)
                raise EqfuseError(f"the program has no tensor {name!r} to be constant", hint=hint)
        numbers = {n: v.item() if isinstance(v, np.generic) else v for n, v in (scalars or {}).items()}
        return Kernel(
            derived,
            device,
            target == "auto",
            prefer,
            verify,
            trials,
            numbers,
            bound,
            native,
            allowed,
            visible,
            first=compiler.nominal_extents(derived.program, sizes) if sizes else None,
            at_once=at_once,
            constants=tuple(sorted(constants)),
        )


def reference(source: str, *, scalars: Mapping[str, float] | None = None) -> Callable[..., Any]:
    """The unfused program in float64: a function of tensors, scalars and `sizes` by name, giving numpy arrays.
    `scalars` are constants known now, as in `compile`."""
    from eqfuse.terms.interpreter import reference as interpreted

    program = parse(source, scalars=scalars)
    names = {tensor.name for tensor in program.tensors}

    @deep()
    def run(*, sizes: Mapping[str, int] | None = None, **values: Any) -> Any:
        tensors = {n: v for n, v in values.items() if n in names}
        scalars = {n: v for n, v in values.items() if n not in names}
        return interpreted(program, tensors, scalars, sizes)

    return run


register_shipped()
register_operator(lambda given: compile(**given))

__all__ = [
    "Certificate",
    "Derivation",
    "EqfuseError",
    "Kernel",
    "Rule",
    "certify_gradient",
    "certify_jvp",
    "compile",
    "equivalent",
    "from_torch",
    "grad",
    "jvp",
    "patch",
    "reduction",
    "reference",
    "rule",
    "rules",
    "shard",
]
