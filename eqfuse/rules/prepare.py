"""The best equal program over whole axes, before anything is split.

Its outputs are put into one e-graph, saturated once whatever the sizes: factors leave loops, sums commute where that
shows that reductions depend on each other, unstable forms meet their stable equals; extraction takes the stablest, then the
cheapest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eqfuse.rules.catalogue import DISTRIBUTED, PREPARE
from eqfuse.rules.egraph.encode import Encoder, global_name
from eqfuse.rules.egraph.extract import Extraction
from eqfuse.rules.egraph.ranges import Ranges
from eqfuse.rules.egraph.saturate import Graph, Node, Report, TooManyTerms
from eqfuse.rules.engine import PLAIN, Engine
from eqfuse.rules.scope import current
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import Call, Const, Expr, Output, Program, Reduce, free_axes, walk
from eqfuse.terms.promises import ascends

WIDE = (None, "f32", "f64")
"""Dtypes of tensors that scales may be multiplied to; float32 is what is not declared."""


def prepare(
    program: Program, engine: Engine = PLAIN, *, apart: bool = False
) -> tuple[tuple[Output, ...], Report]:
    """The outputs in their stablest, then cheapest equal form over whole axes, of those that are found within the
    budget; with sums of several terms taken `apart` where each reads reductions over their axis. Outputs that are too
    many for one e-graph, or that no form is found of, get one each."""
    try:
        return _prepared(program, engine, apart)
    except TooManyTerms as many:
        if len(program.outputs) == 1:
            return program.outputs, Report(stopped=str(many))
    outputs, report = [], Report()
    for place, output in enumerate(program.outputs):
        try:
            (alone,), took = _prepared(replace(program, outputs=(output,)), engine, apart, place)
        except TooManyTerms as many:
            alone, took = output, Report(stopped=str(many))
        outputs.append(alone)
        report.add(took)
    return tuple(outputs), report


def _prepared(
    program: Program, engine: Engine, apart: bool, first: int = 0
) -> tuple[tuple[Output, ...], Report]:
    """The outputs from one e-graph, in which they are numbered from `first`."""
    exprs = [output.expr for output in program.outputs]
    axes = list(dict.fromkeys(n.axis for n in walk(*exprs) if isinstance(n, Reduce)))
    if not axes:
        return program.outputs, Report()
    encoder = Encoder(program.strict_casts)
    with engine.session(current().applied(DISTRIBUTED if apart else PREPARE)) as saturation:
        roots = [encoder.encode(expr) for expr in exprs]
        purposes = [f"out{first + i}" for i in range(len(roots))]
        names = [global_name(purpose) for purpose in purposes]
        lets = [f"(let {name} {root})" for name, root in zip(names, roots, strict=True)]
        promises = [pair for pair in program.at_most if not ascends(*pair)]
        bounds = [f"(le {encoder.encode(a)} {encoder.encode(b)})" for a, b in promises]
        saturation.run(encoder.lines + encoder.facts(axes) + lets + bounds)
        saturation.saturate()
        graph = saturation.read()
        unproved = _unproved_exponents(exprs, encoder, graph)
        if unproved and saturation.report.saturated:
            saturation.run([f"(unproved {term})" for term in unproved])
            saturation.saturate()
            graph = saturation.read()
        spread = {(e, axis) for e, _, _, axis in graph.facts["spread"]}

        def allowed(node: Node) -> bool:
            return node.head != "Red" or node.words[0] != "sum" or (node.args[0], node.words[1]) not in spread

        narrow = frozenset(tensor.name for tensor in program.tensors if tensor.dtype not in WIDE)
        best = Extraction(graph, encoder, Ranges(graph, encoder, narrow), allowed=allowed, whole=True)
        if any(best.cost(graph.roots[name]) is None for name in names):
            # The budget ended before the terms of every sum had left it.
            raise TooManyTerms(saturation.report.stopped or "a sum of several terms stays whole")
        for purpose, name in zip(purposes, names, strict=True):
            engine.chose(purpose, best, graph.roots[name])
        outputs = tuple(
            replace(output, expr=best.term(graph.roots[name]))
            for output, name in zip(program.outputs, names, strict=True)
        )
        return outputs, saturation.report


def _unproved_exponents(exprs: Sequence[Expr], encoder: Encoder, graph: Graph) -> list[str]:
    """Terms of exponents inside reductions that no fact bounds by 0, nor the program's own shift."""
    settled = {row[0] for row in graph.facts["exp_safe"]}
    bodies = [node.body for node in walk(*exprs) if isinstance(node, Reduce)]
    found: dict[str, None] = {}
    for node in walk(*bodies):
        match node:
            case Call("exp", (a,)):
                term = encoder.terms["ALL"][a]
                if graph.roots.get(term) not in settled:
                    found[term] = None
    return list(found)


def is_spread(reduce: Reduce) -> bool:
    """Whether the body of a sum has terms that read reductions over its axis, so that rules take it apart: terms that vary, or
    that are added to what does."""
    is_sum, parts = reduce.op == "sum", (reduce.body, reduce.axis)
    return is_sum and (_is_spread(*parts) or _is_shifted(*parts))


def _is_shifted(expr: Expr, axis: str) -> bool:
    match expr:
        case Call("add" | "sub", parts):
            fixed = (part for part in parts if axis not in free_axes(part))
            return any(_is_cascaded(p, axis) for p in fixed) or any(_is_shifted(p, axis) for p in parts)
        case _:
            return False


def _is_spread(expr: Expr, axis: str) -> bool:
    match expr:
        case Call("add" | "sub", (a, b)) if _is_cascaded(expr, axis):
            varying = [part for part in (a, b) if axis in free_axes(part)]
            return len(varying) == 2 or any(_is_cascaded(part, axis) for part in varying)
        case Call("where", (_, a, b)) if b is not Const(0) and _is_cascaded(expr, axis):
            return True
        case Call("mul", (a, b)):
            return _is_spread(a, axis) or _is_spread(b, axis)
        case Call("div", (a, _)) | Call("neg", (a,)) | Call("where", (_, a, Const(0))):
            return _is_spread(a, axis)
        case Call(fn, (a,)) if fn in CASTS:
            return _is_spread(a, axis)
        case _:
            return False


def _is_cascaded(expr: Expr, axis: str) -> bool:
    return any(isinstance(node, Reduce) and node.axis == axis for node in walk(expr))
