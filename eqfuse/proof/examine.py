"""Whether a proof proves what it says: every step, every connection between chains, and the program it is of."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse.errors import EqfuseError
from eqfuse.loops.plan import SCANS, WAYS
from eqfuse.proof.check import Ground, Refused, Replay, known_rules
from eqfuse.proof.elaborate import (
    AT,
    Circular,
    expanded,
    in_parts,
    merge_values,
    named,
    normal,
    opened,
    over_parts,
    part_of,
    reading,
    with_axes,
    with_exponents_as_sums,
    without_names,
)
from eqfuse.proof.nodes import (
    GroupProof,
    KernelProof,
    Merged,
    Origin,
    OutputProof,
    Proof,
    StateProof,
    Walk,
    has_casts,
    inferences,
)
from eqfuse.proof.positions import AxisNames, computed_load, packed
from eqfuse.proof.syntax import Term, term, walk
from eqfuse.proof.trial import Untried, tried
from eqfuse.rules.rule import Rule
from eqfuse.terms.dtypes import INTEGERS
from eqfuse.terms.nodes import Expr, Load, Program
from eqfuse.terms.parser import parse
from eqfuse.terms.prefixes import alike
from eqfuse.terms.python import parsed


@dataclass(frozen=True)
class Verdict:
    """Whether a derivation holds; `why` says what was replayed, or which step was refused and why."""

    ok: bool
    why: str

    def __bool__(self) -> bool:
        return self.ok


def examine(
    proof: Proof,
    program: Program | None = None,
    claims: Sequence[KernelProof] | None = None,
    rules: Mapping[str, Rule] | None = None,
) -> Verdict:
    """Replays a proof. `program` is what it has to be of (its own source where None), `claims` what the
    kernels have to be, `rules` the rules that may be used (all known ones where None)."""
    try:
        if proof.gaps:
            raise Refused("the derivation", f"not derived: {proof.gaps[0]}")
        known = known_rules(proof) if rules is None else rules
        own = _parsed(proof.origin)
        _Examiner(proof, own, known).run()
        if program is not None and _definitions(program) != _definitions(own):
            raise Refused("the derivation", "it is of another program")
        if claims is not None:
            _compare(proof.kernels, claims)
    except Refused as refused:
        return Verdict(False, f"{refused.where}: {refused.why}")
    except Circular as error:
        return Verdict(False, f"the derivation: {error} is defined by itself")
    except (SyntaxError, ValueError):  # of texts of leaves and numbers
        return Verdict(False, "the derivation: a name or a number in it is none of the language")
    except RecursionError:
        return Verdict(False, "the derivation: its terms are nested too deeply")
    chains = [chain for _, chain in proof.chains()]
    steps, inferred = sum(map(len, chains)), sum(1 for _ in inferences(*chains))
    return Verdict(True, f"{steps} steps, {inferred} instances of {len(proof.rules)} rules")


def _parsed(origin: Origin) -> Program:
    try:
        return parse(origin.source, scalars=dict(origin.scalars), strict_casts=origin.strict_casts)
    except EqfuseError as error:
        raise Refused("the program", f"its source is not a program: {error.message}") from None


def _definitions(program: Program) -> list[tuple[str, tuple[str, ...], Term]]:
    return [(o.name, o.axes, reading(o.expr, strict_casts=program.strict_casts)) for o in program.outputs]


def _bare(merged: Merged | None) -> Merged | None:
    return merged and replace(merged, steps=())


def _compare(proved: Sequence[KernelProof], claims: Sequence[KernelProof]) -> None:
    """That what is proved is what the kernel runs."""
    if [k.name for k in proved] != [k.name for k in claims]:
        raise Refused("the derivation", "it has other kernels than the compiled program")
    for kernel, claim in zip(proved, claims, strict=True):
        groups = tuple(
            replace(
                g,
                states=tuple(replace(s, update=_bare(s.update), combine=_bare(s.combine)) for s in g.states),
            )
            for g in kernel.groups
        )
        for mine, its in zip(groups, claim.groups, strict=False):
            for state, other in zip(mine.states, its.states, strict=False):
                if state != other:
                    raise Refused(f"{state.name} in {kernel.name}", "the kernel runs another merge")
        if replace(kernel, groups=groups) != claim:
            raise Refused(kernel.name, "the compiled program has another kernel there")


def _same(left: Term, right: Term) -> bool:
    """Whether terms say the same in other notation."""
    left, right = normal(left), normal(right)
    return left is right or normal(opened(left)) is normal(opened(right))


def _canonical(*roots: Term) -> tuple[Term, ...]:
    """What is the same of terms that name the axes of their folds in other ways, or multiply out exponents."""
    roots, prefix = tuple(normal(opened(root)) for root in roots), "axis_"
    while any(prefix in word for node in walk(*roots) for word in node.words):
        prefix = f"_{prefix}"
    return tuple(with_exponents_as_sums(without_names(root, prefix)) for root in roots)


def _loaded(name: str, axes: Sequence[str]) -> str:
    """How a kernel reads what another has stored."""
    return f"{name}[{', '.join(axes)}]" if axes else name


def _is_load(value: Term) -> bool:
    return value.head == "Apply1" and value.words[0].endswith(AT)


def _is_named(text: str, load: Term) -> bool:
    """Whether a leaf's text is the load that it stands for, as far as its indices go."""
    tensor, index = _access(text)
    found = [term("Leaf", (ast.unparse(part),)) for part in index]
    return bool(index) and load.words == (tensor + AT,) and _same(packed(found), load.args[0])


