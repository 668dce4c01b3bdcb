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
from eqfuse.devices import Target, place_of
from eqfuse.differentiate.gradient import cotangents
from eqfuse.errors import BindError, EqfuseError, VerificationError, did_you_mean
from eqfuse.extract.devices import Device
from eqfuse.kernel import Kernel
from eqfuse.results import source_digest
from eqfuse.sharding.axes import Lengths, Mesh, even, link_of, ranks_of, sharding_of
from eqfuse.sharding.check import certified
from eqfuse.sharding.engine import Place, gathered, in_two_pieces, own_part, run
from eqfuse.sharding.exchange import Group, Join, Rank, Run, TorchArrays, simulated
from eqfuse.sharding.kernels import Alone, Kernels, driven
from eqfuse.sharding.links import Link, link_named
from eqfuse.sharding.nodes import Sharding, ShardPlan, shown
from eqfuse.sharding.prices import Price, Sizes, price
from eqfuse.sharding.strategies import STRATEGIES, strategies
from eqfuse.terms.arguments import wants_gradient
from eqfuse.terms.bounds import check_selections
from eqfuse.terms.extents import axes_along
from eqfuse.terms.nodes import Output
from eqfuse.terms.prefixes import alike
from eqfuse.terms.sizes import bind, check_names, check_ranks, undetermined
from eqfuse.threads import cached, undisturbed

LAYOUTS = ("contiguous", "zigzag")
WORDS = 24
"""Numbers that ranks say before a call: what they call, and the lengths of sharded axes."""
MOST_AXES = 16
MOST_KEPT = 1024


