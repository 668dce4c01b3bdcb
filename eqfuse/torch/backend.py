"""`torch.compile(model, backend="eqfuse")`.

    Dynamo's graph  --AOTAutograd, without gradients-->  ATen, functional
                    --regions, prices-->                 the same, with `eqfuse::call` for each region that gains
                    --Inductor, or AOTAutograd alone-->  what runs, forward and backward

The kernel of a region has its gradient's kernel, so that in training the backward graph calls that.
"""

from __future__ import annotations

import operator
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis, TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch.fx.passes.tools_common import legalize_graph

from eqfuse import compiler, limits, logs, results
from eqfuse.arguments import DTYPE_NAMES
from eqfuse.derived import Derived
from eqfuse.devices import device_named, gpu_device
from eqfuse.differentiate.gradient import gradient_sizes
from eqfuse.errors import EqfuseError
from eqfuse.extract.devices import Device
from eqfuse.kernel import Kernel
from eqfuse.operator.content import compiled, names_text
from eqfuse.operator.derivative import untraced
from eqfuse.operator.shapes import extents, hint
from eqfuse.progress import progress
from eqfuse.terms.nodes import Program, reductions
from eqfuse.terms.parser import parse
from eqfuse.torch import outcome as reports
from eqfuse.torch import prices
from eqfuse.torch.operators.table import packet
from eqfuse.torch.outcome import Entry
from eqfuse.torch.regions import FREE, Finder, Region, called
from eqfuse.torch.text import Text, text_of
from eqfuse.torch.translate import Refused, Translation, of_module, reserved, user_line
from eqfuse.torch.values import Value, Writer

GAIN = 1.05
"""How many times faster a region has to be predicted as a kernel, to become one."""

MOST_REDUCTIONS = 16
"""Of a gradient that is derived to be priced: the time of planning grows with the ways to divide them into kernels."""

T = TypeVar("T")

RESTS = ("inductor", "aot_eager")
CHOICES = ("predicted", "always")


@dataclass(frozen=True)
class Options:
    """`rest` compiles what is left: "inductor" or "aot_eager"; by default Inductor where there is a compiler for it.
    `take` is "predicted" (the candidate that the cost model predicts to gain most, where one gains) or "always" (the
    largest). With `constants`, graphs without gradients keep what kernels make of parameters alone."""

    rest: str | None = None
    take: str = "predicted"
    native: str | None = None
    constants: bool = False

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        known = ("rest", "take", "native", "constants")
        for name in given:
            if name not in known:
                raise EqfuseError(f"the back end has no option {name!r}", hint=f"options: {', '.join(known)}")
        options = Options(**given)
        if options.rest not in (None, *RESTS):
            raise EqfuseError(f"rest is {options.rest!r}", hint=f"choose one of {', '.join(RESTS)}")
        if options.take not in CHOICES:
            raise EqfuseError(f"take is {options.take!r}", hint=f"choose one of {', '.join(CHOICES)}")
        if not isinstance(options.constants, bool):
            raise EqfuseError(f"constants is {options.constants!r}", hint="give True or False")
        return options


def eqfuse(
    graph: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **more: Any
) -> Callable[..., Any]:
    """The back end. Options are given as `torch.compile(model, backend="eqfuse", options={"take": "always"})`."""
    chosen = Options.of({**(options or {}), **more})
    _fix_attributes(graph)
    found = _functional(graph, inputs)
    number = reports.begin()
    if isinstance(found, str):
        reports.leave(number, found)
        found = graph
    else:
        Fusion(found, number, chosen, _is_tracked(inputs), _parameters(graph, found)).run()
        _as_dynamo(graph, found)
    rest = _rest(chosen, inputs)
    try:
        return rest(found, inputs)  # type: ignore[no-any-return]
    except RestartAnalysis:
        reports.forget(number)  # Dynamo traces again, and the graph comes back
        raise


