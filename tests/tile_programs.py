"""Tile programs written by hand, for tests of what runs them."""

from __future__ import annotations

from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer
from eqfuse.terms.nodes import Program, Tensor
from eqfuse.tile.nodes import (
    Align,
    Argument,
    BlockSize,
    Bound,
    Carried,
    Cast,
    Constant,
    Dot,
    Elementwise,
    Extent,
    Fill,
    For,
    Kernel,
    Let,
    LoadTile,
    Op,
    Positions,
    ReduceTile,
    Start,
    Stmt,
    Store,
    TileProgram,
    Value,
)

MINUS_INF = float("-inf")


class Body:
    """Statements under construction: every method adds one and returns its value."""

    def __init__(self, names: set[str] | None = None) -> None:
        self.stmts: list[Stmt] = []
        self.names: set[str] = set() if names is None else names

    def let(self, op: Op, dims: str = "", dtype: str = "f32", name: str = "v") -> Value:
        unique = name
        while unique in self.names:
            unique = f"{name}_{len(self.names)}"
        self.names.add(unique)
        value = Value(unique, tuple(dims.split()), dtype)
        self.stmts.append(Let(value, op))
        return value

    def inner(self) -> Body:
        return Body(self.names)

    def carried(self, name: str, init: Value) -> Value:
        self.names.add(name)
        return Value(name, init.dims, init.dtype)

    def loop(
        self,
        axis: str,
        start: Value,
        stop: Value,
        carried: list[tuple[Value, Value, Value]],
        body: Body,
        *,
        masked: bool = True,
    ) -> None:
        items = tuple(Carried(*item) for item in carried)
        self.stmts.append(For(axis, start, stop, items, tuple(body.stmts), masked))

    def store(self, tensor: str, index: list[Value], value: Value, mask: Value | None) -> None:
        self.stmts.append(Store(tensor, tuple(index), value, mask))

    def call(self, fn: str, *args: Value, name: str | None = None, dtype: str | None = None) -> Value:
        dims = max((arg.dims for arg in args), key=len)
        truth = fn in ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not")
        return self.let(
            Elementwise(fn, args), " ".join(dims), dtype or ("bool" if truth else args[-1].dtype), name or fn
        )

    def integer(self, number: int) -> Value:
        return self.let(Constant(number), "", "i32", f"k{number}")

    def extent(self, axis: str) -> Value:
        return self.let(Extent(axis), "", "i32", f"{axis}_size")

    def start(self, axis: str) -> Value:
        return self.let(Start(axis), "", "i32", f"{axis}_at")

    def positions(self, axis: str) -> Value:
        return self.let(Positions(axis), axis, "i32", f"{axis}_positions")

    def bound(self, axis: str, stop: Value) -> Value:
        return self.let(Bound(axis, stop), axis, "bool", f"{axis}_in")

    def align(self, value: Value, dims: str) -> Value:
        return self.let(Align(value), dims, value.dtype, f"{value.name}_aligned")

    def load(
        self,
        tensor: str,
        index: list[Value],
        mask: Value | None,
        dims: str,
        dtype: str = "f32",
        *,
        other: float = 0.0,
    ) -> Value:
        return self.let(LoadTile(tensor, tuple(index), mask, other), dims, dtype, f"{tensor}_tile")

    def reduce(self, op: str, value: Value, axis: str) -> Value:
        dims = [dim for dim in value.dims if dim != axis]
        return self.let(ReduceTile(op, value, axis), " ".join(dims), value.dtype, f"{op}_{axis}")

    def masks(self, dims: str, *bounds: Value) -> Value:
        """All of the bounds, over `dims`."""
        return self.call("and", *(self.align(b, dims) for b in bounds), name="mask")

    def kernel(self, name: str, grid: tuple[str, ...], *blocks: Block) -> Kernel:
        return Kernel(name, grid, blocks, tuple(self.stmts))


def program(
    kernels: list[Kernel], buffers: list[Buffer], shards: dict[str, str] | None = None
) -> TileProgram:
    return TileProgram(tuple(kernels), tuple(buffers), (), tuple((shards or {}).items()))


def source(**tensors: str) -> Program:
    """The inputs of a program: `x="f32 i j"` is a tensor of f32 with axes i and j."""
    declared = []
    for name, text in tensors.items():
        dtype, *axes = text.split()
        declared.append(Tensor(name, len(axes), dtype, tuple(axes)))
    return Program("", tuple(declared), (), (), {})


