"""Hand-made plans for the tests of eqfuse.loops: what derivation and planning would hand over."""

from __future__ import annotations

from eqfuse.loops.plan import GroupPlan, KernelPlan, Plan, Schedule
from eqfuse.rules.merge import Combine, Finish, Group, Merge, Obstacle, Part, State, Update
from eqfuse.terms.nodes import Axis, Expr, Load, Local, Output, Program, Scalar, call, transform
from eqfuse.terms.parser import parse

SCHEDULES: tuple[Schedule, ...] = ("rolling", "split_k", "resident", "multi_pass")


def term(definition: str, *values: str) -> Expr:
    """The right-hand side of a definition in which some names are values of the nest.

    `term("_[i,j] = x[i,j] - m[i]", "m")` reads the value `m` with dims (i,).
    """

    def step(node: Expr) -> Expr:
        match node:
            case Load(name, index) if name in values:
                return Local(name, tuple(part.name for part in index if isinstance(part, Axis)))
            case Scalar(name) if name in values:
                return Local(name, ())
            case _:
                return node

    (output,) = parse(definition).outputs
    return transform(output.expr, step)


def finite(expr: Expr) -> Expr:
    return call("finite", expr)


def difference(left: Expr, right: Expr) -> Expr:
    """exp(left - right), where -inf on the right is harmless."""
    return call("exp", call("sub", left, finite(right)))


SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"

ATTENTION = """
S[b,h,i,j] = where(j <= i, sum[d](Q[b,h,i,d] * K[b,h//g,j,d]) * scale, -inf)
P[b,h,i,j] = exp(S[b,h,i,j] - max[j](S[b,h,i,j]))
O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h//g,j,e])
"""

SCORES = "_[b,h,i,j] = where(j <= i, sum[d](Q[b,h,i,d] * K[b,h//g,j,d]) * scale, -inf)"


def softmax_group(scores: Expr, dims: tuple[str, ...], weighted: Expr | None = None) -> Group:
    """max, sum of exponentials and, given what it weighs, the weighted sum with one dim more (e)."""
    m, m_new, m_tile = (Local(name, dims) for name in ("m", "m_new", "m_tile"))
    m_a, m_b = Local("m_a", dims), Local("m_b", dims)
    states = [State("m", "max", scores, dims)]
    updates = [Update("m", (Part("m_tile", "max", scores),), call("maximum", m, m_tile))]
    combines = [Combine("m", call("maximum", m_a, m_b))]
    sums = [("s", dims, None)] + ([("o", (*dims, "e"), weighted)] if weighted is not None else [])
    for name, axes, weight in sums:

        def body(top: Expr, weight: Expr | None = weight) -> Expr:
            value = difference(scores, top)
            return value if weight is None else call("mul", value, weight)

        old, tile, a, b = (Local(f"{name}{suffix}", axes) for suffix in ("", "_tile", "_a", "_b"))
        repaired = call("mul", old, difference(m, m_new))
        merged = (call("mul", a, difference(m_a, m_new)), call("mul", b, difference(m_b, m_new)))
        states.append(State(name, "sum", body(m), axes))
        updates.append(Update(name, (Part(f"{name}_tile", "sum", body(m_new)),), call("add", repaired, tile)))
        combines.append(Combine(name, call("add", *merged)))
    return Group("j", tuple(states), Merge(tuple(updates), tuple(combines), ()))


def softmax(schedule: Schedule) -> tuple[Program, Plan]:
    """One program, a map output along the reduced axis."""
    program = parse(SOFTMAX)
    group = softmax_group(term("_[i,j] = x[i,j]"), ("i",))
    y = Output("y", ("i", "j"), term("_[i,j] = exp(x[i,j] - m[i]) / s[i]", "m", "s"))
    kernel = KernelPlan("softmax", (y,), (GroupPlan(group, schedule),), ("i",), ())
    return program, Plan(schedule, (kernel,))


def attention(schedule: Schedule) -> tuple[Program, Plan]:
    """An inner reduction, a mask, and a state with a whole axis."""
    program = parse(ATTENTION)
    dims = ("b", "h", "i")
    group = softmax_group(term(SCORES), dims, term("_[b,h,j,e] = V[b,h//g,j,e]"))
    out = Output("O", (*dims, "e"), term("_[b,h,i,e] = o[b,h,i,e] / s[b,h,i]", "o", "s"))
    kernel = KernelPlan("attention", (out,), (GroupPlan(group, schedule),), dims, ("e",))
    return program, Plan(schedule, (kernel,))


def plain_sum_group(name: str, axis: str, body: Expr, dims: tuple[str, ...]) -> Group:
    old, tile, a, b = (Local(f"{name}{suffix}", dims) for suffix in ("", "_tile", "_a", "_b"))
    update = Update(name, (Part(f"{name}_tile", "sum", body),), call("add", old, tile))
    merge = Merge((update,), (Combine(name, call("add", a, b)),), ())
    return Group(axis, (State(name, "sum", body, dims),), merge)


def plain_sum(schedule: Schedule) -> tuple[Program, Plan]:
    program = parse("y[i] = sum[j](sq(x[i,j]))")
    group = plain_sum_group("s", "j", term("_[i,j] = sq(x[i,j])"), ("i",))
    y = Output("y", ("i",), Local("s", ("i",)))
    return program, Plan(schedule, (KernelPlan("total", (y,), (GroupPlan(group, schedule),), ("i",), ()),))