def _fix_attributes(graph: fx.GraphModule) -> None:
    """Makes numbers constant that are attributes of modules, as the epsilon of a norm: under `dynamic=True` Dynamo makes
    them inputs, which torch takes back once all is traced and compiled. Dynamo traces again then, at once."""
    known = False
    for node in _placeholders(graph):
        source = getattr(node.meta.get("grapharg"), "source", None)
        number = getattr(node.meta.get("example_value"), "item_memo", None)
        if source is None or number is None or not source.guard_source.is_unspecialized_nn_module():
            continue
        name = getattr(number.node._expr, "name", "")
        if name and not TensorifyState.should_specialize(name):
            TensorifyState.specialize(name)
            known = True
    if known:
        raise TensorifyScalarRestartAnalysis


def _rest(options: Options, inputs: Sequence[Any]) -> Callable[..., Any]:
    """What compiles the rest."""
    on_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in inputs)
    has_compiler = on_gpu or any(shutil.which(name) for name in ("g++", "clang++"))
    if (options.rest or ("inductor" if has_compiler else "aot_eager")) == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return compile_fx
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager


UNSEEN = (
    "detach", "detach_", "_get_data_attr", "_set_grad_enabled", "set_grad_enabled", "_enter_inference_mode",
    "autograd_function_apply", "_enter_autocast",
)  # fmt: skip
"""What stands in Dynamo's graph and not in ATen's, and changes gradients or dtypes."""


