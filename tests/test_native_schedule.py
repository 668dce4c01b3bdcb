"""How the loops of native kernels are run: what each pass makes of them, and what it may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import needs
import pytest
import torch
from test_native_programs import both, bound
from test_native_programs import check as compared

import eqfuse as eq
from eqfuse.lowered import native_tiles
from eqfuse.tile.check import TileError
from eqfuse.tile.native import schedule
from eqfuse.tile.native.context import Context, CppNames, Interface
from eqfuse.tile.native.listing import show
from eqfuse.tile.native.nodes import (
    Begin,
    Define,
    End,
    Jam,
    Leaf,
    Loop,
    Node,
    RegisterTile,
    Vectors,
    Walk,
    items_in,
)
from eqfuse.tile.native.run import unit_dims
from eqfuse.tile.native.schedule import Pass, check, scheduled
from eqfuse.tile.nodes import Positions
from eqfuse.tile.storage import resolve_extents

pytestmark = needs.cxx

X, W = torch.randn(64, 256), torch.randn(40, 64)
SOFTMAX = "y[r,c] = exp(x[r,c] - max[c](x[r,c])) / sum[c](exp(x[r,c] - max[c](x[r,c])))"
COLUMNS = "s[c] = sum[r](x[r,c])"


def context(source: str, **tensors: torch.Tensor) -> Context:
    """The first kernel of a program, before it is written."""
    kernel = eq.compile(source, verify=False)
    compiled, given, _ = bound(kernel, tensors)
    tiles = native_tiles(compiled, kernel.program)
    shards = {axis: compiled.chosen.plan.shards for axis, _ in compiled.chosen.nest.shards}
    sizes = resolve_extents(tiles, compiled.extents, shards)
    interface = Interface.of(tiles, {n: t.dim() for n, t in given.items()}, unit_dims(given), sizes)
    return Context(tiles.kernels[0], tiles, interface, sizes, CppNames(), 0)


def heads(source: str, **tensors: torch.Tensor) -> list[str]:
    """The lines that say how loops are run, without the items."""
    made = context(source, **tensors)
    lines = show(made.kernel, scheduled(made.tree)).splitlines()
    return [line for line in lines if line.lstrip().startswith(("for", "begin", "end"))]


def test_folds_take_parts_of_their_axis_at_once_and_stores_begin_at_whole_vectors() -> None:
    assert heads(SOFTMAX, x=X) == [
        "begin max_c in lanes",
        "for vectors of c, 4 parts at once:",
        "end max_c in lanes",
        "begin sum_c in lanes",
        "for vectors of c, 4 parts at once:",
        "end sum_c in lanes",
        "for vectors of c, aligned to y:",
    ]


def test_sums_of_columns_take_rows_at_once() -> None:
    assert heads(COLUMNS, x=X) == [
        "begin sum_r in memory",
        "for r, 4 at once:",
        "    for vectors of c:",
        "for vectors of c, aligned to s:",
    ]


def test_rows_at_once_have_their_numbers_before_them() -> None:
    """In blocks of rows the place of a row is a number for each; the last rows and columns are fewer than are taken at once."""
    x = torch.randn(39, 70)
    x[3, 5], x[20, 6], x[38, 69] = torch.inf, -torch.inf, torch.nan
    source = f"{COLUMNS}\nm[c] = max[r](x[r,c])\nreturn s, m"
    kernel = eq.compile(source, prefer="rolling", verify=False)
    compared(both(kernel, {"x": x}))
    tiles, program = native_tiles(bound(kernel, {"x": x})[0], kernel.program), context(source, x=x)
    made = Context(tiles.kernels[0], tiles, program.interface, {"c": 70, "r": 39}, CppNames(), 0)
    (jam, *_) = (n for n in _all_nodes(scheduled(made.tree)) if isinstance(n, Jam))
    assert [type(leaf.item.op) for leaf in jam.before if isinstance(leaf.item, Define)] == [Positions]


def _all_nodes(body: list[Node]) -> Iterator[Node]:
    for node in body:
        yield node
        if isinstance(node, Walk | Loop):
            yield from _all_nodes(node.body)


def test_sums_of_what_is_in_tiles_stay_in_registers() -> None:
    source = "y[r,c] = sum[k](abs(a[r,k] - exp(b[k,c] * b[k,c] - 1)))"
    assert heads(source, a=torch.randn(64, 40), b=W) == [
        "for k:",
        "    for vectors of c:",
        "for r:",
        "    for 8 or 4 or 1 vectors of c, for k, sums in registers:",
        "    for vectors of c, aligned to y:",
    ]


def test_a_loop_over_single_positions_has_its_states_in_registers() -> None:
    """As of a fold that does not commute, whose elements are taken one after the other."""
    tree = context(COLUMNS, x=X).tree
    loop = next(node for node in tree.body if isinstance(node, Loop))
    single = Loop("r", [Leaf(item) for item in items_in(loop.body)])
    kinds = [(type(node), getattr(node, "place", "")) for node in schedule._accumulated([single], tree)]
    assert kinds == [(Begin, "register"), (Loop, ""), (End, "register")]


def _dropped(body: list[Node]) -> list[Node]:
    return body[1:]


def _twice(body: list[Node]) -> list[Node]:
    return [*body, body[-1]]


@pytest.mark.parametrize("broken", [_dropped, _twice])
def test_a_pass_keeps_every_item_once(
    broken: Callable[[list[Node]], list[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = context(COLUMNS, x=X).tree
    monkeypatch.setattr(schedule, "PASSES", (Pass("broken", lambda body, _: broken(body), ""),))
    with pytest.raises(TileError, match="broken has lost an item, or made one twice"):
        scheduled(tree)


def _unwrapped(body: list[Node]) -> list[Node]:
    """A jammed loop without the vectors inside."""
    return [Loop(n.axis, list(n.vectors.body)) if isinstance(n, Jam) else n for n in body]


def _nested(body: list[Node]) -> list[Node]:
    return [Loop(n.axis, [n]) if isinstance(n, Jam) else n for n in body]


@pytest.mark.parametrize(
    ("change", "message"),
    [(_unwrapped, "an item outside loops over c"), (_nested, "a loop over r inside of one")],
)
def test_loops_around_items_are_checked(change: Callable[[list[Node]], list[Node]], message: str) -> None:
    body = scheduled(context(COLUMNS, x=X).tree)
    check(body)
    with pytest.raises(TileError, match=message):
        check(change(body))


def test_accumulators_are_begun_and_ended() -> None:
    body = scheduled(context(SOFTMAX, x=X).tree)
    check(body)
    for kind, message in ((End, "do not end"), (Begin, "has not begun")):
        with pytest.raises(TileError, match=message):
            check([node for node in body if not isinstance(node, kind)])
    swapped = [End(n.item, "register") if isinstance(n, End) else n for n in body]
    with pytest.raises(TileError, match="ends in register"):
        check(swapped)


def test_a_register_tile_is_inside_no_loop_over_its_vectors() -> None:
    made = scheduled(
        context("y[r,c] = sum[k](abs(a[r,k] - exp(b[k,c] * b[k,c] - 1)))", a=torch.randn(64, 40), b=W).tree
    )
    rows = next(node for node in made if isinstance(node, Loop) and node.axis == "r")
    tile = next(node for node in rows.body if isinstance(node, RegisterTile))
    assert isinstance(tile.vectors, Vectors)
    with pytest.raises(TileError, match="inside of one"):
        check([Loop("r", [Loop("c", [tile])])])


def test_a_sum_that_a_product_adds_to_begins_before_the_loop_over_its_axis() -> None:
    """The loops over the sums of the product's positions are gone, what they begin is not."""
    source = "y[o,v,x] = sum[p,q,c](relu(i[c,v + p,x + q]) * w[o,c,p,q])\nv: axis[7]\nx: axis[19]"
    tree = context(source, i=torch.randn(5, 9, 21), w=torch.randn(20, 5, 3, 3)).tree
    body, (total,) = scheduled(tree), set(tree.into.values()) - set(tree.into)
    (at,) = (n for n, node in enumerate(body) if isinstance(node, Begin) and node.item.value.name == total)
    assert body[at].place == "memory" and any(
        isinstance(node, Loop) and node.axis == "p" for node in body[at:]
    )
    assert total not in {item.value.name for item in items_in(body) if isinstance(item, Define)}