def _access(text: str) -> tuple[str, list[ast.expr]]:
    """The tensor that a leaf's text reads, and at which index; no index of other text."""
    match parsed(text.rstrip("'")):
        case ast.Subscript(ast.Name(tensor), index):
            return tensor, index.elts if isinstance(index, ast.Tuple) else [index]
    return "", []


def _elsewhere(
    kernel: KernelProof,
    stored: Mapping[str, Term],
    axes: Mapping[str, Sequence[str]],
    extents: dict[str, int | str],
) -> dict[str, Term]:
    """What a kernel reads of temporaries at the positions of other axes than those that they are stored along."""
    found: dict[str, Term] = {}
    for text in _leaves(kernel):
        tensor, index = _access(text)
        names = [part.id for part in index if isinstance(part, ast.Name)]
        if tensor in axes and text not in stored and len(names) == len(index) == len(axes[tensor]):
            own = stored[_loaded(tensor, axes[tensor])]
            found[text] = with_axes(own, dict(zip(axes[tensor], names, strict=True)), extents)
    return found


def _leaves(kernel: KernelProof) -> Iterator[str]:
    """Texts of the leaves of what a kernel runs, and of what its leaves stand for."""
    roots = [*(o.value for o in kernel.outputs), *kernel.leaves.values()]
    for state in (state for group in kernel.groups for state in group.states):
        merged = [m.value for m in (state.update, state.combine) if m is not None]
        roots += [state.body, *merged, *([state.finish] if state.finish else [])]
    yield from (node.words[0] for node in walk(*roots) if node.head == "Leaf")


def _number(loaded: str) -> int:
    """The number in the name of a temporary."""
    digits = re.match(r"\D*(\d*)", loaded)
    return int(digits[1] or 0) if digits else 0


