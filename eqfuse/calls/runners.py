"""What runs compiled plans: programs that are loaded on a device, or made of torch calls, once for all sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from eqfuse.arguments import Given, Scalars, Tensors, to_numpy
from eqfuse.calls.specialization import Specialization, Specializations
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.devices import place_of
from eqfuse.extract import call_estimate
from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.in_place import may_replace
from eqfuse.lowered import native_tiles
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.threads import undisturbed
from eqfuse.tile.modes import Mode

if TYPE_CHECKING:  # loaded at first use: every start would wait for them
    from eqfuse.tile.gluon.launch import GluonProgram
    from eqfuse.tile.host import HostProgram
    from eqfuse.tile.triton.direct import Kind
    from eqfuse.tile.triton.launch import TritonProgram

Results = Mapping[str, torch.Tensor]
Runner = Callable[..., Results]
"""The outputs by name, from tensors and scalars by name, the extents of axes and the numbers of shards."""


@dataclass
class Runners:
    """What runs the plans of one program. `native` says when a CPU has C++."""

    shapes: Specializations
    native: Mode = "background"
    _runners: dict[int, tuple[Compiled, Runner]] = field(default_factory=dict)
    _programs: dict[int, tuple[Compiled, HostProgram | TritonProgram | GluonProgram]] = field(
        default_factory=dict
    )
    _begun: dict[int, tuple[Compiled, TritonProgram | GluonProgram]] = field(default_factory=dict)
    """What is compiled for a call while its plan is verified."""

    @property
    def _derived(self) -> Derived:
        return self.shapes.derived

    @property
    def compilations(self) -> int:
        """How many programs were compiled to be run: see `Kernel.compilations`."""
        return sum(program.compilations for _, program in self._programs.values())

    def run(self, special: Specialization, given: Given) -> Results:
        """The outputs by name."""
        compiled = special.compiled
        if special.is_empty:
            return self._unfused(compiled, given)
        arguments = given.tensors, given.scalars, special.extents, special.shards
        out = self._out(compiled, given)
        found = self._runners.get(id(compiled))
        if found is None:
            with self.shapes.lock:
                found = self._runners.get(id(compiled))
                if found is None:
                    runner = self.runner(compiled)
                    try:
                        return runner(*arguments, **out)  # others wait: it may be compiled for a GPU now
                    finally:
                        self._runners[id(compiled)] = compiled, runner
        return found[1](*arguments, **out)

    def _out(self, compiled: Compiled, given: Given) -> dict[str, Tensors]:
        """The memory that outputs are written to on a GPU, by name: what is given, but for that of tensors which are read elsewhere too."""
        if not given.out or compiled.device.kind == "cpu":
            return {}
        nest, places = compiled.chosen.nest, {x.data_ptr(): name for name, x in given.tensors.items()}
        read = {name: places.get(x.data_ptr()) for name, x in given.out.items()}
        taken = {
            name: given.out[name]
            for name, tensor in read.items()
            if tensor is None or may_replace(nest, name, tensor)
        }
        return {"out": taken} if taken else {}

    def _unfused(self, compiled: Compiled, given: Given) -> Results:
        """The unfused program, which is all there is to run where an axis is empty."""
        from eqfuse.terms.interpreter import reference

        program = self._derived.program
        arrays = {name: to_numpy(tensor.cpu()) for name, tensor in given.tensors.items()}
        found = reference(program, arrays, given.scalars, given.sizes)
        found = found if isinstance(found, tuple) else (found,)
        kinds = {buffer.name: buffer.dtype for buffer in compiled.tile.buffers}
        place = place_of(given.tensors)
        return {
            o.name: torch.as_tensor(np.asarray(a)).to(place, TORCH_DTYPES[kinds[o.name] or "f32"])
            for o, a in zip(program.returned, found, strict=True)
        }

    def begin(self, given: Given, compiled: Compiled, sizes: Mapping[str, int]) -> None:
        """Begins to compile for a GPU what a call of these sizes launches: nothing where the plan has run, or stores so much that it may
        run in chunks."""
        tensors = given.tensors.values()
        is_served = compiled.device.kind == "gpu" and torch.version.hip is None
        is_new = id(compiled) not in self._runners
        is_whole = self.shapes.stored_by(compiled, sizes) <= call_estimate.MUCH
        if is_served and is_new and is_whole and all(tensor.is_cuda for tensor in tensors):
            launcher = self._launcher(compiled)
            launcher.begin({**given.tensors, **given.scalars, "sizes": sizes})
            self._begun[id(compiled)] = compiled, launcher

    def _launcher(self, compiled: Compiled) -> TritonProgram | GluonProgram:
        if compiled.roles is None:
            from eqfuse.tile.triton.launch import TritonProgram

            return TritonProgram(self.shapes.triton(compiled), self._derived.name)
        from eqfuse.tile.gluon.launch import GluonProgram

        emit = partial(self.shapes.triton, compiled)
        return GluonProgram(self.shapes.gluon(compiled), self._derived.name, emit)

    def loaded(self, compiled: Compiled) -> Runner:
        """What has run a plan."""
        return self._runners[id(compiled)][1]

    def runner(self, compiled: Compiled, *, wait: bool = False) -> Runner:
        """What runs a plan on tensors and scalars by name, at any sizes; compiling for a GPU waits for the first run. With
        `wait` the first run on a CPU waits for its C++, unless that is switched off."""
        if compiled.device.kind == "cpu":
            from eqfuse.tile.host import HostProgram

            program = self._derived.program
            mode: Mode = "wait" if wait and self.native == "background" else self.native
            host = HostProgram(compiled.tile, lambda: native_tiles(compiled, program), program, mode)
            self._programs[id(compiled)] = compiled, host
            return host
        begun = self._begun.pop(id(compiled), None)
        launcher = self._launcher(compiled) if begun is None else begun[1]
        self._programs[id(compiled)] = compiled, launcher
        outputs = [output.name for output in self._derived.program.returned]

        def run(
            tensors: Tensors,
            scalars: Scalars,
            extents: Mapping[str, int],
            shards: Mapping[str, int],
            out: Tensors | None = None,
        ) -> Results:
            places = tuple((out or {}).get(name) for name in outputs)
            into = {} if out is None else {"out": places if len(places) > 1 else places[0]}
            made = launcher(**tensors, **scalars, sizes={**extents, **shards}, **into)
            return dict(zip(outputs, made if isinstance(made, tuple) else (made,), strict=True))

        return run

    def host(self, compiled: Compiled) -> HostProgram | None:
        """What runs a shape on a CPU; None before it is called there."""
        found = self._programs.get(id(compiled))
        if found is None or compiled.device.kind != "cpu":
            return None
        from eqfuse.tile.host import HostProgram

        return found[1] if isinstance(found[1], HostProgram) else None

    def kind(self, special: Specialization, given: Given) -> Kind | None:
        """What Triton has compiled for a call that has run; None where that was not Triton."""
        found = self._programs.get(id(special.compiled))
        if found is None or not hasattr(found[1], "kind") or self._takes_views(special):
            return None
        program = self._derived.program
        tensors = {tensor.name: given.tensors[tensor.name] for tensor in program.tensors}
        integers = [name for name in program.scalars if name in program.integers]
        outputs = [output.name for output in program.returned]
        names = tuple(given.tensors)
        return found[1].kind(tensors, given.scalars, integers, special.sizes, names, outputs)

    def triton(self, special: Specialization) -> TritonProgram | None:
        """The Triton module that runs calls, where that is what runs them."""
        found = self._programs.get(id(special.compiled))
        if found is None or not hasattr(found[1], "planner") or self._takes_views(special):
            return None
        return found[1]  # type: ignore[return-value]

    def _takes_views(self, special: Specialization) -> bool:
        """Whether a library is given views of tensors: launches take their addresses alone, which are those of the tensors."""
        calls = any(kernel.library is not None for kernel in special.compiled.chosen.plan.kernels)
        return calls and self._derived.views is not None

    def prepared(self, special: Specialization, given: Given) -> Results:
        """The outputs of a call, once all that it needs is compiled: C++ is waited for."""
        compiled = special.compiled
        if compiled.device.kind == "cpu" and not special.is_empty:
            with self.shapes.lock:
                if id(compiled) not in self._runners:
                    self._runners[id(compiled)] = compiled, self.runner(compiled)
            host = self.host(compiled)
            assert host is not None
            host.prepare(given.tensors, special.extents, special.shards)
        return self.run(special, given)

    def held(self, special: Specialization, given: Given, outputs: Results) -> Callable[[], None]:
        """What runs a call, which has run, once more: on the same tensors, into the same outputs."""
        compiled, sizes = special.compiled, (special.extents, special.shards)
        host = None if special.is_empty else self.host(compiled)
        if host is not None:
            return host.into(given.tensors, outputs, given.scalars, *sizes)
        kind = None if special.is_empty else self.kind(special, given)

        def run() -> None:
            with undisturbed():
                for name, made in self.run(special, given).items():
                    outputs[name].copy_(made)

        if kind is None:
            return self._into(special, given, outputs) or run
        from eqfuse.tile.triton.direct import bound

        again = bound(kind, given.tensors, given.scalars, outputs)

        def launch() -> None:
            if not again():
                run()

        return launch

    def _into(self, special: Specialization, given: Given, outputs: Results) -> Callable[[], None] | None:
        """What runs a call whose kernel has roles into the same outputs; None where it has none."""
        from eqfuse.tile.gluon.launch import GluonProgram

        found = self._programs.get(id(special.compiled))
        if found is None or special.is_empty or not isinstance(found[1], GluonProgram):
            return None
        sizes = special.sizes
        program = found[1].form({**given.tensors, "sizes": sizes})
        made = tuple(outputs[output.name] for output in self._derived.program.returned)
        out = made[0] if len(made) == 1 else made

        def launch() -> None:
            with undisturbed():
                program(**given.tensors, **given.scalars, out=out, sizes=sizes)

        return launch
