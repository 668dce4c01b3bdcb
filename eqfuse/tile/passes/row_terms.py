"""Terms of rows behind maxima: what all elements of a row have in common is taken from the maximum, not from each of them.

    t = a + (x - r);  m = max(t);  s = t - b      ->      y = a + x;  m = max(y) - r;  s = y - (b + r)

where r has a value for each row, b too, and nothing else reads t: one operation of each element less. ALiBi's distances are of
this kind, i - j being the difference of a term of the row and one of the column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eqfuse.tile.def_use import Readers, readers_of
from eqfuse.tile.nodes import Align, Elementwise, Kernel, Let, Op, ReduceTile, Stmt, Value
from eqfuse.tile.passes.draft import Draft, changed
from eqfuse.tile.passes.scaled_maxima import for_a_maximum
from eqfuse.tile.walk import lets_of, ops_of, pruned, uses_of


@dataclass(frozen=True)
class _Sum:
    """Two tiles that are added, and what is then subtracted from each row."""

    left: Value
    right: Value
    row: Value


def rows_last(kernel: Kernel) -> Kernel:
    """No element has a term of its row for a maximum alone."""
    ops, uses, readers = ops_of(kernel.body), uses_of(kernel.body), readers_of(kernel)

    def terms_of(value: Value, op: Op) -> _Sum | None:
        terms = _terms(value, op, ops, uses)
        wanted = terms and for_a_maximum(value, readers, ops) and _shifted_by_rows(value, readers, ops)
        return terms if wanted else None

    pairs = ((let.value.name, terms_of(let.value, let.op)) for let in lets_of(kernel.body))
    found = {name: each for name, each in pairs if each is not None}
    if not found:
        return kernel
    draft = Draft(kernel)
    plain: dict[str, tuple[Value, Value]] = {}  # by name, what stands for a value, and the term of its row

    def one(let: Let) -> Sequence[Stmt]:
        match let.op:
            case _ if let.value.name in found:
                terms = found[let.value.name]
                made = draft.new(f"{let.value.name}_of_columns", let.value.dims, let.value.dtype)
                plain[let.value.name] = made, terms.row
                return (Let(made, Elementwise("add", (terms.left, terms.right))),)
            case Elementwise("where", (mask, inner, other)) if inner.name in plain:
                made, row = plain[inner.name]
                plain[let.value.name] = let.value, row
                return (Let(let.value, Elementwise("where", (mask, made, other))),)
            case ReduceTile("max", source, axis) if source.name in plain:
                made, row = plain[source.name]
                most = draft.new(f"{let.value.name}_of_columns", let.value.dims, let.value.dtype)
                return (
                    Let(most, ReduceTile("max", made, axis)),
                    Let(let.value, Elementwise("sub", (most, row))),
                )
            case Elementwise("sub", (left, shift)) if left.name in plain:
                made, row = plain[left.name]
                aligned = ops[shift.name]
                assert isinstance(aligned, Align)
                both = draft.new(f"{shift.name}_and_row", row.dims, row.dtype)
                wide = draft.new(f"{shift.name}_and_row", shift.dims, shift.dtype)
                return (
                    Let(both, Elementwise("add", (aligned.value, row))),
                    Let(wide, Align(both)),
                    Let(let.value, Elementwise("sub", (made, wide))),
                )
            case _:
                return (let,)

    return draft.kernel_of(pruned(changed(kernel.body, one)))


def _terms(value: Value, op: Op, ops: Mapping[str, Op], uses: Counter[str]) -> _Sum | None:
    """a + (x - r), of which nothing else reads the difference, as its parts."""
    match op:
        case Elementwise("add", (left, right)) if len(value.dims) == 2 and value.dtype == "f32":
            for other, difference in ((left, right), (right, left)):
                match ops.get(difference.name):
                    case Elementwise("sub", (tile, row)) if uses[difference.name] == 1:
                        match ops.get(row.name):
                            case Align(rows) if rows.dims == value.dims[:1] and rows.dtype == "f32":
                                return _Sum(other, tile, rows)
    return None


def _shifted_by_rows(value: Value, readers: Readers, ops: Mapping[str, Op]) -> bool:
    """Whether what is subtracted from a value, masked or not, has a value for each row."""
    pending = [value]
    while pending:
        here = pending.pop()
        for reader, op in readers.get(here.name, []):
            match op:
                case Elementwise("where") if reader is not None:
                    pending.append(reader)
                case Elementwise("sub", (_, shift)):
                    match ops.get(shift.name):
                        case Align(rows) if rows.dims == value.dims[:1] and rows.dtype == "f32":
                            continue
                    return False
                case ReduceTile(_, _, axis) if axis == value.dims[0]:
                    return False
    return True