@dataclass(frozen=True)
class _Examiner:
    proof: Proof
    program: Program
    rules: Mapping[str, Rule]

    def run(self) -> None:
        self._outputs()
        if self.proof.origin.strict_casts and not has_casts(self.program):
            raise Refused("the program", "casts are strict, and there is none in it")
        stored: dict[str, Term] = {}
        axes: dict[str, tuple[str, ...]] = {}
        outputs = {o.name: o for o in self.proof.outputs}
        loads = self._loads()
        made: set[str] = set()
        for number, kernel in enumerate(self.proof.kernels, start=1):
            if kernel.name != f"kernel{number}":
                raise Refused(kernel.name, f"the name of kernel {number} is kernel{number}")
            before = {**stored, **_elsewhere(kernel, stored, axes, dict(alike(self.program)))}
            values = self._values(kernel, before)
            for group in kernel.groups:
                self._group(kernel, group, values)
            self._walks(kernel)
            self._auxiliaries(kernel, values, before)
            self._reads_made(kernel, outputs, made)
            mine = [name for name in outputs if name in {output.name for output in kernel.outputs}]
            if mine != [output.name for output in kernel.outputs if output.name in outputs]:
                raise Refused(kernel.name, "its outputs are not in the order of the program")
            for output in kernel.outputs:
                where = f"{output.name} in {kernel.name}"
                if output.name in made:
                    raise Refused(where, "it is computed twice")
                whole = expanded(output.value, values)
                if output.name not in outputs:
                    if len(set(output.axes)) < len(output.axes):
                        raise Refused(where, "an axis of it is named twice")
                    stored[_loaded(output.name, output.axes)] = whole
                    axes[output.name] = output.axes
                elif output.axes != outputs[output.name].axes:
                    raise Refused(where, "it has other axes than the output of the program")
                elif not self._agree(whole, expanded(outputs[output.name].prepared, loads)):
                    raise Refused(where, "it does not compute the prepared form of the output")
                made.add(output.name)
        missing = [name for name in outputs if name not in made]
        if list(stored) != sorted(stored, key=_number):
            raise Refused("the derivation", "temporaries are not in the order of their numbers")
        if missing:
            raise Refused("the derivation", f"no kernel computes {missing[0]}")
        self._read(stored)
        if self.proof.unread:
            raise Refused("the derivation", f"nothing in it refers to {self.proof.unread[0]}")

    def _reads_made(
        self, kernel: KernelProof, outputs: Mapping[str, OutputProof], made: Collection[str]
    ) -> None:
        """That what a kernel reads of outputs was stored: by a kernel before, or, where it goes in order, by itself at positions that
        all are before its own one, or all after it."""
        mine = {output.name: output.axes for output in kernel.outputs}
        signs: set[int] = set()
        for text in _leaves(kernel):
            tensor, index = _access(text)
            if tensor not in outputs or tensor in made:
                continue
            if tensor not in mine:
                raise Refused(kernel.name, f"it reads {tensor} before a kernel has stored it")
            place = mine[tensor].index(kernel.in_order) if kernel.in_order in mine[tensor] else -1
            match index[place] if 0 <= place < len(index) else None:
                case ast.BinOp(ast.Name(axis), ast.Sub() | ast.Add() as op, ast.Constant(int(far))) if (
                    axis == kernel.in_order and far > 0
                ):
                    signs.add(1 if isinstance(op, ast.Add) else -1)
                case _:
                    raise Refused(kernel.name, f"it reads {text} while it stores {tensor}")
        if len(signs) > 1:
            raise Refused(kernel.name, f"it reads what it stores before and after {kernel.in_order}")
        if kernel.in_order and not signs:
            raise Refused(kernel.name, f"nothing that it reads goes in order along {kernel.in_order}")

    def _loads(self) -> dict[str, Term]:
        """What the loads of the program, and of what it was rewritten to, at computed indices stand for: the rules do not look into them."""
        strict = self.program.strict_casts
        leaves: dict[str, Expr] = {}
        for output in self.program.outputs:
            reading(output.expr, strict_casts=strict, leaves=leaves)
        found = {
            text: reading(expr, strict_casts=strict, indices=True)
            for text, expr in leaves.items()
            if isinstance(expr, Load)
        }
        texts = {
            node.words[0] for o in self.proof.outputs for node in walk(o.prepared) if node.head == "Leaf"
        }
        new = {text: load for text in texts - found.keys() if (load := computed_load(text)) is not None}
        return {text: load for text, load in {**found, **new}.items() if _is_load(load)}

    def _read(self, stored: Mapping[str, Term]) -> None:
        """That every temporary is read."""
        read = {text for kernel in self.proof.kernels for text in _leaves(kernel)}
        tensors = {text.split("[")[0] for text in read}
        for loaded in stored:
            if loaded.split("[")[0] not in tensors:
                raise Refused(loaded, "no kernel reads it")

    def _auxiliaries(
        self, kernel: KernelProof, values: Mapping[str, Term], before: Mapping[str, Term]
    ) -> None:
        """That no output reads an auxiliary state, which has no exact value, and that the others are of the program. What an earlier kernel
        has stored may be of the value of an auxiliary state: it is read as it is stored."""
        read = set(walk(*(output.value for output in kernel.outputs)))
        own = {name: value for name, value in values.items() if name not in before}
        here, program = (
            {node for output in kernel.outputs for node in walk(expanded(output.value, known))}
            for known in (own, values)
        )
        for state in (state for group in kernel.groups for state in group.states):
            local = term("Local", (state.name,))
            where = f"{state.name} in {kernel.name}"
            inlined = expanded(local, own) in here
            # what is the same at every position, as a count, may be in the program without being read
            if state.auxiliary and (local in read or (inlined and state.body.head != "Num")):
                raise Refused(where, "it is auxiliary, and an output needs it")
            if not state.auxiliary and expanded(local, values) not in program:
                raise Refused(where, "no output needs it, and it is not auxiliary")

    def _outputs(self) -> None:
        defined = _definitions(self.program)
        if [(o.name, o.axes) for o in self.proof.outputs] != [(name, axes) for name, axes, _ in defined]:
            raise Refused("the outputs", "they are not those of the program")
        exponents = {
            node.args[0] for _, _, definition in defined for node in walk(definition) if node.head == "Exp"
        }
        program = self.program
        declared = (tensor.name for tensor in program.tensors if tensor.dtype in INTEGERS)
        integers = frozenset({*program.integers, *program.integer_tensors, *declared})
        ground = Ground(
            scalars=program.scalars, exponents=exponents, integers=integers, axes=AxisNames.of(program)
        )
        replay = Replay(self.rules, ground)
        for output, (_, _, definition) in zip(self.proof.outputs, defined, strict=True):
            if output.definition is not definition:
                raise Refused(f"output {output.name}", "its definition is not that of the program")
            replay.chain(output.definition, output.steps, output.prepared, f"output {output.name}")

    def _values(self, kernel: KernelProof, stored: Mapping[str, Term]) -> dict[str, Term]:
        """What the names in a kernel stand for, over whole axes."""
        values = dict(stored)
        parts = {walked.axis: walked.where for walked in kernel.walks if walked.where}
        states = [(group.axis, state) for group in kernel.groups for state in group.states]
        for axis, state in states:
            if state.name in values:
                raise Refused(kernel.name, f"{state.name} is defined twice")
            values[state.name] = term("Red", (state.op, axis, parts.get(axis, "ALL")), (state.body,))
        read = set(_leaves(kernel))
        for name, meaning in kernel.leaves.items():
            if name not in read:
                raise Refused(kernel.name, f"nothing reads the leaf {name!r:.40}")
            if _is_load(meaning) and not _is_named(name, meaning):
                raise Refused(kernel.name, f"the leaf {name!r:.60} is not the load that it stands for")
            values.setdefault(name, meaning)
        return values

    def _group(self, kernel: KernelProof, group: GroupProof, values: Mapping[str, Term]) -> None:
        if not group.is_fused:
            if any(s.update or s.combine for s in group.states) or not group.obstacles:
                raise Refused(
                    f"the group over {group.axis} in {kernel.name}", "a part of its states has no merge"
                )
            return
        parts = over_parts(group.axis, ((s.name, s.op, s.body) for s in group.states))
        a, b, ab = parts["A"], parts["B"], parts["AB"]
        ground = Ground(
            values=values,
            scalars=self.program.scalars,
            states=frozenset({*a.values(), *b.values()}),
            split=group.axis,
        )
        replay = Replay(self.rules, ground)
        names = merge_values(parts)
        for state in group.states:
            for kind, merged, known, fresh in (
                ("update", state.update, names.update, ("B",)),
                ("combine", state.combine, names.combine, ()),
            ):
                assert merged is not None
                where = f"{kind} of {state.name} in {kernel.name}"
                if merged.definition is not ab[state.name]:
                    raise Refused(where, "it does not start at the definition of the state")
                replay.chain(merged.definition, merged.steps, merged.derived, where)
                _is_derived(merged, group.axis, known, fresh, where)
                _guards(merged.value, state, group.axis, where)
            _finishes(state, f"{state.name} in {kernel.name}")
        for kind in ("update", "combine"):
            _in_some_order(group, kind, kernel.name)
        try:
            found = tried(group, values)
        except Untried as error:
            raise Refused(f"the group over {group.axis} in {kernel.name}", str(error)) from None
        if found is not None:
            raise Refused(f"{found.kind} of {found.state} in {kernel.name}", str(found))

    def _walks(self, kernel: KernelProof) -> None:
        axes = [group.axis for group in kernel.groups]
        if [w.axis for w in kernel.walks] != axes:
            raise Refused(kernel.name, "it walks other axes than its groups have")
        for walked, group in zip(kernel.walks, kernel.groups, strict=True):
            way = next((way for name, way in WAYS.items() if name == walked.schedule), None)
            if way is None:
                raise Refused(kernel.name, f"there is no schedule {walked.schedule!r}")
            if way.needs_merge and not group.is_fused:
                raise Refused(kernel.name, f"it walks {walked.axis} as {walked.schedule} without a merge")
            if (walked.schedule in SCANS) != bool(walked.where):
                raise Refused(
                    kernel.name, f"it walks {walked.axis} as {walked.schedule}, and not for its parts"
                )
        scans = [walked for walked in kernel.walks if walked.where]
        if len(scans) > 1:
            raise Refused(kernel.name, "it scans two axes")
        for scan in scans:
            self._scans(kernel, scan)

    def _scans(self, kernel: KernelProof, scan: Walk) -> None:
        """That the part of an axis that states of a scan stand for is one before or after the positions of an axis of the same
        extent that every output has, and that nothing but outputs reads these states."""
        found = part_of(opened(term("Leaf", (scan.where,))), scan.axis, alike(self.program))
        if found is None:
            raise Refused(kernel.name, f"{scan.where!r:.60} is no part of the axis {scan.axis}")
        if any(found.at not in output.axes for output in kernel.outputs):
            raise Refused(kernel.name, f"an output of the scan has no axis {found.at}")
        own = {s.name for g in kernel.groups if g.axis == scan.axis for s in g.states}
        bodies = [s.body for g in kernel.groups if g.axis != scan.axis for s in g.states]
        if any(node.head == "Local" and node.words[0] in own for node in walk(*bodies)):
            raise Refused(kernel.name, "a fold reads a state of the scan")

    def _agree(self, left: Term, right: Term) -> bool:
        """Whether terms say the same, folds over the parts of axes that kernels scan in either notation, by whatever name of an axis."""
        # what is stored may be read at the positions of other axes
        folds = (node.words for node in walk(left) if node.head == "Red")
        scans = {(axis, where): None for _, axis, where in folds if " " in where}
        scans |= {(each.axis, each.where): None for k in self.proof.kernels for each in k.walks if each.where}
        names = AxisNames.of(self.program)
        bound = {node.words[1] for node in walk(left, right) if node.head == "Red"}
        more = {axis: extent for axis in bound if (extent := names.extent(axis)) is not None}
        parts = (in_parts(each, scans, {**more, **alike(self.program)}) for each in (left, right))
        return _same(*_canonical(*parts))


