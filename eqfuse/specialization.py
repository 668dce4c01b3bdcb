"""What a kernel has for each shape that it was called with: a compiled plan, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eqfuse import compiler
from eqfuse.arguments import Arguments, Given, Scalars, Tensors, to_numpy
from eqfuse.compiler import Checks, Compiled, Shape, shape_of
from eqfuse.derived import Derived
from eqfuse.devices import Target, device_named, place_of
from eqfuse.errors import VerificationError
from eqfuse.extract.devices import Device
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.threads import Lock
from eqfuse.tile.modes import Mode
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.storage import resolve_extents
from eqfuse.verify.certificate import Certificate

if TYPE_CHECKING:
    from eqfuse.tile.host import HostProgram

Results = Mapping[str, torch.Tensor]
Runner = Callable[[Tensors, Scalars], Results]
"""The outputs by name, from tensors and scalars by name."""


@dataclass(frozen=True)
class Specialization:
    """What is run for the like of one call's arguments. Where an axis is empty, there is nothing but the unfused program
    to run; what is `compiled` is then for one position of it."""

    compiled: Compiled
    is_empty: bool


@dataclass
class Specializations:
    """The shapes of one program, compiled at the first call of each. With `verifies`, what is not verified is not
    handed out. Several threads may ask at once: the first compiles, under the program's lock."""

    derived: Derived
    target: Target
    prefer: str | None
    verifies: bool
    checks: Checks
    native: Mode = "background"
    _compiled: dict[Shape, Compiled] = field(default_factory=dict)
    _refused: dict[Shape, VerificationError] = field(default_factory=dict)
    _calls: dict[Any, Specialization] = field(default_factory=dict)
    _runners: dict[int, tuple[Compiled, Runner]] = field(default_factory=dict)
    _hosts: dict[int, tuple[Compiled, HostProgram]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is loaded on a device."""
        state = {**self.__dict__, "_runners": {}, "_hosts": {}}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}

    @property
    def lock(self) -> Lock:
        """Held by whoever compiles, or reads what compiling adds to."""
        return self.derived.lock

    @property
    def was_called(self) -> bool:
        return bool(self._calls)

    def of(self, arguments: Arguments, given: Given) -> Specialization:
        """What to run for these arguments, which are checked at the first call with their like."""
        integers = self.derived.program.integers
        key = (
            tuple((n, t.shape, t.dtype, t.device) for n, t in sorted(given.tensors.items())),
            tuple((n, s if n in integers else None) for n, s in sorted(given.scalars.items())),
            tuple(sorted((given.sizes or {}).items())),
        )
        found = self._calls.get(key)
        if found is None:
            extents, dtypes = arguments.bound(given)
            some = {axis: max(1, extent) for axis, extent in extents.items()}
            device = self.target.of(given.tensors)
            with self.lock:
                compiled = self.compile(some, dtypes, device)
                found = self._calls[key] = Specialization(compiled, 0 in extents.values())
        return found

    def compile(self, extents: Mapping[str, int], dtypes: Mapping[str, str], device: Device) -> Compiled:
        """The plan for a shape. The program runs as written where what was derived of it is not verified; raises
        VerificationError where that is no way out: a schedule was asked for, a rule of the user's own may be wrong, or
        the program as written is not verified either."""
        shape = shape_of(extents, dtypes, device)
        if shape not in self._compiled:
            asked, checks = (self.derived, extents, dtypes, device), self.checks if self.verifies else None
            try:
                self._compiled[shape] = compiler.pipeline(*asked, self.prefer, checks)
            except VerificationError as error:
                if self.prefer is not None or self.derived.scope.added:
                    raise
                try:
                    self._compiled[shape] = compiler.pipeline(*asked, "multi_pass", checks)
                except VerificationError:
                    raise error from None
                self._refused[shape] = error
        return self._compiled[shape]

    def refused(self, compiled: Compiled) -> VerificationError | None:
        """Why the derived form of a shape was not verified, so that the program runs as written; None where it was."""
        return self._refused.get(compiled.shape)

    def certificate(self, compiled: Compiled) -> Certificate:
        """The certificate of a shape, verified now where it was not. Raises VerificationError."""
        return compiler.certify(self.derived, compiled, self.checks)

    def certified(self, compiled: Compiled) -> Certificate | None:
        """The certificate of a shape, where there is one already."""
        return compiler.certified(self.derived, compiled, self.checks)

    def known(self, shape: Shape) -> Compiled:
        """What was compiled for a shape."""
        return self._compiled[shape]

    def planned(self, compiled: Compiled) -> Compiled:
        """The plan that the cost model chooses for a shape, whatever runs now."""
        shape = self.derived, compiled.extents, compiled.dtypes, compiled.device
        return compiler.pipeline(*shape, self.prefer)

    def replace(self, old: Compiled, new: Compiled) -> None:
        """Runs another plan for the shape of an old one from now on."""
        self._compiled[new.shape] = new
        self._runners.pop(id(old), None)
        self._hosts.pop(id(old), None)
        self._calls = {call: found for call, found in self._calls.items() if found.compiled is not old}

    # -- running -----------------------------------------------------------------------------------

    def run(self, special: Specialization, given: Given) -> Results:
        """The outputs by name."""
        compiled = special.compiled
        if special.is_empty:
            return self._unfused(compiled, given)
        found = self._runners.get(id(compiled))
        if found is None:
            with self.lock:
                found = self._runners.get(id(compiled))
                if found is None:
                    runner = self.runner(compiled)
                    try:
                        return runner(
                            given.tensors, given.scalars
                        )  # others wait: it may be compiled for a GPU now
                    finally:
                        self._runners[id(compiled)] = compiled, runner
        return found[1](given.tensors, given.scalars)

    def runner(self, compiled: Compiled, *, wait: bool = False) -> Runner:
        """What runs a compiled shape on tensors and scalars by name; compiling for a GPU waits for the first run. With
        `wait` the first run on a CPU waits for its C++, unless that is switched off."""
        shards = {axis: compiled.chosen.plan.shards for axis, _ in compiled.chosen.nest.shards}
        if compiled.device.kind == "cpu":
            from eqfuse.tile.host import HostProgram

            mode: Mode = "wait" if wait and self.native == "background" else self.native
            host = HostProgram(compiled.tile, lambda: self.tiles(compiled), self.derived.program, mode)
            self._hosts[id(compiled)] = compiled, host
            return lambda tensors, scalars: host(tensors, scalars, compiled.extents, shards)
        from eqfuse.tile.triton.launch import TritonProgram

        launcher = TritonProgram(self.triton(compiled), self.derived.name)
        outputs = [output.name for output in self.derived.program.outputs]
        extents = {**compiled.extents, **shards}

        def run(tensors: Tensors, scalars: Scalars) -> Results:
            made = launcher(**tensors, **scalars, sizes=extents)
            return dict(zip(outputs, made if isinstance(made, tuple) else (made,), strict=True))

        return run

    def tiles(self, compiled: Compiled) -> TileProgram:
        """The tile program of a shape in blocks for native code on a CPU."""
        from eqfuse.tile.native.blocks import native_configs

        chosen, program = compiled.chosen, self.derived.program
        shards = {axis: chosen.plan.shards for axis, _ in chosen.nest.shards}
        sizes = resolve_extents(compiled.tile, compiled.extents, shards)
        configs = native_configs(compiled.tile, chosen.plan.configs, sizes)
        return compiler.lower_nest(chosen.nest, program, compiled.dtypes, configs, compiled.device)

    def host(self, compiled: Compiled) -> HostProgram | None:
        """What runs a shape on a CPU; None before it is called there."""
        found = self._hosts.get(id(compiled))
        return None if found is None else found[1]

    def triton(self, compiled: Compiled) -> str:
        """The Triton module of a compiled shape; of a shape on the CPU, that of the plan for sm_90."""
        if compiled.device.kind == "cpu":
            compiled = self.compile(compiled.extents, compiled.dtypes, device_named("sm_90"))
        return compiler.emit_triton(self.derived, compiled, self.derived.name)

    def _unfused(self, compiled: Compiled, given: Given) -> Results:
        """The unfused program, which is all there is to run where an axis is empty."""
        from eqfuse.terms.interpreter import reference

        program = self.derived.program
        arrays = {name: to_numpy(tensor.cpu()) for name, tensor in given.tensors.items()}
        found = reference(program, arrays, given.scalars, given.sizes)
        found = found if isinstance(found, tuple) else (found,)
        kinds = {buffer.name: buffer.dtype for buffer in compiled.tile.buffers}
        place = place_of(given.tensors)
        return {
            o.name: torch.as_tensor(np.asarray(a)).to(place, TORCH_DTYPES[kinds[o.name] or "f32"])
            for o, a in zip(program.outputs, found, strict=True)
        }