def shard(
    kernel: Kernel,
    mesh: Mesh,
    axes: Mapping[str, str],
    *,
    out: Mapping[str, str] | None = None,
    strategy: str = "auto",
    layout: str = "contiguous",
    equal: bool = False,
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

    With `equal`, every rank promises to have as many positions as any other: lengths are then agreed on at the first call of some shapes
    alone, and later ones neither exchange them nor wait for the device, so that CUDA graphs may capture them.

    The result is called as the kernel is, on every rank alike, with that rank's shards (of any lengths, also none), in the order
    of the ranks, or with DTensors; it returns the rank's shards of outputs that have sharded axes, and others whole on every rank.
    Simulated ranks take whole tensors and return whole outputs. Raises EqfuseError for axes and dimensions that are not there, and
    for a strategy that the program does not have, with the reason.
    """
    if not isinstance(kernel, Kernel):
        raise EqfuseError(
            f"{type(kernel).__name__} is no kernel", hint="compile the program first: eq.compile(...)"
        )
    sizes = ranks_of(mesh)
    sharding = sharding_of(kernel.program, sizes, axes, {} if out is None else out)
    if len(sharding.meshes) > MOST_AXES:
        raise EqfuseError(f"{len(sharding.meshes)} axes are sharded", hint=f"shard {MOST_AXES} at most")
    found, refused = strategies(kernel.program, kernel.merged_plans(), sharding)
    if layout not in LAYOUTS:
        raise EqfuseError(f"layout is {layout!r}", hint=f"one of {', '.join(LAYOUTS)}")
    if layout == "zigzag":
        pieces = {plan.strategy: in_two_pieces(plan, sharding) for plan in found}
        found = [plan for plan in found if not pieces[plan.strategy]]
        refused = {**refused, **{name: each for name, each in pieces.items() if each}}
    if strategy != "auto":
        if strategy not in STRATEGIES:
            hint = did_you_mean(str(strategy), STRATEGIES) or f"one of auto, {', '.join(STRATEGIES)}"
            raise EqfuseError(f"strategy is {strategy!r}", hint=hint)
        chosen = [plan for plan in found if strategy in plan.strategy.split(" + ")]
        if not chosen:
            has = ", ".join(plan.strategy for plan in found)
            why = refused.get(strategy, "nothing in the program is exchanged so")
            raise EqfuseError(f"the program has no strategy {strategy!r}: {why}", hint=f"it has {has}")
        found = chosen
    if not found:
        raise EqfuseError("the program has no strategy", hint="; ".join(refused.values()))
    link = link_of(mesh) if link is None else link
    link_named(link)
    return Sharded(kernel, mesh, sizes, sharding, tuple(found), refused, link, layout, equal)


class Kept(dict[Any, Any]):
    """What was made for calls before: of so many kinds at most, the latest."""

    def keep(self, key: Any, value: Any) -> Any:
        if len(self) >= MOST_KEPT:
            self.pop(next(iter(self)), None)
        self[key] = value
        return value


@dataclass
class Sharded:
    """A `kernel` over several ranks of a `mesh`, of which `ranks` has the number of each dimension. `strategies` are the step sequences that the program has,
    `refused` why it has not others; `plan` is that of the last call, `certificate` what was verified of it. `sharding` says which axes are sharded;
    `layout`, `link` and `equal` are those that `eq.shard` was given, or chose."""

    kernel: Kernel
    mesh: Mesh
    ranks: dict[str, int]
    sharding: Sharding
    strategies: tuple[ShardPlan, ...]
    refused: Mapping[str, str]
    link: str
    layout: str = "contiguous"
    equal: bool = False
    plan: ShardPlan | None = None
    _place: Place | None = field(default=None, repr=False)
    _device: Device | None = field(default=None, repr=False)
    _kernels: dict[Any, Kernels] = field(default_factory=dict, repr=False)
    _said: Kept = field(default_factory=Kept, repr=False)
    _prepared: Kept = field(default_factory=Kept, repr=False)
    _compared: Kept = field(default_factory=Kept, repr=False)
    _certificates: dict[str, Any] = field(default_factory=dict, repr=False)
    _gradients: dict[tuple[str, ...], Sharded] = field(default_factory=dict, repr=False)
    _groups: dict[str, Group] = field(default_factory=dict, repr=False)

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **values: Any) -> Any:
        """The outputs: see `eq.shard`. `sizes` gives axes that no tensor determines.

        Every rank has to call alike; where programs, dtypes or shapes differ, all of them raise an error that says which rank does.
        Under `torch.compile` a call is outside of graphs. A call is differentiable: its gradient is the gradient's program, sharded
        alike; that of a whole tensor is whole on every rank.
        """
        return _outside(self, unnamed, values, sizes)

    def _any(self, unnamed: Sequence[Any], values: Mapping[str, Any], sizes: Mapping[str, int] | None) -> Any:
        self._arguments.all_named(unnamed)
        if any(isinstance(value, DTensor) for value in values.values()):
            return self._of_dtensors(values, sizes)
        return self._differentiated(values, sizes=sizes)

    def _differentiated(
        self,
        values: Mapping[str, Any],
        lengths: Mapping[str, Lengths] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Any:
        """A call, with a derivative where one is wanted."""
        if wants_gradient(values):
            names = tuple(
                name
                for name, value in values.items()
                if isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point()
            )
            rest = {name: value for name, value in values.items() if name not in names}
            made: Any = _Differentiable.apply(  # type: ignore[no-untyped-call]
                self, names, rest, lengths, sizes, *(values[name] for name in names)
            )
            return made[0] if len(made) == 1 else made
        with undisturbed():
            return self._called(values, lengths, sizes)

    def _called(
        self,
        values: Mapping[str, Any],
        lengths: Mapping[str, Lengths] | None,
        sizes: Mapping[str, int] | None,
    ) -> Any:
        program = self.kernel.program
        if self.is_simulated:
            given = self._arguments.given(values, sizes)
            return given.returned(self._simulated(given, lengths))
        failed: EqfuseError | None = None
        given, own, said = Given({}, {}, None, False), dict[str, int](), dict[str, int]()
        try:
            given = self._arguments.given(values, sizes)
            key = _key(given)
            known = lengths or {}
            own, said = self._said.get(key) or self._said.keep(key, self._described(given, known))
        except EqfuseError as error:
            failed = error
        every = lengths
        if self.equal and every is None:
            every = {axis: (n,) * self.ranks[self.sharding.meshes[axis]] for axis, n in own.items()}
        agreed = None if every is None else (tuple(sorted(every.items())), tuple(said.values()))
        if every is None or failed is not None or agreed not in self._compared:
            found = self._agreed(place_of(given.tensors), said, own, failed)
            if every is not None and any(every[axis] != each for axis, each in found.items()):
                raise EqfuseError(
                    f"ranks have {found} positions", hint="leave `equal` out, or share them out evenly"
                )
            every = found if every is None else every
            if agreed is not None:
                self._compared.keep(agreed, True)
        at = key, tuple(sorted(every.items()))
        plan, kernels, place = self._prepared.get(at) or self._prepared.keep(at, self._prepare(given, every))
        self.plan, self._place = plan, place
        result = driven(run(plan, place, {**given.tensors, **given.scalars}, kernels), self._group)
        return given.returned([result[output.name] for output in program.outputs])

    @cached
    def _arguments(self) -> Arguments:
        return Arguments(self.kernel.program)

    def _described(self, given: Given, known: Mapping[str, Lengths]) -> tuple[dict[str, int], dict[str, int]]:
        """The positions of sharded axes on this rank, and what all ranks have to agree on, as numbers of 63 bits."""
        own = self._own_lengths({name: tuple(tensor.shape) for name, tensor in given.tensors.items()}, known)
        shapes = sorted(
            (name, tuple(n for at, n in enumerate(tensor.shape) if (name, at) not in self._along))
            for name, tensor in given.tensors.items()
        )
        return own, {
            **self._identity,
            "dtypes": _digest(sorted((name, str(tensor.dtype)) for name, tensor in given.tensors.items())),
            "shapes": _digest(shapes),
            "scalars": _digest(sorted(given.scalars.items())),
        }

    @cached
    def _identity(self) -> dict[str, int]:
        classes = sorted(self.sharding.classes.items())
        return {
            "version": _digest(source_digest()),
            "program": _digest((self.kernel.program.source, classes)),
            "strategy": _digest(
                ([plan.strategy for plan in self.strategies], self._link, self.layout, self.equal)
            ),
        }

    @property
    def is_simulated(self) -> bool:
        """Whether this process plays every rank."""
        return isinstance(self.mesh, int | Mapping)

    def _own_lengths(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        known: Mapping[str, Any] | None = None,
        some: bool = False,
    ) -> dict[str, int]:
        """The positions of every sharded axis on this rank. Raises BindError where tensors differ, or lack dimensions, or, but of `some`
        tensors, no tensor has an axis that is not `known`."""
        if not some:
            check_names(self.kernel.program, shapes, dict.fromkeys(self.kernel.program.scalars, 0))
            check_ranks(self.kernel.program, shapes)
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
        for axis in () if some else self.sharding.meshes:
            if axis not in found and axis not in self.sharding.outputs and axis not in (known or {}):
                raise BindError(
                    f"no tensor has the sharded axis {axis!r}", hint="shard axes that tensors are read along"
                )
        return {axis: length for axis, (length, _) in found.items()}

    @cached
    def _along(self) -> dict[tuple[str, int], str]:
        return self.sharding.along(self.kernel.program)

    def _rank(self) -> Rank:
        return {mesh: self._group(mesh).rank for mesh in self._meshes}

    @cached
    def _meshes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.sharding.meshes.values()))

    def _group(self, mesh: str) -> Group:
        if mesh not in self._groups:
            assert isinstance(self.mesh, DeviceMesh | dist.ProcessGroup)
            group = self.mesh if isinstance(self.mesh, dist.ProcessGroup) else self.mesh.get_group(mesh)
            self._groups[mesh] = Group(group, mesh)
        return self._groups[mesh]

    def _agreed(
        self,
        device: torch.device,
        said: Mapping[str, int],
        own: Mapping[str, int],
        failed: EqfuseError | None,
    ) -> dict[str, Lengths]:
        """The lengths of every axis on all ranks, who say beforehand what they were called with. Raises on all ranks where they
        differ, or where one of them could not go on."""
        found: dict[str, Lengths] = {}
        for mesh in self._meshes:  # ranks along one dimension pass on what went wrong along those before
            group = self._group(mesh)
            axes = [axis for axis, of in self.sharding.meshes.items() if of == mesh and axis in own]
            row = [int(failed is not None), *said.values(), *(own[axis] for axis in axes)]
            row += [0] * (WORDS - len(row))
            rows = group.numbers(row, device)
            failed = failed or _difference(mesh, group.rank, list(said), rows)
            for at, axis in enumerate(axes):
                found[axis] = tuple(int(other[1 + len(said) + at]) for other in rows)
        if failed is not None:
            raise failed
        return found

    def _prepare(
        self, given: Given, lengths: Mapping[str, Lengths], rank: Rank | None = None
    ) -> tuple[ShardPlan, Kernels, Place]:
        """The steps for a call, verified and with their kernels compiled, before anything is exchanged."""
        program, tensors = self.kernel.program, given.tensors
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        for (tensor, dimension), axis in self._along.items():
            if tensor in shapes and axis in lengths:
                shapes[tensor][dimension] = sum(lengths[axis])
        whole = {name: tuple(shape) for name, shape in shapes.items()}
        extents = bind(program, whole, given.sizes, given.scalars)
        check_selections(program, extents, given.scalars)
        lengths = dict(lengths)
        for axis in self.sharding.outputs:
            own = next(a for a, of in self.sharding.classes.items() if of == axis and a in extents)
            lengths[axis] = even(extents[own], self.ranks[self.sharding.meshes[axis]])
        here = self._rank() if rank is None else rank
        place = Place(self.sharding, here, self.ranks, lengths, extents, self._along, self.layout == "zigzag")
        self._device = Target(self.kernel.device, self.kernel.auto).of(tensors)
        plan = self._cheapest(extents, max((tensor.itemsize for tensor in tensors.values()), default=4))
        kinds = sorted((name, str(tensor.dtype)) for name, tensor in tensors.items())
        key = plan.strategy, place_of(tensors), tuple(kinds)
        if key not in self._kernels:
            self._verified(plan)
            kernels = Kernels(self.kernel, plan, given)
            if rank is None:
                self._compile(plan, kernels, place, given)
            self._kernels[key] = kernels
        return plan, self._kernels[key], place

    def _compile(self, plan: ShardPlan, kernels: Kernels, place: Place, given: Given) -> None:
        """Runs the steps once with no other rank, so that all is compiled, and waits for the others. Raises on all ranks where one of
        them could not."""
        failed: EqfuseError | None = None
        try:
            values = {**given.tensors, **given.scalars}
            driven(run(plan, place, values, kernels), lambda mesh: Alone(place, mesh))
        except EqfuseError as error:
            failed = error
        for mesh in self._meshes:
            rows = self._group(mesh).numbers([int(failed is not None)], kernels.device)
            others = [rank for rank, (word,) in enumerate(rows) if word]
            if failed is None and others:
                failed = EqfuseError(
                    f"rank {others[0]} of {mesh!r} could not compile the program",
                    hint="its own error says what is wrong there",
                )
        if failed is not None:
            raise failed

    def _cheapest(self, extents: Mapping[str, int], itemsize: int) -> ShardPlan:
        """The strategy whose price is the least."""
        return min(self.strategies, key=lambda plan: self._price(plan, extents, itemsize).seconds)

    def _price(self, plan: ShardPlan, extents: Mapping[str, int], itemsize: int = 4) -> Price:
        sizes = Sizes(self.kernel.program, self.sharding, extents, self.ranks, itemsize)
        return price(plan, sizes, self._link, self._device or self.kernel.device)

    @cached
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
        whole = self._own_lengths(shapes, lengths)
        cut = {axis: even(n, self.ranks[self.sharding.meshes[axis]]) for axis, n in whole.items()}
        cut |= lengths or {}
        arrays, ranks, places = TorchArrays(), list[tuple[Run, Rank]](), list[Place]()
        for numbers in product(*(range(self.ranks[mesh]) for mesh in self._meshes)):
            rank = dict(zip(self._meshes, numbers, strict=True))
            at = Place(self.sharding, rank, self.ranks, cut, {}, self._along, self.layout == "zigzag")
            own = replace(given, tensors=self._own(given.tensors, at))
            plan, kernels, place = self._prepare(own, cut, rank)
            ranks.append((run(plan, place, {**own.tensors, **own.scalars}, kernels), rank))
            places.append(place)
            self.plan, self._place = plan, place
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

    def own_output(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole output, at the sizes of the last call."""
        if self._place is None:
            raise EqfuseError("nothing was called yet", hint="call the sharded kernel first")
        axes = next(output.axes for output in self.kernel.program.outputs if output.name == name)
        for dimension, axis in enumerate(axes):
            if axis in self.sharding.classes:
                value = own_part(value, dimension, self.sharding.classes[axis], self._place, TorchArrays())
        return value

    def local(self, **values: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's shards of whole tensors, shared out evenly: `s(**s.local(Q=Q, K=K, V=V))`."""
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        lengths = {
            axis: even(n, self.ranks[self.sharding.meshes[axis]])
            for axis, n in self._own_lengths(shapes, some=True).items()
        }
        place = Place(
            self.sharding, self._rank(), self.ranks, lengths, {}, self._along, self.layout == "zigzag"
        )
        return {name: value.contiguous() for name, value in self._own(values, place).items()}

    def simulate(self, lengths: Mapping[str, Sequence[int]], /, **values: Any) -> Any:
        """The outputs of simulated ranks that have so many positions of each sharded axis: `s.simulate({"j": (5, 0, 3)}, x=x)`. Raises
        EqfuseError where these are not as many as the ranks, or do not sum to the axis."""
        if not self.is_simulated:
            raise EqfuseError("the ranks are not simulated", hint="give eq.shard a number of ranks")
        for axis, each in lengths.items():
            if isinstance(each, int) or not all(isinstance(n, int) and n >= 0 for n in each):
                raise EqfuseError(
                    f"lengths of {axis!r} are {each!r}", hint="one number for each rank, none negative"
                )
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
        return self._differentiated(values, same)

    # -- DTensors ----------------------------------------------------------------------------------

    def _of_dtensors(self, values: Mapping[str, Any], sizes: Mapping[str, int] | None) -> Any:
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
        results = self._differentiated(local, known, sizes)
        made = results if isinstance(results, tuple) else (results,)
        place, found = self._place, []
        assert place is not None
        for output, value in zip(self.kernel.program.outputs, made, strict=True):
            shape = torch.Size(place.extents[axis] for axis in output.axes)
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

    def gradient(self, names: tuple[str, ...]) -> Sharded:
        """The gradient by some inputs, sharded alike: it reads the tensors and a cotangent for each output of real numbers."""
        if names not in self._gradients:
            axes = {a: self.sharding.meshes[of] for a, of in self.sharding.classes.items()}
            kernel = self.kernel.gradient(names)
            known = {*alike(kernel.program), *axes_along(kernel.program.outputs, kernel.program.tensors)}
            axes = {a: mesh for a, mesh in axes.items() if a in known and self._is_input(a)}
            self._gradients[names] = shard(
                kernel, self.mesh, axes, layout=self.layout, equal=self.equal, link=self.link
            )
        return self._gradients[names]

    def _lengths_of(self, other: Sharded, lengths: Mapping[str, Lengths]) -> dict[str, Lengths]:
        """Lengths by the axes of another program."""
        classes = self.sharding.classes
        return {
            classes[a]: lengths[of]
            for a, of in other.sharding.classes.items()
            if a in classes and of in lengths
        }

    def _lacking(self, extents: Mapping[str, int]) -> dict[str, int]:
        """The extents of axes that no tensor determines."""
        return {axis: extents[axis] for axis in undetermined(self.kernel.program) if axis in extents}

    def _whole(self, output: Output, value: torch.Tensor, place: Place) -> torch.Tensor:
        """An output that is whole along axes that are sharded in outputs alone."""
        if self.is_simulated:
            return value
        for dimension, axis in enumerate(output.axes):
            found = self.sharding.classes.get(axis)
            if found in self.sharding.outputs:
                mesh, lengths = self.sharding.meshes[found], place.lengths[found]
                ((*parts,),) = self._group(mesh).answer(Join(mesh, (value,), (dimension,), (lengths,)))
                value = torch.cat(parts, dimension)
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

    def price(self, plan: ShardPlan) -> Price:
        """The price of a strategy at the sizes of the last call, or at nominal ones."""
        return self._price(plan, self._nominal)

    def why(self, **sizes: int) -> str:
        """The strategies as a table: exchanges, bytes that a rank sends and holds, seconds of the exchanges by the model of the link and of
        the computations by the rates of the device; the cheapest first. `sizes` are extents of axes over all ranks, by default those of the last call."""
        for axis, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise EqfuseError(f"{axis} is {size!r}", hint="sizes are whole numbers from 1 on")
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

        return self._place.extents if self._place is not None else nominal_extents(self.kernel.program)

    def explain(self, strategy: str | None = None) -> str:
        """The steps of every rank, of the last call's strategy or of another one."""
        plans = {plan.strategy: plan for plan in self.strategies}
        found = plans.get(strategy) if strategy is not None else self.plan or self.strategies[0]
        if found is None:
            raise EqfuseError(f"strategy is {strategy!r}", hint=f"it has {', '.join(plans)}")
        return f"{found.strategy}\n{shown(found.steps)}"


_outside: Any = torch.compiler.disable(Sharded._any)  # type: ignore[no-untyped-call]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def _key(given: Given) -> tuple[Any, ...]:
    """What a call has in common with others of the same shapes, dtypes and numbers."""
    tensors = tuple(
        (name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in given.tensors.items()
    )
    return tensors, tuple(given.scalars.items())


def _difference(
    mesh: str, own: int, said: Sequence[str], rows: Sequence[Sequence[int]]
) -> EqfuseError | None:
    """The error of a rank that has called as the program asks, where another one has not, or has called something else."""
    for rank, other in enumerate(rows):
        if other[0]:
            return EqfuseError(
                f"rank {rank} of {mesh!r} was not called as the program asks",
                hint="its own error says what is wrong there",
            )
        for what, here, there in zip(said, rows[own][1:], other[1:], strict=False):
            if here != there:
                return EqfuseError(
                    f"rank {rank} of {mesh!r} differs from rank {own} in its {what}",
                    hint="all ranks call the same program alike; only lengths of sharded axes may differ",
                )
    return None


def _digest(value: Any) -> int:
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1


class _Differentiable(torch.autograd.Function):
    """A call whose gradient is the sharded gradient."""

    @staticmethod
    def forward(
        sharded: Sharded, names: Any, rest: Any, lengths: Any, sizes: Any, *tensors: torch.Tensor
    ) -> Any:
        with undisturbed():
            made = sharded._called({**rest, **dict(zip(names, tensors, strict=True))}, lengths, sizes)
        return made if isinstance(made, tuple) else (made,)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.sharded, ctx.names, ctx.rest, _, _, *tensors = inputs
        ctx.place = ctx.sharded._place
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        sharded, program = ctx.sharded, ctx.sharded.kernel.program
        named = cotangents(program)
        wanted = [n for n, needed in zip(ctx.names, ctx.needs_input_grad[5:], strict=True) if needed]
        gradient = sharded.gradient(tuple(wanted))
        values = {**ctx.rest, **dict(zip(ctx.names, ctx.saved_tensors, strict=True))}
        for output, value in zip(program.outputs, given, strict=True):
            if output.name in named:
                values[named[output.name]] = sharded._whole(output, value.contiguous(), ctx.place)
        read = {*Arguments(gradient.kernel.program).names}
        values = {name: value for name, value in values.items() if name in read}
        lengths = gradient._lengths_of(sharded, ctx.place.lengths)
        made = gradient._differentiated(values, lengths, gradient._lacking(ctx.place.extents))
        found = dict(zip(wanted, made if isinstance(made, tuple) else (made,), strict=True))
        return None, None, None, None, None, *(found.get(name) for name in ctx.names)
