"""A plan: which kernels, which groups of reductions in each, how each group is walked.

A kernel computes some outputs over the same parallel axes. Its groups run one after the other, in
dependency order; expressions (outputs, and bodies of later groups) read the exact value of a state
as `Local(state, dims)`, and a temporary of an earlier kernel as `Load(name, axes)`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Literal

from eqfuse.fast_dataclass import dataclass
from eqfuse.hashed import Hashed, hash_of
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import LibraryProduct
from eqfuse.rules.assignments import fold_of_merge
from eqfuse.rules.merge import Group
from eqfuse.terms.nodes import Expr, InOrder, Output

Schedule = Literal[
    "rolling", "split_k", "resident", "multi_pass", "scan", "scan_tiles", "scan_split", "in_order", "library"
]


@dataclass(frozen=True)
class Way:
    """A way to walk the axis of a group: whether it repairs states and so needs the group's merge, and what it does."""

    needs_merge: bool
    what: str


WAYS: Mapping[Schedule, Way] = {
    "rolling": Way(True, "one loop, whose states the merge repairs at every tile"),
    "split_k": Way(True, "such a loop for each shard, whose states the merge then joins"),
    "resident": Way(False, "no loop: one tile holds the axis"),
    "multi_pass": Way(False, "a loop for each dependency between the states"),
    "scan": Way(True, "one loop, position by position, whose states are prefixes"),
    "scan_tiles": Way(True, "one loop, whose states the merge joins with the prefixes of each tile"),
    "scan_split": Way(
        True, "such a loop for each shard, from the states that the merge makes of those before it"
    ),
    "in_order": Way(
        False, "one loop, position by position, each from the states that the one before has left"
    ),
    "library": Way(False, "no loop: a call of the device's library of matrix products"),
}
"""Every way to walk an axis. That all of them compute the same is what the merge is derived and proved for, so this is a
table and no set of rules: what a schedule can be used for is whether there is a merge."""

IN_TILES: tuple[Schedule, ...] = ("scan_tiles", "scan_split")
"""The schedules of prefixes whose tiles the threads of a GPU share."""

SCANS: tuple[Schedule, ...] = ("scan", *IN_TILES)
"""The schedules of prefixes."""

STEPPED: tuple[Schedule, ...] = (*SCANS, "in_order")
"""The schedules that store outputs at each position of a walk."""

SCHEDULES: tuple[Schedule, ...] = tuple(s for s in WAYS if s not in (*STEPPED, "library"))
"""Those of any reductions over whole axes."""


def schedules(groups: Iterable[Group], parallel: Collection[str]) -> tuple[Schedule, ...]:
    """The schedules that groups can have which run in one kernel over `parallel` axes; those of prefixes are scans."""
    groups = tuple(groups)
    prefixes = [group for group in groups if group.prefix is not None]
    if prefixes:
        return _scans(prefixes[0], parallel) if len(prefixes) == 1 else ()
    merged = all(group.merge is not None for group in groups)
    return tuple(schedule for schedule in SCHEDULES if merged or not WAYS[schedule].needs_merge)


def _scans(group: Group, parallel: Collection[str]) -> tuple[Schedule, ...]:
    """Those of a prefix. A tile has all states at each of its positions: they are numbers of each row there."""
    if group.merge is None:
        return ()
    numbers = all(frozenset(state.dims) <= {*parallel} for state in group.states)
    fold = fold_of_merge(group.axis, group, group.merge) if numbers else None
    return ("scan",) if fold is None else SCANS


Form = Literal["rewritten", "apart", "reassociated", "written"]
FORMS: Mapping[Form, str] = {
    "rewritten": "",
    "apart": "terms taken apart",
    "reassociated": "reassociated",
    "written": "as written",
}
"""Which equal form of the program a plan runs, and how that is said: the stablest, then cheapest; that with sums taken
apart so that it fuses; that of sums of products in a cheaper order; or the program as it is written."""


@dataclass(frozen=True)
class Range:
    """What data leaves to visit of a group's axis, in a row: from `start` to `stop`, which read data at a position of each of
    `axes` and no other position. It says how long rows are, and nothing of what they compute: less is never visited."""

    axes: tuple[str, ...]
    start: Expr
    stop: Expr


@dataclass(frozen=True)
class GroupPlan:
    """With `even`, of the schedule split_k, the rows share the shards out by what each has to do: see loops/slots.py."""

    group: Group
    schedule: Schedule
    even: Range | None = None


@dataclass(frozen=True)
class KernelPlan(Hashed):
    """`library` is the matrix product that the kernel is, where its schedule is that. `parallel` are the axes whose positions are independent; `whole` the axes of states and
    outputs that one program instance keeps complete (a later group or the epilogue folds them).
    Axes of outputs that a group of this kernel reduces (softmax itself) are in neither. The outputs of a recurrence are computed
    `in_order`."""

    name: str
    outputs: tuple[Output, ...]
    groups: tuple[GroupPlan, ...]
    parallel: tuple[str, ...]
    whole: tuple[str, ...]
    in_order: InOrder | None = None
    library: LibraryProduct | None = None

    __hash__ = hash_of


