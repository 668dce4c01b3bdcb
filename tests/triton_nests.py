"""Hand-made loop nests that the tests of Triton emission print, run and compile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer, Carried, Kernel, Let, Loop, Nest, Store
from eqfuse.loops.plan import KernelConfig
from eqfuse.terms.nodes import Axis, Const, Expr, Load, Local, Reduce, Scalar, Size, call
from eqfuse.terms.parser import parse
from eqfuse.tile.lower.program import lower
from eqfuse.tile.passes.pipeline import GPU_PASSES, run_passes
from eqfuse.tile.triton.module import emit

LOW, ZERO = Const(-math.inf), Const(0.0)


@dataclass(frozen=True)
class Case:
    """A nest with the program that it computes and its blocks."""

    source: str
    nest: Nest
    configs: tuple[KernelConfig, ...]

    def text(
        self, dtypes: Mapping[str, str], name: str = "compute", sizes: Mapping[str, int] | None = None
    ) -> str:
        source = parse(self.source)
        program = run_passes(lower(self.nest, source, dtypes, self.configs), GPU_PASSES, dtypes)
        return emit(program, source, dtypes, self.configs, name=name, sizes=sizes)


def load(tensor: str, axes: str) -> Expr:
    return Load(tensor, tuple(map(Axis, axes)))


def grid(axis: str, size: int) -> Block:
    return Block(axis, "grid", size)


def loop(axis: str, size: int) -> Block:
    return Block(axis, "loop", size)


def whole(axis: str) -> Block:
    return Block(axis, "whole", None)


def store(name: str, axes: str, dims: str, value: Expr) -> Store:
    return Store(name, tuple(map(Axis, axes)), tuple(dims), value)


def exponential(value: Expr, peak: Expr) -> Expr:
    return call("exp", call("sub", value, call("finite", peak)))


def rolling_sum(body: Expr, peak: str = "m", total: str = "s") -> tuple[tuple[Carried, ...], tuple[Let, ...]]:
    """The running maximum of `body` over j, and the sum of its exponentials."""
    m, m_new, s = Local(peak, ("i",)), Local("m_new", ("i",)), Local(total, ("i",))
    carried = (Carried(peak, ("i",), LOW, "m_new"), Carried(total, ("i",), ZERO, "s_new"))
    lets = (
        Let("x_now", ("i", "j"), body),
        Let("m_new", ("i",), call("maximum", m, Reduce("max", "j", Local("x_now", ("i", "j"))))),
        Let("r", ("i",), exponential(call("finite", m), m_new)),
        Let("p", ("i", "j"), exponential(Local("x_now", ("i", "j")), m_new)),
        Let(
            "s_new",
            ("i",),
            call("add", call("mul", Local("r", ("i",)), s), Reduce("sum", "j", Local("p", ("i", "j")))),
        ),
    )
    return carried, lets


def softmax() -> Case:
    carried, lets = rolling_sum(load("x", "ij"))
    scaled = call(
        "div",
        exponential(load("x", "ij"), Local("m", ("i",))),
        call("invertible", Local("s", ("i",))),
    )
    body = (
        Loop("j", Const(0), Size("j"), False, carried, lets),
        Loop("j", Const(0), Size("j"), False, (), (store("y", "ij", "ij", scaled),)),
    )
    nest = Nest((Kernel("softmax_rows", ("i",), body),), (Buffer("y", ("i", "j"), None, True),))
    source = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
    return Case(source, nest, (KernelConfig((grid("i", 4), loop("j", 16)), 4, 2),))


def row_sum(block: Block) -> Case:
    """Sum of rows: in a loop, or of a whole row at once."""
    body: tuple[Store | Loop, ...]
    if block.kind == "whole":
        body = (store("y", "i", "i", Reduce("sum", "j", load("x", "ij"))),)
    else:
        total = call("add", Local("s", ("i",)), Reduce("sum", "j", load("x", "ij")))
        carried = (Carried("s", ("i",), ZERO, "s_new"),)
        body = (
            Loop("j", Const(0), Size("j"), False, carried, (Let("s_new", ("i",), total),)),
            store("y", "i", "i", Local("s", ("i",))),
        )
    nest = Nest((Kernel("sums", ("i",), body),), (Buffer("y", ("i",), None, True),))
    return Case("y[i] = sum[j](x[i,j])", nest, (KernelConfig((grid("i", 4), block), 4, 1),))


def attention(rows: int = 128, columns: int = 64, warps: int = 8) -> Case:
    """One pass over keys, causal, with the weights in the values' dtype."""
    product = Reduce("sum", "d", call("mul", load("Q", "bhid"), load("K", "bhjd")))
    score = call("where", call("le", Axis("j"), Axis("i")), call("mul", product, Scalar("scale")), LOW)
    carried, lets = rolling_sum(score)
    weighted = Reduce("sum", "j", call("mul", Local("p", ("i", "j")), load("V", "bhje")))
    sum_now = call("add", call("mul", Local("r", ("i",)), Local("acc", ("i", "e"))), weighted)
    body = (
        Loop(
            "j",
            Const(0),
            Size("j"),
            False,
            (*carried, Carried("acc", ("i", "e"), ZERO, "acc_new")),
            (*lets, Let("acc_new", ("i", "e"), sum_now)),
        ),
        store(
            "O", "bhie", "ie", call("div", Local("acc", ("i", "e")), call("invertible", Local("s", ("i",))))
        ),
    )
    nest = Nest((Kernel("attend", ("i", "h", "b"), body),), (Buffer("O", tuple("bhie"), None, True),))
    source = """
S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * scale
T[b,h,i,j] = where(j <= i, S[b,h,i,j], -inf)
P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h,j,e])
"""
    blocks = (grid("i", rows), grid("h", 1), grid("b", 1), loop("j", columns), whole("d"), whole("e"))
    return Case(source, nest, (KernelConfig(blocks, warps, 3),))


