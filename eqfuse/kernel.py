"""What a user holds: a compiled program, callable on tensors, and open to inspection at every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from torch.compiler import is_dynamo_compiling

from eqfuse import compiler
from eqfuse.arguments import Arguments, CallKey, CallLike, Given, call_key
from eqfuse.calls.call_cache import CachedCall, Calls
from eqfuse.calls.constants import Constants
from eqfuse.calls.regions import Region
from eqfuse.calls.routing import Routes
from eqfuse.calls.runners import Results, Runners
from eqfuse.calls.specialization import Specialization, Specializations
from eqfuse.certification import Checks
from eqfuse.compiled import Asked, Compiled, Shape
from eqfuse.derived import Derived
from eqfuse.devices import Target, place_of
from eqfuse.errors import EqfuseError, ScheduleError, VerificationError
from eqfuse.extend.define import admit, registered_in
from eqfuse.extract.call_estimate import CallEstimate
from eqfuse.extract.devices import Device
from eqfuse.limits import OverLimit
from eqfuse.loops.nodes import Nest
from eqfuse.loops.plan import KernelPlan, Plan
from eqfuse.loops.plans import Plans
from eqfuse.lowered import native_source
from eqfuse.operator.content import Saving, enrol, written
from eqfuse.operator.library import called, is_recorded, recorded
from eqfuse.operator.shapes import empty_outputs, extents
from eqfuse.rules.printer import MergeText
from eqfuse.terms.arguments import is_transforming, ordinary_tensors, wants_gradient
from eqfuse.terms.collapse_axes import Layouts
from eqfuse.terms.nodes import Output, Program
from eqfuse.terms.scalars import as_elements, given_as_elements, in_tensors
from eqfuse.terms.split_axes import split_axes
from eqfuse.terms.types import program_dtypes
from eqfuse.threads import Lock, deep, undisturbed
from eqfuse.tile.modes import mode_named
from eqfuse.tile.nodes import TileProgram
from eqfuse.verify.certificate import ALL_UNTAKEN, REQUESTED, Certificate

if TYPE_CHECKING:  # loaded by those who ask: every start would wait for them
    import torch

    from eqfuse.calls.launches import Launch
    from eqfuse.differentiate.autograd import Backward, Gradients
    from eqfuse.differentiate.divide import ChunkedCall, Chunker
    from eqfuse.explain.report import Listings, Report
    from eqfuse.proof.derivation import Derivation
    from eqfuse.stream.aggregate import Aggregate
    from eqfuse.stream.streamer import Streamer, StreamState
    from eqfuse.tile.roles.nodes import RolesProgram
    from eqfuse.tune.tuner import Limits, Tuning


Shown = TypeVar("Shown")
Rest = ParamSpec("Rest")


def _of_last_call(
    read: Callable[Concatenate[Kernel, Rest], Shown],
) -> Callable[Concatenate[Kernel, Rest], Shown]:
    """What tells of the kernel that ran the last call: this one, or that of views."""

    @wraps(read)
    def shown(self: Kernel, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Shown:
        with deep():
            return read(self._shown, *args, **kwargs)

    return shown


@dataclass
class Kernel:
    """One program, fused. Call it with the program's tensors and scalars by name.

    The plan is chosen on each call from the shapes of the tensors, once per shape. `plan`, `loops`, `tile` and `triton`
    describe the most recent call (before any: a call of nominal extents). Several threads may call it at once: what a
    shape needs is compiled by the first. It may be pickled and copied; what runs on a device is made again there.

    `device` is what it is planned for, by itself (`auto`) that of the tensors, and `derived` what of its program depends on no size. `scalars`, `prefer`, `verify`,
    `trials`, `bound`, `native`, `allow` and `visible` are as `eq.compile` was given them. Where `divides`, a call may run the program with an axis in chunks.
    """

    derived: Derived
    device: Device
    auto: bool
    prefer: str | None
    verify: bool | Literal["again"]
    trials: int
    scalars: Mapping[str, float]
    bound: float = REQUESTED
    native: str | None = None
    allow: tuple[str, ...] = ()
    visible: bool = False
    divides: bool = True
    first: Mapping[str, int] | None = None
    """The sizes that a plan is made for before any call; nominal ones by default."""
    at_once: bool = True
    """Whether that plan is made and verified now, or where it is asked for before any call: where a call follows, as one of a gradient does, it is not."""
    constants: tuple[str, ...] = ()
    """Tensors of which what is made of them alone is computed once for each value."""
    kept: tuple[str, ...] = ()
    """What this kernel's program reads that another one makes of constants, as text."""

    def __post_init__(self) -> None:
        checks = Checks(self.trials, self.bound, self.scalars, self.verify == "again", self.allow)
        target = Target(self.device, self.auto)
        self._shapes = Specializations(self.derived, target, self.prefer, bool(self.verify), checks)
        self._tunings: dict[Shape, Tuning] = {}
        self._stream: Streamer | None = None
        self._gradients: Gradients | None = None
        self._extents: Mapping[str, int] = self.first or compiler.nominal_extents(self.program)
        if self.at_once:
            self._current = self._before_calls()
        self._joints: dict[Layouts, Kernel | None] = {}
        self._elements: dict[tuple[str, ...], Kernel] = {}
        self._start()
        self.content = self._written()
        enrol(self)

    def _before_calls(self) -> Compiled:
        return self._shapes.compile(self._extents, program_dtypes(self.program), self.device)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Compiled:
            """The plan of the last call is, before any, one for the first sizes."""
            if name != "_current":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            with self._lock:
                return self.__dict__.setdefault(name, self._before_calls())

    def _start(self) -> None:
        """Resets the caches of calls and of what is loaded on devices."""
        self._calls = Calls(Runners(self._shapes, mode_named(self.native)))
        is_divided = self.divides and self.prefer is None and not self.program.in_order
        chunker = self._chunker if is_divided else None
        self._sorted: Kernel | None = None
        self._in_chunks: Kernel | None = None
        self._routes = Routes(
            self._calls, self._sorted_routes, self._calls_in_chunks, self._joint_calls, chunker
        )
        self._constants = (
            Constants(self.program, self.constants, self._like, self._is_equal)
            if self.constants and not self.program.in_order
            else None
        )

    def _is_equal(self, order: tuple[Output, ...]) -> bool:
        """Whether the program is another one with these outputs, where that is to be verified."""
        from eqfuse.verify.equivalence import equivalent  # loaded by those who ask

        if not self.verify:
            return True
        limits: dict[str, Any] = {"trials": self.trials, "bound": self.bound, "scalars": self.scalars}
        other = replace(self.program, outputs=order)
        return equivalent(self.program, other, allow="untaken", **limits).ok

    def _chunker(self) -> Chunker:
        from eqfuse.differentiate.divide import Chunker

        return Chunker(
            self.program, self.scalars, self.bound, lambda text: replace(self._like(text), divides=False)
        )

    def _sorted_routes(self) -> Routes | None:
        """Routes of the program of sorted positions."""
        with self._lock:
            if self._sorted is None:
                self._sorted = self._made_of(compiler.of_segments)
        return None if self._sorted is None else self._sorted._routes

    def _calls_in_chunks(self) -> Calls | None:
        """Calls of the program with axes in chunks."""
        with self._lock:
            if self._in_chunks is None:
                self._in_chunks = self._made_of(compiler.of_chunks)
        return None if self._in_chunks is None else self._in_chunks._calls

    def _made_of(self, make: Callable[[Derived], Derived | None]) -> Kernel | None:
        """The kernel of a program made of this one; None where there is none, or this one was made so itself."""
        derived = None if self.derived.views is not None else make(self.derived)
        if derived is None:
            return None
        return replace(self, derived=derived, prefer=None, first=None, at_once=False, constants=())

    def _joint_calls(self, layouts: Layouts, extents: Mapping[str, int]) -> Calls | None:
        """Calls of the program of views of tensors that lie so; its first plan is made for these extents."""
        joint = self._of_views(layouts, extents)
        return None if joint is None else joint._calls

    @property
    def joint(self) -> Kernel | None:
        """The kernel of the program with adjacent axes collapsed (`k.joint.program`), which runs calls where tensors lie so:
        `plan` and the like describe it after such a call. None where no axes are always together."""
        return self._of_views((), self._extents)

    def _of_views(self, layouts: Layouts, extents: Mapping[str, int]) -> Kernel | None:
        """The kernel of the program of views of tensors that lie so; None where that is the program itself."""
        if self.derived.views is not None and self.derived.views.shaped is not None:
            return None
        with self._lock:
            if layouts not in self._joints:
                derived, joint = compiler.of_views(self.derived, layouts), None
                if derived is not None and derived.collapsed is not None:
                    first = derived.collapsed.extents(extents)
                    joint = replace(
                        self, derived=derived, prefer=None, first=first, at_once=False, constants=()
                    )
                self._joints[layouts] = joint
        return self._joints[layouts]

    @property
    def _made_of_views(self) -> tuple[Kernel, ...]:
        joints = [joint for joint in self._joints.values() if joint is not None]
        of_segments = () if self._sorted is None else (self._sorted, *self._sorted._made_of_views)
        in_chunks = () if self._in_chunks is None else (self._in_chunks,)
        return (*joints, *of_segments, *in_chunks)

    @property
    def _shown(self) -> Kernel:
        """The kernel that ran the last call."""
        if self._constants is not None and self._constants.latest is not None:
            return self._constants.latest.rest.kernel._shown  # type: ignore[attr-defined, no-any-return]
        ran, own = self._current.views, self.derived.views
        of_elements = (
            each for each in self._elements.values() if each.__dict__.get("_current") is self._current
        )
        other: Kernel | None = next(of_elements, None)
        if other is not None:
            return other._shown
        if ran is not None and ran.segments is not None and own is None:
            other = self._sorted
        elif ran is not None and ran.split is not None:
            other = self._in_chunks
        elif ran is not None and ran.collapsed is not None:
            other = self._joints.get(ran.collapsed.layouts)
        if other is None or other is self:
            return self
        other._current = self._current
        return other._shown

    @property
    def _general(self) -> Compiled:
        """The plan of the program as it was given, for the sizes of the last call."""
        found = self._current
        if found.views == self.derived.views:
            return found
        own = program_dtypes(self.program)
        dtypes = {**own, **{name: dtype for name, dtype in found.dtypes.items() if name in own}}
        return self._shapes.compile(self._extents, dtypes, found.device)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is loaded on a device, and with the registered reductions that the program uses."""
        with self._lock:
            made = {
                "_shapes": copy(self._shapes),
                "_tunings": dict(self._tunings),
                "_stream": None,
                "_gradients": None,
                "_joints": {},
                "_elements": {},
                "_current": self._general,
                "_calls": None,
                "_routes": None,
                "_sorted": None,
                "_in_chunks": None,
                "_constants": None,
            }
            exprs = (output.expr for output in self.program.outputs)
            return {**self.__dict__, **made, "reductions": registered_in(*exprs)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raises EqfuseError where another reduction is registered under the name of one of the kernel's."""
        for reduction in state.pop("reductions"):
            admit(reduction)
        self.__dict__.update(state)
        self._start()
        enrol(self)

    @property
    def program(self) -> Program:
        """The program that was compiled."""
        return self.derived.program

    @property
    def _lock(self) -> Lock:
        """Held by whoever compiles, or reads what compiling adds to."""
        return self.derived.lock

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **values: Any) -> Any:
        """The outputs, for torch or numpy tensors and numbers given by name: one tensor, or a tuple in
        program order, of the kind that came in. `sizes` gives axes that no tensor determines.

        Tensors may be non-contiguous or broadcast. An empty reduced axis gives what the unfused
        program gives: every reduction its identity. Raises BindError or TypeCheckError for what does not fit.

        For tensors that require grad, and under `torch.func.grad` and `vjp`, the result is differentiable: `backward`
        is the gradient's kernel. Where torch compiles, exports, batches (`torch.vmap`), traces or pushes tangents through the call
        (`torch.func.jvp`), or tensors hold no numbers, it is the operator `eqfuse::call` (docs/pytorch.md).
        """
        if is_dynamo_compiling():
            Arguments(self.program).all_named(unnamed)
            return called(self.content, values, sizes)
        like: CallLike | None = None
        if self._constants is not None and not unnamed:
            like = call_key(values, sizes)
            key = None if like is None or like.wants_gradient else like.key
            made = self._constants.call(key, self._shapes.arguments, values, sizes)
            if made is not None:
                return made
        quick = self._calls.quick
        if quick is not None and not unnamed and (made := quick[0](values, sizes)) is not None:
            return self._ran(quick[1], made)
        if like is None and not unnamed:
            like = call_key(values, sizes)
        key, addresses, is_differentiable = like or (None, [], False)
        if key is not None:
            cached = self._calls.cached(key, values, sizes)
            if cached is not None and (made := cached.call(values, addresses)) is not None:
                return self._ran(cached, made)
        arguments = self._shapes.arguments
        is_plain = key is not None and not is_differentiable and all(addresses)
        plain = arguments.plain(values, sizes) if is_plain else None
        if plain is not None:
            with undisturbed():
                return self._run(key, plain, addresses, values)
        if key is None and not unnamed and (held := in_tensors(self.program, values)):
            return self._of_elements(held, values, sizes)
        beside = is_transforming()
        arguments.all_named(unnamed)
        if is_recorded(values):
            return recorded(self.content, values, sizes)
        if wants_gradient(values):
            from eqfuse.differentiate.autograd import DifferentiableCall

            with self._lock:
                gradients = self._differentiated
            call = DifferentiableCall.of(self, gradients, values, sizes)
            made = call(values)
            if key is not None:
                self._calls.keep(key, CachedCall(None, call, {}))
            return made
        with undisturbed(), ordinary_tensors() if beside else nullcontext():
            return self._run(key, arguments.given(values, sizes, unnamed), addresses, values)

    def _of_elements(
        self, names: tuple[str, ...], values: Mapping[str, Any], sizes: Mapping[str, int] | None
    ) -> Any:
        """The outputs of a call whose scalars of these names are in tensors: of the program that reads them there."""
        kernel = self._by_elements(names)
        made = kernel(**given_as_elements(self.program, values, names), sizes=sizes)
        self._current, self._extents = kernel._current, kernel._extents
        return made

    def _by_elements(self, names: tuple[str, ...]) -> Kernel:
        """The kernel of the program in which these scalars are elements of tensors."""
        with self._lock, self.derived.scope.entered():
            if names not in self._elements:
                source = as_elements(self.program.source, names)
                derived = compiler.derive_like(self.program, source, self.scalars)
                self._elements[names] = replace(self, derived=derived, first=None, at_once=False)
            return self._elements[names]

    def _ran(self, cached: CachedCall, made: Any) -> Any:
        """What a call of a cached kind has made, whose plan is the one to show."""
        if cached.compiled is not None:
            self._current, self._extents = cached.compiled, cached.extents
        return made

    @deep()
    def _run(self, key: CallKey | None, given: Given, addresses: list[int], values: Mapping[str, Any]) -> Any:
        """The outputs of a call that no cached one is like."""
        routed = self._routes.routed(given)
        self._current, self._extents = routed.special.compiled, routed.extents
        return self._routes.run(key, routed, given, addresses, values)

    def cached(self, values: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> CachedCall | None:
        """What runs all calls like one that has run: `run_cached` takes it. None where they are looked at each time."""
        like = call_key(values, sizes)
        if like is None or like.wants_gradient:
            return None
        cached = self._calls.cached(like.key, values, sizes)
        return cached if cached is not None and cached.lasts else None

    def run_cached(self, cached: CachedCall, values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
        """The outputs of a call of a cached kind, from its values by name and the addresses of its tensors; None where it has to
        be looked at once more."""
        made = cached.call(values, addresses) if cached.lasts else None
        return None if made is None else self._ran(cached, made)

    @property
    def chunks(self) -> ChunkedCall | None:
        """How the last call was divided into chunks of an axis, so that its kernels store less for each other; None where it
        ran as a whole. A backward's: `k.backward.chunks`."""
        return self._routes.latest

    def make_ready(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], sizes: Mapping[str, int] | None
    ) -> None:
        """Plans and verifies what a call of these tensors and numbers will run, and begins to compile it. The tensors may be absent
        (`terms.arguments.Absent`); nothing runs."""
        if held := in_tensors(self.program, tensors):
            given = given_as_elements(self.program, tensors, held)
            self._by_elements(held).make_ready(given, numbers, sizes)
            return
        with deep(), undisturbed():
            self._routes.routed(Given(tensors, numbers, sizes, numpy=False))

    def estimate(self, values: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> CallEstimate:
        """What a call of these tensors and numbers would take: predicted seconds, and the bytes of what its kernels would make
        for each other. The plan is chosen as the call would choose it; nothing runs."""
        arguments = self._shapes.arguments
        with undisturbed():
            routed = self._routes.routed(replace(arguments.given(values, sizes), is_run=False))
            return routed.by.shapes.estimate(routed.special)

    @deep()
    def into(
        self, out: Mapping[str, torch.Tensor], values: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> Mapping[str, torch.Tensor]:
        """The outputs of a call by name, in the memory `out` where the plan runs on a GPU and may write there: it may be that of a tensor which
        only the store of that output reads."""
        if in_tensors(self.program, values):
            made = self(**values, sizes=sizes)
            names = [output.name for output in self.program.returned]
            return dict(zip(names, made if isinstance(made, tuple) else (made,), strict=True))
        with undisturbed():
            given = replace(self._shapes.arguments.given(values, sizes), out=out)
            routed = self._routes.routed(given)
            self._current, self._extents = routed.special.compiled, routed.extents
            return routed.apart(routed.by.runners.run(routed.special, routed.given))

    def bind(self, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **values: Any) -> Launch:
        """A launch: this very call, its tensors and numbers fixed, that may be run again and again. It gives the same output
        tensors each time, and takes less than any other call: nothing is looked at, and nothing allocated.

        Takes what a call takes, as torch tensors; runs once. Raises BindError for what a launch cannot hold: arrays,
        tensors that require grad (outside of `torch.no_grad()`), numbers inside of tensors."""
        from eqfuse.calls.launches import bind

        Arguments(self.program).all_named(unnamed)
        launch = bind(self.name, self._shapes, self._routes.routed, values, sizes)
        self._current = launch.compiled
        return launch

    def prepare(
        self,
        *shapes: Mapping[str, Any],
        sizes: Mapping[str, int] | None = None,
        device: str | torch.device | None = None,
    ) -> int:
        """Compiles and loads every kernel that calls of these shapes need, before a CUDA graph is captured or a server
        answers its first request; the number of binaries that were new. `k.prepare({"x": (64, 1024)})`: names to shapes;
        `((64, 1024), torch.float16)` has a dtype too (the declared one is taken else, or float32), and tensors stand for their
        shapes, strides and dtypes. Scalars that sizes depend on are given among them. Several mappings are several calls.

        `device` is that of the tensors, else the GPU where the kernel may run there. On a CPU it waits for C++. It runs the
        kernels once, on zeros. What a backward needs is not prepared. Raises BindError for what no call takes.
        """
        from eqfuse.calls.launches import prepare

        before = self.compilations
        prepare(self._shapes, self._routes.routed, shapes, sizes, device)
        return self.compilations - before

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
        from eqfuse.tune.tuner import Limits

        arguments = Arguments(self.program)
        for name in ("seconds", "plans", "again"):
            if name in arguments.names:
                message = f"tune takes {name!r} for its own limit, not for the program's input"
                raise EqfuseError(message, hint="give the input another name")
        limits = Limits(seconds, plans)
        with self._lock, undisturbed():
            given = arguments.given(values, sizes, unnamed)
            routed = self._routes.routed(replace(given, is_run=False))
            joint = next((j for j in self._made_of_views if j._calls is routed.by), None)
            if joint is not None:
                taken = routed.given
                tuning = joint.tune(
                    seconds=seconds,
                    plans=plans,
                    again=again,
                    sizes=taken.sizes,
                    **taken.tensors,
                    **taken.scalars,
                )
                self._calls.forget()
                self._current, self._extents = joint._current, routed.extents
                return tuning
            found = routed.special
            if found.is_empty:
                raise EqfuseError(
                    "an axis is empty: there is nothing to time", hint="tune with other tensors"
                )
            shape = found.shape
            if again or shape not in self._tunings:
                self._tunings[shape] = self._searched(found, given, limits, again)
            self._current = self._shapes.of(arguments, given).compiled
            return self._tunings[shape]

    def _searched(self, special: Specialization, given: Given, limits: Limits, again: bool) -> Tuning:
        """What a search finds for one shape; later calls run the winner."""

        from eqfuse.tune.tuner import Tuner

        def start(candidate: Compiled) -> Callable[[], Results]:
            shards = {axis: candidate.chosen.plan.shards for axis, _ in candidate.chosen.nest.shards}
            sizes = candidate.extents, shards
            return partial(
                self._calls.runners.runner(candidate, wait=True), given.tensors, given.scalars, *sizes
            )

        base = self._shapes.planned(special)
        tuner = Tuner(self.derived, base, self.prefer, self.scalars, start, place_of(given.tensors))
        tuned, tuning = tuner.tune(limits, again)
        if self.verify:
            self._shapes.certificate(tuned)
        self._shapes.tuned(tuned)
        self._calls.forget()
        return tuning

    # -- gradients ---------------------------------------------------------------------------------

    @property
    def backward(self) -> Backward:
        """The gradient, as of the last backward; before any, by all tensors of real numbers: `.source`, its text,
        `.plan`, `.merge`, `.explain()` of its kernel, and `.certificate`, of both."""
        with self._lock:
            return self._differentiated.shown()

    @property
    def _differentiated(self) -> Gradients:
        from eqfuse.differentiate.autograd import Gradients

        if self._gradients is None:
            self._gradients = Gradients(self.program, self.scalars, bool(self.verify), self._gradient)
        return self._gradients

    def _gradient(self, source: str) -> Kernel:
        """The kernel of a gradient's text, compiled as this one is."""
        with self.derived.scope.entered():
            derived = compiler.derive_like(self.program, source)
        return self._made(derived, at_once=False)

    def _made(self, derived: Derived, *, at_once: bool = True, kept: tuple[str, ...] = ()) -> Kernel:
        """A kernel of another program, compiled as this one is: the user has not written its branches."""
        return replace(
            self,
            derived=derived,
            prefer=None,
            scalars={},
            allow=(ALL_UNTAKEN,),
            first=None,
            at_once=at_once,
            constants=(),
            kept=kept,
        )

    # -- as an operator of torch -------------------------------------------------------------------

    content: str = field(init=False, default="", repr=False)
    """What the kernel is compiled from, as text: what graphs of torch know it by."""

    def _written(self) -> str:
        program, scope = self.program, self.derived.scope
        options = {
            "target": "auto" if self.auto else self.device.name,
            "prefer": self.prefer,
            "verify": self.verify,
            "strict_casts": program.strict_casts,
            "assume_finite": program.assume_finite,
            "reassociate": program.reassociate,
            "trials": self.trials,
            "bound": self.bound,
            "native": self.native,
            "allow": list(self.allow),
            **({"visible": True} if self.visible else {}),
            **({"constants": self.constants} if self.constants else {}),
        }
        added = [*scope.added, *sorted(scope.without), *registered_in(*(o.expr for o in program.outputs))]
        return written({"source": program.source, "scalars": dict(self.scalars), **options}, added)

    def extents(self, shapes: Mapping[str, Sequence[Any]], sizes: Mapping[str, Any]) -> dict[str, Any]:
        """The extent of every axis in a call of tensors of these shapes, which may be symbols. Raises BindError."""
        return extents(self.program, shapes, sizes)

    def shaped(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], sizes: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """The outputs of a call, holding nothing."""
        return empty_outputs(self.program, tensors, numbers, lambda shapes: self.extents(shapes, sizes))

    def forward(
        self,
        names: tuple[str, ...],
        dtypes: Mapping[str, torch.dtype] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Saving:
        """What a call, on inputs of these `dtypes`, runs of which gradients by some inputs may be asked. Where `shapes` of all tensors and
        `sizes` of axes are given, it may make the gradients itself."""
        from eqfuse.differentiate.autograd import halves_in, saves_in

        with self._lock:
            known, dtypes = self._differentiated, dtypes or {}
            tracked = known.outputs_by(names)
            extents = None if shapes is None else known.extents(self, names, shapes, sizes)
            halves = halves_in({name: dtypes[name] for name in names if name in dtypes})
            found = known.forward(names, saves_in(dtypes.values()), halves, extents)
            kernel = found.kernel or self
            return Saving(kernel, found.outputs, found.residuals, tracked, found.scales)  # type: ignore[arg-type]

    def gradient(
        self,
        names: tuple[str, ...],
        of: tuple[str, ...] = (),
        alike: bool = False,
        dtypes: Mapping[str, torch.dtype] | None = None,
        scales: bool = False,
    ) -> Kernel:
        """The kernel of the gradient by some inputs: one that reads what the forward for gradients `of` inputs has saved,
        in the `dtypes` of the inputs where these are halves; or, without, one of inputs and cotangents alone. `alike`:
        dimensions that are divided alike are as long; `scales`: the forward has made the gradients."""
        from eqfuse.differentiate.autograd import halves_in, saves_in

        with self._lock:
            known = self._differentiated
            halves = halves_in(
                {name: (dtypes or {})[name] for name in (of if scales else names) if name in (dtypes or {})}
            )
            saves = saves_in((dtypes or {}).values())
            found = known.by(names, of, alike, halves, saves, scales) if of else known.alone(names)
            known.latest = found
            return found.kernel  # type: ignore[return-value]

    def jvp(self, names: tuple[str, ...]) -> Kernel:
        """The kernel of the directional derivative (`eq.jvp`) along tangents of the inputs `names`. Raises VerificationError where the
        program of that is not verified, and EqfuseError where no output has a derivative by them."""
        with self._lock:
            return self._differentiated.jvp(names)  # type: ignore[return-value]

    def outputs_by(self, names: tuple[str, ...]) -> frozenset[str]:
        """The outputs that have a derivative by some of these inputs."""
        with self._lock:
            return self._differentiated.outputs_by(names)

    def made(self, source: str) -> Kernel:
        """The kernel of a text that was made of this one's program, compiled as this one is."""
        return self._like(source)

    def alike(self, source: str) -> Kernel:
        """The kernel of another text, compiled as this one is."""
        with self.derived.scope.entered():
            derived = compiler.derive_like(self.program, source, self.scalars)
        return replace(self, derived=derived, first=None, at_once=True, constants=())

    def opened(
        self,
        tensors: Mapping[str, torch.Tensor],
        numbers: Mapping[str, Any],
        sizes: Mapping[str, Any],
    ) -> list[torch.Tensor]:
        """The outputs of a call, by what it launches: what compilers see of one that is `visible`."""
        from eqfuse.opened import opened

        return opened(self._shapes, tensors, numbers, sizes)

    def planned(self, sizes: Mapping[str, int], dtypes: Mapping[str, str] | None = None) -> Kernel:
        """This kernel with its plan before any call for these sizes (others count as 256), and for tensors of these dtypes, where the
        program declares none. Raises BindError for other axes."""
        found = replace(self, first=compiler.nominal_extents(self.program, sizes), at_once=False)
        every = {**program_dtypes(self.program), **(dtypes or {})}
        with found._lock:
            found._current = found._shapes.compile(found._extents, every, found.device)
        return found

    # -- streaming ---------------------------------------------------------------------------------

    @property
    def stream(self) -> Streamer:
        """The derived merge as programs: `stream.stream.update`, `.combine` and `.finish` are their texts, and `.step` where outputs are prefixes.

        Raises EqfuseError where the program has no fused merge over one axis that its outputs do not have, nor prefixes along it.
        """
        from eqfuse.stream.programs import stream_of
        from eqfuse.stream.streamer import Streamer

        with self._lock:
            if self._stream is None:
                found = stream_of(self.program, self.merged_plans(), self.why_not)
                self._stream = Streamer(found, self.program, self._like, self._lock)
            return self._stream

    def merged_plans(self) -> list[tuple[KernelPlan, ...]]:
        """The kernels of every plan whose reductions are the rewritten ones, those that walk long prefixes first."""
        from eqfuse.stream.programs import long_prefixes

        with self._lock:
            general = self._general
            plans = (general.chosen.plan, *Plans(candidate.plan for candidate in general.candidates))
            if extents := long_prefixes(self.program):
                asked = Asked(extents, program_dtypes(self.program), self.device)
                with suppress(ScheduleError, OverLimit):
                    plans = (*(c.plan for c in compiler.choose(self.derived, asked)[0]), *plans)
            return [plan.kernels for plan in plans if plan.form != "written"]

    def _like(self, source: str, kept: tuple[str, ...] = ()) -> Kernel:
        """A kernel of a text that was made of this one's program, compiled as this one is; what it reads that is `kept`, as text."""
        with self.derived.scope.entered():
            derived = compiler.derive_like(self.program, source, made=True)
        return self._made(derived, kept=kept)

    def init(self, start: int = 0, total: int | None = None) -> StreamState:
        """A stream that has seen nothing, the first position of which is `start`. `total` is the extent of the whole
        axis, which programs that read it (`j <= i + N(j) - N(i)`) need before its end."""
        return self.stream.init(start, total)

    def update(
        self, state: StreamState, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **chunk: Any
    ) -> StreamState:
        """The state once it has also seen a chunk: the program's tensors, of any number of positions of the
        streamed axis. `state` itself stays as it is."""
        Arguments(self.program).all_named(unnamed)
        with undisturbed():
            return self.stream.update(state, chunk, sizes)

    def step(
        self, state: StreamState, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **chunk: Any
    ) -> tuple[StreamState, Any]:
        """The next state of a program of prefixes, and its outputs at the positions of a chunk, of one or more: what a call on all that the
        stream has seen gives there. So decoding goes on from what a prompt has left."""
        Arguments(self.program).all_named(unnamed)
        with undisturbed():
            return self.stream.step(state, chunk, sizes)

    def combine(self, left: StreamState, right: StreamState) -> StreamState:
        """The state of two adjacent parts of the axis, seen apart. Raises EqfuseError where the program reads
        positions and the parts are not adjacent."""
        with undisturbed():
            return self.stream.combine(left, right)

    def finish(self, state: StreamState, /, *unnamed: Any, **values: Any) -> Any:
        """The outputs for what a stream has seen, as a call on all of it gives them; `values` are the tensors
        and scalars that the program reads after its reductions. The state may be updated further."""
        Arguments(self.program).all_named(unnamed)
        with undisturbed():
            return self.stream.finish(state, values)

    @property
    def aggregate(self) -> Aggregate:
        """The stream as an aggregation of data engines (`.dask()`, `.delayed()`, `.ray()`, `.spark()`), or by hand: `.zero()`,
        `.reduce(state, chunk)`, `.merge(a, b)` and `.finish(state)` on Arrow records, in any process (docs/data_engines.md).
        A chunk has the program's tensors by name, in their shapes but for the streamed axis, along which it has any number of
        positions; or it is a table with a row for each.

        Raises EqfuseError where `stream` does, and for programs of prefixes. Needs pyarrow: `pip install 'eqfuse[data]'`.
        """
        from eqfuse.operator.content import kernel_of
        from eqfuse.stream.aggregate import aggregate_of

        return aggregate_of(self.content, kernel_of, self.derived.scope, self.program, self.stream.stream)

    # -- inspection --------------------------------------------------------------------------------

    @property
    def compiled(self) -> Compiled:
        """Everything about the shape of the last call."""
        return self._current

    @property
    def name(self) -> str:
        """A name for the emitted function: the outputs'."""
        return self.derived.name

    @property
    @_of_last_call
    def plan(self) -> Plan:
        """The chosen plan: `.schedule`, `.cost` (predicted seconds, by term), `.kernels`, `.configs`, `.shards`, and
        `.measured`, the seconds of a call where `tune` has found it. `.roles` are how each of its kernels is divided on
        a Hopper GPU, None of one that is not, empty where none is. `.code` says what calls run: there Gluon, or Triton and
        why, for each kernel; on a CPU, at the last call, C++, or torch calls and why."""
        plan, host = self.compiled.chosen.plan, self._calls.runners.host(self.compiled)
        return replace(plan, code=host.code) if host is not None and host.code else plan

    @_of_last_call
    def plans(self) -> Plans:
        """Every candidate for the shape, cheapest first; those that `tune` has timed before the others."""
        return Plans(candidate.plan for candidate in self.compiled.candidates)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of sizes that calls have found so far, each with its plan: a call inside one compiles nothing."""
        with self._lock:
            return (
                *self._shapes.regions,
                *(region for joint in self._made_of_views for region in joint.regions),
            )

    @property
    def compilations(self) -> int:
        """How many binaries calls have needed so far. On a GPU, those of Triton, each kernel's counted: one where a row fills
        its block, one where lengths are odd, one where they are divisible by 16. On a CPU, libraries of C++, and forms made
        of torch calls."""
        with self._lock:
            of_views = (joint.compilations for joint in self._made_of_views)
            return self._calls.runners.compilations + sum(of_views)

    @property
    @_of_last_call
    def merge(self) -> MergeText:
        """The derived merge of every group of reductions; printable."""
        groups = dict.fromkeys(g.group for k in self.plan.kernels for g in k.groups)
        return MergeText(tuple(groups))

    @property
    @_of_last_call
    def loops(self) -> Nest:
        """The loop nest of the chosen plan; `str` prints it."""
        return self.compiled.chosen.nest

    @property
    @_of_last_call
    def tile(self) -> TileProgram:
        """The tile program of the chosen plan; `str` prints it."""
        return self.compiled.tile

    @property
    @_of_last_call
    def cpp(self) -> str:
        """The C++ of the last call on a CPU; before any, that for contiguous tensors. Raises EqfuseError where there is none (yet)."""
        host = self._calls.runners.host(self.compiled)
        if host is None and self.compiled.device.kind == "cpu":
            with self._lock:
                return native_source(self.compiled, self.program).text
        text = None if host is None else host.text
        if text is None:
            why = "nothing was called on a CPU" if host is None else host.code or "it is switched off"
            raise EqfuseError(f"there is no C++: {why}", hint='call a kernel compiled with native="wait"')
        return text

    @property
    def triton(self) -> str:
        """A Python module that needs torch and triton alone; its launcher is named after the outputs.

        A kernel for the CPU gives the module for sm_90 at the shape of the last call, with that device's plan.
        """
        with self._lock:
            return self._shapes.triton(self._general)

    @property
    def gluon(self) -> str:
        """The kernels in roles, for a Hopper GPU, and those without: a Python module that needs torch and triton alone, as
        `triton` is, and which calls run where the plan has roles. Raises EqfuseError, which says why, where it has none."""
        with self._lock:
            return self._shapes.gluon(self._general)

    @property
    def roles(self) -> RolesProgram:
        """The roles of the chosen plan; `str` prints them. Raises EqfuseError, which says why, where it has none."""
        with self._lock:
            return self._shapes.roles(self._general)

    @property
    @_of_last_call
    def certificate(self) -> Certificate:
        """What was verified, how, and what that does not cover. Verifies now if compilation did not."""
        with self._lock:
            return self._shapes.certificate(self.compiled)

    @property
    @_of_last_call
    def graded(self) -> str:
        """The grade of the certificate (see `eqfuse.Certificate.grade`) and how sure it is; "unverified" where nothing was verified yet."""
        certificate = self._shapes.certified(self.compiled)
        return "unverified" if certificate is None else certificate.graded

    @property
    @_of_last_call
    def refused(self) -> VerificationError | OverLimit | None:
        """Why the derived form of the last call's shape was not verified, or not derived within its limits, so that the
        program runs as written; None where it was."""
        return self._shapes.refused(self.compiled)

    @property
    @_of_last_call
    def derivation(self) -> Derivation:
        """How the kernel follows from the program, step by step; recorded at the first request."""
        with self._lock:
            len(self.compiled.candidates)
            return compiler.derivation(self.derived, self.plan, self.scalars)

    @property
    @_of_last_call
    def rule_counts(self) -> Mapping[str, int]:
        """How often each rule has matched so far, shipped or added, most often first; rules that never did are absent."""
        with self._lock:
            len(self.compiled.candidates)  # where the plan was kept, merges have not been asked for
            matches = {name: count for name, count in self.derived.report.matches.items() if count}
        return dict(sorted(matches.items(), key=lambda item: (-item[1], item[0])))

    @property
    @_of_last_call
    def stats(self) -> Mapping[str, Any]:
        """enodes, rounds, saturated, rule matches, and milliseconds per stage so far."""
        with self._lock:
            len(self.compiled.candidates)
            report = self.derived.report
            return {
                "enodes": report.enodes,
                "rounds": report.rounds,
                "saturated": report.saturated,
                "matches": dict(report.matches),
                "ms": dict(self.derived.timings.ms),
            }

    @property
    @_of_last_call
    def report(self) -> Report:
        """What explanations are made of."""
        from eqfuse.explain.report import Report
        from eqfuse.specialize_warps import account_of

        derived, compiled = self.derived, self.compiled
        len(compiled.candidates)
        return Report(
            self.name,
            self.program,
            derived.order,
            derived.groups,
            derived.unfinished,
            self.refused,
            self.plan,
            self.plans(),
            compiled.device,
            self._shapes.was_called or bool(self._tunings),
            self.graded,
            partial(account_of, derived, compiled, dict(compiled.chosen.plan.sizes) or compiled.extents),
            self.kept,
            derived.views,
        )

    def explain(self, format: str = "text", detail: str = "short") -> str:
        """The derivation, why anything is not fused, how the last gradient was made, and why this plan: as "text", "latex", one "html"
        page, or the derivation alone as "json". `detail="full"` has every step and why each condition holds.

        Raises EqfuseError for an unknown format or detail.
        """
        latest = None if self._gradients is None else self._gradients.latest
        return self._explained("" if latest is None else latest.said, format, detail)

    @_of_last_call
    def _explained(self, gradients: str, format: str, detail: str) -> str:
        """The same; `gradients` says how the last gradient was made."""
        from eqfuse.explain.explanation import explain  # templates are for those who ask

        with self._lock, self.derived.scope.entered():
            report = replace(self.report, gradients=gradients)
            return explain(report, lambda: self.derivation, self._listings, format, detail)

    def _listings(self) -> Listings:
        from eqfuse.explain.report import Listings

        sources = self.sources()
        if self.compiled.device.kind == "cpu":
            sources["Triton, with the plan for sm_90"] = self.triton
        return Listings(str(self.loops), str(self.tile), sources, str(self.certificate))

    @_of_last_call
    def sources(self) -> dict[str, str]:
        """What is emitted for the kernel's device, by name: Triton, and where it has roles these and Gluon; on a CPU C++, or nothing
        where torch calls run it."""
        if self.compiled.device.kind == "gpu":
            roles = self.compiled.roles is not None
            return {
                "Triton": self.triton,
                **({"roles": str(self.roles), "Gluon": self.gluon} if roles else {}),
            }
        try:
            return {"C++": self.cpp}
        except EqfuseError:
            return {}

    @_of_last_call
    def why_not(self) -> tuple[str, ...]:
        """Why reductions could not be fused: for each the factor or condition in the way, its place in the source and
        the rule that would have helped; what kernels store for each other, the cheapest plan of fewer kernels, and why an axis that may
        be in chunks has none. Empty where all is one fused kernel."""
        from eqfuse.explain.explanation import why_not

        split = split_axes(self.program) if self.derived.views is None else None
        whole = "" if split is None else split.why_not(self._extents)
        with self._lock, self.derived.scope.entered():
            found = tuple(map(str, why_not(self.report)))
        return (*found, f"not in chunks: {whole}") if whole else found

    @_of_last_call
    def _repr_html_(self) -> str:
        from eqfuse.explain.notebook import kernel_html

        certificate = self._shapes.certified(self.compiled)
        return kernel_html(self.report, str(self.merge), str(self.loops), certificate)

    def __repr__(self) -> str:
        written = "" if self.refused is None else ", as written"
        return f"<eqfuse.Kernel {self.name}: {self.plan.schedule}{written} on {self.compiled.device.name}, {self.graded}>"
