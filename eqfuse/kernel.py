"""A compiled program: callable on tensors, and open to inspection at every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eqfuse import compiler
from eqfuse.compiler import Compiled, Derived
from eqfuse.errors import BindError, EqfuseError, VerificationError, locate
from eqfuse.extend.define import register
from eqfuse.extract.devices import Device
from eqfuse.loops.plan import Plan, Plans
from eqfuse.loops.printer import show as show_nest
from eqfuse.progress import progress
from eqfuse.proof.derivation import Derivation
from eqfuse.rules.printer import MergeText
from eqfuse.stream.streaming import Streamer, StreamState, stream_of
from eqfuse.terms.arguments import detached
from eqfuse.terms.bounds import check_selections
from eqfuse.terms.folds import folds_in
from eqfuse.terms.integers import fits
from eqfuse.terms.interpreter import check_dense, reference
from eqfuse.terms.parser import axes_of
from eqfuse.terms.registry import REGISTERED, Reduction
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import check_dtypes, program_dtypes, result_dtype
from eqfuse.threads import Lock, undisturbed
from eqfuse.tile.cpu.run import CpuProgram
from eqfuse.tile.printer import show as show_tiles
from eqfuse.tile.triton.launch import TritonProgram
from eqfuse.tune.tuner import Tuner, Tuning
from eqfuse.verify.bound import REQUESTED
from eqfuse.verify.certificate import Certificate

TORCH_DTYPES: Mapping[torch.dtype, str] = {
    torch.float8_e4m3fn: "f8e4m3",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}

Runner = Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], Mapping[str, torch.Tensor]]
"""The outputs by name, from tensors and scalars by name."""


@dataclass
class Kernel:
    """One program, fused. Call it with the program's tensors and scalars by name.

    Plans are chosen per shape and kept; `plan`, `loops`, `tile`, `triton` show the one of the last
    call (before any call: of nominal extents). Several threads may call it at once: what a shape needs is compiled by
    the first. It may be pickled and copied; what runs on a device is made again there.
    """

    derived: Derived
    device: Device
    auto: bool
    prefer: str | None
    verify: bool
    trials: int
    scalars: Mapping[str, float]
    bound: float = REQUESTED
    _compiled: dict[Any, Compiled] = field(default_factory=dict)
    _calls: dict[Any, tuple[Compiled, bool]] = field(default_factory=dict)
    _runners: dict[int, tuple[Compiled, Runner]] = field(default_factory=dict)
    _tunings: dict[Any, Tuning] = field(default_factory=dict)
    _certificates: dict[Any, Certificate] = field(default_factory=dict)
    _refused: dict[Any, VerificationError] = field(default_factory=dict)
    _current: Compiled | None = None
    _stream: Streamer | None = None

    def __post_init__(self) -> None:
        program = self.derived.program
        self._current = self._compile(compiler.nominal_extents(program), program_dtypes(program), self.device)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is loaded on a device, and with the registered reductions that the program uses."""
        with self._lock:
            made: dict[str, Any] = {"_runners": {}, "_stream": None, "reductions": self._reductions()}
            state = {**self.__dict__, **made}
            return {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raises EqfuseError where another reduction is registered under the name of one of the kernel's."""
        for reduction in state.pop("reductions"):
            known = REGISTERED.get(reduction.name, reduction)
            if known != reduction:
                raise EqfuseError(
                    f"the kernel uses a reduction {reduction.name!r} that is not the one registered here",
                    hint="register the same one, or load the kernel before another one is registered",
                )
            register(reduction)
        self.__dict__.update(state)

    def _reductions(self) -> tuple[Reduction, ...]:
        exprs = [output.expr for output in self.derived.program.outputs]
        folds = folds_in(*exprs)
        return tuple(reduction for reduction in REGISTERED.values() if reduction.fold in folds)

    @property
    def _lock(self) -> Lock:
        """Held by whoever compiles, or reads what compiling adds to."""
        return self.derived.lock

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **values: Any) -> Any:
        """The outputs, for torch or numpy tensors and numbers given by name: one tensor, or a tuple in
        program order, of the kind that came in. `sizes` gives axes that no tensor determines.

        Tensors may be non-contiguous or broadcast. An empty reduced axis gives what the unfused
        program gives: every reduction its identity. Raises BindError or TypeCheckError for what does not fit,
        and BindError for tensors that require grad (under `torch.no_grad()` or detached they do not) or are
        under a transform of `torch.func`: kernels have no derivatives.
        """
        program = self.derived.program
        if unnamed:
            raise self._by_name(len(unnamed))
        with undisturbed():
            tensors, scalars, was_numpy = self._sorted(values)
            compiled, is_empty = self._bound(tensors, scalars, sizes)
            self._current = compiled
            results: Mapping[str, torch.Tensor]
            if is_empty:
                results = self._unfused(compiled, tensors, scalars, sizes)
            else:
                results = self._run(compiled, tensors, scalars)
            made = [results[output.name] for output in program.outputs]
            ordered: tuple[Any, ...] = tuple(map(_to_numpy, made)) if was_numpy else tuple(made)
            return ordered[0] if len(ordered) == 1 else ordered

    def tune(
        self,
        /,
        *unnamed: Any,
        seconds: float = 60.0,
        plans: int = 32,
        again: bool = False,
        sizes: Mapping[str, int] | None = None,
        **values: Any,
    ) -> Tuning:
        """Searches for the fastest plan for these tensors and scalars, on the device that they are on; later calls
        of their shapes run it. Tries other schedules, then plans one step away from the best so far: at most
        `plans`, none that would end after `seconds`. Only a plan that computes what the chosen one does may win.

        The winner is kept in `$XDG_CACHE_HOME/eqfuse/tuned`, by program, dtypes, sizes, device and versions, and
        taken from there at the next request, with nothing timed unless `again`.
        """
        if unnamed:
            raise self._by_name(len(unnamed))
        for name in ("seconds", "plans", "again"):
            if name in self._inputs:
                message = f"tune takes {name!r} for its own limit, not for the program's input"
                raise EqfuseError(message, hint="give the input another name")
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise EqfuseError(
                f"seconds is {seconds!r}", hint="give a positive number: the limit of the search"
            )
        if isinstance(plans, bool) or not isinstance(plans, int) or plans < 1:
            raise EqfuseError(f"plans is {plans!r}", hint="give a positive integer: the limit of the search")
        with self._lock, undisturbed():
            tensors, scalars, _ = self._sorted(values)
            compiled, is_empty = self._bound(tensors, scalars, sizes)
            if is_empty:
                raise EqfuseError(
                    "an axis is empty: there is nothing to time", hint="tune with other tensors"
                )
            key = _key(compiled.extents, compiled.dtypes, compiled.device)
            if again or key not in self._tunings:
                base = compiler.compile_for(
                    self.derived, compiled.extents, compiled.dtypes, compiled.device, self.prefer
                )
                place = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))

                def start(candidate: Compiled) -> Callable[[], Mapping[str, torch.Tensor]]:
                    runner = self._runner(candidate)
                    return lambda: runner(tensors, scalars)

                tuner = Tuner(self.derived, base, self.prefer, self.scalars, start, place)
                with progress("tune"):
                    tuned, tuning = (None if again else tuner.recall()) or tuner.search(seconds, plans)
                if self.verify:
                    self._certify(tuned)
                self._compiled[key], self._tunings[key] = tuned, tuning
                self._runners.pop(id(compiled), None)
                self._calls = {call: found for call, found in self._calls.items() if found[0] is not compiled}
            self._current = self._compiled[key]
            return self._tunings[key]

    # -- streaming ---------------------------------------------------------------------------------

    @property
    def stream(self) -> Streamer:
        """The derived merge as three programs: `stream.stream.update`, `.combine` and `.finish` are their texts.

        Raises EqfuseError where the program has no fused merge over one axis that its outputs do not have.
        """
        with self._lock:
            if self._stream is None:
                self._stream = self._streamer()
            return self._stream

    def _streamer(self) -> Streamer:
        program = self.derived.program
        merged = next(plan for plan in (self.plan, *self.plans()) if plan.form != "written")
        found = stream_of(program, merged.kernels, self.why_not)

        def compiled(text: str) -> Kernel:
            with self.derived.scope.entered():
                derived = compiler.derive(
                    text, None, program.strict_casts, assume_finite=program.assume_finite, made=True
                )
            return Kernel(derived, self.device, self.auto, None, self.verify, self.trials, {}, self.bound)

        def extents(
            values: Mapping[str, Any], sizes: Mapping[str, int] | None
        ) -> tuple[Mapping[str, int], torch.device, bool]:
            tensors, scalars, was_numpy = self._sorted(values)
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            place = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
            return bind(program, shapes, sizes, scalars), place, was_numpy

        return Streamer(found, compiled, extents, self._lock)

    def init(self, start: int = 0, total: int | None = None) -> StreamState:
        """A stream that has seen nothing, the first position of which is `start`. `total` is the extent of the whole
        axis, which programs that read it (`j <= i + N(j) - N(i)`) need before its end."""
        return self.stream.init(start, total)

    def update(
        self, state: StreamState, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **chunk: Any
    ) -> StreamState:
        """The state once it has also seen a chunk: the program's tensors, of any number of positions of the
        streamed axis. `state` itself stays as it is."""
        if unnamed:
            raise self._by_name(len(unnamed))
        with undisturbed():
            return self.stream.update(state, chunk, sizes)

    def combine(self, left: StreamState, right: StreamState) -> StreamState:
        """The state of two adjacent parts of the axis, seen apart. Raises EqfuseError where the program reads
        positions and the parts are not adjacent."""
        with undisturbed():
            return self.stream.combine(left, right)

    def finish(self, state: StreamState, /, *unnamed: Any, **values: Any) -> Any:
        """The outputs for what a stream has seen, as a call on all of it gives them; `values` are the tensors
        and scalars that the program reads after its reductions. The state may be updated further."""
        if unnamed:
            raise self._by_name(len(unnamed))
        with undisturbed():
            program = self.derived.program
            made = dict(zip(self.stream.stream.outputs, self.stream.finish(state, values), strict=True))
            if state.start == state.stop:
                axes = axes_of(program.outputs)
                extents = {axis: int(program.domains.get(axis, axis) != state.axis) for axis in axes}
                check_selections(program, extents, {})
            ordered = [made[output.name] for output in program.outputs]
            kinds = {name: dtype for dtype, name in TORCH_DTYPES.items()}
            dtypes = program_dtypes(program) | {n: TORCH_DTYPES[dtype] for n, dtype in state.dtypes.items()}
            typed = [
                value.to(kinds[output.dtype or result_dtype(output.expr, dtypes)])
                if value.is_floating_point()
                else value
                for output, value in zip(program.outputs, ordered, strict=True)
            ]
            results: tuple[Any, ...] = tuple(map(_to_numpy, typed)) if state.numpy else tuple(typed)
            return results[0] if len(results) == 1 else results

    def _bound(
        self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any], sizes: Mapping[str, int] | None
    ) -> tuple[Compiled, bool]:
        """What to run for these arguments, checked at the first call with their like, and whether an axis is
        empty: then what is compiled is for one position of it."""
        program = self.derived.program
        if sizes is not None and not isinstance(sizes, Mapping):
            raise BindError(f"sizes is a {type(sizes).__name__}", hint='pass a mapping: sizes={"i": 128}')
        key = (
            tuple((n, t.shape, t.dtype, t.device) for n, t in sorted(tensors.items())),
            tuple((n, s if n in program.integers else None) for n, s in sorted(scalars.items())),
            tuple(sorted((sizes or {}).items())),
        )
        found = self._calls.get(key)
        if found is None:
            extents = bind(program, {n: tuple(t.shape) for n, t in tensors.items()}, sizes, scalars)
            check_selections(program, extents, scalars)
            dtypes = check_dtypes(program, {name: _dtype_name(name, t) for name, t in tensors.items()})
            some = {axis: max(1, extent) for axis, extent in extents.items()}
            device = self._device_of(tensors)
            with self._lock:
                found = self._calls[key] = self._compile(some, dtypes, device), 0 in extents.values()
        return found

    @property
    def _inputs(self) -> tuple[str, ...]:
        """Names of the program's tensors and scalars."""
        program = self.derived.program
        return (*(tensor.name for tensor in program.tensors), *program.scalars)

    def _by_name(self, count: int) -> BindError:
        given = f"{count} argument{'s' * (count > 1)} without a name"
        names = ", ".join(f"{name}=..." for name in self._inputs)
        return BindError(
            given, hint=f"pass each by its name: {names}" if names else "the program has no inputs"
        )

    def _sorted(self, values: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any], bool]:
        """Tensors (as torch tensors) and scalars apart; whether the tensors came as numpy arrays."""
        names = {t.name for t in self.derived.program.tensors}
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                check_dense(name, value)
            if isinstance(value, torch.Tensor) and (name in names or value.ndim):
                tensors[name], kinds[name] = detached(name, value, self.derived.program.source), "torch"
            elif isinstance(value, np.ndarray) and (name in names or value.ndim):
                tensors[name], kinds[name] = _from_numpy(name, value), "numpy"
            elif name in names:
                raise BindError(
                    f"{name!r} is a {type(value).__name__}, not a tensor",
                    source=self.derived.program.source,
                    span=locate(self.derived.program.source, name),
                    hint="pass a torch tensor or a numpy array",
                )
            else:
                scalars[name] = self._number(name, value)
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
            raise BindError(f"torch tensors and numpy arrays are mixed: {listed}", hint="pass one kind")
        return tensors, scalars, "numpy" in kinds.values()

    def _number(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = detached(name, value, self.derived.program.source)
        plain = value.item() if isinstance(value, torch.Tensor | np.generic | np.ndarray) else value
        if not isinstance(plain, int | float):
            raise BindError(
                f"{name!r} is a {type(value).__name__}, not a number",
                source=self.derived.program.source,
                span=locate(self.derived.program.source, name),
                hint="scalars are integers and floats",
            )
        if not fits(plain):
            raise BindError(
                f"{name!r} does not fit 64 bits",
                source=self.derived.program.source,
                span=locate(self.derived.program.source, name),
                hint="give a float, as 1e30",
            )
        return plain

    def _device_of(self, tensors: Mapping[str, torch.Tensor]) -> Device:
        places = {name: tensor.device for name, tensor in tensors.items()}
        if len(set(places.values())) > 1:
            listed = ", ".join(f"{name} on {place}" for name, place in places.items())
            raise BindError(f"tensors are on different devices: {listed}", hint="move them to one device")
        for name, place in places.items():
            if place.type not in ("cpu", "cuda"):
                raise BindError(
                    f"{name!r} is on device {str(place)!r}, where kernels do not run",
                    hint="move the tensors to the CPU or to a CUDA or ROCm device",
                )
        on_gpu = any(place.type == "cuda" for place in places.values())
        if self.auto:
            return gpu_device() if on_gpu else compiler.device_named("cpu")
        if on_gpu != (self.device.kind == "gpu"):
            where = "the GPU" if on_gpu else "the CPU"
            raise BindError(
                f"the tensors are on {where}, the kernel was compiled for {self.device.name}",
                hint='move the tensors, or compile with target="auto"',
            )
        return self.device

    def _unfused(
        self,
        compiled: Compiled,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        sizes: Mapping[str, int] | None,
    ) -> dict[str, torch.Tensor]:
        """The unfused program, which is all there is to run where an axis is empty."""
        program = self.derived.program
        arrays = {n: _to_numpy(t.cpu()) for n, t in tensors.items()}
        found = reference(program, arrays, scalars, sizes)
        found = found if isinstance(found, tuple) else (found,)
        kinds = {b.name: b.dtype for b in compiled.tile.buffers}
        names = {v: k for k, v in TORCH_DTYPES.items()}
        place = next((t.device for t in tensors.values()), torch.device("cpu"))
        return {
            o.name: torch.as_tensor(np.asarray(a)).to(place, names[kinds[o.name] or "f32"])
            for o, a in zip(program.outputs, found, strict=True)
        }

    def _run(
        self, compiled: Compiled, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]
    ) -> Mapping[str, torch.Tensor]:
        found = self._runners.get(id(compiled))
        if found is None:
            with self._lock:
                found = self._runners.get(id(compiled))
                if found is None:
                    runner = self._runner(compiled)
                    try:
                        return runner(tensors, scalars)  # others wait: it may be compiled for a GPU now
                    finally:
                        self._runners[id(compiled)] = compiled, runner
        return found[1](tensors, scalars)

    def _runner(self, compiled: Compiled) -> Runner:
        """What runs a compiled shape on tensors and scalars by name; compiling for a GPU waits for the first run."""
        shards = {axis: compiled.chosen.plan.shards for axis, _ in compiled.chosen.nest.shards}
        if compiled.device.kind == "cpu":
            program = CpuProgram(compiled.tile, self.derived.program)
            return lambda tensors, scalars: program(tensors, scalars, compiled.extents, shards)
        launcher = TritonProgram(compiler.emit_triton(self.derived, compiled, self.name), self.name)
        outputs = [output.name for output in self.derived.program.outputs]
        extents = {**compiled.extents, **shards}

        def run(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> dict[str, torch.Tensor]:
            made = launcher(**tensors, **scalars, sizes=extents)
            return dict(zip(outputs, made if isinstance(made, tuple) else (made,), strict=True))

        return run

    def _compile(self, extents: Mapping[str, int], dtypes: Mapping[str, str], device: Device) -> Compiled:
        key = _key(extents, dtypes, device)
        if key not in self._compiled:
            compiled = compiler.compile_for(self.derived, extents, dtypes, device, self.prefer)
            if self.verify:
                try:
                    self._certify(compiled)
                except VerificationError as error:
                    compiled = self._unmerged(extents, dtypes, device, error)
                    self._refused[key] = error
            self._compiled[key] = compiled
        return self._compiled[key]

    def _unmerged(
        self, extents: Mapping[str, int], dtypes: Mapping[str, str], device: Device, error: VerificationError
    ) -> Compiled:
        """The program as written, since what was derived of it is not verified. Raises `error` where that is no way out:
        a schedule was asked for, a rule of the user's own may be wrong, or the program as written is not verified."""
        if self.prefer is not None or self.derived.scope.added:
            raise error
        compiled = compiler.compile_for(self.derived, extents, dtypes, device, "multi_pass")
        try:
            self._certify(compiled)
        except VerificationError:
            raise error from None
        return compiled

    def _certify(self, compiled: Compiled) -> Certificate:
        key = (compiled.chosen.nest, compiled.device.kind)
        found = self._certificates.get(key)
        if found is None or not set(compiled.tile.passes) <= set(found.passes):
            self._certificates[key] = compiler.verify(
                self.derived,
                compiled.chosen.nest,
                compiled.dtypes,
                compiled.device,
                plan=compiled.chosen.plan,
                trials=self.trials,
                scalars=self.scalars,
                bound=self.bound,
            )
        return self._certificates[key]

    # -- inspection --------------------------------------------------------------------------------

    @property
    def compiled(self) -> Compiled:
        """Everything about the shape of the last call."""
        assert self._current is not None
        return self._current

    @property
    def name(self) -> str:
        """A name for the emitted function: the outputs'."""
        return "fused_" + "_".join(output.name for output in self.derived.program.outputs)

    @property
    def plan(self) -> Plan:
        """The chosen plan: `.schedule`, `.cost` (predicted seconds, by term), `.kernels`, `.configs`, `.shards`, and
        `.measured`, the seconds of a call where `tune` has found it."""
        return self.compiled.chosen.plan

    def plans(self) -> Plans:
        """Every candidate for the shape, cheapest first; those that `tune` has timed before the others."""
        return Plans(candidate.plan for candidate in self.compiled.candidates)

    @property
    def merge(self) -> MergeText:
        """The derived merge of every group of reductions; printable."""
        groups = dict.fromkeys(g.group for k in self.plan.kernels for g in k.groups)
        return MergeText(tuple(groups))

    @property
    def loops(self) -> str:
        """The loop nest of the chosen plan."""
        return show_nest(self.compiled.chosen.nest)

    @property
    def tile(self) -> str:
        """The tile program of the chosen plan."""
        return show_tiles(self.compiled.tile)

    @property
    def triton(self) -> str:
        """A Python module that needs torch and triton alone; its launcher is named after the outputs.

        A kernel for the CPU gives the module for sm_90 at the shape of the last call, with that device's plan.
        """
        compiled = self.compiled
        with self._lock:
            if compiled.device.kind == "cpu":
                compiled = self._compile(compiled.extents, compiled.dtypes, compiler.device_named("sm_90"))
            return compiler.emit_triton(self.derived, compiled, self.name)

    @property
    def certificate(self) -> Certificate:
        """What was verified, how, and what that does not cover. Verifies now if compilation did not."""
        with self._lock:
            return self._certify(self.compiled)

    @property
    def certified(self) -> Certificate | None:
        """The certificate, where there is one already."""
        return self._certificates.get((self.compiled.chosen.nest, self.compiled.device.kind))

    @property
    def was_called(self) -> bool:
        """Whether the sizes of what is shown are those of a call, or of a search."""
        return bool(self._calls or self._tunings)

    @property
    def derivation(self) -> Derivation:
        """How the kernel follows from the program, step by step; recorded at the first request."""
        with self._lock:
            return compiler.derivation(self.derived, self.plan, self.scalars)

    @property
    def rule_counts(self) -> Mapping[str, int]:
        """How often each rule has matched so far, shipped or added, most often first; rules that never did are absent."""
        with self._lock:
            matches = dict(self.derived.report.matches)
        return {
            name: matches[name]
            for name in sorted(matches, key=lambda name: (-matches[name], name))
            if matches[name]
        }

    @property
    def stats(self) -> Mapping[str, Any]:
        """enodes, rounds, saturated, rule matches, and milliseconds per stage so far."""
        with self._lock:
            report = self.derived.report
            return {
                "enodes": report.enodes,
                "rounds": report.rounds,
                "saturated": report.saturated,
                "matches": dict(report.matches),
                "ms": dict(self.derived.timings.ms),
            }

    def explain(self, format: str = "text", detail: str = "short") -> str:
        """The derivation, why anything is not fused, and why this plan: as "text", "latex", one "html" page, or
        the derivation alone as "json". `detail="full"` has every step and why each condition holds.

        Raises EqfuseError for an unknown format or detail.
        """
        from eqfuse.explain.explanation import explain  # templates are for those who ask

        with self._lock, self.derived.scope.entered():
            return explain(self, format, detail)

    @property
    def refused(self) -> VerificationError | None:
        """Why the derived form of the last call's shape was not verified, so that the program runs as written; None where
        it was."""
        compiled = self.compiled
        return self._refused.get(_key(compiled.extents, compiled.dtypes, compiled.device))

    def why_not(self) -> tuple[str, ...]:
        """Why reductions could not be fused: for each the factor or condition in the way, its place in the source and
        the rule that would have helped; empty where everything is."""
        from eqfuse.explain.explanation import why_not

        with self._lock, self.derived.scope.entered():
            return tuple(map(str, why_not(self)))

    def _repr_html_(self) -> str:
        from eqfuse.explain.notebook import kernel_html

        return kernel_html(self)

    def __repr__(self) -> str:
        return f"<eqfuse.Kernel {self.name}: {self.plan.schedule} on {self.compiled.device.name}>"


def _key(extents: Mapping[str, int], dtypes: Mapping[str, str], device: Device) -> tuple[Any, ...]:
    """What a plan is chosen for."""
    return device.name, tuple(sorted(extents.items())), tuple(sorted(dtypes.items()))


def gpu_device() -> Device:
    """The description of the GPU that is here."""
    major, minor = torch.cuda.get_device_capability()
    if torch.version.hip:
        return compiler.device_named("gfx942")
    if (major, minor) == (9, 0):
        return compiler.device_named("h200" if "H200" in torch.cuda.get_device_name() else "sm_90")
    return compiler.device_named("sm_100" if major >= 10 else "sm_80")


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    found = TORCH_DTYPES.get(tensor.dtype)
    if found is None:
        raise BindError(
            f"{name!r} has dtype {tensor.dtype}, which the language does not have",
            hint=f"convert it to one of {', '.join(TORCH_DTYPES.values())}",
        )
    return found


def _from_numpy(name: str, array: np.ndarray) -> torch.Tensor:
    """A view of the array; a copy where torch has no such view (negative strides, foreign byte order)."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    if array.dtype.kind in "fiub" and not array.flags.writeable:
        array = np.asarray(_Lent(array))
    try:
        return torch.as_tensor(array)
    except TypeError:
        raise BindError(
            f"{name!r} has dtype {array.dtype}, which the language does not have",
            hint=f"convert it to one of {', '.join(TORCH_DTYPES.values())}",
        ) from None


class _Lent:
    """A read-only array as one that torch takes without a warning: a kernel only reads its inputs."""

    def __init__(self, array: np.ndarray) -> None:
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
        self._array = array


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """numpy has no bfloat16 and no float8: those become float32."""
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tensor = tensor.float()
    result: np.ndarray = tensor.numpy()
    return result


__all__ = ["EqfuseError", "Kernel"]