ROTARY = """
p: axis[2]
other[b,s,c,p] = where(p == 0, -x[b,s,c,1], x[b,s,c,0])
y[b,s,c,p] = x[b,s,c,p] * cos[s,c] + other[b,s,c,p] * sin[s,c]
return y
"""


def test_loops_are_shared_by_what_is_computed_again() -> None:
    """The angles are not of the axis of pairs, around which the loop of vectors stands: read again, they wait for nothing."""
    found = heads(ROTARY, x=torch.randn(2, 64, 64, 2), cos=torch.randn(64, 64), sin=torch.randn(64, 64))
    assert sum("vectors" in line for line in found) == 1


@pytest.mark.pairwise
@pytest.mark.parametrize("pairs", [2, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_neighbours_that_lie_apart(pairs: int, length: int, dtype: torch.dtype) -> None:
    """Strided reads under a mask of another axis, and strided writes: nothing between them is touched."""
    source = f"p: axis[{pairs}]\ny[c,p] = where(p == 0, -x[c,1], x[c,0]) + w[c]"
    x, w = torch.randn(length, pairs).to(dtype), torch.randn(length).to(dtype)
    compared(both(eq.compile(source, verify=False), {"x": x, "w": w}))
    out = eq.compile(source, native="wait")(x=x, w=w)
    expected = torch.stack([-x[:, 1], *[x[:, 0]] * (pairs - 1)], 1) + w[:, None]
    torch.testing.assert_close(out, expected)