MLP = """
H[i,k] = relu(sum[j](x[i,j] * A[j,k]))
y[i,f] = sum[k](H[i,k] / sqrt(sum[k](sq(H[i,k]))) * B[k,f])
"""


def two_groups(first: Schedule, second: Schedule) -> tuple[Program, Plan]:
    """A group whose state has a whole axis, which the next group reduces."""
    program = parse(MLP)
    h = plain_sum_group("h", "j", term("_[i,j,k] = x[i,j] * A[j,k]"), ("i", "k"))
    n = State("n", "sum", term("_[i,k] = sq(relu(h[i,k]))", "h"), ("i",))
    body = term("_[i,k,f] = relu(h[i,k]) * B[k,f]", "h")
    z = plain_sum_group("z", "k", body, ("i", "f"))
    n_tile = Update("n", (Part("n_tile", "sum", n.body),), term("_[i] = n[i] + n_tile[i]", "n", "n_tile"))
    n_merge = Combine("n", term("_[i] = n_a[i] + n_b[i]", "n_a", "n_b"))
    assert z.merge is not None
    merge = Merge((n_tile, *z.merge.update), (n_merge, *z.merge.combine), ())
    group = Group("k", (n, *z.states), merge)
    y = Output("y", ("i", "f"), term("_[i,f] = z[i,f] / sqrt(n[i])", "z", "n"))
    plans = (GroupPlan(h, first), GroupPlan(group, second))
    return program, Plan(second, (KernelPlan("mlp", (y,), plans, ("i",), ("k", "f")),))


def guarded(schedule: Schedule) -> tuple[Program, Plan]:
    """A state whose carried value is not the exact one until finished, and an auxiliary state."""
    program = parse("y[i,j] = x[i,j] / max[j](abs(x[i,j]))")
    dims = ("i",)
    body = term("_[i,j] = abs(x[i,j])")
    old, tile, a, b, n = (Local(name, dims) for name in ("m", "m_tile", "m_a", "m_b", "n"))
    double, half = term("_ = 2.0"), term("_ = 0.5")
    # The carried value is twice the maximum: only a reader of the finished one gets it right.
    value = call("maximum", old, call("mul", double, tile))
    states = (State("m", "max", body, dims), State("n", "sum", term("_[i,j] = x[i,j]"), dims, auxiliary=True))
    n_tile = Update("n", (Part("n_tile", "sum", states[1].body),), call("add", n, Local("n_tile", dims)))
    n_merge = Combine("n", call("add", Local("n_a", dims), Local("n_b", dims)))
    merge = Merge(
        (Update("m", (Part("m_tile", "max", body),), value), n_tile),
        (Combine("m", call("maximum", a, b)), n_merge),
        (Finish("m", call("mul", half, old)),),
    )
    y = Output("y", ("i", "j"), term("_[i,j] = x[i,j] / m[i]", "m"))
    group = Group("j", states, merge)
    return program, Plan(schedule, (KernelPlan("scaled", (y,), (GroupPlan(group, schedule),), dims, ()),))


def two_kernels(schedule: Schedule) -> tuple[Program, Plan]:
    """A temporary between kernels."""
    program = parse("y[k] = sum[i](sum[j](x[i,j]) * w[i,k])")
    first = plain_sum_group("r", "j", term("_[i,j] = x[i,j]"), ("i",))
    second = plain_sum_group("c", "i", term("_[i,k] = rows[i] * w[i,k]"), ("k",))
    rows = Output("rows", ("i",), Local("r", ("i",)))
    y = Output("y", ("k",), Local("c", ("k",)))
    kernels = (
        KernelPlan("rows", (rows,), (GroupPlan(first, schedule),), ("i",), ()),
        KernelPlan("columns", (y,), (GroupPlan(second, schedule),), ("k",), ()),
    )
    return program, Plan(schedule, kernels)


def elementwise() -> tuple[Program, Plan]:
    """No groups: a map, with an inner reduction that only its own kernel folds."""
    program = parse("y[i,e] = exp(x[i] * scale) + exp(x[i] * scale) * c[e]")
    (output,) = program.outputs
    return program, Plan("resident", (KernelPlan("map", (output,), (), ("i",), ("e",)),))


def obstructed(schedule: Schedule) -> tuple[Program, Plan]:
    """A group without a merge."""
    program = parse("y[i] = sum[j](round(x[i,j] / max[j](x[i,j])))")
    states = (
        State("m", "max", term("_[i,j] = x[i,j]"), ("i",)),
        State("s", "sum", term("_[i,j] = round(x[i,j] / m[i])", "m"), ("i",)),
    )
    factor = term("_[i] = 1 / m[i]", "m")
    obstacle = Obstacle(program.outputs[0].expr, factor, "round does not commute with a factor")
    group = Group("j", states, None, (obstacle,))
    y = Output("y", ("i",), Local("s", ("i",)))
    return program, Plan(schedule, (KernelPlan("rounded", (y,), (GroupPlan(group, schedule),), ("i",), ()),))