def _functional(graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | str:
    """A graph of functional ATen operators that is called as the graph of Dynamo is; or why there is none."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    tracked = _is_tracked(inputs)
    graphs = [module.graph for module in graph.modules() if isinstance(module, fx.GraphModule)]
    for node in (node for each in graphs for node in each.nodes):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if tracked and node.op in ("call_function", "call_method") and name in UNSEEN:
            return f"it has {name!r} in training, which a graph of ATen operators does not show"
    grabbed: list[fx.GraphModule] = []

    def grab(found: fx.GraphModule, _: Sequence[Any]) -> Any:
        grabbed.append(found)
        return make_boxed_func(found.forward)

    try:
        with torch.no_grad():
            aot_autograd(fw_compiler=grab, inference_compiler=grab, keep_inference_input_mutations=True)(
                graph, inputs
            )
    except RestartAnalysis:
        raise  # Dynamo traces again
    except Exception as error:  # noqa: BLE001  what AOTAutograd does not trace is the rest's to refuse
        return f"AOTAutograd refused it: {_first_line(error)}"
    if len(grabbed) != 1:
        return f"AOTAutograd made {len(grabbed)} graphs of it"
    (found,) = grabbed
    if tracked:
        _keep_for_backward(found)
    count = len(_results(graph))
    if len(_results(found)) != count or len(_placeholders(found)) != len(_placeholders(graph)):
        return "it returns views of what it computes, or changes the strides of its inputs"
    for write in writes(found):
        target, value = write.all_input_nodes
        if target.op != "placeholder":
            return f"it changes part of an input, {target.name}"
        if tracked and target.meta["val"].requires_grad:
            return "it changes an input that requires grad"
        if any(_is_view(result, value) for result in _results(found)):
            return "it returns an input that it changes, or a view of it"
    return found


def _keep_for_backward(graph: fx.GraphModule) -> None:
    """Has torch's attention compute the log-sum-exp that its gradient reads: traced without gradients, it is left out. And has
    gradients read an input that changes, as the running statistics of batch norm, as it was."""
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for write in writes(graph):
        target = write.all_input_nodes[0]
        if len(target.users) > 1:
            with graph.graph.inserting_before(first):
                before = graph.graph.call_function(torch.ops.aten.clone.default, (target,))
            before.meta = dict(target.meta)
            for user in [each for each in target.users if each not in (before, write)]:
                user.replace_input_with(target, before)
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            names = [argument.name for argument in node.target._schema.arguments]
            if "compute_log_sumexp" in names:
                node.update_arg(names.index("compute_log_sumexp"), True)
    graph.recompile()


def writes(graph: fx.GraphModule) -> list[fx.Node]:
    """What changes inputs, as a cache that grows in place: AOTAutograd puts it at the end, behind all that reads them."""
    return [node for node in graph.graph.nodes if node.target is torch.ops.aten.copy_.default]


def _is_view(node: Any, base: fx.Node) -> bool:
    """Whether a node is another one, or a view of it."""
    while (
        isinstance(node, fx.Node)
        and node is not base
        and packet(node.target) in FREE
        and node.all_input_nodes
    ):
        node = node.all_input_nodes[0]
    return node is base


def _parameters(graph: fx.GraphModule, found: fx.GraphModule) -> frozenset[fx.Node]:
    """The inputs of a graph of ATen operators that are parameters of modules in Dynamo's, and that it does not change."""
    changed = {write.all_input_nodes[0] for write in writes(found)}
    pairs = zip(_placeholders(graph), _placeholders(found), strict=True)
    return frozenset(
        new
        for old, new in pairs
        if isinstance(old.meta.get("example_value"), torch.nn.Parameter) and new not in changed
    )


def _is_tracked(inputs: Sequence[Any]) -> bool:
    """Whether a backward is to come."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


@lru_cache(maxsize=512)
def _kernel(source: str, native: str | None, constants: tuple[str, ...]) -> Kernel:
    """The kernel of a text: layers that are alike share it."""
    return compiled(source, native=native, constants=constants)  # type: ignore[no-any-return]


@lru_cache(maxsize=512)
def _derived(source: str) -> Derived:
    """A text with its merges, which plans are priced from; nothing of it is verified."""
    return compiler.derive(source, None, strict_casts=False)


@lru_cache(maxsize=512)
def _gradient(source: str, wrt: tuple[str, ...]) -> str:
    """The gradient of a program, as it is kept."""
    from eqfuse.differentiate.gradient import grad

    folds = results.folds_in_order(*(output.expr for output in parse(source).outputs))
    subject = results.Differentiating(source, wrt, folds)
    with limits.derivation():
        return results.kept("differentiated", subject, lambda: grad(source, wrt))[0]


def _real(values: Sequence[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    """The inputs that have a gradient."""
    return tuple(name for name, value in values if value.dtype.is_floating_point)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _results(graph: fx.GraphModule) -> Sequence[Any]:
    (last,) = [node for node in graph.graph.nodes if node.op == "output"]
    found = last.args[0]
    return found if isinstance(found, tuple | list) else (found,)


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _as_dynamo(graph: fx.GraphModule, found: fx.GraphModule) -> None:
    """Gives a graph what the rest reads of Dynamo's: where inputs come from."""
    for old, new in zip(_placeholders(graph), _placeholders(found), strict=True):
        for name in ("_dynamo_source",):
            if hasattr(old, name):
                setattr(new, name, getattr(old, name))
        new.meta.update({key: value for key, value in old.meta.items() if key not in new.meta})
    for node in found.graph.nodes:
        # A kernel's output may have other strides than what it takes the place of.
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
    found.recompile()


@dataclass(frozen=True)
class Candidate:
    """A region as a program. `seconds` are predicted, as a kernel and without one."""

    region: Region
    text: Text
    inputs: tuple[tuple[str, fx.Node], ...]
    results: tuple[Any, ...]
    alone: fx.GraphModule
    seconds: tuple[float, float]

    @property
    def gain(self) -> float:
        return self.seconds[1] - self.seconds[0]


@dataclass(frozen=True)
class _Judged:
    """A candidate without its nodes: `inputs` are places among those of the region."""

    text: Text
    inputs: tuple[tuple[str, int], ...]
    seconds: tuple[float, float]


MOST_JUDGED = 1024
_judged: dict[object, _Judged | str] = {}
"""What became of the forms of regions so far."""


@dataclass(frozen=True)
class Chosen:
    """A candidate that becomes a kernel."""

    candidate: Candidate
    kernel: Kernel


def _tried(make: Callable[[], T]) -> T | str:
    """What `make` gives, or why it failed. Whatever it is, a region that cannot be compiled is left, and the report says
    why."""
    try:
        return make()
    except Refused as refused:
        return refused.error().message
    except EqfuseError as error:
        return error.message
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {_first_line(error)}"


@dataclass
class Fusion:
    """The regions of one graph, replaced where that is predicted to gain."""

    module: fx.GraphModule
    number: int
    options: Options
    in_training: bool
    parameters: frozenset[fx.Node] = frozenset()
    """Inputs that kernels read as they are, and not by views: what is made of them alone may be kept."""
    entries: list[Entry] = field(default_factory=list)

    def run(self) -> None:
        taken: set[fx.Node] = set()
        chosen: list[Chosen] = []
        finder = Finder(self.module.graph, taken)
        places = {seed: place for place, seed in enumerate(finder.seeds(), 1)}
        for seed in finder.seeds():
            what = f"reduction {places[seed]} of {len(places)}{of_module(seed)}"
            start = time.perf_counter()
            with progress(what):
                regions = [each.with_views_of(self.parameters) for each in finder.candidates(seed)]
                found = self._best(regions, seed)
            seconds = time.perf_counter() - start
            logs.note("regions", f"{what}, {seconds:.1f} s: {self.entries[-1]}")
            if found is not None:
                region = found.candidate.region
                taken.update(node for node in region.nodes if node not in region.copied)
                chosen.append(found)
        for each in chosen:
            self._replace(each.candidate, each.kernel)
        legalize_graph(self.module)  # what read a region's first result may stand before its last
        (last,) = [node for node in self.module.graph.nodes if node.op == "output"]
        for write in writes(self.module):
            last.prepend(write)
        self.module.graph.eliminate_dead_code()
        self.module.recompile()
        reports.add(self.entries)

    def _best(self, regions: Sequence[Region], seed: fx.Node) -> Chosen | None:
        """The candidate that gains most, with its kernel; what becomes of it is noted. Only a candidate that wins is
        compiled and verified: the next one takes its place where that fails."""
        made: list[Candidate] = []
        why = "its result is read by what it computes with"
        for region in regions:
            priced = self._priced(region)
            if isinstance(priced, str):
                why = priced
            else:
                made.append(priced)
        if self.options.take == "predicted":
            made.sort(key=lambda candidate: -candidate.gain)
        failed = ""
        for candidate in made:
            if not self._wins(candidate.seconds):
                loses = f"the kernel is predicted to be no {GAIN:.2f} times faster"
                self.entries.append(self._entry(candidate, seed, failed or loses))
                return None
            kernel = _tried(partial(self._compiled, candidate))
            if not isinstance(kernel, str):
                self.entries.append(self._entry(candidate, seed, "", kernel))
                return Chosen(candidate, kernel)
            failed = kernel
        name = regions[0].name if regions else seed.name
        self.entries.append(Entry(self.number, name, user_line(seed), False, failed or why))
        return None

    def _entry(self, candidate: Candidate, seed: fx.Node, why: str, kernel: Kernel | None = None) -> Entry:
        region, source, alone = candidate.region, candidate.text.source, candidate.alone
        places = {node: place for place, node in enumerate(region.inputs)}
        names = {name: places[node] for name, node in candidate.inputs}

        def timed() -> tuple[float, float]:
            return _timed(kernel or self._kernel(candidate), alone, names)

        return Entry(
            self.number, region.name, user_line(seed), kernel is not None, why, source, candidate.seconds,
            kernel=kernel, alone=alone, time=timed,
        )  # fmt: skip

    def _wins(self, seconds: tuple[float, float]) -> bool:
        fused, rest = seconds
        return fused * GAIN <= rest or self.options.take == "always"

    def _backward(
        self, program: Program, values: Sequence[tuple[str, torch.Tensor]], device: Device
    ) -> float:
        """Predicted seconds of the gradient by all inputs. What it is compared with is twice the forward."""
        from eqfuse.differentiate.gradient import cotangents, real_outputs

        real = _real(values)
        # What is priced makes what the forward makes, and a sum for each gradient.
        count = len(reductions(*(output.expr for output in program.outputs))) + len(real)
        if count > MOST_REDUCTIONS:
            raise EqfuseError(
                f"its gradient has {count} reductions or more: those of more than {MOST_REDUCTIONS} take too long to derive"
            )
        source = _gradient(program.source, real)
        gradient = parse(source)
        made = {
            name: torch.empty([hint(n) for n in value.shape], dtype=value.dtype, device="meta")
            for name, value in values
        }
        found = extents(program, {name: tuple(value.shape) for name, value in made.items()}, {})
        dtype = values[0][1].dtype
        named = cotangents(program)
        above = {
            named[output.name]: torch.empty([found[axis] for axis in output.axes], dtype=dtype, device="meta")
            for output in program.outputs
            if output.name in real_outputs(program)
        }
        sizes = gradient_sizes(gradient, found, {named[name]: made[name].shape for name in real})
        given = [*made.items(), *above.items()]
        return prices.fused(gradient, given, device, partial(_derived, source), sizes)

    def _compiled(self, candidate: Candidate) -> Kernel:
        """The kernel of a candidate, and in training its gradient's, both verified. Raises EqfuseError."""
        with untraced():
            kernel = self._kernel(candidate)
            if self.in_training:
                values = [(name, node.meta["val"]) for name, node in candidate.inputs]
                real = _real(values)
                kernel.gradient(real, real, True, {name: value.dtype for name, value in values})
        return kernel

    def _kernel(self, candidate: Candidate) -> Kernel:
        """The kernel of a candidate, which keeps what it makes of parameters alone where that is asked for."""
        keeps = self.options.constants and not self.in_training
        parameters = sorted(name for name, node in candidate.inputs if node in self.parameters)
        return _kernel(candidate.text.source, self.options.native, tuple(parameters) if keeps else ())

    def _priced(self, region: Region) -> Candidate | str:
        """A region as a program, and what its kernel is predicted to take; or why it is none. Layers that are alike are looked
        at once."""
        key = region.form, self.in_training, self.options.take
        if key not in _judged:
            if len(_judged) >= MOST_JUDGED:
                _judged.clear()
            _judged[key] = _tried(partial(self._judged, region))
        found = _judged[key]
        if isinstance(found, str):
            return found
        given = tuple((name, region.inputs[place]) for name, place in found.inputs)
        return Candidate(region, found.text, given, region.outputs, _alone(region), found.seconds)

    def _judged(self, region: Region) -> _Judged:
        """What regions of a form have in common. Raises Refused and EqfuseError."""
        inputs = [node for node in region.inputs if isinstance(node.meta["val"], torch.Tensor)]
        device = _device(inputs)
        least, rest = prices.least(region, device), prices.apart(region, device)
        backward = prices.least_backward(region, device) if self.in_training else 0.0
        for bound, whole, of in ((least, rest, ""), (least + backward, 3 * rest, " with the gradient's")):
            if not self._wins((bound, whole)):
                raise EqfuseError(
                    f"reading, writing and products alone take {1e6 * bound:.3g} us{of}, all of it {1e6 * whole:.3g} us "
                    "without a kernel"
                )
        names = {node: f"x{place}" for place, node in enumerate(inputs)}
        translation = Translation(Writer([*names.values(), *reserved()]))
        for node in region.inputs:
            if node in names and node.meta["val"].dtype not in DTYPE_NAMES:
                raise Refused(node, f"it is {node.meta['val'].dtype}")
            translation.read(node, names.get(node, node.name))
        for node in region.nodes:
            if graph := called(node):
                translation.graph(node, graph)
            else:
                translation.call(node)
        values: list[Value] = []
        for node in region.outputs:
            made = translation.made[node]
            if not isinstance(made, Value):
                raise Refused(node, "several of its results are read together")
            values.append(made)
        try:
            words = [translation.writer.names.definition("out") for _ in values]
            text = text_of(translation, values, words)
        except NotImplementedError as error:
            raise Refused(region.outputs[0], str(error)) from None
        if text.sizes or text.numbers:
            raise Refused(region.outputs[0], "it has a size that no tensor gives")
        given = tuple((names[node], node) for node in inputs if names[node] in text.inputs)
        with untraced():
            program = parse(text.source)
            pairs = [(name, node.meta["val"]) for name, node in given]
            seconds = prices.fused(program, pairs, device, partial(_derived, text.source)), rest
            if self.in_training and self.options.take == "predicted" and self._wins(seconds):
                forward = seconds[0]
                seconds = forward + max(forward, prices.least_backward(region, device)), 3 * rest
                if self._wins(seconds):
                    seconds = forward + self._backward(program, pairs, device), 3 * rest
        places = {node: place for place, node in enumerate(region.inputs)}
        return _Judged(text, tuple((name, places[node]) for name, node in given), seconds)

    def _replace(self, candidate: Candidate, kernel: Kernel) -> None:
        """Calls the kernel in place of a region."""
        graph = self.module.graph
        last = candidate.region.nodes[-1]
        names = names_text([name for name, _ in candidate.inputs], [], [], [])
        with graph.inserting_after(last):
            call = graph.call_function(
                torch.ops.eqfuse.call.default,
                (kernel.content, names, [node for _, node in candidate.inputs], [], []),
            )
        if trace := candidate.region.nodes[0].meta.get("stack_trace"):
            call.meta["stack_trace"] = trace
        place: fx.Node = call
        for number, node in enumerate(candidate.results):
            with graph.inserting_after(place):
                result = graph.call_function(operator.getitem, (call, number))
            place = result
            if (
                len(candidate.text.groups[number]) != sum(candidate.text.groups[number])
                or 0 in candidate.text.groups[number]
            ):
                shape = self._shape(node, candidate)
                with graph.inserting_after(place):
                    result = graph.call_function(torch.ops.aten.reshape.default, (result, shape))
                place = result
            inside = set(candidate.region.nodes)
            node.replace_all_uses_with(result, delete_user_cb=lambda user, inside=inside: user not in inside)
            result.meta = dict(node.meta)

    def _shape(self, node: fx.Node, candidate: Candidate) -> list[Any]:
        """The shape of a result, of numbers and nodes; at most one size is left to torch."""
        shape: list[Any] = []
        for size in node.meta["val"].shape:
            if isinstance(size, int):
                shape.append(size)
                continue
            found = self._size(size, candidate)
            shape.append(-1 if found is None else found)
        if shape.count(-1) > 1:
            raise EqfuseError(f"the shape of {node.name} cannot be told", hint="")
        return shape

    def _size(self, size: Any, candidate: Candidate) -> fx.Node | None:
        for node in _placeholders(self.module):
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
                return node
        graph = self.module.graph
        for _, node in candidate.inputs:
            for dimension, own in enumerate(node.meta["val"].shape):
                if not isinstance(own, int) and own.node.expr == size.node.expr:
                    with graph.inserting_after(node):
                        return graph.call_function(torch.ops.aten.sym_size.int, (node, dimension))
        return None


def _device(nodes: Sequence[fx.Node]) -> Device:
    on_gpu = any(node.meta["val"].device.type == "cuda" for node in nodes)
    return gpu_device() if on_gpu else device_named("cpu")


def _timed(kernel: Kernel, alone: fx.GraphModule, names: Mapping[str, int]) -> tuple[float, float]:
    """Seconds of a region as a kernel and operator by operator, on random tensors of the example's sizes. `names` are
    the kernel's inputs, as places among those of the region."""
    values = [node.meta["val"] for node in _placeholders(alone)]
    drawn = [_drawn(value) if isinstance(value, torch.Tensor) else hint(value) for value in values]
    given: dict[str, Any] = {name: drawn[place] for name, place in names.items()}
    device = next((each.device for each in drawn if isinstance(each, torch.Tensor)), torch.device("cpu"))
    with torch.no_grad():
        return reports.timed(lambda: kernel(**given), device), reports.timed(lambda: alone(*drawn), device)


def _alone(region: Region) -> fx.GraphModule:
    """A region as a graph of its own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for place, node in enumerate(region.inputs):
        copies[node] = graph.placeholder(f"in{place}")
        copies[node].meta = {"val": node.meta["val"]}
    for node in region.nodes:
        copies[node] = graph.node_copy(node, lambda each: copies[each])
    graph.output(tuple(copies[node] for node in region.outputs))
    return fx.GraphModule({str(node.target): step for node in region.nodes if (step := called(node))}, graph)


def _drawn(value: torch.Tensor) -> torch.Tensor:
    """Random numbers where the example has its own: the graph's views hold for its strides alone."""
    shape, strides = ([hint(size) for size in sizes] for sizes in (value.shape, value.stride()))
    span = (
        1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    )
    if value.dtype == torch.bool:
        made = torch.rand(span, device=value.device) < 0.7
    elif value.dtype.is_floating_point:
        made = torch.randn(span, device=value.device).to(value.dtype)
    else:
        made = torch.zeros(span, dtype=value.dtype, device=value.device)
    return made.as_strided(shape, strides)