def _is_derived(
    merged: Merged, axis: str, known: Mapping[str, Term], fresh: Sequence[str], where: str
) -> None:
    """That the value that is run is what the steps end at, written with the names of states, guarded."""
    for node in walk(merged.value):
        if node.head == "Red" and node.words[1] == axis and node.words[2] not in fresh:
            raise Refused(where, f"it folds over a part of {axis} that it has only a state of")
    run = normal(named(merged.value, known), axis, guards=False, ordered=True)
    if run is not normal(merged.derived, axis, guards=False, ordered=True):
        raise Refused(where, "what is run is not what the steps end at, with guards")


def _finishes(state: StateProof, where: str) -> None:
    """That the value at the end differs from the carried one by guards alone."""
    if state.finish is None:
        return
    if normal(state.finish, guards=False) is not term("Local", (state.name,)):
        raise Refused(where, "its final value is not the state, but for guards")
    _guards(state.finish, state, None, where)


def _guards(value: Term, state: StateProof, axis: str | None, where: str) -> None:
    """That guards are around factors and terms by which a state is moved, not around the state or what a tile adds."""
    own = {state.name + end for end in ("", "_a", "_b", "_new")}
    for guard in (node for node in walk(value) if node.head in ("Finite", "Invertible")):
        for node in walk(guard):
            if node.head == "Local" and node.words[0] in own:
                raise Refused(where, "a guard is around the state itself")
            if node.head == "Red" and node.words[1] == axis:
                raise Refused(where, f"a guard is around what a part of {axis} gives")


def _in_some_order(group: GroupProof, kind: str, kernel: str) -> None:
    """That no new value needs itself."""
    waiting = {s.name: set(_new_values(s, kind)) for s in group.states}
    while waiting:
        ready = [name for name, needs in waiting.items() if not needs & waiting.keys()]
        if not ready:
            raise Refused(f"{kind} over {group.axis} in {kernel}", "new values of states need each other")
        for name in ready:
            del waiting[name]


def _new_values(state: StateProof, kind: str) -> Iterator[str]:
    merged = state.update if kind == "update" else state.combine
    assert merged is not None
    for node in walk(merged.value):
        if node.head == "Local" and node.words[0].endswith("_new"):
            yield node.words[0].removesuffix("_new")
