"""Whether a value is 0 whatever the inputs are, tried in a finite field.

The cotangent of the maximum that a softmax is shifted by is `sum_j p_j dp_j - sum_j p_j * sum_j p_j dp_j`, of which no
rule of differentiation sees that it is 0. A polynomial that is not 0 is not 0 at random points (see
docs/verification.md), so it is evaluated. What was left out for it is checked once more: the certificate of a gradient
is one of all of it.
"""

from __future__ import annotations

import numpy as np

from eqfuse.errors import EqfuseError
from eqfuse.grad.steps import Step, Steps
from eqfuse.grad.text import text_of
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.nodes import Expr
from eqfuse.terms.parser import parse
from eqfuse.verify.field.domain import TWISTED, UNDEFINED, FieldArray, FieldDomain
from eqfuse.verify.sampling import draw_scalars, draw_specs
from eqfuse.verify.sizes import constant_conditions, input_specs, small_extents, small_integers

TRIALS = 16
ENOUGH = 4
"""Trials that every position must have had a value in."""


def is_zero(steps: Steps, axes: tuple[str, ...], value: Expr) -> bool:
    """Whether an expression over the steps so far is 0 in every trial, at sizes that show all of it."""
    name = steps.names.fresh("zero")
    program = parse(text_of(steps, [Step(name, axes, value, written=True)]))
    given = dict(small_integers(program))
    try:
        extents = small_extents(program, given)
    except EqfuseError:
        return False
    if constant_conditions(program, extents, given):
        return False
    rng = np.random.default_rng(0)
    domain = FieldDomain(seed=int(rng.integers(2**62)))
    tensors = draw_specs(input_specs(program, extents, given, None), domain, TRIALS, rng)
    scalars = draw_scalars([program], given, domain, TRIALS, rng)
    found = evaluate(program, tensors, scalars, extents, domain, batch=TRIALS)[name]
    if not isinstance(found, FieldArray):
        return not np.asarray(found).any()
    if found.p is None:
        return False
    usable = np.isfinite(found.shadow) & found.lacks(UNDEFINED) & found.lacks(TWISTED)
    return bool((usable.sum(0) >= ENOUGH).all() and not (found.p[usable]).any())
