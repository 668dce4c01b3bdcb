"""`eq.shard`: a kernel whose axes are sharded over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from eqfuse.arguments import Arguments, Given
from eqfuse.certification import Checks
from eqfuse.devices import Target, place_of
from eqfuse.differentiate.gradient import cotangents
from eqfuse.errors import EqfuseError, VerificationError, did_you_mean
from eqfuse.extract.devices import Device
from eqfuse.kernel import Kernel
from eqfuse.operator.content import DERIVED, SHARDED, Saving, enrol, quoted
from eqfuse.operator.library import called, is_recorded, recorded
from eqfuse.operator.shapes import Size, empty_outputs, extents
from eqfuse.results import source_digest
from eqfuse.sharding.agreement import MOST_AXES, agreed, digest
from eqfuse.sharding.axes import (
    Lengths,
    Mesh,
    even,
    link_of,
    names_of_groups,
    own_lengths,
    ranks_of,
    sharding_of,
    share,
)
from eqfuse.sharding.check import certified
from eqfuse.sharding.dtensors import from_local, local_parts, placements
from eqfuse.sharding.engine import Place, gathered, in_two_pieces, own_part, run
from eqfuse.sharding.exchange import Group, Join, Rank, Run, TorchArrays, simulated
from eqfuse.sharding.kernels import Alone, Kernels, driven
from eqfuse.sharding.links import Link, link_named
from eqfuse.sharding.nodes import Sharding, ShardPlan, shown
from eqfuse.sharding.prices import Price, Sizes, price, table
from eqfuse.sharding.strategies import STRATEGIES, strategies
from eqfuse.terms.arguments import wants_gradient
from eqfuse.terms.bounds import check_selections
from eqfuse.terms.extents import axes_along
from eqfuse.terms.nodes import Program
from eqfuse.terms.prefixes import alike
from eqfuse.terms.recurrences import check_merges
from eqfuse.terms.sizes import bind, places, undetermined
from eqfuse.threads import cached, undisturbed

LAYOUTS = ("contiguous", "zigzag")
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
    check_merges(
        kernel.program, "such a recurrence is not sharded", "call the kernel on each rank's own rows"
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
    return Sharded(kernel, mesh, sizes, sharding, tuple(found), refused, link, layout, equal, asked=strategy)


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
    `layout`, `link` and `equal` are those that `eq.shard` was given, or chose; `asked` is the strategy that it was given."""

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
    asked: str = field(default="auto", repr=False)
    _rows: Mapping[tuple[str, int], tuple[str, str]] = field(default_factory=dict, repr=False)
    """Dimensions of tensors that come as a rank's rows and become whole: the axis, and the dimension of the mesh."""
    _origin: tuple[str, str, Any] | None = field(default=None, repr=False)
    """The content of what it was derived from, the method that did so, and the argument."""
    _place: Place | None = field(default=None, repr=False)
    _device: Device | None = field(default=None, repr=False)
    _kernels: dict[Any, Kernels] = field(default_factory=dict, repr=False)
    _said: Kept = field(default_factory=Kept, repr=False)
    _prepared: Kept = field(default_factory=Kept, repr=False)
    _compared: Kept = field(default_factory=Kept, repr=False)
    _certificates: dict[str, Any] = field(default_factory=dict, repr=False)
    _gradients: dict[tuple[str, ...], Sharded] = field(default_factory=dict, repr=False)
    _groups: dict[str, Group] = field(default_factory=dict, repr=False)

    _along: dict[tuple[str, int], str] = field(init=False, default_factory=dict, repr=False)
    """The sharded axes along the dimensions of tensors."""
    _row_sources: dict[str, tuple[str, int]] = field(init=False, default_factory=dict, repr=False)
    """A dimension of a tensor that is as long as each axis that is sharded in outputs alone."""
    content: str = field(init=False, default="", repr=False)
    """What graphs of torch know it by."""

    def __post_init__(self) -> None:
        sharding = self.sharding
        made_of = {
            "kernel": self.kernel.content,
            "ranks": self.ranks,
            "groups": names_of_groups(self.mesh),
            "axes": {axis: sharding.meshes[of] for axis, of in sharding.classes.items()},
            "out": sorted(sharding.outputs),
            "strategies": [plan.strategy for plan in self.strategies],
            "link": self.link,
            "layout": self.layout,
            "equal": self.equal,
        }
        self.content = quoted({SHARDED: made_of} if self._origin is None else {DERIVED: self._origin})
        enrol(self)
        self._along = sharding.along(self.program)
        same = alike(self.program)
        rows = ((same.get(axis, axis), (tensor, at)) for axis, tensor, at in places(self.program))
        self._row_sources = {of: place for of, place in rows if of in sharding.outputs}

    @property
    def program(self) -> Program:
        """The program of the kernel."""
        return self.kernel.program

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **values: Any) -> Any:
        """The outputs: see `eq.shard`. `sizes` gives axes that no tensor determines.

        Every rank has to call alike; where programs, dtypes or shapes differ, all of them raise an error that says which rank does.
        Under `torch.compile` a call is the operator `eqfuse::call`, as that of a kernel is. A call is differentiable: its gradient is the
        gradient's program, sharded alike; that of a whole tensor is whole on every rank.
        """
        Arguments(self.program).all_named(unnamed)
        if any(isinstance(value, DTensor) for value in values.values()):
            return self._of_dtensors(values, sizes)
        if is_dynamo_compiling():
            return called(self.content, values, sizes)
        if is_recorded(values):
            return recorded(self.content, values, sizes)
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
        program = self.program
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
        words = None if every is None else (tuple(sorted(every.items())), tuple(said.values()))
        if every is None or failed is not None or words not in self._compared:
            device, groups = place_of(given.tensors), [self._group(mesh) for mesh in self._meshes]
            found = agreed(groups, self.sharding.meshes, device, said, own, failed)
            if every is not None and any(every[axis] != each for axis, each in found.items()):
                raise EqfuseError(
                    f"ranks have {found} positions", hint="leave `equal` out, or share them out evenly"
                )
            every = found if every is None else every
            if words is not None:
                self._compared.keep(words, True)
        given = self._with_whole_rows(given)
        at = key, tuple(sorted(every.items()))
        plan, kernels, place = self._prepared.get(at) or self._prepared.keep(at, self._prepare(given, every))
        self.plan, self._place = plan, place
        result = driven(run(plan, place, {**given.tensors, **given.scalars}, kernels), self._group)
        return given.returned([result[output.name] for output in program.outputs])

    @cached
    def _arguments(self) -> Arguments:
        return Arguments(self.program)

    def _described(self, given: Given, known: Mapping[str, Lengths]) -> tuple[dict[str, int], dict[str, int]]:
        """The positions of sharded axes on this rank, and what all ranks have to agree on, as numbers of 63 bits."""
        own = own_lengths(
            self.program, self.sharding, self._along, _shapes(given.tensors), known, given.sizes
        )
        parts = {*self._along, *self._rows}
        shapes = sorted(
            (name, tuple(n for at, n in enumerate(tensor.shape) if (name, at) not in parts))
            for name, tensor in given.tensors.items()
        )
        sizes = sorted((a, n) for a, n in (given.sizes or {}).items() if a not in self.sharding.classes)
        return own, {
            **self._identity,
            "dtypes": digest(sorted((name, str(tensor.dtype)) for name, tensor in given.tensors.items())),
            "shapes": digest(shapes),
            "scalars": digest(sorted(given.scalars.items())),
            "sizes": digest(sizes),
        }

    @cached
    def _identity(self) -> dict[str, int]:
        classes = sorted(self.sharding.classes.items())
        return {
            "version": digest(source_digest()),
            "program": digest((self.program.source, classes)),
            "strategy": digest(
                ([plan.strategy for plan in self.strategies], self._link, self.layout, self.equal)
            ),
        }

    @property
    def is_simulated(self) -> bool:
        """Whether this process plays every rank."""
        return isinstance(self.mesh, int | Mapping)

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

    def _prepare(
        self, given: Given, lengths: Mapping[str, Lengths], rank: Rank | None = None
    ) -> tuple[ShardPlan, Kernels, Place]:
        """The steps for a call, verified and with their kernels compiled, before anything is exchanged."""
        program, tensors = self.program, given.tensors
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        for (tensor, dimension), axis in self._along.items():
            if tensor in shapes and axis in lengths:
                shapes[tensor][dimension] = sum(lengths[axis])
        whole = {name: tuple(shape) for name, shape in shapes.items()}
        of = self.sharding.classes
        sizes = {
            a: sum(lengths[of[a]]) if of.get(a) in lengths else n for a, n in (given.sizes or {}).items()
        }
        extents = bind(program, whole, sizes, given.scalars)
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
        sizes = Sizes(self.program, self.sharding, extents, self.ranks, itemsize)
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
        whole = own_lengths(
            self.program, self.sharding, self._along, _shapes(given.tensors), lengths, given.sizes
        )
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
            for output in self.program.outputs
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
        axes = next(output.axes for output in self.program.outputs if output.name == name)
        for dimension, axis in enumerate(axes):
            if axis in self.sharding.classes:
                value = own_part(value, dimension, self.sharding.classes[axis], self._place, TorchArrays())
        return value

    def local(self, **values: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's shards of whole tensors, shared out evenly: `s(**s.local(Q=Q, K=K, V=V))`."""
        lengths = {
            axis: even(n, self.ranks[self.sharding.meshes[axis]])
            for axis, n in own_lengths(
                self.program, self.sharding, self._along, _shapes(values), some=True
            ).items()
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
        given = Arguments(self.program).given(values)
        whole = own_lengths(self.program, self.sharding, self._along, _shapes(given.tensors))
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
        meshes = {
            at: self.sharding.meshes[axis]
            for at, axis in self._along.items()
            if axis not in self.sharding.outputs
        }
        local, shapes = local_parts(values, self.mesh, [*self.ranks], meshes)
        counts = {
            axis: shapes[tensor][dimension]
            for (tensor, dimension), axis in self._along.items()
            if tensor in shapes and axis not in self.sharding.outputs
        }
        known = counts.keys() >= self.sharding.meshes.keys() - self.sharding.outputs
        if is_dynamo_compiling():
            if not known:
                raise EqfuseError(
                    "some tensors with sharded axes are DTensors, others are not",
                    hint="under torch.compile give DTensors alone, or local tensors alone",
                )
            results = called(self.content, local, sizes)
        else:
            lengths = {axis: even(n, self.ranks[self.sharding.meshes[axis]]) for axis, n in counts.items()}
            results = self._differentiated(local, lengths if known else None, sizes)
        made, found = results if isinstance(results, tuple) else (results,), []
        for output, value in zip(self.program.outputs, made, strict=True):
            sizes_of = zip(output.axes, value.shape, strict=True)
            shape = [self._whole_size(axis, size, counts, local, sizes) for axis, size in sizes_of]
            meshes_of = enumerate(map(self.sharding.mesh, output.axes))
            axes = {at: mesh for at, mesh in meshes_of if mesh is not None}
            found.append(from_local(value, self.mesh, placements(self.ranks, axes), shape))
        return found[0] if len(found) == 1 else tuple(found)

    def _whole_size(
        self,
        axis: str,
        own: int,
        counts: Mapping[str, int],
        tensors: Mapping[str, Any],
        sizes: Mapping[str, int] | None,
    ) -> int:
        """The extent over all ranks of an axis of outputs, of which this one has its `own` positions; `counts` are those of sharded axes that
        are known."""
        of = self.sharding.classes.get(axis)
        if of is None:
            return own
        if of in counts:
            return counts[of]
        if of in self._row_sources:
            tensor, dimension = self._row_sources[of]
            return int(tensors[tensor].shape[dimension])
        if sizes and axis in sizes and of in self.sharding.outputs:
            return sizes[axis]
        assert self._place is not None
        return sum(self._place.lengths[of])

    # -- gradients ---------------------------------------------------------------------------------

    def gradient(
        self,
        names: tuple[str, ...],
        of: tuple[str, ...] = (),
        alike: bool = False,
        dtypes: Mapping[str, torch.dtype] | None = None,
        scales: bool = False,
    ) -> Sharded:
        """The gradient by some inputs, sharded alike: it reads the tensors and a cotangent for each output of real numbers, which is this
        rank's part as the output is. Nothing is saved for it, so the other arguments, those of a kernel's, change nothing."""
        if names not in self._gradients:
            named, rows = cotangents(self.program), dict[tuple[str, int], tuple[str, str]]()
            for output in () if self.is_simulated else self.program.outputs:
                for dimension, axis in enumerate(output.axes):
                    of_axis = self.sharding.classes.get(axis, "")
                    if of_axis in self.sharding.outputs and output.name in named:
                        rows[named[output.name], dimension] = axis, self.sharding.meshes[of_axis]
            made = self._over(self.kernel.gradient(names), self._axes(), ("gradient", names))
            self._gradients[names] = replace(made, _rows=rows)
        return self._gradients[names]

    def _axes(self, outputs: bool = False) -> dict[str, str]:
        """The sharded axes of tensors, or of outputs alone, and their dimensions of the mesh."""
        of, meshes = self.sharding.classes, self.sharding.meshes
        return {a: meshes[of[a]] for a in of if (of[a] in self.sharding.outputs) == outputs}

    def _over(
        self,
        kernel: Kernel,
        axes: Mapping[str, str],
        by: tuple[str, Any],
        out: Mapping[str, str] | None = None,
        asked: str = "auto",
    ) -> Sharded:
        """A kernel that a method has made of this one, over the same ranks, those of the axes that it has."""
        known = {*alike(kernel.program), *axes_along(kernel.program.outputs, kernel.program.tensors)}
        held = {axis: mesh for axis, mesh in axes.items() if axis in known}
        layout, equal, link = self.layout, self.equal, self.link
        made = shard(kernel, self.mesh, held, out=out, strategy=asked, layout=layout, equal=equal, link=link)
        return replace(made, _origin=(self.content, *by))

    def _lengths_of(self, other: Sharded, lengths: Mapping[str, Lengths]) -> dict[str, Lengths]:
        """Lengths by the axes of another program."""
        classes = self.sharding.classes
        return {
            classes[a]: lengths[of]
            for a, of in other.sharding.classes.items()
            if a in classes and of in lengths
        }

    def _lacking(self, place: Place) -> dict[str, int]:
        """The positions, on this rank, of axes that no tensor determines."""
        extents = place.extents if self.is_simulated else place.local()
        return {axis: extents[axis] for axis in undetermined(self.program) if axis in extents}

    def _with_whole_rows(self, given: Given) -> Given:
        """The arguments, with tensors whole of which ranks have given their rows."""
        if not self._rows:
            return given
        tensors, shapes = dict(given.tensors), _shapes(given.tensors)
        for (tensor, dimension), (axis, mesh) in self._rows.items():
            value, group = tensors[tensor].contiguous(), self._group(mesh)
            count = self._whole_extent(axis, shapes, given.sizes or {})
            lengths = (
                tuple(n for (n,) in group.numbers([value.shape[dimension]], value.device))
                if count is None
                else even(count, group.size)
            )
            ((*parts,),) = group.answer(Join(mesh, (value,), (dimension,), (lengths,)))
            tensors[tensor] = torch.cat(parts, dimension)
        return replace(given, tensors=tensors)

    def _whole_extent(
        self, axis: str, shapes: Mapping[str, Sequence[Size]], sizes: Mapping[str, Size]
    ) -> Size:
        """The extent of an axis whose rows ranks give, by a tensor that is whole along it, or by `sizes`; None where nothing gives it."""
        same = alike(self.program)
        for of, tensor, dimension in places(self.program):
            is_same = same.get(of, of) == same.get(axis, axis)
            if is_same and (tensor, dimension) not in self._rows and tensor in shapes:
                return shapes[tensor][dimension]
        return sizes.get(axis)

    # -- as an operator of torch -------------------------------------------------------------------

    scalars: Mapping[str, float] = field(init=False, default_factory=dict, repr=False)
    """Those that are known in advance: none."""
    constants: tuple[str, ...] = field(init=False, default=(), repr=False)
    """Tensors that are known in advance: none."""

    def extents(self, shapes: Mapping[str, Sequence[Size]], sizes: Mapping[str, Size]) -> dict[str, Size]:
        """The extent of every axis on this rank. Sizes may be symbols."""
        if self.is_simulated:
            return extents(self.program, shapes, sizes)
        classes, found = self.sharding.classes, {name: list(shape) for name, shape in shapes.items()}
        own = {of: sizes[axis] for axis, of in classes.items() if axis in sizes}
        own |= {of: shapes[name][at] for (name, at), of in self._along.items() if name in shapes}
        for axis, tensor, dimension in places(self.program):
            of = classes.get(axis)
            if of in own and of not in self.sharding.outputs and (tensor, dimension) not in self._along:
                found[tensor][dimension] = own[of]  # whole along an axis that other tensors are sharded along
        for (tensor, dimension), (axis, _) in self._rows.items():
            count = self._whole_extent(axis, shapes, sizes)
            found[tensor][dimension] = shapes[tensor][dimension] if count is None else count
        return extents(self.program, found, sizes)

    def shaped(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], sizes: Mapping[str, Size]
    ) -> list[torch.Tensor]:
        """This rank's outputs, holding nothing."""
        made = empty_outputs(self.program, tensors, numbers, lambda shapes: self.extents(shapes, sizes))
        for place, output in enumerate(() if self.is_simulated else self.program.outputs):
            shape = list(made[place].shape)
            for dimension, axis in enumerate(output.axes):
                of = self.sharding.classes.get(axis)
                if of in self.sharding.outputs:
                    group = self._group(self.sharding.meshes[of])
                    shape[dimension] = share(shape[dimension], group.size, group.rank)
            made[place] = made[place].new_empty(shape)
        return made

    def forward(
        self,
        names: tuple[str, ...],
        dtypes: Mapping[str, torch.dtype] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Saving:
        """What a call runs of which gradients by some inputs may be asked: itself, and nothing is saved."""
        return Saving(self, (), (), self.outputs_by(names))

    def outputs_by(self, names: tuple[str, ...]) -> frozenset[str]:
        """The outputs that have a derivative by some inputs."""
        return self.kernel.outputs_by(names)

    def jvp(self, names: tuple[str, ...]) -> Sharded:
        """The directional derivative along tangents of some inputs, sharded alike."""
        return self._over(self.kernel.jvp(names), self._axes(), ("jvp", names), self._axes(outputs=True))

    def alike(self, source: str) -> Sharded:
        """The kernel of another text over the same ranks."""
        made = self.kernel.alike(source)
        return self._over(made, self._axes(), ("alike", source), self._axes(outputs=True), self.asked)

    def cached(self, values: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> None:
        """Every call is looked at."""

    def run_cached(self, cached: Any, values: Mapping[str, Any], addresses: Sequence[int]) -> None:
        """No call is cached."""

    def opened(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], sizes: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Raises EqfuseError: what ranks exchange is no kernel that compilers could see."""
        raise EqfuseError(
            "a sharded kernel has no visible form", hint="compile the kernel without visible=True"
        )

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
        same = alike(self.program)
        given = {same.get(axis, axis): size for axis, size in sizes.items()}
        extents = {a: given.get(same.get(a, a), size) for a, size in self._nominal.items()}
        prices = {plan.strategy: self._price(plan, extents) for plan in self.strategies}
        ranks = {mesh: n for mesh, n in self.ranks.items() if mesh in self._meshes}
        return table(prices, self.refused, self._link, ranks, extents)

    @property
    def _nominal(self) -> Mapping[str, int]:
        from eqfuse.compiler import nominal_extents

        return self._place.extents if self._place is not None else nominal_extents(self.program)

    def explain(self, strategy: str | None = None) -> str:
        """The steps of every rank, of the last call's strategy or of another one."""
        plans = {plan.strategy: plan for plan in self.strategies}
        found = plans.get(strategy) if strategy is not None else self.plan or self.strategies[0]
        if found is None:
            raise EqfuseError(f"strategy is {strategy!r}", hint=f"it has {', '.join(plans)}")
        return f"{found.strategy}\n{shown(found.steps)}"


def _key(given: Given) -> tuple[Any, ...]:
    """What a call has in common with others of the same shapes, dtypes and numbers."""
    tensors = tuple(
        (name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in given.tensors.items()
    )
    return tensors, tuple(given.scalars.items()), tuple((given.sizes or {}).items())


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


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
                values[named[output.name]] = value.contiguous()
        read = {*Arguments(gradient.kernel.program).names}
        values = {name: value for name, value in values.items() if name in read}
        lengths = gradient._lengths_of(sharded, ctx.place.lengths)
        made = gradient._differentiated(values, lengths, gradient._lacking(ctx.place))
        found = dict(zip(wanted, made if isinstance(made, tuple) else (made,), strict=True))
        return None, None, None, None, None, *(found.get(name) for name in ctx.names)