def row_softmax(rows: int, columns: int, *, masked_load: bool = True, identity: bool = True) -> TileProgram:
    """y[i, j] = softmax of x[i, :], one rolling pass for the states and one for the result."""
    b = Body()
    n_i, n_j, zero = b.extent("i"), b.extent("j"), b.integer(0)
    i, i_in = b.positions("i"), b.bound("i", n_i)
    m0 = b.let(Fill(MINUS_INF), "i", name="m0")
    s0 = b.let(Fill(0.0), "i", name="s0")
    m, s = b.carried("m", m0), b.carried("s", s0)
    c = b.inner()
    j, j_in = c.positions("j"), c.bound("j", n_j)
    mask = c.masks("i j", i_in, j_in)
    x = c.load("x", [i, j], mask if masked_load else c.align(i_in, "i j"), "i j")
    shown = c.call("where", c.align(j_in, "i j"), x, c.let(Constant(MINUS_INF))) if identity else x
    m_next = c.call("maximum", m, c.reduce("max", shown, "j"), name="m_next")
    shift = c.call("finite", m_next, name="shift")
    weights = c.call("exp", c.call("sub", shown, c.align(shift, "i j")), name="weights")
    scaled = c.call("mul", s, c.call("exp", c.call("sub", m, shift)))
    s_next = c.call("add", scaled, c.reduce("sum", weights, "j"), name="s_next")
    b.loop("j", zero, n_j, [(m, m0, m_next), (s, s0, s_next)], c)
    d = b.inner()
    j, j_in = d.positions("j"), d.bound("j", n_j)
    mask = d.masks("i j", i_in, j_in)
    x = d.load("x", [i, j], mask, "i j")
    e = d.call("exp", d.call("sub", x, d.align(m, "i j")))
    d.store("y", [i, j], d.call("div", e, d.align(s, "i j")), mask)
    b.loop("j", zero, n_j, [], d)
    kernel = b.kernel("row_softmax", ("i",), Block("i", "grid", rows), Block("j", "loop", columns))
    return program([kernel], [Buffer("y", ("i", "j"), "f32", True)])


def attention(
    rows: int, columns: int, *, dtype: str = "f32", causal: bool = False, heads: int = 1, repair: bool = True
) -> TileProgram:
    """o[h, i, e] = softmax over j of scale * q[h, i, :] . k[h // 2, j, :], times v[h // 2, j, e]; `heads` per block.

    With `causal`, positions j > i are masked and blocks of them never visited.
    """
    b = Body()
    batch = "h " if heads > 1 else ""
    n_h, n_i, n_j, zero, two = b.extent("h"), b.extent("i"), b.extent("j"), b.integer(0), b.integer(2)
    n_d, n_e = b.extent("d"), b.extent("e")
    scale = b.let(Argument("scale"), "", "f32", "scale_arg")
    h = b.positions("h") if heads > 1 else b.start("h")
    kv = b.call("floordiv", h, two, name="kv")
    i, i_in, d, d_in = b.positions("i"), b.bound("i", n_i), b.positions("d"), b.bound("d", n_d)
    e, e_in = b.positions("e"), b.bound("e", n_e)

    def mask(c: Body, dims: str, *bounds: Value) -> Value:
        every = (*bounds, c.bound("h", n_h)) if heads > 1 else bounds
        found = c.align(every[0], batch + dims)
        for bound in every[1:]:
            found = c.call("and", found, c.align(bound, batch + dims), name="mask")
        return found

    q = b.load("q", [h, i, d], mask(b, "i d", i_in, d_in), f"{batch}i d", dtype)
    m0 = b.let(Fill(MINUS_INF), f"{batch}i", name="m0")
    s0 = b.let(Fill(0.0), f"{batch}i", name="s0")
    o0 = b.let(Fill(0.0), f"{batch}i e", name="o0")
    m, s, o = b.carried("m", m0), b.carried("s", s0), b.carried("o", o0)
    c = b.inner()
    stop = n_j
    if causal:
        end = b.call("add", b.start("i"), b.let(BlockSize("i"), "", "i32", "i_block"))
        stop = b.call("minimum", end, n_j, name="j_end")
    j, j_in = c.positions("j"), c.bound("j", stop)
    k = c.load("k", [kv, j, d], mask(c, "j d", j_in, d_in), f"{batch}j d", dtype)
    v = c.load("v", [kv, j, e], mask(c, "j e", j_in, e_in), f"{batch}j e", dtype)
    logits = c.let(Dot(q, c.align(k, f"{batch}d j"), "d", None), f"{batch}i j", name="logits")
    seen = c.align(j_in, f"{batch}i j")
    if causal:
        le = c.call("le", c.align(j, "i j"), c.align(i, "i j"))
        seen = c.call("and", seen, c.align(le, f"{batch}i j"))
    minus_inf = c.let(Constant(MINUS_INF), "", "f32", "minus_inf")
    shown = c.call("where", seen, c.call("mul", logits, scale), minus_inf, dtype="f32", name="shown")
    m_next = c.call("maximum", m, c.reduce("max", shown, "j"), name="m_next")
    shift = c.call("finite", m_next, name="shift")
    p = c.call("exp", c.call("sub", shown, c.align(shift, f"{batch}i j")), name="p")
    r = c.call("exp", c.call("sub", m, shift), name="r")
    s_next = c.call("add", c.call("mul", s, r), c.reduce("sum", p, "j"), name="s_next")
    scaled = c.call("mul", o, c.align(r, f"{batch}i e"), name="scaled") if repair else o
    weights = p if dtype == "f32" else c.let(Cast(p), f"{batch}i j", dtype, "weights")
    o_next = c.let(Dot(weights, v, "j", scaled), f"{batch}i e", "f32", "o_next")
    b.loop("j", zero, stop, [(m, m0, m_next), (s, s0, s_next), (o, o0, o_next)], c)
    total = b.call("invertible", s, name="total")
    result = b.call("div", o, b.align(total, f"{batch}i e"), name="result")
    if dtype != "f32":
        result = b.let(Cast(result), f"{batch}i e", dtype, "rounded")
    b.store("o", [h, i, e], result, mask(b, "i e", i_in, e_in))
    kernel = b.kernel(
        "attention",
        ("i", "h"),
        *(Block("h", "grid", heads), Block("i", "grid", rows), Block("j", "loop", columns)),
        *(Block("d", "whole", None), Block("e", "whole", None)),
    )
    return program([kernel], [Buffer("o", ("h", "i", "e"), dtype, True)])


