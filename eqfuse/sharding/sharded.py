"""`eq.shard`: a kernel whose axes are sharded over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from eqfuse.arguments import Arguments, Given
from eqfuse.certification import Checks
from eqfuse.devices import place_of
from eqfuse.differentiate.gradient import cotangent, real_outputs
from eqfuse.errors import BindError, EqfuseError, VerificationError, did_you_mean
from eqfuse.kernel import Kernel
from eqfuse.results import source_digest
from eqfuse.sharding.check import certified
from eqfuse.sharding.engine import Place, gathered, in_two_pieces, own_part, run
from eqfuse.sharding.exchange import Group, Join, Rank, Run, TorchArrays, simulated
from eqfuse.sharding.kernels import Alone, Kernels, driven
from eqfuse.sharding.links import Link, link_named
from eqfuse.sharding.nodes import Sharding, ShardPlan, shown
from eqfuse.sharding.prices import Price, Sizes, price
from eqfuse.sharding.strategies import STRATEGIES, strategies
from eqfuse.terms.arguments import wants_gradient
from eqfuse.terms.extents import axes_along
from eqfuse.terms.nodes import Output, Program
from eqfuse.terms.prefixes import alike
from eqfuse.terms.sizes import bind
from eqfuse.threads import undisturbed

Mesh = DeviceMesh | dist.ProcessGroup | int | Mapping[str, int]
Lengths = tuple[int, ...]
LAYOUTS = ("contiguous", "zigzag")
MOST_CHOSEN = 1024
"""Sizes whose strategy is remembered."""


def shard(
    kernel: Kernel,
    mesh: Mesh,
    axes: Mapping[str, str],
    *,
    out: Mapping[str, str] | None = None,
    strategy: str = "auto",
    layout: str = "contiguous",
    link: str | None = None,
) -> Sharded:
    """The kernel with axes of its program sharded over the dimensions of a mesh: `eq.shard(k, mesh, {"j": "cp"})`.

    `mesh` is a `DeviceMesh`; a process group, whose one dimension has any name; or a number of ranks, or numbers by dimension,
    that this process simulates. `axes` maps axes of the program to dimensions of the mesh: every tensor that is read along one is
    sharded along that dimension. Axes that `out` has are sharded in the outputs alone. A reduction over a sharded axis is merged by
    the merge that eqfuse derived for it. `strategy` is one of `STRATEGIES`, or "auto": the cheapest by the model of the `link`
    ("nvlink", "infiniband", "gloo"; by default that of the group's back end).

    `layout` is "contiguous", or "zigzag": of n ranks rank r has pieces r and 2 n - 1 - r of 2 n pieces of each sharded axis, one after
    the other, so that a causal mask leaves as much to each.

    The result is called as the kernel is, on every rank alike, with that rank's shards (of any lengths, also none), in the order
    of the ranks, or with DTensors; it returns the rank's shards of outputs that have sharded axes, and others whole on every rank.
    Simulated ranks take whole tensors and return whole outputs. Raises EqfuseError for axes and dimensions that are not there, and
    for a strategy that the program does not have, with the reason.
    """
    sizes = _ranks(mesh)
    sharding = _sharding(kernel.program, sizes, axes, out or {})
    found, refused = strategies(kernel.program, kernel.merged_plans(), sharding)
    if layout not in LAYOUTS:
        raise EqfuseError(f"layout is {layout!r}", hint=f"one of {', '.join(LAYOUTS)}")
    if layout == "zigzag":
        pieces = {plan.strategy: in_two_pieces(plan, sharding) for plan in found}
        found = [plan for plan in found if not pieces[plan.strategy]]
        refused = {**refused, **{name: each for name, each in pieces.items() if each}}
    if strategy != "auto":
        if strategy not in STRATEGIES:
            hint = did_you_mean(strategy, STRATEGIES) or f"one of auto, {', '.join(STRATEGIES)}"
            raise EqfuseError(f"strategy is {strategy!r}", hint=hint)
        chosen = [plan for plan in found if strategy in plan.strategy.split(" + ")]
        if not chosen:
            has = ", ".join(plan.strategy for plan in found)
            why = refused.get(strategy, "nothing in the program is exchanged so")
            raise EqfuseError(f"the program has no strategy {strategy!r}: {why}", hint=f"it has {has}")
        found = chosen
    if not found:
        raise EqfuseError("the program has no strategy", hint="; ".join(refused.values()))
    link = link or _link_of(mesh)
    link_named(link)
    return Sharded(kernel, mesh, sizes, sharding, tuple(found), refused, link, layout)


def _ranks(mesh: Mesh) -> dict[str, int]:
    """The numbers of ranks by dimension of the mesh; one of any name is ""."""
    if isinstance(mesh, DeviceMesh):
        if mesh.mesh_dim_names is None:
            raise EqfuseError(
                "the mesh has no names of dimensions", hint='init_device_mesh(..., mesh_dim_names=("cp",))'
            )
        return dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    found = (
        {"": dist.get_world_size(mesh)}
        if isinstance(mesh, dist.ProcessGroup)
        else {"": mesh}
        if isinstance(mesh, int)
        else dict(mesh)
        if isinstance(mesh, Mapping)
        else None
    )
    if found is None or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in found.values()):
        raise EqfuseError(
            f"mesh is {mesh!r}", hint="give a DeviceMesh, a process group, or a number of ranks to simulate"
        )
    return found


def _sharding(
    program: Program, sizes: dict[str, int], axes: Mapping[str, str], out: Mapping[str, str]
) -> Sharding:
    if not axes and not out:
        raise EqfuseError("no axes are sharded", hint='map axes to dimensions of the mesh: {"j": "cp"}')
    same = alike(program)
    known = {*same, *axes_along(program.outputs, program.tensors)}
    if "" in sizes:
        names = dict.fromkeys([*axes.values(), *out.values()])
        if len(names) > 1:
            raise EqfuseError(
                f"the ranks have one dimension, not {len(names)}", hint="give a DeviceMesh, or {name: ranks}"
            )
        sizes[next(iter(names))] = sizes.pop("")
    meshes: dict[str, str] = {}
    for axis, mesh in (*axes.items(), *out.items()):
        if axis not in known:
            hint = did_you_mean(axis, known) or f"its axes are {', '.join(sorted(known))}"
            raise EqfuseError(f"the program has no axis {axis!r}", hint=hint)
        if mesh not in sizes:
            hint = did_you_mean(mesh, sizes) or f"its dimensions are {', '.join(sizes)}"
            raise EqfuseError(f"the mesh has no dimension {mesh!r}", hint=hint)
        of = str(same.get(axis, axis))
        if meshes.setdefault(of, mesh) != mesh:
            raise EqfuseError(
                f"{axis!r} is as long as an axis over {meshes[of]!r}", hint="shard both over one dimension"
            )
    of_outputs = {axis: str(same.get(axis, axis)) for axis in out}
    for axis, of in of_outputs.items():
        if any(str(same.get(each, each)) == of for each in axes):
            raise EqfuseError(f"{axis!r} is sharded in tensors already", hint="leave it out of `out`")
        if not any(axis in output.axes for output in program.outputs):
            raise EqfuseError(f"no output has the axis {axis!r}", hint="`out` has axes of outputs")
    classes = {axis: str(same.get(axis, axis)) for axis in known if str(same.get(axis, axis)) in meshes}
    for output in program.outputs:
        over = [meshes[classes[axis]] for axis in output.axes if axis in classes]
        if len(set(over)) < len(over):
            twice = next(mesh for mesh in over if over.count(mesh) > 1)
            raise EqfuseError(
                f"{output.name!r} has two axes over {twice!r}",
                hint="shard one of them, or over another dimension",
            )
    return Sharding(classes, meshes, frozenset(of_outputs.values()))


def _link_of(mesh: Mesh) -> str:
    if isinstance(mesh, DeviceMesh | dist.ProcessGroup):
        group = mesh if isinstance(mesh, dist.ProcessGroup) else mesh.get_group(0)
        if dist.get_backend(group) != "nccl":
            return "gloo"
        hosts = torch.cuda.device_count() or 1
        return "nvlink" if dist.get_world_size() <= hosts else "infiniband"
    return "nvlink"


@dataclass
class Sharded:
    """A kernel over several ranks. `strategies` are the step sequences that the program has, `refused` why it has not others;
    `plan` is that of the last call, `certificate` what was verified of it."""

    kernel: Kernel
    mesh: Mesh
    ranks: dict[str, int]
    sharding: Sharding
    strategies: tuple[ShardPlan, ...]
    refused: Mapping[str, str]
    link: str
    layout: str = "contiguous"
    plan: ShardPlan | None = None
    _kernels: dict[Any, Kernels] = field(default_factory=dict, repr=False)
    _chosen: dict[Any, ShardPlan] = field(default_factory=dict, repr=False)
    _certificates: dict[str, Any] = field(default_factory=dict, repr=False)
    _gradients: dict[tuple[str, ...], Sharded] = field(default_factory=dict, repr=False)
    _groups: dict[str, Group] = field(default_factory=dict, repr=False)
    _sizes: dict[str, int] = field(default_factory=dict, repr=False)

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, /, *unnamed: Any, **values: Any) -> Any:
        """The outputs: see `eq.shard`. Every rank has to call alike; where programs, dtypes or shapes differ, all of them raise an
        error that says which rank does. Differentiable: the gradient is the gradient's program, sharded alike; that of a whole
        tensor is whole on every rank."""
        Arguments(self.kernel.program).all_named(unnamed)
        if any(isinstance(value, DTensor) for value in values.values()):
            return self._of_dtensors(values)
        if wants_gradient(values) and torch.is_grad_enabled():
            return self._differentiable(values)
        with undisturbed():
            return self._called(values)

    def _called(self, values: Mapping[str, Any], lengths: Mapping[str, Lengths] | None = None) -> Any:
        program = self.kernel.program
        if self.is_simulated:
            given = Arguments(program).given(values)
            return given.returned(self._simulated(given, lengths))
        failed: EqfuseError | None = None
        given, own = Given({}, {}, None, False), dict[str, int]()
        try:
            given = Arguments(program).given(values)
            own = self._own_lengths({name: tuple(t.shape) for name, t in given.tensors.items()})
        except EqfuseError as error:
            failed = error
        if lengths is None or failed is not None:
            lengths = self._agreed(given, own, failed)
        ready, kernels, place = self._prepared(given, lengths)
        result = driven(run(ready, place, _named(given), kernels), self._group)
        return given.returned([result[output.name] for output in program.outputs])

    @property
    def is_simulated(self) -> bool:
        return isinstance(self.mesh, int | Mapping)

    def _own_lengths(self, shapes: Mapping[str, tuple[int, ...]], all_axes: bool = True) -> dict[str, int]:
        """The positions of every sharded axis on this rank. Raises BindError where tensors differ."""
        found: dict[str, tuple[int, str]] = {}
        for (tensor, dimension), axis in self._along.items():
            shape = shapes.get(tensor)
            if shape is None or len(shape) <= dimension or axis in self.sharding.outputs:
                continue
            length, first = found.setdefault(axis, (shape[dimension], tensor))
            if length != shape[dimension]:
                raise BindError(
                    f"this rank has {length} positions of {axis!r} in {first!r}, {shape[dimension]} in {tensor!r}",
                    hint="give every tensor the same positions",
                )
        for axis in self.sharding.meshes if all_axes else ():
            if axis not in found and axis not in self.sharding.outputs:
                raise BindError(
                    f"no tensor has the sharded axis {axis!r}", hint="shard axes that tensors are read along"
                )
        return {axis: length for axis, (length, _) in found.items()}

    @property
    def _along(self) -> dict[tuple[str, int], str]:
        return self.sharding.along(self.kernel.program)

    def _rank(self) -> Rank:
        return {mesh: self._group(mesh).rank for mesh in self._meshes}

    @property
    def _meshes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.sharding.meshes.values()))

    def _group(self, mesh: str) -> Group:
        if mesh not in self._groups:
            assert isinstance(self.mesh, DeviceMesh | dist.ProcessGroup)
            group = self.mesh if isinstance(self.mesh, dist.ProcessGroup) else self.mesh.get_group(mesh)
            self._groups[mesh] = Group(group)
        return self._groups[mesh]

    def _agreed(self, given: Given, own: Mapping[str, int], failed: EqfuseError | None) -> dict[str, Lengths]:
        """The lengths of every axis on all ranks, who say beforehand what they were called with. Raises on all ranks where they
        differ, or where one of them could not go on."""
        said = _said(self, given)
        found: dict[str, Lengths] = {}
        for mesh in self._meshes:
            group = self._group(mesh)
            axes = [axis for axis, of in self.sharding.meshes.items() if of == mesh and axis in own]
            row = [int(failed is not None), *said.values(), *(own[axis] for axis in axes)]
            row += [0] * (1 + len(said) + len(self.sharding.meshes) - len(row))
            rows = group.numbers(row, place_of(given.tensors))
            for rank, other in enumerate(rows):
                if other[0] and failed is None:
                    raise EqfuseError(
                        f"rank {rank} of {mesh!r} was not called as the program asks",
                        hint="its own error says what is wrong there",
                    )
                for what, here, there in zip(said, row[1:], other[1:], strict=False):
                    if here != there and failed is None:
                        raise EqfuseError(
                            f"rank {rank} of {mesh!r} has another {what} than rank {group.rank}",
                            hint="all ranks call the same program alike; only lengths of sharded axes may differ",
                        )
            for at, axis in enumerate(axes):
                found[axis] = tuple(int(other[1 + len(said) + at]) for other in rows)
        if failed is not None:
            raise failed
        return found

    def _prepared(
        self, given: Given, lengths: Mapping[str, Lengths], rank: Rank | None = None
    ) -> tuple[ShardPlan, Kernels, Place]:
        """The steps for a call, verified and with their kernels compiled, before anything is exchanged."""
        shapes = {name: list(tensor.shape) for name, tensor in given.tensors.items()}
        for (tensor, dimension), axis in self._along.items():
            if tensor in shapes and axis in lengths:
                shapes[tensor][dimension] = sum(lengths[axis])
        whole = {name: tuple(shape) for name, shape in shapes.items()}
        extents = bind(self.kernel.program, whole, given.sizes, given.scalars)
        lengths = dict(lengths)
        for axis in self.sharding.outputs:
            own = next(a for a, of in self.sharding.classes.items() if of == axis and a in extents)
            lengths[axis] = even(extents[own], self.ranks[self.sharding.meshes[axis]])
        self._sizes = dict(extents)
        here = self._rank() if rank is None else rank
        place = Place(self.sharding, here, self.ranks, lengths, extents, self._along, self.layout == "zigzag")
        tensors = given.tensors
        plan = self._cheapest(extents, max((tensor.itemsize for tensor in tensors.values()), default=4))
        key = plan.strategy, tuple(sorted((name, str(tensor.dtype)) for name, tensor in tensors.items()))
        if key not in self._kernels:
            self._verified(plan)
            kernels = Kernels(self.kernel, plan, given)
            if rank is None:
                driven(run(plan, place, _named(given), kernels), lambda mesh: Alone(place, mesh))
                for mesh in self._meshes:
                    self._group(mesh).numbers([1], place_of(tensors))
            self._kernels[key] = kernels
        self.plan = plan
        return plan, self._kernels[key], place

    def _cheapest(self, extents: Mapping[str, int], itemsize: int) -> ShardPlan:
        if len(self.strategies) == 1:
            return self.strategies[0]
        key = *sorted(extents.items()), itemsize
        if key not in self._chosen:
            found = min(self.strategies, key=lambda plan: self._price(plan, extents, itemsize).seconds)
            if len(self._chosen) >= MOST_CHOSEN:
                self._chosen.pop(next(iter(self._chosen)))
            self._chosen[key] = found
        return self._chosen[key]

    def _price(self, plan: ShardPlan, extents: Mapping[str, int], itemsize: int = 4) -> Price:
        sizes = Sizes(self.kernel.program, self.sharding, extents, self.ranks, itemsize)
        return price(plan, sizes, self._link, self.kernel.device)

    @property
    def _link(self) -> Link:
        return link_named(self.link)

    def _verified(self, plan: ShardPlan) -> None:
        """Raises VerificationError where the steps differ from the program."""
        if not self.kernel.verify or plan.strategy in self._certificates:
            return
        kernel = self.kernel
        checks = Checks(kernel.trials, kernel.bound, kernel.scalars, False, kernel.allow)
        found = certified(kernel.program, plan, self.sharding, {}, checks, self.layout == "zigzag")
        if found.counterexample is not None or (not found.ok and found.over):
            raise VerificationError(
                f"the sharded program was not verified, by {plan.strategy}: {found.reason}",
                hint="a fault of eqfuse, which the program does not cause: please report it with the program",
                certificate=found,
            )
        self._certificates[plan.strategy] = found

    # -- simulated ranks ---------------------------------------------------------------------------

    def _simulated(self, given: Given, lengths: Mapping[str, Lengths] | None) -> list[torch.Tensor]:
        """The outputs of ranks of this process, that share whole tensors out evenly, or by `lengths`."""
        shapes = {name: tuple(tensor.shape) for name, tensor in given.tensors.items()}
        whole = self._own_lengths(shapes)
        cut = {axis: even(n, self.ranks[self.sharding.meshes[axis]]) for axis, n in whole.items()}
        cut |= lengths or {}
        arrays, ranks, places = TorchArrays(), list[tuple[Run, Rank]](), list[Place]()
        for numbers in product(*(range(self.ranks[mesh]) for mesh in self._meshes)):
            rank = dict(zip(self._meshes, numbers, strict=True))
            at = Place(self.sharding, rank, self.ranks, cut, {}, self._along, self.layout == "zigzag")
            own = replace(given, tensors=self._own(given.tensors, at))
            plan, kernels, place = self._prepared(own, cut, rank)
            ranks.append((run(plan, place, _named(own), kernels), rank))
            places.append(place)
        results = simulated(ranks, arrays)
        return [
            gathered([result[output.name] for result in results], output.axes, places, arrays)
            for output in self.kernel.program.outputs
        ]

    def _own(self, tensors: Mapping[str, torch.Tensor], place: Place) -> dict[str, torch.Tensor]:
        """A rank's shards of whole tensors."""
        found, arrays = dict(tensors), TorchArrays()
        for (tensor, dimension), axis in self._along.items():
            if axis not in self.sharding.outputs and tensor in found:
                found[tensor] = own_part(found[tensor], dimension, axis, place, arrays)
        return found

    def local(self, **values: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's shards of whole tensors, shared out evenly: `s(**s.local(Q=Q, K=K, V=V))`."""
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        lengths = {
            axis: even(n, self.ranks[self.sharding.meshes[axis]])
            for axis, n in self._own_lengths(shapes, False).items()
        }
        place = Place(
            self.sharding, self._rank(), self.ranks, lengths, {}, self._along, self.layout == "zigzag"
        )
        return self._own(values, place)

    def simulate(self, lengths: Mapping[str, Sequence[int]], /, **values: Any) -> Any:
        """The outputs of simulated ranks that have so many positions of each sharded axis: `s.simulate({"j": (5, 0, 3)}, x=x)`. Raises
        EqfuseError where these are not as many as the ranks, or do not sum to the axis."""
        if not self.is_simulated:
            raise EqfuseError("the ranks are not simulated", hint="give eq.shard a number of ranks")
        same = {self.sharding.classes.get(axis, axis): tuple(each) for axis, each in lengths.items()}
        given = Arguments(self.kernel.program).given(values)
        whole = self._own_lengths({name: tuple(t.shape) for name, t in given.tensors.items()})
        for axis, each in same.items():
            if (
                axis not in whole
                or sum(each) != whole[axis]
                or len(each) != self.ranks[self.sharding.meshes[axis]]
            ):
                raise EqfuseError(
                    f"lengths of {axis!r} are {each}",
                    hint=f"one for each rank, {whole.get(axis, 'no')} positions together",
                )
        with undisturbed():
            return self._called(values, same)

    # -- DTensors ----------------------------------------------------------------------------------

    def _of_dtensors(self, values: Mapping[str, Any]) -> Any:
        """As a call, with DTensors in and out. What is placed otherwise is redistributed; lengths are those that DTensors have."""
        if self.layout != "contiguous":
            raise EqfuseError("DTensors are contiguous", hint="give local tensors: s.local(x=x) has a rank's")
        if not isinstance(self.mesh, DeviceMesh):
            raise EqfuseError("DTensors need a DeviceMesh", hint="give eq.shard the mesh of the DTensors")
        local: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, value in values.items():
            local[name] = value
            if isinstance(value, DTensor):
                if value.device_mesh != self.mesh:
                    raise BindError(
                        f"{name!r} is on another mesh", hint="give eq.shard the mesh of the DTensors"
                    )
                shapes[name] = tuple(value.shape)
                wanted = self._placements(name)
                placed = value if tuple(value.placements) == wanted else value.redistribute(placements=wanted)
                local[name] = placed.to_local()
        lengths = {
            axis: even(shapes[tensor][dimension], self.ranks[self.sharding.meshes[axis]])
            for (tensor, dimension), axis in self._along.items()
            if tensor in shapes and axis not in self.sharding.outputs
        }
        known = lengths if lengths.keys() >= self.sharding.meshes.keys() - self.sharding.outputs else None
        if wants_gradient(local) and torch.is_grad_enabled():
            results = self._differentiable(local, known)
        else:
            with undisturbed():
                results = self._called(local, known)
        made = results if isinstance(results, tuple) else (results,)
        found = []
        for output, value in zip(self.kernel.program.outputs, made, strict=True):
            shape = torch.Size(self._sizes[axis] for axis in output.axes)
            strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
            where: list[Placement] = [Replicate() for _ in self.ranks]
            for dimension, axis in enumerate(output.axes):
                if (mesh := self.sharding.mesh(axis)) is not None:
                    where[list(self.ranks).index(mesh)] = Shard(dimension)
            found.append(
                DTensor.from_local(
                    value, self.mesh, where, run_check=False, shape=shape, stride=tuple(strides)
                )
            )
        return found[0] if len(found) == 1 else tuple(found)

    def _placements(self, tensor: str) -> tuple[Placement, ...]:
        found: list[Placement] = [Replicate() for _ in self.ranks]
        for (name, dimension), axis in self._along.items():
            if name == tensor and axis not in self.sharding.outputs:
                found[list(self.ranks).index(self.sharding.meshes[axis])] = Shard(dimension)
        return tuple(found)

    # -- gradients ---------------------------------------------------------------------------------

    def _differentiable(self, values: Mapping[str, Any], lengths: Mapping[str, Lengths] | None = None) -> Any:
        names = tuple(
            name
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point()
        )
        rest = {name: value for name, value in values.items() if name not in names}
        made: Any = _Differentiable.apply(  # type: ignore[no-untyped-call]
            self, names, rest, lengths, *(values[name] for name in names)
        )
        return made[0] if len(made) == 1 else made

    def gradient(self, names: tuple[str, ...]) -> Sharded:
        """The gradient by some inputs, sharded alike: it reads the tensors and a cotangent for each output of real numbers."""
        if names not in self._gradients:
            axes = {a: self.sharding.meshes[of] for a, of in self.sharding.classes.items()}
            kernel = self.kernel.gradient(names)
            known = {*alike(kernel.program), *axes_along(kernel.program.outputs, kernel.program.tensors)}
            axes = {a: mesh for a, mesh in axes.items() if a in known and self._is_input(a)}
            self._gradients[names] = shard(kernel, self.mesh, axes, layout=self.layout, link=self.link)
        return self._gradients[names]

    def _lengths_of(self, other: Sharded, lengths: Mapping[str, Lengths]) -> dict[str, Lengths]:
        """Lengths by the axes of another program."""
        classes = self.sharding.classes
        return {
            classes[a]: lengths[of]
            for a, of in other.sharding.classes.items()
            if a in classes and of in lengths
        }

    def _whole(self, output: Output, value: torch.Tensor) -> torch.Tensor:
        """An output that is whole along axes that are sharded in outputs alone."""
        if self.is_simulated:
            return value
        for dimension, axis in enumerate(output.axes):
            found = self.sharding.classes.get(axis)
            if found in self.sharding.outputs:
                mesh = self.sharding.meshes[found]
                lengths = even(self._sizes[axis], self.ranks[mesh])
                (value,) = self._group(mesh).answer(Join(mesh, (value,), (dimension,), (lengths,)))
        return value

    def _is_input(self, axis: str) -> bool:
        return self.sharding.classes[axis] not in self.sharding.outputs

    # -- inspection --------------------------------------------------------------------------------

    @property
    def certificate(self) -> Any:
        """What was verified of the strategy of the last call, on one to five simulated ranks, with ragged and empty shards; before any,
        of the first strategy."""
        plan = self.plan or self.strategies[0]
        self._verified(plan)
        return self._certificates.get(plan.strategy)

    def why(self, **sizes: int) -> str:
        """The strategies as a table: exchanges, bytes that a rank sends and holds, seconds of the exchanges by the model of the link and of
        the computations by the rates of the device; the cheapest first. `sizes` are extents of axes over all ranks, by default those of the last call."""
        for axis in sizes:
            if axis not in self._nominal:
                raise EqfuseError(
                    f"the program has no axis {axis!r}",
                    hint=did_you_mean(axis, self._nominal) or f"its axes are {', '.join(self._nominal)}",
                )
        same = alike(self.kernel.program)
        given = {str(same.get(axis, axis)): size for axis, size in sizes.items()}
        extents = {a: given.get(str(same.get(a, a)), size) for a, size in self._nominal.items()}
        rows = sorted(
            ((self._price(p, extents), p.strategy) for p in self.strategies), key=lambda row: row[0].seconds
        )
        ranks = " x ".join(f"{n} {mesh}" for mesh, n in self.ranks.items() if mesh in self._meshes)
        link = self._link
        lines = [
            f"{ranks} ranks, {link.name}: {1e6 * link.latency:.3g} us a message, {1e-9 / link.byte:.3g} GB/s ({link.of})",
            "  ".join(f"{axis}={extents[axis]}" for axis in extents),
            f"{'strategy':28} {'exchanges':>9} {'sent':>10} {'held':>10} {'exchanging':>13} {'computing':>13}",
        ]
        lines += [
            f"{name:28} {each.exchanges:9} {_bytes(each.sent):>10} {_bytes(each.held):>10}"
            f" {1e6 * each.exchanging:10.1f} us {1e6 * each.computing:10.1f} us"
            for each, name in rows
        ]
        lines += [f"{name:28} not: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)

    @property
    def _nominal(self) -> Mapping[str, int]:
        from eqfuse.compiler import nominal_extents

        return self._sizes or nominal_extents(self.kernel.program)

    def explain(self, strategy: str | None = None) -> str:
        """The steps of every rank, of the last call's strategy or of another one."""
        plans = {plan.strategy: plan for plan in self.strategies}
        found = plans.get(strategy) if strategy is not None else self.plan or self.strategies[0]
        if found is None:
            raise EqfuseError(f"strategy is {strategy!r}", hint=f"it has {', '.join(plans)}")
        return f"{found.strategy}\n{shown(found.steps)}"


def even(count: int, ranks: int) -> Lengths:
    """The lengths of shards as DTensor cuts them: all as long as the first, the last ones shorter or empty."""
    each = -(-count // ranks)
    return tuple(max(0, min(each, count - rank * each)) for rank in range(ranks))


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def _named(given: Given) -> dict[str, Any]:
    return {**given.tensors, **given.scalars}


def _said(sharded: Sharded, given: Given) -> dict[str, int]:
    """What every rank has to agree on, as numbers of 63 bits."""
    along = sharded._along
    shapes = sorted(
        (name, tuple(n for at, n in enumerate(tensor.shape) if (name, at) not in along))
        for name, tensor in given.tensors.items()
    )
    program = sharded.kernel.program
    return {
        "version": _digest(source_digest()),
        "program": _digest((program.source, sorted(sharded.sharding.classes.items()))),
        "strategy": _digest([plan.strategy for plan in sharded.strategies] + [sharded._link]),
        "dtypes": _digest(sorted((name, str(tensor.dtype)) for name, tensor in given.tensors.items())),
        "shapes": _digest(shapes),
        "scalars": _digest(sorted(given.scalars.items())),
    }


def _digest(value: Any) -> int:
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1


class _Differentiable(torch.autograd.Function):
    """A call whose gradient is the sharded gradient."""

    @staticmethod
    def forward(
        ctx: Any, sharded: Sharded, names: Any, rest: Any, lengths: Any, *tensors: torch.Tensor
    ) -> Any:
        ctx.sharded, ctx.names, ctx.rest, ctx.lengths = sharded, names, rest, lengths
        ctx.save_for_backward(*tensors)
        with undisturbed():
            made = sharded._called({**rest, **dict(zip(names, tensors, strict=True))}, lengths)
        return made if isinstance(made, tuple) else (made,)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        sharded, program = ctx.sharded, ctx.sharded.kernel.program
        real = real_outputs(program)
        wanted = [n for n, needed in zip(ctx.names, ctx.needs_input_grad[4:], strict=True) if needed]
        gradient = sharded.gradient(tuple(wanted))
        values = {**ctx.rest, **dict(zip(ctx.names, ctx.saved_tensors, strict=True))}
        for output, value in zip(program.outputs, cotangents, strict=True):
            if output.name in real:
                values[cotangent(output.name)] = sharded._whole(output, value.contiguous())
        read = {*Arguments(gradient.kernel.program).names}
        lengths = gradient._lengths_of(sharded, ctx.lengths) if ctx.lengths is not None else None
        with undisturbed():
            made = gradient._called({n: v for n, v in values.items() if n in read}, lengths)
        found = dict(zip(wanted, made if isinstance(made, tuple) else (made,), strict=True))
        return None, None, None, None, *(found.get(name) for name in ctx.names)
