"""Ranks of gloo as processes, and what each of them does, for tests of `eq.shard`. Nothing outlives its time."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shard_programs import CASES, RANKS, Case, affine, by, outputs, ragged, same
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import eqfuse as eq
from eqfuse.sharding.axes import even
from eqfuse.sharding.sharded import Sharded

TIME_OUT, PATIENT = 10, 300
"""Seconds that a collective waits for other ranks."""

Work = Callable[..., Any]


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what its work returned, or the error that it raised, as the name of its type, its text and
    trace, after how many seconds of work."""

    value: Any = None
    error: str = ""
    text: str = ""
    seconds: float = 0.0
    trace: str = ""


def ranks_of(
    count: int, work: Work, *given: Any, seconds: float = 240, time_out: float = TIME_OUT
) -> list[Ended | None]:
    """Runs `work(rank, *given)` on so many ranks of a group. Kills what has not ended in time, and fails; None is
    of a rank that died without a word."""
    context = mp.get_context("spawn")
    said = context.Queue()
    file = Path(mkdtemp(prefix="eqfuse-ranks-")) / "store"
    processes = [
        context.Process(target=_rank, args=(rank, count, str(file), said, work, given, time_out), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    ended: dict[int, Ended] = {}
    end = time.monotonic() + seconds
    try:
        while len(ended) < count and time.monotonic() < end:
            alive = any(process.is_alive() for process in processes)
            with suppress(Exception):
                rank, found = said.get(timeout=0.2)
                ended[rank] = found
                continue
            if not alive:
                break
        hanging = [rank for rank, each in enumerate(processes) if each.is_alive() and rank not in ended]
        assert not hanging, f"ranks {hanging} hang"
    finally:
        for process in processes:
            process.join(0.5 if process.pid and len(ended) == count else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
    return [ended.get(rank) for rank in range(count)]


def values_of(count: int, work: Work, *given: Any, seconds: float = 600) -> list[Any]:
    """What the work of all ranks returns, none of which fails."""
    found = []
    for rank, ended in enumerate(ranks_of(count, work, *given, seconds=seconds, time_out=PATIENT)):
        assert ended is not None, f"rank {rank} died"
        assert not ended.error, f"rank {rank}: {ended.trace}"
        found.append(ended.value)
    return found


def _rank(
    rank: int, count: int, file: str, said: Any, work: Work, given: tuple[Any, ...], time_out: float
) -> None:
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        store: Any = dist.FileStore(file, count)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=time_out)
        )
        start = time.monotonic()
        with affine():
            found = Ended(work(rank, *given))
    except Exception as error:  # noqa: BLE001
        seconds = time.monotonic() - start
        found = Ended(None, type(error).__name__, str(error), seconds, traceback.format_exc())
    said.put((rank, found))
    said.close()
    said.join_thread()
    os._exit(0)  # a group that has lost a rank waits at its end


# What ranks do ------------------------------------------------------------------------------------


def compiled(source: str) -> eq.Kernel:
    """Steps are verified on simulated ranks: here they are run."""
    return eq.compile(source, verify=False)


def sharded_of(case: Case, mesh: Any, **options: Any) -> Sharded:
    return eq.shard(
        compiled(case.source),
        mesh,
        dict.fromkeys(case.axes, RANKS),
        out=dict.fromkeys(case.out, RANKS),
        **options,
    )


def world() -> Any:
    return dist.group.WORLD


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(RANKS,))


