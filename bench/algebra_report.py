"""`eqfuse bench algebra`: orders of sums and products, as they are written and as they are chosen, beside the best by hand in torch.

Each program (`bench/algebra_programs.py`) is called as a user does it, on a CPU in one thread (`--threads N` has another number). "as
written" and "by hand" are torch's: one operation a line in the order of the program, and in the best order that is known. Errors are
against float64, relative to the greatest value, beside those of what is written in torch in float32.

    refused: NAME   a program whose cheapest order may cancel, as it is compiled and with reassociate="free": bounds and errors
    flip: NAME      a program along sizes at which another order is chosen: the times of both orders there
    gap             the orders of all benchmark programs beside the best of all that were tried, and a greedy choice
    chains          random chains of products (`--examples`) beside the optimal path of opt_einsum, where that is installed

On a GPU `ON_GPU` runs where nothing else is asked for; `--seconds S` begins nothing later.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.markup import escape

import eqfuse as eq
from bench.algebra_gap import gaps
from bench.algebra_gap import said as gaps_said
from bench.algebra_programs import FLIPS, ON_GPU, PROGRAMS, REFUSED, Flip, Order
from bench.gallery import GALLERY
from bench.report import Column, Options, Report, chosen_names, geometric_mean, recorded
from bench.timing import in_turn
from bench.workloads import WORKLOADS
from eqfuse.errors import EqfuseError
from eqfuse.rules.reassociate import cheapest, roundings, visited
from eqfuse.terms.nodes import Axis, Call, Expr, Load, Output, Program, Reduce, call, reductions, walk
from eqfuse.terms.parser import parse
from eqfuse.terms.prefixes import alike
from eqfuse.terms.printer import output_lines

TITLE = "Orders of sums and products"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("runs", lambda row: escape("\n".join(row["order"])) or "as written"),
    Column("elements, written", lambda row: f"{row['written']:.2e}"),
    Column("chosen", lambda row: f"{row['chosen']:.2e}"),
    Column("ms", lambda row: f"{row['ms']:.3g}"),
    Column("torch, as written", lambda row: f"{row['written_ms']:.3g}"),
    Column("by hand", lambda row: f"{row['hand_ms']:.3g}"),
    Column("by hand / ms", lambda row: f"{row['hand_ms'] / row['ms']:.2f}"),
    Column("error", lambda row: f"{row['error']:.1e}"),
    Column("as written", lambda row: f"{row['written_error']:.1e}"),
)
CHAINS = 500
"""Random chains, where `--examples` says nothing."""
MOST_ERROR = 4.0
"""Of the error of what is written, or of float32's rounding of the sums, that an order may have."""
WORST = 1.3
"""Of the time of the best order by hand that a program should take at most."""
UNIT = 2.0**-24
"""The unit of rounding of float32."""
T = torch.Tensor


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, an order that is not proved, an error over `MOST_ERROR` times that of what is written, an
    order that is dearer than the best that was tried, and a chain that is dearer than opt_einsum's."""
    parts: dict[str, Callable[[], None]] = {
        **{name: partial(_measured, name, order, options, report) for name, order in PROGRAMS.items()},
        **{
            f"refused: {name}": partial(_refused, name, order, options, report)
            for name, order in REFUSED.items()
        },
        **{f"flip: {flip.program}": partial(_flips, flip, options, report) for flip in FLIPS},
        "gap": lambda: _gap(report),
        "chains": lambda: _chains(options, report),
    }
    start, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(options.threads[0] if options.threads else 1)
    try:
        on_gpu = options.device == "cuda" and options.only is None
        for name in ON_GPU if on_gpu else chosen_names(options.only, tuple(parts)):
            if time.monotonic() - start > options.seconds:
                report.summary.append(f"ended before {name}, after {options.seconds:g} s")
                break
            with recorded(report.failing(name)):
                parts[name]()
    finally:
        torch.set_num_threads(threads)
    for row in report.rows:
        if not row["proved"]:
            report.failures.append(f"{row['program']}: its derivation does not check")
        if row["reassociate"] != "free" and row["error"] > MOST_ERROR * max(row["written_error"], 1e-6):
            report.failures.append(f"{row['program']}: error {row['error']:.1e}")
    measured = [row for row in report.rows if row["program"] in PROGRAMS]
    slower = [row for row in measured if row["ms"] > WORST * row["hand_ms"]]
    if measured:
        ratios = ", ".join(f"{row['program']} {row['ms'] / row['hand_ms']:.2f}" for row in slower)
        faster = geometric_mean(row["written_ms"] / row["ms"] for row in measured)
        report.summary.insert(
            0,
            f"{len(measured)} programs, {faster:.1f} times as fast as written in torch; over {WORST} of the best by hand: {ratios or 'none'}",
        )


