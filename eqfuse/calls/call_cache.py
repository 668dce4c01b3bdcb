"""The cache of calls: what runs calls like one that was checked and has run, with next to nothing between them and the launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from eqfuse.arguments import CallKey, Given, Tensors, as_given
from eqfuse.calls.quick import Quick, quick
from eqfuse.calls.runners import Results, Runners
from eqfuse.calls.specialization import Specialization, Specializations
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.devices import place_of
from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.extents import shapes_of
from eqfuse.threads import undisturbed

if TYPE_CHECKING:  # loaded at first use: every start would wait for it
    from eqfuse.tile.triton.planned import Planned

Call = Callable[[Mapping[str, Any], Sequence[int]], Any]
"""The outputs as a call gives them, from its values by name and the addresses of its tensors; None where the call has to be
looked at once more."""

MOST_CALLS = 1024
"""How many kinds of calls are cached at once."""


@dataclass
class CachedCall:
    """What runs calls of a kind: the plan, and the function. `extents` are those of the axes of the program that was called.
    `compiled` is None for calls that autograd sees: the kernel that runs them is another one. `lasts`: it is what runs later calls too,
    until that is forgotten."""

    compiled: Compiled | None
    call: Call
    extents: Mapping[str, int]
    lasts: bool = True


@dataclass(frozen=True)
class Routed:
    """How a call runs: by the program that was called, or by that of views (then `shapes` are those that the
    outputs have apart), the arguments as it takes them, what is run of them, and the extents of the called program's axes.
    `as_taken` makes the values that a program of sorted positions takes of those of a call."""

    by: Calls
    given: Given
    special: Specialization
    extents: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]] | None = None
    as_taken: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def apart(self, results: Results) -> Results:
        """The outputs as the program that was called has them."""
        if self.shapes is None:
            return results
        return {name: made.view(self.shapes[name]) for name, made in results.items()}

    def of_called(self, call: Call | None) -> Call | None:
        """What runs calls of the program that was called, made of what runs those of this one. It holds no tensor."""
        if call is None:
            return None
        if self.shapes is not None:
            program = self.by.shapes.derived.program
            own = shapes_of(program, self.special.extents)
            names = [output.name for output in program.returned]
            call = _apart(call, {k: self.shapes[n] for k, n in enumerate(names) if self.shapes[n] != own[n]})
        return call if self.as_taken is None else _sorted_first(call, self.as_taken)


@dataclass
class Calls:
    """The calls of one program, and what runs those that are cached."""

    runners: Runners
    _cached: dict[CallKey, CachedCall] = field(default_factory=dict)
    _last: tuple[CallKey, CachedCall] | None = None
    quick: tuple[Quick, CachedCall] | None = None
    """What runs calls like the last ones, where the last two were of one kind."""

    @property
    def shapes(self) -> Specializations:
        """The plans."""
        return self.runners.shapes

    @property
    def _derived(self) -> Derived:
        return self.runners.shapes.derived

    def cached(self, key: CallKey, values: Mapping[str, Any], sizes: Any) -> CachedCall | None:
        """What runs calls of a key, where there is something already. Calls come in runs of one kind: at the second of one, what
        runs the others is made."""
        last = self._last
        if last is not None and last[0] == key:
            cached = last[1]
            if self.quick is None and cached.lasts:
                self.quick = quick(cached.call, values, sizes), cached
            return cached
        found = self._cached.get(key)
        if found is not None:
            self._last, self.quick = (key, found), None
        return found

    def forget(self) -> None:
        """Calls are looked at once more."""
        for cached in list(self._cached.values()):
            cached.lasts = False
        self._cached.clear()
        self._last = self.quick = None

    def routed(self, given: Given) -> Routed:
        """A call of the program as it is. Where it is run, what it launches on a GPU is compiled while its plan is verified."""
        begin = partial(self.runners.begin, given) if given.is_run else None
        special = self.shapes.of(self.shapes.arguments, given, begin)
        return Routed(self, given, special, special.extents)

    def prepared(self, routed: Routed) -> Results:
        """The outputs of a call, as what runs it has them, once all that it needs is compiled: C++ is waited for."""
        special, given = routed.special, routed.given
        results = self.runners.prepared(special, given)
        if not special.is_empty:
            self._learn(special, None, given)
        return results

    def called(
        self,
        key: CallKey | None,
        routed: Routed,
        given: Given,
        addresses: Sequence[int],
        values: Mapping[str, Any],
    ) -> Any:
        """The outputs of a call, as it gives them. Where it has a key, what runs calls like it is kept; where its launches are
        those of another one with other sizes, it goes straight to these."""
        by, special = routed.by, routed.special
        if given.numpy or special.is_empty:
            key = None
        planned = None if key is None else by._planned(special, routed.given)
        call = None if planned is None else routed.of_called(by._planned_call(special, planned, routed.given))
        made = None if call is None else call(values, addresses)
        if key is not None and call is not None and made is not None:
            self.keep(key, CachedCall(special.compiled, call, routed.extents))
            return made
        results = routed.apart(by.runners.run(special, routed.given))
        if key is not None:
            by._learn(special, planned, routed.given)
            self._remember(key, routed)
        return given.returned([results[output.name] for output in self._derived.program.returned])

    def _planned(self, special: Specialization, given: Given) -> Planned | None:
        """What a call launches on a GPU, where Triton's binaries run it; None where nothing of its plan has run there yet."""
        program = self.runners.triton(special)
        if program is None:
            return None
        return program.planned(given.tensors, given.scalars, special.sizes)

    def _planned_call(self, special: Specialization, planned: Planned, given: Given) -> Call | None:
        """What runs a call that launches what others have launched, and calls like it."""
        program = self.runners.triton(special)
        planner = None if program is None else program.planner
        if planner is None:
            return None
        outputs = tuple(output.name for output in self._derived.program.returned)
        kind = planner.kind(planned, tuple(given.tensors), outputs, place_of(given.tensors))
        return None if kind is None else planner.form(kind)(kind)

    def _learn(self, special: Specialization, planned: Planned | None, given: Given) -> None:
        """Notes what a call has launched."""
        planned = planned or self._planned(special, given)
        program = None if planned is None else self.runners.triton(special)
        if planned is None or program is None or program.planner is None:
            return
        kind = self.runners.kind(special, given)
        if kind is not None:
            program.planner.learn(planned, kind.known)

    def keep(self, key: CallKey, cached: CachedCall) -> None:
        """Calls of this key are run so from now on."""
        if len(self._cached) >= MOST_CALLS:
            self._cached.clear()
        self._cached[key] = cached

    def _remember(self, key: CallKey, routed: Routed) -> None:
        """Keeps what runs calls of a key. It holds nothing of this call but names and sizes: no input outlives its call."""
        names, numbers = tuple(routed.given.tensors), tuple(routed.given.scalars)
        kind = replace(routed, given=Given({}, {}, None, numpy=False))
        by, special, extents = kind.by, kind.special, kind.extents

        def second(values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
            """Many kinds of calls come once: what runs the others is made at the second."""
            given = values if kind.as_taken is None else kind.as_taken(values)
            tensors, scalars = ({name: given[name] for name in part} for part in (names, numbers))
            call = kind.of_called(by._call(special, Given(by._taken(tensors), scalars, None, numpy=False)))
            if call is None:
                return None
            self._cached[key] = CachedCall(special.compiled, call, extents)
            self._last = self.quick = None
            return call(values, addresses)

        self.keep(key, CachedCall(special.compiled, second, extents, lasts=False))

    def _taken(self, tensors: Tensors) -> Tensors:
        """The tensors of a call like one that has run, as the program takes them."""
        derived = self._derived
        if derived.split is not None:
            return derived.split.views(tensors)
        return tensors if derived.collapsed is None else derived.collapsed.views(tensors) or tensors

    def _call(self, special: Specialization, given: Given) -> Call | None:
        """What runs calls like one that has run; None where they have to be looked at once more."""
        names, outputs = tuple(given.tensors), [output.name for output in self._derived.program.returned]
        host = self.runners.host(special.compiled)
        if host is None:
            kind = self.runners.kind(special, given)
            if kind is not None:
                from eqfuse.tile.triton.direct import direct

                return direct(kind)
        elif not host.is_settled(given.tensors):
            return None
        else:
            call = host.direct(names, given.tensors, special.extents, special.shards, outputs)
            if call is not None:
                return call
        runner, scalars = self.runners.loaded(special.compiled), tuple(given.scalars)

        def run(values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
            with undisturbed():
                tensors, numbers = ({name: values[name] for name in part} for part in (names, scalars))
                made = runner(self._taken(tensors), numbers, special.extents, special.shards)
            return as_given([made[name] for name in outputs], numpy=False)

        return run


def _apart(call: Call, shapes: Mapping[int, tuple[int, ...]]) -> Call:
    """What gives the outputs of a call, those at some places in other shapes."""
    if not shapes:
        return call

    def apart(values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
        made = call(values, addresses)
        if made is None:
            return None
        if type(made) is not tuple:
            return made.view(shapes[0])
        every = list(made)
        for place, shape in shapes.items():
            every[place] = every[place].view(shape)
        return tuple(every)

    return apart


def _sorted_first(call: Call, as_taken: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Call:
    """What runs calls by one that takes sorted positions."""

    def run(values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
        with undisturbed():
            taken = as_taken(values)
        return call(taken, [value.data_ptr() for value in taken.values() if isinstance(value, torch.Tensor)])

    return run