def lengths_of(
    sharded: Sharded, tensors: Mapping[str, torch.Tensor], cut: Callable[[int, int], Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """The lengths on every rank of sharded axes, by their classes; those of outputs alone are even."""
    found: dict[str, tuple[int, ...]] = {}
    for (tensor, dimension), axis in sharded.sharding.along(sharded.kernel.program).items():
        size, ranks = tensors[tensor].shape[dimension], sharded.ranks[sharded.sharding.meshes[axis]]
        found[axis] = even(size, ranks) if axis in sharded.sharding.outputs else tuple(cut(size, ranks))
    return found


def own(value: torch.Tensor, dimension: int, lengths: Sequence[int], rank: int) -> torch.Tensor:
    return value.narrow(dimension, sum(lengths[:rank]), lengths[rank])


def shards(
    sharded: Sharded, tensors: Mapping[str, torch.Tensor], lengths: Mapping[str, Sequence[int]], rank: int
) -> dict[str, Any]:
    found = dict(tensors)
    for (tensor, dimension), axis in sharded.sharding.along(sharded.kernel.program).items():
        if axis not in sharded.sharding.outputs:
            found[tensor] = own(found[tensor], dimension, lengths[axis], rank)
    return found


def own_outputs(
    sharded: Sharded, whole: Any, lengths: Mapping[str, Sequence[int]], rank: int
) -> tuple[torch.Tensor, ...]:
    found = []
    for output, value in zip(sharded.kernel.program.outputs, outputs(whole), strict=True):
        for dimension, axis in enumerate(output.axes):
            if axis in sharded.sharding.classes:
                value = own(value, dimension, lengths[sharded.sharding.classes[axis]], rank)
        found.append(value)
    return tuple(found)


CUTS: dict[str, Callable[[int, int], Sequence[int]]] = {
    "even": even,
    "ragged": lambda size, ranks: ragged(size, ranks, 3),
    "all on the last": lambda size, ranks: (*[0] * (ranks - 1), size),
}


def as_dtensors(sharded: Sharded, tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, Any]:
    places: dict[str, Any] = {name: Replicate() for name in tensors}
    for (tensor, dimension), axis in sharded.sharding.along(sharded.kernel.program).items():
        if axis not in sharded.sharding.outputs:
            places[tensor] = Shard(dimension)
    return {name: distribute_tensor(value, mesh, [places[name]]) for name, value in tensors.items()}


def programs(rank: int, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Every strategy of some programs: on even, ragged and empty local shards, and on DTensors, which are uneven.
    Returns those that were run."""
    ran: dict[str, tuple[str, ...]] = {}
    mesh = mesh_of()
    for name in names:
        case = CASES[name]
        tensors = case.tensors()
        wanted = compiled(case.source)(**tensors)
        group, spread = sharded_of(case, world()), sharded_of(case, mesh)
        for plan, same_plan in zip(group.strategies, spread.strategies, strict=True):
            alone = by(group, plan)
            for what, cut in CUTS.items():
                lengths = lengths_of(alone, tensors, cut)
                found = alone(**shards(alone, tensors, lengths, rank))
                same(found, own_outputs(alone, wanted, lengths, rank), f"{name} by {plan.strategy}, {what}")
            alone = by(spread, same_plan)
            made = outputs(alone(**as_dtensors(alone, tensors, mesh)))
            for output, value in zip(alone.kernel.program.outputs, made, strict=True):
                places = [axis in alone.sharding.classes for axis in output.axes]
                place = Shard(places.index(True)) if any(places) else Replicate()
                assert isinstance(value, DTensor) and value.placements == (place,), value.placements
            whole = tuple(value.full_tensor() for value in made)
            same(whole, outputs(wanted), f"{name} by {plan.strategy}, DTensors")
        ran[name] = tuple(plan.strategy for plan in group.strategies)
    return ran


def gradients(rank: int, names: Sequence[str], in_graphs: bool = False) -> int:
    """Gradients of ragged local shards, and of DTensors: those of a whole tensor are whole on every rank. With `in_graphs` each call is
    one graph of torch.compile."""
    mesh, compared = mesh_of(), 0

    def call(sharded: Sharded) -> Callable[..., Any]:
        torch._dynamo.reset()
        return (
            torch.compile(lambda **values: outputs(sharded(**values)), fullgraph=True)
            if in_graphs
            else sharded
        )

    for name in names:
        case = CASES[name]
        tensors = case.tensors()
        leaves = {each: tensors[each].requires_grad_() for each in case.wrt}
        wanted = outputs(compiled(case.source)(**tensors))
        weights = [torch.linspace(-1, 1, w.numel(), dtype=w.dtype).reshape(w.shape) for w in wanted]
        exact = torch.autograd.grad(wanted, list(leaves.values()), weights)
        for what, cut in CUTS.items():
            sharded = sharded_of(case, world())
            lengths = lengths_of(sharded, tensors, cut)
            local = {
                each: value.detach().requires_grad_(each in case.wrt)
                for each, value in shards(sharded, tensors, lengths, rank).items()
            }
            made = outputs(call(sharded)(**local))
            parts = own_outputs(sharded, tuple(weights), lengths, rank)
            found = torch.autograd.grad(made, [local[each] for each in case.wrt], parts)
            part_of = shards(sharded, dict(tensors) | dict(zip(case.wrt, exact, strict=True)), lengths, rank)
            same(found, tuple(part_of[each] for each in case.wrt), f"{name}, {what}")
            compared += 1
        sharded = sharded_of(case, mesh)
        spread = as_dtensors(sharded, {n: t.detach() for n, t in tensors.items()}, mesh)
        for each in case.wrt:
            spread[each].requires_grad_()
        total = sum(
            (
                (value * distribute_tensor(w, mesh, value.placements)).sum()
                for value, w in zip(outputs(call(sharded)(**spread)), weights, strict=True)
            ),
            torch.zeros(()),
        )
        total.backward()
        for each, value in zip(case.wrt, exact, strict=True):
            gradient = spread[each].grad
            assert isinstance(gradient, DTensor) and gradient.placements == spread[each].placements
            same(gradient.full_tensor(), value, f"{name}, DTensors")
        compared += 1
    return compared


def special(rank: int, sources: Sequence[str], dtypes: Sequence[torch.dtype]) -> int:
    """NaN and infinities, by every strategy. Libraries differ in what a MAX all-reduce makes of NaN."""
    compared = 0
    for dtype in dtypes:
        x = torch.randn(6, 13, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[0, 1], x[1, 12], x[2, 5], x[3], x[4, 6:] = torch.nan, torch.nan, torch.inf, -torch.inf, -torch.inf
        for source in sources:
            k = compiled(source)
            sharded = eq.shard(k, world(), {"j": RANKS})
            for plan in sharded.strategies:
                for cut in CUTS.values():
                    alone = by(sharded, plan)
                    lengths = lengths_of(alone, {"x": x}, cut)
                    found = alone(**shards(alone, {"x": x}, lengths, rank))
                    wanted = own_outputs(alone, k(x=x), lengths, rank)
                    exact = 1e-12 if dtype == torch.float64 else 1e-5
                    same(found, wanted, f"{source} by {plan.strategy}, {dtype}", exact)
                    compared += 1
    return compared


def two_dimensions(rank: int) -> int:
    """A mesh of 2 by 2: queries over one dimension, keys over the other; local tensors and DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    case, compared = CASES["attention"], 0
    tensors = case.tensors()
    wanted = compiled(case.source)(**tensors)
    spread: dict[str, Any]
    sharded = eq.shard(compiled(case.source), mesh, {"i": "dp", "j": "tp"})
    row, column = mesh.get_coordinate() or (0, 0)
    for plan in sharded.strategies:
        alone = by(sharded, plan)
        rows, columns = (4, 2), (0, 13)
        Q, K, V = own(tensors["Q"], 0, rows, row), *(own(tensors[n], 0, columns, column) for n in "KV")
        found = alone(Q=Q, K=K, V=V)
        same(found, own(wanted, 0, rows, row), plan.strategy)
        places = {"Q": [Shard(0), Replicate()], "K": [Replicate(), Shard(0)], "V": [Replicate(), Shard(0)]}
        spread = {n: distribute_tensor(t, mesh, places[n]) for n, t in tensors.items()}
        made = alone(**spread)
        assert made.placements == (Shard(0), Replicate())
        same(made.full_tensor(), wanted, plan.strategy)
        compared += 1
    spread = {n: distribute_tensor(t, mesh, [Replicate(), Replicate()]) for n, t in tensors.items()}
    same(sharded(**spread).full_tensor(), wanted, "DTensors that are placed otherwise")
    return compared


def zigzag(rank: int) -> tuple[str, ...]:
    """Two pieces on each rank."""
    case = CASES["causal attention, both axes"]
    tensors: dict[str, Any] = case.tensors()
    wanted = compiled(case.source)(**tensors)
    sharded = sharded_of(case, world(), layout="zigzag")
    for plan in sharded.strategies:
        alone = by(sharded, plan)
        local: dict[str, Any] = dict(alone.local(**tensors))
        found = alone(**local)
        same(found, alone.own_output("O", wanted), plan.strategy)
    return tuple(plan.strategy for plan in sharded.strategies)


def sized(rank: int) -> int:
    """An axis of the output that no tensor has, of two sizes with the same tensors, and a sharded one whose positions are given so."""
    mesh = world()
    k = compiled("y[i] = sum[j](x[j] * cos(i * x[j]))\nreturn y")
    sharded, x = eq.shard(k, mesh, {"j": RANKS}), torch.linspace(-1, 1, 9, dtype=torch.float64)
    part = x[:4] if rank == 0 else x[4:]
    for count in (3, 5):
        same(sharded(x=part, sizes={"i": count}), k(x=x, sizes={"i": count}), str(count))
    squares = compiled("y[i] = sum[j](j * x[i])\nreturn y")
    found = eq.shard(squares, mesh, {"j": RANKS})(x=x, sizes={"j": 2 + rank})
    same(found, squares(x=x, sizes={"j": 5}), "positions alone")
    return 2


def as_many(rank: int) -> tuple[str, str]:
    """Ranks that promise to have as many positions as any other, and once do not. Returns what that raises."""
    x, w = torch.arange(12.0).reshape(3, 4) + rank, torch.ones(4)
    count = dist.get_world_size()
    sharded = eq.shard(eq.compile(PROGRAM), world(), {"j": RANKS}, equal=True)
    wanted = sum(
        ((torch.arange(12.0).reshape(3, 4) + each).sum(1) * 2 for each in range(count)), torch.zeros(3)
    )
    for _ in range(3):
        torch.testing.assert_close(sharded(x=x, w=w, c=2.0), wanted)
    length = 3 - (rank == 1)
    try:
        sharded(x=x[:, :length], w=w[:length], c=2.0)
    except eq.EqfuseError as error:
        return type(error).__name__, str(error)
    return "", ""


# Faults -------------------------------------------------------------------------------------------

PROGRAM = "y[i] = sum[j](x[i,j] * w[j]) * c\nreturn y"


def differing(rank: int, what: str) -> tuple[str, str]:
    """The second rank calls otherwise. Returns the error's type and text; a right call after it is answered rightly."""
    x = torch.arange(12.0).reshape(3, 4) + rank
    w, c, odd = torch.ones(4), 2.0, rank == 1
    source, axes = PROGRAM, {"j": RANKS}
    values: dict[str, Any] = {"x": x, "w": w, "c": c}
    options: dict[str, Any] = {}
    match what if odd else "":
        case "program":
            source = PROGRAM.replace("* w[j]", "+ w[j]")
        case "axes":
            axes = {"i": RANKS, "j": RANKS}
        case "dtype":
            values |= {"x": x.double(), "w": w.double()}
        case "shape":
            values |= {"x": x[:2]}
        case "scalar":
            values |= {"c": 3.0}
        case "strategy":
            options = {"strategy": "tree"}
        case "argument":
            values = {"x": x, "c": c}
        case "argument's rank":
            values |= {"x": x[0]}
        case "shards":
            values |= {"w": w[:3]}
    k = eq.compile(source)
    sharded = eq.shard(k, world(), axes, **options)
    try:
        sharded(**values)
        raised = "", ""
    except eq.EqfuseError as error:
        raised = type(error).__name__, str(error)
    right = eq.shard(eq.compile(PROGRAM), world(), {"j": RANKS})
    count = dist.get_world_size()
    wanted = sum((torch.arange(12.0).reshape(3, 4) + each).sum(1) * c for each in range(count))
    torch.testing.assert_close(right(x=x, w=w, c=c), wanted)
    return raised


def differing_dtensors(rank: int) -> tuple[str, str]:
    """The second rank has another program, and all are called with DTensors, whose lengths need no exchange."""
    mesh = mesh_of()
    source = PROGRAM.replace("* w[j]", "+ w[j]") if rank == 1 else PROGRAM
    sharded = eq.shard(eq.compile(source), mesh, {"j": RANKS})
    x, w = torch.arange(24.0).reshape(3, 8), torch.ones(8)
    try:
        sharded(x=distribute_tensor(x, mesh, [Shard(1)]), w=distribute_tensor(w, mesh, [Shard(0)]), c=1.0)
    except eq.EqfuseError as error:
        return type(error).__name__, str(error)
    return "", ""


def lost(rank: int, when: str) -> None:
    """The last rank dies, before the first call or after it."""
    sharded = eq.shard(eq.compile(PROGRAM), world(), {"j": RANKS})
    x, w = torch.arange(12.0).reshape(3, 4), torch.ones(4)
    last = rank == dist.get_world_size() - 1
    if when == "after":
        sharded(x=x, w=w, c=1.0)
    if last:
        os._exit(1)
    sharded(x=x, w=w, c=1.0)


def absent(rank: int) -> None:
    """The last rank lives, and does not call until the others have given up."""
    sharded = eq.shard(eq.compile(PROGRAM), world(), {"j": RANKS})
    if rank == dist.get_world_size() - 1:
        time.sleep(2.5 * TIME_OUT)
        return
    sharded(x=torch.ones(3, 4), w=torch.ones(4), c=1.0)


def crossed(rank: int) -> tuple[str, str]:
    """The first of two times two ranks is called wrongly; then all are called right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = eq.shard(compiled("y[i] = sum[j](x[i,j] * w[j])\nreturn y"), mesh, {"i": "dp", "j": "tp"})
    found = ("", "")
    try:
        sharded(x=torch.ones(3, 5), w=torch.ones(5 if rank else 6))
    except eq.EqfuseError as error:
        found = type(error).__name__, str(error)
    assert torch.equal(sharded(x=torch.ones(3, 5), w=torch.ones(5)), torch.full((3,), 10.0))
    return found
