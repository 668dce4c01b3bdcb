"""Broken nests: the checker refuses what is not well-formed, the interpreter what is not written once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from loops_plans import attention, softmax, term, two_kernels

import eqfuse as eq
from eqfuse.loops.check import NestError, check
from eqfuse.loops.interpreter import run
from eqfuse.loops.lower import lower
from eqfuse.loops.nodes import Carried, Kernel, Let, Loop, Nest, Stmt, Store
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Local, Program, Reduce, Scalar, Size

Edit = Callable[[Stmt], list[Stmt]]


def edited(nest: Nest, edit: Edit, kernel: int = 0) -> Nest:
    """The nest with every statement of one kernel replaced by what `edit` makes of it."""

    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        inner = [replace(stmt, body=body(stmt.body)) if isinstance(stmt, Loop) else stmt for stmt in stmts]
        return tuple(new for stmt in inner for new in edit(stmt))

    new = replace(nest.kernels[kernel], body=body(nest.kernels[kernel].body))
    return replace(nest, kernels=(*nest.kernels[:kernel], new, *nest.kernels[kernel + 1 :]))


def changed(stmt: Stmt, changes: dict[str, Any]) -> list[Stmt]:
    return [replace(stmt, **changes)]


def let(which: str, /, **changes: Any) -> Edit:
    """Changes the `Let` of that name."""
    return lambda stmt: changed(stmt, changes) if isinstance(stmt, Let) and stmt.name == which else [stmt]


def without(name: str) -> Edit:
    return lambda stmt: [] if isinstance(stmt, Let) and stmt.name == name else [stmt]


def loop(**changes: Any) -> Edit:
    return lambda stmt: changed(stmt, changes) if isinstance(stmt, Loop) else [stmt]


def store(**changes: Any) -> Edit:
    return lambda stmt: changed(stmt, changes) if isinstance(stmt, Store) else [stmt]


def twice(stmt: Stmt) -> list[Stmt]:
    return [stmt, stmt] if isinstance(stmt, Store) else [stmt]


def flash() -> tuple[Program, Nest]:
    program, plan = attention("rolling")
    return program, lower(plan, program)


M, E = Local("m", ()), Axis("e")
T2: Expr = Local("t2", ("j",))

WRONG: dict[str, tuple[Edit, str]] = {
    "undefined": (without("t4"), "'s_new' reads 't4', which is not defined there"),
    "out of scope": (store(expr=Local("s_tile", ())), "reads 's_tile', which is not defined there"),
    "dims of a read": (
        let("m_tile", expr=Reduce("max", "j", Local("t2", ()))),
        "'t2' with dims (), which has ('j',)",
    ),
    "free axis": (let("t3", dims=()), "'t3' depends on axes ['j'], which nothing provides"),
    "parallel dim": (let("t3", dims=("j", "i")), "'t3' has dims ['i'], of which one position is at hand"),
    "dim twice": (let("t3", dims=("j", "j")), "2 dims of 't3' in 'attention's are called 'j'"),
    "no next": (without("o_new"), "does not compute 'o_new' with the dims of 'o'"),
    "dims of next": (let("o_new", dims=("e", "d")), "does not compute 'o_new' with the dims of 'o'"),
    "nested fold": (
        let("m_new", expr=Call("maximum", (M, Reduce("max", "j", T2)))),
        "max[j], which needs a name",
    ),
    "fold of a position": (let("m_tile", expr=Reduce("max", "i", T2)), "'m_tile' folds axis 'i', of which"),
    "unknown fold": (let("m_tile", expr=Reduce("median", "j", T2)), "'median', which is not a reduction"),
    "unknown tensor": (
        let("s_tile", expr=Load("W", (Axis("i"),))),
        "loads 'W', which no earlier kernel stores",
    ),
    "rank": (let("s_tile", expr=Load("Q", (Axis("i"),))), "loads 'Q' with 1 indices, of rank 4"),
    "unknown scalar": (
        let("s_tile", expr=Scalar("eps")),
        "the scalar 'eps', which the program does not have",
    ),
    "arity": (let("s_tile", expr=Call("exp", (M, M))), "calls 'exp' with 2 arguments"),
    "same name": (let("t4", name="t3"), "are called 't3'"),
    "stored twice": (twice, "'O' is stored by 2 statements, not by one"),
    "never stored": (lambda stmt: [] if isinstance(stmt, Store) else [stmt], "stored by 0 statements"),
    "store rank": (store(index=(E,)), "has 1 indices, the buffer has rank 4"),
    "race": (
        store(index=(Axis("b"), Axis("h"), Const(0), E)),
        "does not depend on axes ['i']: several values",
    ),
    "store without dim": (store(dims=()), "the store to 'O' depends on axes ['e'], which nothing provides"),
    "no buffer": (store(tensor="P"), "the store to 'P' has no buffer"),
    "loop of a parallel axis": (loop(axis="i"), "the loop over 'i' is inside of what walks the same axis"),
    "loop in itself": (
        lambda stmt: (
            [Loop("j", Const(0), Size("j"), False, (), (stmt,))] if isinstance(stmt, Loop) else [stmt]
        ),
        "is inside of what walks the same axis",
    ),
    "bound of a tile": (loop(stop=Axis("d")), "the loop over 'j' depends on axes ['d']"),
    "carried tile": (
        loop(carried=(Carried("m", ("j",), Const(0.0), "t3"),)),
        "'m' has a component for each position of the loop that carries it",
    ),
}


def test_what_lowering_makes_is_well_formed() -> None:
    program, nest = flash()
    check(nest, program)


@pytest.mark.parametrize(("edit", "text"), WRONG.values(), ids=WRONG.keys())
def test_a_broken_nest_is_refused(edit: Edit, text: str) -> None:
    program, nest = flash()
    with pytest.raises(NestError, match=re.escape(text)):
        check(edited(nest, edit), program)


def test_a_temporary_is_stored_by_an_earlier_kernel() -> None:
    program, plan = two_kernels("rolling")
    nest = lower(plan, program)
    with pytest.raises(NestError, match="loads 'rows', which no earlier kernel stores"):
        check(replace(nest, kernels=nest.kernels[::-1]), program)


def test_outputs_are_those_of_the_program() -> None:
    program, nest = flash()
    (buffer,) = nest.buffers
    for wrong in (replace(buffer, is_output=False), replace(buffer, axes=buffer.axes[::-1])):
        with pytest.raises(NestError, match="the program's outputs are"):
            check(replace(nest, buffers=(wrong,)), program)


def test_outputs_are_in_the_order_of_the_program() -> None:
    kernel = eq.compile("a[i] = sum[j](x[i,j])\nb[i] = max[j](x[i,j])\nreturn b, a", verify=False)
    program, nest = kernel.derived.program, kernel.compiled.chosen.nest
    with pytest.raises(NestError, match="the program's outputs are"):
        check(replace(nest, buffers=nest.buffers[::-1]), program)


def test_extents_are_given_in_one_step() -> None:
    program, nest = flash()
    with pytest.raises(NestError, match="axis 'b2' has the extent of 'a2', which has none of its own"):
        check(replace(nest, domains=(("a2", "j"), ("b2", "a2"))), program)


def test_kernels_have_names_of_their_own() -> None:
    program, plan = two_kernels("rolling")
    nest = lower(plan, program)
    first, second = nest.kernels
    with pytest.raises(NestError, match="2 kernels are called 'rows'"):
        check(replace(nest, kernels=(first, Kernel("rows", second.parallel, second.body))), program)


def run_softmax(nest: Nest, program: Program) -> None:
    x = np.random.default_rng(0).normal(size=(4, 7))
    run(nest, program, {"x": x}, {}, {"i": 4, "j": 7}, FloatDomain(), tiles={"j": 3}, shards={"j_shard": 3})


def only_maps(**changes: Any) -> Edit:
    """Changes the loops that carry nothing, which store the output."""
    return lambda stmt: changed(stmt, changes) if isinstance(stmt, Loop) and not stmt.carried else [stmt]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (only_maps(start=Const(2)), "'y' at (0, 0) is written 0 times, not once"),
        (only_maps(stop=Const(6)), "'y' at (0, 6) is written 0 times, not once"),
        (only_maps(start=Size("j")), "'y' is never written"),
        (store(index=(Axis("i"), term("_[j] = max(j, 1)"))), "'y' at (0, 0) is written 0 times"),
        (store(index=(Axis("i"), term("_[j] = j // 3 * 3"))), "'y' at (0, 0) is written 3 times"),
    ],
    ids=["start", "stop", "nothing", "index", "overlap"],
)
def test_running_notices_elements_that_are_not_written_once(edit: Edit, text: str) -> None:
    program, plan = softmax("rolling")
    nest = lower(plan, program)
    run_softmax(nest, program)
    with pytest.raises(NestError, match=re.escape(text)):
        run_softmax(edited(nest, edit), program)


def test_a_dropped_repair_gives_a_wrong_answer() -> None:
    """The interpreter is no friend of the lowering: it computes what is written."""
    program, plan = softmax("rolling")
    nest = lower(plan, program)
    x = np.random.default_rng(0).normal(size=(4, 7))
    broken = edited(nest, let("s_new", expr=Call("add", (Local("s", ()), Local("s_tile", ())))))
    results = [
        run(each, program, {"x": x}, {}, {"i": 4, "j": 7}, FloatDomain(), tiles={"j": 3}, shards={})["y"]
        for each in (nest, broken)
    ]
    assert np.allclose(results[0].sum(1), 1)
    assert not np.allclose(results[1].sum(1), 1)