def split_sum(columns: int) -> TileProgram:
    """y[i] = sum of x[i, :], in shards of ceil(J / shards) columns that a second kernel adds one by one."""
    b = Body()
    n_j, shards, one = b.extent("j"), b.extent("s"), b.integer(1)
    i, s = b.start("i"), b.start("s")
    length = b.call("floordiv", b.call("sub", b.call("add", n_j, shards), one), shards, name="length")
    begin = b.call("mul", s, length, name="begin")
    stop = b.call("minimum", b.call("add", begin, length), n_j, name="stop")
    t0 = b.let(Constant(0.0), name="t0")
    t = b.carried("t", t0)
    c = b.inner()
    j, j_in = c.positions("j"), c.bound("j", stop)
    x = c.load("x", [i, j], j_in, "j")
    t_next = c.call("add", t, c.reduce("sum", x, "j"), name="t_next")
    b.loop("j", begin, stop, [(t, t0, t_next)], c)
    b.store("part", [s, i], t, None)
    partial = b.kernel(
        "partial", ("s", "i"), Block("i", "grid", 1), Block("s", "grid", 1), Block("j", "loop", columns)
    )
    b = Body()
    n_i, shards, zero = b.extent("i"), b.extent("s"), b.integer(0)
    i, i_in = b.positions("i"), b.bound("i", n_i)
    t0 = b.let(Fill(0.0), "i", name="t0")
    t = b.carried("t", t0)
    c = b.inner()
    part = c.load("part", [c.start("s"), i], i_in, "i")
    b.loop("s", zero, shards, [(t, t0, c.call("add", t, part, name="t_next"))], c)
    b.store("y", [i], t, i_in)
    merge = b.kernel("merge", ("i",), Block("i", "grid", 4), Block("s", "unit", 1))
    buffers = [Buffer("part", ("s", "i"), "f32", False), Buffer("y", ("i",), "f32", True)]
    return program([partial, merge], buffers, {"s": "j"})


def paged_sum(rows: int, columns: int, page: int) -> TileProgram:
    """y[i, d] = sum over j < length[i] of x[table[i, j // page], j % page, d], one row i at a time."""
    b = Body()
    zero, size, n_d = b.integer(0), b.integer(page), b.extent("d")
    i, d, d_in = b.start("i"), b.positions("d"), b.bound("d", n_d)
    length = b.load("length", [i], None, "", "i32")
    t0 = b.let(Fill(0.0), "d", name="t0")
    t = b.carried("t", t0)
    c = b.inner()
    j, j_in = c.positions("j"), c.bound("j", length)
    entry = c.load("table", [i, c.call("floordiv", j, size)], j_in, "j", "i32")
    x = c.load("x", [entry, c.call("mod", j, size), d], c.masks("j d", j_in, d_in), "j d", "f16")
    wide = c.let(Cast(x), "j d", "f32", "wide")
    t_next = c.call("add", t, c.reduce("sum", wide, "j"), name="t_next")
    b.loop("j", zero, length, [(t, t0, t_next)], c)
    b.store("y", [i, d], t, d_in)
    kernel = b.kernel(
        "paged", ("i",), Block("i", "grid", rows), Block("j", "loop", columns), Block("d", "whole", None)
    )
    return program([kernel], [Buffer("y", ("i", "d"), "f32", True)])