def split_log_sum() -> Case:
    """log(sum(exp)) of rows: shards of a row first, then their states one by one."""
    chunk = call("floordiv", call("add", Size("j"), call("sub", Size("c"), Const(1))), Size("c"))
    start = call("mul", Axis("c"), chunk)
    stop = call("minimum", Size("j"), call("add", start, chunk))
    carried, lets = rolling_sum(load("x", "ij"))
    partial = (
        Loop("j", start, stop, False, carried, lets),
        store("m_part", "ic", "i", Local("m", ("i",))),
        store("s_part", "ic", "i", Local("s", ("i",))),
    )
    m, s, m_new = Local("m", ("i",)), Local("s", ("i",)), Local("m_new", ("i",))
    merged = call(
        "add",
        call("mul", s, exponential(m, m_new)),
        call("mul", load("s_part", "ic"), exponential(load("m_part", "ic"), m_new)),
    )
    merge = Loop(
        "c",
        Const(0),
        Size("c"),
        True,
        (Carried("m", ("i",), LOW, "m_new"), Carried("s", ("i",), ZERO, "s_new")),
        (
            Let("m_new", ("i",), call("maximum", m, load("m_part", "ic"))),
            Let("s_new", ("i",), merged),
        ),
    )
    result = call("add", call("log", s), call("finite", m))
    nest = Nest(
        (
            Kernel("partial", ("i", "c"), partial),
            Kernel("merge", ("i",), (merge, store("y", "i", "i", result))),
        ),
        (
            Buffer("m_part", ("i", "c"), None, False),
            Buffer("s_part", ("i", "c"), None, False),
            Buffer("y", ("i",), None, True),
        ),
        shards=(("c", "j"),),
    )
    configs = (
        KernelConfig((grid("i", 2), grid("c", 1), loop("j", 16)), 4, 2),
        KernelConfig((grid("i", 2),), 4, 1),
    )
    return Case("y[i] = log(sum[j](exp(x[i,j])))", nest, configs)


def paged_sum() -> Case:
    """Sum over positions that a page table scatters."""
    element = Load(
        "x",
        (
            Load("page", (Axis("i"), call("floordiv", Axis("j"), Const(4)))),
            call("mod", Axis("j"), Const(4)),
            Axis("d"),
        ),
    )
    total = call("add", Local("s", ("d",)), Reduce("sum", "j", element))
    carried = (Carried("s", ("d",), ZERO, "s_new"),)
    body = (
        Loop("j", Const(0), Load("length", (Axis("i"),)), False, carried, (Let("s_new", ("d",), total),)),
        store("y", "id", "d", Local("s", ("d",))),
    )
    nest = Nest((Kernel("paged", ("i",), body),), (Buffer("y", ("i", "d"), None, True),))
    source = "y[i,d] = sum[j](where(j < length[i], x[page[i, j//4], j%4, d], 0))"
    return Case(source, nest, (KernelConfig((grid("i", 1), loop("j", 8), whole("d")), 4, 1),))


def pointwise(value: Expr, source: str, dtype: str | None = None) -> Case:
    """y[i] = value."""
    nest = Nest((Kernel("map", ("i",), (store("y", "i", "i", value),)),), (Buffer("y", ("i",), dtype, True),))
    return Case(source, nest, (KernelConfig((grid("i", 16),), 1, 1),))