@dataclass(frozen=True)
class Term:
    """One term of a predicted cost, in seconds."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Cost:
    terms: tuple[Term, ...]

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)


@dataclass(frozen=True)
class KernelConfig:
    """Run-shape choices of one kernel, in the order of the nest's kernels."""

    blocks: tuple[Block, ...]
    warps: int = 4
    stages: int = 2

    def sizes(self, extents: Mapping[str, int]) -> dict[str, int]:
        """Positions of every axis in one block: all of them where the block has no size of its own."""
        return {b.axis: b.size or extents[b.axis] for b in self.blocks}


@dataclass(frozen=True)
class Roles:
    """How a kernel is divided among warp groups: `blocks` are those of a thread block, `consumers` share its rows, loops load
    tiles to rings of so many `slots`. `delayed` are the matrix products of a loop, by their number, that run one block
    behind the others. A `persistent` grid has one thread block for each SM, which does several items of work; the tiles that an
    item reads once have two slots with `ahead`, so that those of the next one are there when it begins. With `columns`, consumers
    share the columns of the sums that loops carry: each has all rows, and computes what has none of these columns by itself; or
    the last one, the leader, has no columns and computes that for the others, where they are `led`."""

    blocks: tuple[Block, ...]
    consumers: int
    slots: int
    delayed: tuple[int, ...] = ()
    persistent: bool = False
    ahead: bool = False
    columns: bool = False
    led: bool = False

    def __str__(self) -> str:
        sizes = " ".join(f"{b.axis}={b.size}" for b in self.blocks if b.size is not None and b.size > 1)
        items = ", one thread block for each SM" if self.persistent else ""
        items += ", an item's tiles ahead" if self.ahead else ""
        numbers = ", ".join(str(number + 1) for number in self.delayed)
        behind = f", product {numbers} one block behind" if numbers else ""
        shared = " by columns" if self.columns else ""
        shared += ", one of which leads" if self.led else ""
        return f"1 producer, {self.consumers} consumers{shared}, {self.slots} slots, blocks {sizes}{behind}{items}"


@dataclass(frozen=True, repr=False)
class Plan:
    """A candidate: `schedule` is the one of its dominant group; `shards` is 1 except for split_k. `measured` are the
    seconds of one call where a search has timed the plan on the device. `form` is the form of the program that it runs, `order`
    the outputs of one that is reassociated, before they were rewritten, `sizes` what its cost was predicted for. `roles` are those of each kernel of the nest, None of one that is not divided; empty
    where none is. `code` is what calls run: on a CPU "C++", or "torch calls" and why; on a Hopper GPU, for each kernel, "Gluon"
    and its roles, or "Triton" and why."""

    schedule: Schedule
    kernels: tuple[KernelPlan, ...]
    cost: Cost | None = None
    configs: tuple[KernelConfig, ...] = ()
    shards: int = 1
    reason: str = ""
    measured: float | None = None
    form: Form = "rewritten"
    order: tuple[Output, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    roles: tuple[Roles | None, ...] = ()
    code: str = field(default="", compare=False)

    @property
    def loses_infinities(self) -> bool:
        """Whether an output may be NaN where the program gives an infinity: terms that share one were taken apart, or
        what a sum was shifted by is infinite in the end."""
        merged = (
            g.group.merge for k in self.kernels for g in k.groups if g.schedule in ("rolling", "split_k")
        )
        return self.form in ("apart", "reassociated") or any(
            merge is not None and merge.loses_infinities for merge in merged
        )

    @property
    def evened(self) -> tuple[str, ...]:
        """The axes whose rows share shards out by what each has to do."""
        found = (group.even for kernel in self.kernels for group in kernel.groups)
        return tuple(dict.fromkeys(axis for even in found if even is not None for axis in even.axes))

    def with_roles(self, roles: Sequence[Roles | None], codes: Sequence[tuple[str, str]]) -> Plan:
        """The plan, its kernels divided into roles, as far as there are some. `codes` are the names of the kernels, and what each
        runs."""
        found = tuple(roles) if any(roles) else ()
        if len(codes) == 1:
            return replace(self, roles=found, code=codes[0][1])
        why = list(dict.fromkeys(code.removeprefix("Triton: ") for _, code in codes))
        if not found and len(why) == 1:
            return replace(self, roles=found, code=f"Triton: {why[0]}")
        shared = "Gluon" if found else "Triton"
        parts = "; ".join(f"{name}: {code.removeprefix(f'{shared}: ')}" for name, code in codes)
        return replace(self, roles=found, code=f"{shared}: {parts}")

    @property
    def at_sizes(self) -> str:
        """The sizes that the cost was predicted for, as text."""
        return " at " + " ".join(f"{axis}={size}" for axis, size in self.sizes) if self.sizes else ""

    def __repr__(self) -> str:
        kernels = f"{len(self.kernels)} kernel{'s' if len(self.kernels) > 1 else ''}"
        shards = f", {self.shards} shards" if self.shards > 1 else ""
        shards += f", shared out evenly over {', '.join(self.evened)}" if self.evened else ""
        cost = f", {1e3 * self.cost.seconds:.3g} ms{self.at_sizes}" if self.cost else ""
        timed = f", measured {1e3 * self.measured:.3g} ms" if self.measured is not None else ""
        notes = "".join(f", {note}" for note in (FORMS[self.form], self.reason, self.code) if note)
        return f"<Plan {self.schedule}: {kernels}{shards}{cost}{timed}{notes}>"