def _measured(name: str, order: Order, options: Options, report: Report) -> None:
    report.add(row_of(name, order, options))


def _refused(name: str, order: Order, options: Options, report: Report) -> None:
    """The program as it is compiled, and with the order that its rounding keeps from being taken."""
    rows = [
        row_of(f"{name}, {mode}", replace(order, reassociate=mode), options, bound=True)
        for mode in ("bounded", "free")
    ]
    report.add(*rows)
    bounded, free = rows
    if free["chosen"] >= bounded["chosen"] and not options.small:
        raise EqfuseError("no order is cheaper where any is allowed")
    report.summary.append(
        f"refused: {name}, numbers around {order.offset:g}: {free['chosen'] / bounded['chosen']:.2g} of the elements, "
        f"{bounded['ms'] / free['ms']:.1f} times as fast; bound {free['bound']:.1e}, error {free['error']:.1e}; "
        f"as written bound {bounded['bound']:.1e}, error {bounded['error']:.1e}"
    )


def _flips(flip: Flip, options: Options, report: Report) -> None:
    """Both orders of a program, and the one that is chosen, along sizes of some of its axes."""
    order = PROGRAMS[flip.program]
    texts = {"written": order.text, "other": flip.other}
    kernels = {what: eq.compile(text, native="wait", reassociate="exact") for what, text in texts.items()}
    kernels["chosen"] = eq.compile(order.text, native="wait")
    program, found = parse(order.text), set()
    for size in flip.sizes:
        size = max(1, size // (8 if options.small else 1))
        sizes = order.extents(options.small, options.device) | dict.fromkeys(flip.axes, size)
        given = [drawn(program, order, sizes, options.device) for _ in range(3)]
        calls = {what: lambda values, kernel=kernel: kernel(**values) for what, kernel in kernels.items()}
        ms = in_turn(calls, given, options.device)
        is_other = bool(kernels["chosen"].plan.order)
        found.add(is_other)
        report.summary.append(
            f"flip: {flip.program}, {', '.join(flip.axes)} = {size}: {'the other order' if is_other else 'as written'} {ms['chosen']:.3g} ms; "
            f"as written {ms['written']:.3g} ms, the other order {ms['other']:.3g} ms"
        )
    if len(found) < 2 and not options.small:
        raise EqfuseError("one order is chosen at all sizes")


def _gap(report: Report) -> None:
    found = gaps(PROGRAMS, *WORKLOADS.values(), *GALLERY.values())
    report.summary += gaps_said(found)
    report.failures += [
        f"{gap.program}: {gap.chosen:.4g} elements, where another order has {gap.best:.4g}"
        for gap in found
        if gap.chosen > gap.best
    ]


def row_of(name: str, order: Order, options: Options, *, bound: bool = False) -> dict[str, Any]:
    """One program, called on fresh inputs; with the `bound` of the rounding of what runs, relative to the greatest value."""
    sizes = order.extents(options.small, options.device)
    program = parse(order.text)
    torch.manual_seed(options.seed or 0)
    kernel = eq.compile(order.text, native="wait", reassociate=order.reassociate)
    given = [drawn(program, order, sizes, options.device) for _ in range(3)]
    own = {at.name for index in shaped(program).values() for at in index if isinstance(at, Axis)}
    free = {axis: n for axis, n in sizes.items() if axis not in {*own, *program.lengths, *program.domains}}
    known: dict[str, Any] = {"sizes": free}
    exact = {n: t if n in order.integers else t.double() for n, t in given[1].items()}
    expected = order.written(**exact)
    calls: dict[str, Callable[[dict[str, Any]], T]] = {
        "ms": lambda values: kernel(**values, **known),
        "written_ms": lambda values: order.written(**values),
        "hand_ms": lambda values: order.hand(**values),
    }
    row: dict[str, Any] = {
        "program": name,
        "sizes": sizes,
        "text": order.text,
        "reassociate": order.reassociate,
    }
    found = {what: call(given[1]) for what, call in calls.items()}
    greatest = float(expected.abs().max()) or 1.0
    row["error"] = float((found["ms"] - expected).abs().max()) / greatest
    row["written_error"] = float((found["written_ms"] - expected).abs().max()) / greatest
    row |= in_turn(calls, given, options.device)
    plan = kernel.plan
    program = kernel.program  # with the names that its orders may use
    extents = {**dict(plan.sizes), **{axis: sizes[of] for axis, of in program.domains.items()}}
    runs = plan.order or program.outputs
    row["order"], row["plan"] = output_lines(plan.order), repr(plan)
    row["written"] = visited(program.outputs, extents, same=alike(program))
    row["chosen"] = visited(runs, extents, same=alike(program))
    row["roundings"] = roundings(program.outputs, extents), roundings(runs, extents)
    if bound:
        terms = [replace(output, expr=magnitude(output.expr)) for output in runs]
        total = eq.compile("\n".join(output_lines(terms)), reassociate="exact")(**exact, **known)
        row["bound"] = row["roundings"][1] * UNIT * float(torch.as_tensor(total).max()) / greatest
    row["grade"], row["proved"] = kernel.certificate.graded, bool(kernel.derivation.check())
    return row


def magnitude(expr: Expr) -> Expr:
    """The sum of the absolute values of all terms of an expression; what sums nothing is one term, rounded as often as it has
    operations. With the roundings on the way, it bounds the error (Higham 2002, section 3.1)."""
    match expr:
        case Reduce("sum", axis, body):
            return Reduce("sum", axis, magnitude(body))
        case Call("sub" | "add" | "mul" | "div" | "neg" | "sq", args) if any(map(reductions, args)):
            if expr.fn == "neg":
                return magnitude(args[0])
            return call("add" if expr.fn == "sub" else expr.fn, *map(magnitude, args))
    return call("abs", expr)


def drawn(program: Program, order: Order, sizes: Mapping[str, int], device: str) -> dict[str, Any]:
    """Tensors of a program, normal numbers around its offset, so scaled that sums of products stay near 1."""
    shapes = {name: [_extent(at, sizes) for at in index] for name, index in shaped(program).items()}
    return {
        n: torch.randint(0, sizes[order.integers[n]], s, device=device)
        if n in order.integers
        else torch.randn(s, device=device) / max(s[-1:] or [1]) ** 0.5 + order.offset
        for n, s in shapes.items()
    }


def _extent(index: Expr, sizes: Mapping[str, int]) -> int:
    """How many positions a dimension has that is read at an axis, or at a sum of axes."""
    match index:
        case Axis(name):
            return sizes[name]
        case Call("add", (one, other)):
            return _extent(one, sizes) + _extent(other, sizes) - 1
    raise EqfuseError(f"no size is known of a dimension that is read at {index}")


def shaped(program: Program) -> dict[str, list[Expr]]:
    """What indexes each dimension of each tensor: an axis where one does."""
    read: dict[tuple[str, int], Expr] = {}
    for load in walk(*(output.expr for output in program.outputs)):
        if isinstance(load, Load):
            for n, at in enumerate(load.index):
                if isinstance(at, Axis) or (load.tensor, n) not in read:
                    read[load.tensor, n] = at
    return {t.name: [read[t.name, n] for n in range(t.rank)] for t in program.tensors}


# -- chains ----------------------------------------------------------------------------------------


def _chains(options: Options, report: Report) -> None:
    """Random chains of 3 to 6 tensors: multiplications of the order that is chosen, and of opt_einsum's optimal path."""
    examples = options.examples or CHAINS
    try:
        cheaper, equal, dearer = chains(examples, options.seed)
    except ModuleNotFoundError:
        report.summary.append("opt_einsum is not installed: no chains were compared")
        return
    report.summary.append(
        f"{examples} random chains beside opt_einsum's optimal path: {cheaper} cheaper, {equal} equal, {dearer} dearer"
    )
    if dearer:
        report.failures.append(f"{dearer} of {examples} chains are dearer than opt_einsum's path")


def chains(count: int, seed: int) -> tuple[int, int, int]:
    """Of how many random chains the order that is chosen is cheaper than opt_einsum's optimal path, costs the same, and is dearer."""
    import opt_einsum  # type: ignore[import-not-found]

    rng = random.Random(seed)
    dearer = cheaper = equal = 0
    for _ in range(count):
        tensors, sizes, kept = _chain(rng)
        inner = "".join(sorted({a for t in tensors for a in t} - set(kept)))
        body = " * ".join(f"t{n}[{','.join(axes)}]" for n, axes in enumerate(tensors))
        head = f"y[{','.join(kept)}]" if kept else "y"
        for axis in inner:
            body = f"sum[{axis}]({body})"
        program = parse(f"{head} = {body}")
        found = cheapest(program.outputs, sizes)
        shapes = [[sizes[a] for a in t] for t in tensors]
        path = opt_einsum.contract_path(
            f"{','.join(tensors)}->{kept}", *shapes, shapes=True, optimize="optimal"
        )
        own, best = (
            visited(found, sizes),
            visited([_along(path[0], program.outputs[0], tensors, kept)], sizes),
        )
        cheaper, equal, dearer = cheaper + (own < best), equal + (own == best), dearer + (own > best)
    return cheaper, equal, dearer


def _along(path: Sequence[tuple[int, ...]], output: Output, tensors: Sequence[str], kept: str) -> Output:
    """A chain along a path of opt_einsum."""
    parts: list[tuple[Expr, set[str]]] = [
        (Load(f"t{n}", tuple(map(Axis, axes))), set(axes)) for n, axes in enumerate(tensors)
    ]
    for step in path:
        taken = [parts[n] for n in step]
        parts = [part for n, part in enumerate(parts) if n not in step]
        value, axes = taken[0]
        for other, more in taken[1:]:
            value, axes = call("mul", value, other), axes | more
        outside = set(kept).union(*(more for _, more in parts))
        for axis in sorted(axes - outside):
            value = Reduce("sum", axis, value)
        parts.append((value, axes & outside))
    return replace(output, expr=parts[0][0])


def _chain(rng: random.Random) -> tuple[list[str], dict[str, int], str]:
    count = rng.randint(3, 6)
    axes = "abcdefg"[: count + 1]
    tensors = [axes[n] + axes[n + 1] for n in range(count)]
    if rng.random() < 0.3:
        tensors[rng.randrange(count)] += "z"
        tensors[rng.randrange(count)] += "z"
    tensors = ["".join(dict.fromkeys(t)) for t in tensors]
    sizes = {a: rng.choice([1, 2, 8, 32, 100, 256]) for a in (*axes, "z")}
    kept = "".join(sorted(set(rng.choice([axes[0] + axes[-1], axes[0], axes[-1], "", axes[0] + axes[2]]))))
    return tensors, sizes, kept
