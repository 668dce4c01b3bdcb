"""Arithmetic of the CPU code generator: elementwise functions, choices, folds and dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eqfuse.terms.dtypes import LIMITS
from eqfuse.terms.functions import CASTS, COMPARISONS, DRAWN, FUNCTIONS, LOGICAL, OPERATORS, ROUNDINGS
from eqfuse.tile.cpu.access import place
from eqfuse.tile.cpu.values import TORCH, Affine, Item
from eqfuse.tile.cpu.writer import Writer
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.nodes import Division, Dot, Value

_SIGNS: Mapping[str, str] = {fn: OPERATORS[fn] for fn in (*COMPARISONS, "add", "sub", "mul")}
_DIVIDED = {"floordiv": "integer_quotient({0}, {1})", "mod": "integer_remainder({0}, {1})"}
_BY_NONZERO = {"floordiv": "({0} // {1})", "mod": "({0} % {1})"}
"""Divisions of integers; and those whose divisors are known not to be 0."""
_BITS: Mapping[str, str] = {
    "bitand": "({0} & {1})",
    "bitor": "({0} | {1})",
    "bitxor": "({0} ^ {1})",
    "lshift": "shifted_left({0}, {1})",
    "rshift": "shifted_right({0}, {1})",
}
_PYTHON: Mapping[str, str] = {
    **{fn: f"({{0}} {sign} {{1}})" for fn, sign in _SIGNS.items()},
    **_DIVIDED,
    **_BITS,
    "and": "({0} and {1})",
    "or": "({0} or {1})",
    "not": "(not {0})",
    "maximum": "max({0}, {1})",
    "minimum": "min({0}, {1})",
    "abs": "abs({0})",
    "neg": "(-{0})",
    "sign": "(({0} > 0) - ({0} < 0))",
    "sq": "({0} * {0})",
    "relu": "max({0}, 0)",
}
"""Scalar integers and truth values."""
_GROWING = ("add", "sub", "mul", "floordiv", "neg", "abs", "sq")
"""Functions of 64-bit integers that may give one beyond 64 bits, which Python holds."""

INTEGER_TILES: Mapping[str, str] = {
    **{fn: f"{{0}} {sign} {{1}}" for fn, sign in _SIGNS.items()},
    **_DIVIDED,
    **_BITS,
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "not": "~{0}",
    "maximum": "torch.maximum({0}, {1})",
    "minimum": "torch.minimum({0}, {1})",
    "abs": "torch.abs({0})",
    "neg": "-{0}",
    "sign": "torch.sign({0})",
    "sq": "{0} * {0}",
    "relu": "torch.clamp_min({0}, 0)",
}
REAL: Mapping[str, str] = {
    **{row.name: row.torch for row in FUNCTIONS.values() if row.torch},
    "exp2": "torch.exp2",
    "gelu": "gelu",
    "finite": "finite",
    "invertible": "invertible",
}
_WITHOUT_OUT = ("silu",)
_TAKES_NUMBER = ("add", "sub", "mul", "div", "floordiv", "mod", *COMPARISONS)
"""Functions whose second operand may be a Python number."""


def elementwise(w: Writer, value: Value, fn: str, args: Sequence[Item], division: Division = "any") -> Item:
    """An elementwise function of `nodes.ARITY`, in place where an operand dies here."""
    if fn in CASTS:
        return w.converted(w.converted(args[0], fn, value.name), value.dtype, value.name)
    if fn in DRAWN:
        return _drawn(w, value, [w.plain(arg) for arg in args])
    if fn in ROUNDINGS:
        return _whole(w, value, fn, w.plain(args[0]))
    if fn == "where":
        return _where(w, value, *args)
    if fn in LOGICAL and (folded := _folded(w, value, fn, args)) is not None:
        return folded
    args = [w.plain(arg) for arg in args]
    if any(arg.is_real for arg in args) or value.dtype not in INTEGERS:
        return _compared(w, value, fn, args) if fn in COMPARISONS else _real(w, value, fn, args)
    if not value.dims:
        text, data = _template(_PYTHON, fn, args, division), _from_data(args)
        grows = fn in _GROWING and (data or value.dtype == "i64")  # what is i32 is known to fit
        return w.scalar(value, f"wrapped({text})" if grows else text, data=data)
    return _integer_tile(w, value, fn, args, division)


def _whole(w: Writer, value: Value, fn: str, item: Item) -> Item:
    low, high = LIMITS[fn]
    if item.is_python:
        return w.scalar(value, f"min(max({item.text}, {low}), {high})", data=_from_data([item]))
    text = f"to_whole({item.text}, {low}, {high})"
    if not value.dims:
        return w.scalar(value, f"int({text})", data=True)
    return w.owned(Item(w.let(value.name, text), value.dims, value.dtype, item.full), value.name)


def _drawn(w: Writer, value: Value, args: Sequence[Item]) -> Item:
    text = f"uniform({', '.join(arg.text for arg in args)}, {TORCH[value.dtype]})"
    return w.owned(Item(w.let(value.name, text), value.dims, value.dtype, _full(args)), value.name)


def _from_data(args: Sequence[Item]) -> bool:
    return any(arg.affine is None or arg.affine.data for arg in args)


def _integer_tile(w: Writer, value: Value, fn: str, args: Sequence[Item], division: Division) -> Item:
    affine: Affine | None = None
    match fn, [arg.affine for arg in args]:
        case "add", [Affine() as left, Affine() as right]:
            affine = left.plus(right, "+")
        case "sub", [Affine() as left, Affine() as right]:
            affine = left.plus(right, "-")
        case "mul", [Affine() as left, Affine() as right]:
            affine = left.times(right)
        case "neg", [Affine() as only]:
            affine = Affine("0").plus(only, "-")
    if fn in ("maximum", "minimum"):
        args = [w.aligned(arg, value.dims, value.name) for arg in args]
    text = w.let(value.name, _template(INTEGER_TILES, fn, args, division))
    return Item(text, value.dims, value.dtype, _full(args), affine=affine)


def _template(templates: Mapping[str, str], fn: str, args: Sequence[Item], division: Division) -> str:
    """A function of integers; a division is one of Python or torch where its divisor is not 0: they round down."""
    return (templates if division == "any" else _BY_NONZERO)[fn].format(*(arg.text for arg in args))


def _full(args: Sequence[Item]) -> frozenset[str]:
    return frozenset[str]().union(*(arg.full for arg in args))


def _folded(w: Writer, value: Value, fn: str, args: Sequence[Item]) -> Item | None:
    """A logical function of conditions of which some are known; None if none is."""
    truths = [arg.truth for arg in args]
    if all(truth is None for truth in truths):
        return None
    decides = fn == "or"
    if fn == "not" or decides in truths:
        truth = not truths[0] if fn == "not" else decides
        return Item(repr(truth), value.dims, "bool", truth=truth)
    unknown = [arg for arg in args if arg.truth is None]
    if not unknown:
        return Item(repr(not decides), value.dims, "bool", truth=not decides)
    return w.aligned(unknown[0], value.dims, value.name)


def _real_operands(w: Writer, args: Sequence[Item], dtype: str, name: str) -> list[Item]:
    return [w.converted(arg, dtype, f"{name}_{dtype}") for arg in args]


def _compared(w: Writer, value: Value, fn: str, args: Sequence[Item]) -> Item:
    dtype = next(arg.dtype for arg in args if arg.is_real)
    args = _real_operands(w, args, dtype, value.name)
    text = f"{args[0].text} {_SIGNS[fn]} {_number_or_text(args[1], args[0], value)}"
    if not value.dims:
        return w.scalar(value, f"bool({text})", data=True)
    return Item(w.let(value.name, text), value.dims, "bool", _full(args))


def _number_or_text(item: Item, other: Item, value: Value) -> str:
    """The operand as a Python number where that is known and the other operand gives the result its shape."""
    if item.number is not None and other.number is None and other.dims == value.dims:
        return repr(item.number)
    return item.text


def _real(w: Writer, value: Value, fn: str, args: Sequence[Item]) -> Item:
    args = _real_operands(w, args, value.dtype, value.name)
    full = _full(args)
    texts = [arg.text for arg in args]
    if fn in _TAKES_NUMBER:
        texts[1] = _number_or_text(args[1], args[0], value)
    match fn:
        case "sq":
            function, texts = "torch.mul", texts * 2
        case "relu":
            function, texts = "torch.clamp_min", [*texts, "0.0"]
        case _:
            function = REAL[fn]
    if not value.dims and all(arg.head or arg.number is not None for arg in args):
        return Item(w.at_head(value.name, f"{function}({', '.join(texts)})"), (), value.dtype, head=True)
    if fn not in _WITHOUT_OUT:
        if (there := place(w, value, full)) is not None:
            w.emit(f"{function}({', '.join(texts)}, out={there})")
            return Item(there, value.dims, value.dtype, full)
        for arg in args:
            others = [other for other in args if other is not arg]
            if arg.dims == value.dims and w.reusable(arg, others, full, value.dtype):
                return _in_place(w, value, arg, f"{function}({', '.join(texts)}, out={arg.text})")
    text = w.let(value.name, f"{function}({', '.join(texts)})")
    return w.owned(Item(text, value.dims, value.dtype, full), value.name)


def _in_place(w: Writer, value: Value, item: Item, text: str) -> Item:
    """The result of an operation that has overwritten `item`."""
    result = Item(w.let(value.name, text), value.dims, value.dtype, item.full, item.storage, fresh=True)
    return w.alias(result)


def _where(w: Writer, value: Value, condition: Item, left: Item, right: Item) -> Item:
    if condition.truth is not None:
        chosen = w.converted(w.plain(left if condition.truth else right), value.dtype, value.name)
        return w.aligned(chosen, value.dims, value.name)
    left, right = (w.converted(w.plain(arg), value.dtype, value.name) for arg in (left, right))
    if not condition.dims:
        return _choice(w, value, condition, left, right)
    full = _full((condition, left, right))
    shaped = [arg for arg in (left, right) if arg.number is None]
    for arg, number in ((left, right.number), (right, left.number)):
        others = [other for other in (condition, left, right) if other is not arg]
        if number is not None and arg.is_real and w.reusable(arg, others, full, value.dtype):
            # masked_fill_ takes twice as long, and with `~` needs another tile.
            texts = [
                w.constant(number, value.dtype) if other is not arg else arg.text for other in (left, right)
            ]
            text = f"torch.where({condition.text}, {texts[0]}, {texts[1]}, out={arg.text})"
            return _in_place(w, value, arg, text)
    texts = [
        repr(arg.number) if arg.number is not None and arg.is_real and len(shaped) == 1 else arg.text
        for arg in (left, right)
    ]
    text = w.let(value.name, f"torch.where({condition.text}, {', '.join(texts)})")
    item = Item(text, value.dims, value.dtype, full)
    return w.owned(item, value.name) if item.is_real else item


def _choice(w: Writer, value: Value, condition: Item, left: Item, right: Item) -> Item:
    """One of two values, as a scalar condition decides; it shares the memory of both."""
    if not value.dims and value.dtype in INTEGERS:
        data = _from_data((condition, left, right))
        return w.scalar(value, f"({left.text} if {condition.text} else {right.text})", data=data)
    left, right = (w.aligned(arg, value.dims, value.name) for arg in (left, right))
    full = left.full | right.full
    texts = [w.expanded(arg, full) for arg in (left, right)]
    text = w.let(value.name, f"{texts[0]} if {condition.text} else {texts[1]}")
    return w.alias(Item(text, value.dims, value.dtype, full, left.storage | right.storage))


def reduced(w: Writer, value: Value, op: str, item: Item, axis: str) -> Item:
    """`op` over one dim of a tile."""
    item = w.plain(item)
    whole = w.expanded(item, {axis})
    place = item.dims.index(axis)
    if op in ("max", "min") and w.blocks[axis].kind == "whole":
        text = f"fold_empty({op!r}, {whole}, {place})"
    else:
        function = {"sum": "torch.sum", "prod": "torch.prod", "max": "torch.amax", "min": "torch.amin"}[op]
        text = f"{function}({whole}, {place})"
    if not value.dims and value.dtype in INTEGERS:
        return w.scalar(value, f"int({text})", data=True)
    result = Item(w.let(value.name, text), value.dims, value.dtype, item.full - {axis})
    return w.owned(result, value.name) if result.is_real else result


def dot(w: Writer, value: Value, op: Dot) -> Item:
    """A (batched) matrix product, added to its accumulator in place where that dies here."""
    operands = [w.converted(w.read(v), value.dtype, f"{v.name}_wide") for v in (op.left, op.right)]
    batch = sum(dim in op.right.dims for dim in op.left.dims) - 1
    rows, columns = len(op.left.dims) - batch - 1, len(op.right.dims) - batch - 1
    left, right = (w.expanded(item, item.dims) for item in operands)
    if rows > 1:
        left += f".flatten({batch}, {batch + rows - 1})"
    if columns > 1:
        right += f".flatten({batch + 1}, {batch + columns})"
    masks = [_dot_mask(w, op.left_mask, batch, rows), _dot_mask(w, op.right_mask, batch + 1, columns)]
    is_masked = masks != ["None", "None"]
    with_sum = {0: "addmm", 1: "baddbmm"}.get(batch) if rows and columns and not is_masked else None
    factor = w.dot_factor(value)
    if is_masked:
        left, masks[0] = (
            text if rows or text == "None" else f"{text}.unsqueeze(-2)" for text in (left, masks[0])
        )
        product = f"masked_product({left}, {right}, {masks[0]}, {masks[1]}){'' if rows else '.squeeze(-2)'}"
        product += "" if factor is None else f".mul_({factor[1]})"
    elif factor is None:
        product = f"{'torch.matmul' if rows else 'vector_product'}({left}, {right})"
    elif with_sum:
        nothing = w.constant(0.0, value.dtype)
        product = f"torch.{with_sum}({nothing}, {left}, {right}, beta=0, alpha={factor[1]})"
    else:
        product = f"{'torch.matmul' if rows else 'vector_product'}({left}, {right}).mul_({factor[1]})"
    if rows > 1 or columns > 1:
        product += f".view({w.lengths(value.dims)})"
    full = frozenset(value.dims)
    result = Item("", value.dims, value.dtype, full)
    accumulator = None if op.accumulator is None else w.read(op.accumulator)
    if accumulator is None or accumulator.number == 0:
        result = w.owned(replace(result, text=w.let(value.name, product)), value.name)
        if factor is not None:
            w.made[factor[0].name] = result
        return result
    fused = with_sum if rows == columns == 1 else None
    if w.reusable(accumulator, operands, full, value.dtype):
        text = f".{fused}_({left}, {right})" if fused else f".add_({product})"
        return _in_place(w, value, accumulator, accumulator.text + text)
    if fused:
        if (there := place(w, value, full)) is not None:
            w.emit(f"torch.{fused}({accumulator.text}, {left}, {right}, out={there})")
            return replace(result, text=there)
        text = f"torch.{fused}({accumulator.text}, {left}, {right})"
    else:
        text = f"{accumulator.text} + {product}"
    return w.owned(replace(result, text=w.let(value.name, text)), value.name)


def _dot_mask(w: Writer, mask: Value | None, first: int, count: int) -> str:
    """A mask of one operand of a matrix product as that operand is given: `count` dims from `first` on as one."""
    item = None if mask is None else w.read(mask)
    if item is None or item.truth is True:
        return "None"
    assert mask is not None
    text = f"torch.tensor({item.truth})" if item.truth is not None else w.expanded(item, mask.dims)
    if item.truth is not None or not item.dims:
        text = f"{text}.expand({w.lengths(mask.dims)})"
    return text if count < 2 else f"{text}.flatten({first}, {first + count - 1})"
