"""What a user of the package sees for bad input: the type of error and its text, word for word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import BindError, BudgetError, ParseError, ScheduleError, TypeCheckError

SUM = "y[i] = sum[j](x[i, j])"
SCORES = "S[i, j] = sum[d](Q[i, d] * K[j, d]) * scale"
ROUNDED = "q[i, j] = round(x[i, j] / max[j](abs(x[i, j])))\ny[i] = sum[j](q[i, j] * w[j])"
ones = torch.ones

kernels: dict[str, eq.Kernel] = {}


def kernel(source: str) -> eq.Kernel:
    """Compiled once for all tests."""
    if source not in kernels:
        kernels[source] = eq.compile(source)
    return kernels[source]


def scores(**changes: Any) -> Any:
    given = {"Q": ones(2, 3), "K": ones(4, 3), "scale": 1.0} | changes
    return kernel(SCORES)(**{name: value for name, value in given.items() if value is not ...})


COMPILING: list[tuple[str, Callable[[], Any], type[eq.EqfuseError], str]] = [
    (
        "empty source",
        lambda: eq.compile(""),
        ParseError,
        "the program is empty\nwrite at least one definition, for example y[i] = sum[j](x[i, j])",
    ),
    (
        "not text",
        lambda: eq.compile(None),  # type: ignore[arg-type]
        ParseError,
        "the source is NoneType, not text\npass the program as a string",
    ),
    (
        "unbound axis",
        lambda: eq.compile("y[i] = x[i, j]"),
        ParseError,
        (
            "axis 'j' is not bound here (line 1)\n"
            "    y[i] = x[i, j]\n"
            "                ^\n"
            "reduce over it, as in sum[j](...), or add it to the axes on the left side; "
            "if it is a number, declare it: j: i32"
        ),
    ),
    (
        "output never defined",
        lambda: eq.compile(f"{SUM}\nreturn z"),
        ParseError,
        "output 'z' is never defined (line 2)\n    return z\n           ^\nthe program defines y",
    ),
    (
        "cycle",
        lambda: eq.compile("a[i] = b[i]\nb[i] = a[i]"),
        ParseError,
        (
            "'b' is read before it is defined (line 1)\n"
            "    a[i] = b[i]\n"
            "           ^^^^\n"
            "it is defined on line 2, and reads this one: read it at the position before"
        ),
    ),
    (
        "defined by itself",
        lambda: eq.compile("a[i] = a[i] + 1"),
        ParseError,
        (
            "'a' is defined by itself (line 1)\n"
            "    a[i] = a[i] + 1\n"
            "           ^^^^\n"
            "a definition reads earlier ones, or in a recurrence itself at the position before or after: a[i-1]"
        ),
    ),
    (
        "unknown function",
        lambda: eq.compile("y[i] = exq(x[i])"),
        ParseError,
        "unknown function 'exq' (line 1)\n    y[i] = exq(x[i])\n           ^^^\ndid you mean 'exp'?",
    ),
    (
        "too large for the budget",
        lambda: eq.compile(
            "\n".join(["a0[i] = x[i]", *(f"a{n + 1}[i] = a{n}[i - 1] + a{n}[i + 1]" for n in range(40))])
        ),
        BudgetError,
        (
            "the program has more than 20000 operations once its temporaries are inlined\n"
            "return the temporaries that are read at several places, and read them in another program"
        ),
    ),
    (
        "unknown target",
        lambda: eq.compile(SUM, target="tpu"),
        eq.EqfuseError,
        "unknown target 'tpu'\nchoose one of auto, cpu, sm_80, sm_90, h200, sm_100, gfx942",
    ),
    (
        "unknown schedule",
        lambda: eq.compile(SUM, prefer="best"),
        eq.EqfuseError,
        "unknown schedule 'best'\nchoose one of rolling, split_k, resident, multi_pass, scan, scan_tiles, scan_split, in_order, library",
    ),
    (
        "impossible schedule",
        lambda: eq.compile(ROUNDED, prefer="rolling"),
        ScheduleError,
        (
            "there is no rolling plan for this program\n"
            "round(x[i, j] / max_j): no rule separates what varies along j from the value of max_j in it"
        ),
    ),
    (
        "unknown constant",
        lambda: eq.compile(SCORES, scalars={"scal": 1.0}),
        BindError,
        "the program has no scalar 'scal'\ndid you mean 'scale'?",
    ),
    (
        "constant that is no number",
        lambda: eq.compile(SCORES, scalars={"scale": None}),  # type: ignore[dict-item]
        BindError,
        (
            "scalar 'scale' is NoneType, not a number\n"
            "scalars are numbers; pass tensors when the kernel is called"
        ),
    ),
    (
        "constants that are no mapping",
        lambda: eq.compile(SCORES, scalars=3),  # type: ignore[arg-type]
        BindError,
        'scalars is a int\npass a mapping: scalars={"g": 4}',
    ),
    (
        "no trials",
        lambda: eq.compile(SUM, trials=0),
        eq.EqfuseError,
        "trials is 0\ngive a positive integer",
    ),
]

CALLING: list[tuple[str, Callable[[], Any], type[eq.EqfuseError], str]] = [
    (
        "unknown name",
        lambda: scores(scale=..., scal=1.0),
        BindError,
        (
            "unknown name 'scale' (line 1)\n"
            "    S[i, j] = sum[d](Q[i, d] * K[j, d]) * scale\n"
            "                                          ^^^^^\n"
            "expected a tensor, an earlier definition or a scalar; did you mean 'scal'?"
        ),
    ),
    (
        "two sizes",
        lambda: scores(K=ones(4, 5)),
        BindError,
        (
            "axis 'd' has size 3 in Q (dimension 1) and 5 in K (dimension 1) (line 1)\n"
            "    S[i, j] = sum[d](Q[i, d] * K[j, d]) * scale\n"
            "                               ^\n"
            "pass tensors whose sizes agree, or name the axes differently"
        ),
    ),
    (
        "wrong rank",
        lambda: kernel(SUM)(x=ones(3)),
        BindError,
        (
            "'x' has 2 dimensions, the tensor given has shape (3,) (line 1)\n"
            "    y[i] = sum[j](x[i, j])\n"
            "                  ^\n"
            "the program reads x[i, j]"
        ),
    ),
    (
        "reduced axis that is not there",
        lambda: kernel("y[i] = sum[k](x[i])")(x=ones(3)),
        BindError,
        (
            "nothing gives axis 'k' a size (line 1)\n"
            "    y[i] = sum[k](x[i])\n"
            "               ^\n"
            'no tensor has it as a plain index; pass sizes={"k": ...}'
        ),
    ),
    (
        "index that leaves its tensor",
        lambda: kernel("y[h] = x[h // g]")(x=ones(3), g=1, sizes={"h": 4}),
        BindError,
        (
            "x[h // g] reads positions 0 to 3 of dimension 0 of 'x', which has size 3 (line 1)\n"
            "    y[h] = x[h // g]\n"
            "           ^^^^^^^^^\n"
            "give tensors that fit, or guard the read: where(h // g < 3, x[h // g], 0)"
        ),
    ),
    (
        "gather that leaves its tensor",
        lambda: kernel("y[i] = sum[j](x[t[i], j])")(x=ones(3, 4), t=torch.tensor([0, -1])),
        BindError,
        (
            "'x': position -1 is outside a dimension of 3\n"
            "check the index tensors and sizes: positions run from 0 to 2"
        ),
    ),
    (
        "index that is real",
        lambda: kernel("y[i] = sum[j](x[t[i], j])")(x=ones(3, 4), t=ones(2)),
        TypeCheckError,
        (
            "'t' is used in an index, so it holds integers; the tensor given is f32 (line 1)\n"
            "    y[i] = sum[j](x[t[i], j])\n"
            "                  ^^^^^^^^^^\n"
            "convert it to integers"
        ),
    ),
    (
        "condition that is real",
        lambda: kernel("y[i] = where(m[i], x[i], 0)")(x=ones(3), m=ones(3)),
        TypeCheckError,
        (
            "a condition is a real number (line 1)\n"
            "    y[i] = where(m[i], x[i], 0)\n"
            "                 ^^^^\n"
            "compare it: where(m[i] != 0, ...)"
        ),
    ),
    (
        "declared otherwise",
        lambda: kernel(f"x: f16[i, j]\n{SUM}")(x=ones(2, 3)),
        TypeCheckError,
        (
            "'x' is declared f16, the tensor given is f32 (line 1)\n"
            "    x: f16[i, j]\n"
            "    ^\n"
            "convert the tensor, or change the declaration"
        ),
    ),
    (
        "missing scalar",
        lambda: scores(scale=...),
        BindError,
        (
            "scalar 'scale' is not given (line 1)\n"
            "    S[i, j] = sum[d](Q[i, d] * K[j, d]) * scale\n"
            "                                          ^^^^^\n"
            "pass scale=..."
        ),
    ),
    (
        "scalar that is no number",
        lambda: scores(scale="1"),
        BindError,
        (
            "'scale' is a str, not a number (line 1)\n"
            "    S[i, j] = sum[d](Q[i, d] * K[j, d]) * scale\n"
            "                                          ^^^^^\n"
            "scalars are integers and floats"
        ),
    ),
    (
        "tensor for a scalar",
        lambda: scores(scale=ones(2)),
        BindError,
        (
            "'scale' is a scalar, a tensor is given (line 1)\n"
            "    S[i, j] = sum[d](Q[i, d] * K[j, d]) * scale\n"
            "                                          ^^^^^\n"
            "pass a number"
        ),
    ),
    (
        "missing tensor",
        lambda: kernel(SUM)(),
        BindError,
        ("tensor 'x' is not given (line 1)\n    y[i] = sum[j](x[i, j])\n                  ^\npass x=..."),
    ),
    (
        "unknown keyword",
        lambda: kernel(SUM)(x=ones(2, 3), z=1),
        BindError,
        "the program has no input 'z'\ninputs: x",
    ),
    (
        "number for a tensor",
        lambda: kernel(SUM)(x=3.0),
        BindError,
        (
            "'x' is a float, not a tensor (line 1)\n"
            "    y[i] = sum[j](x[i, j])\n"
            "                  ^\n"
            "pass a torch tensor or a numpy array"
        ),
    ),
    (
        "meta tensor that is bound",
        lambda: kernel(SUM).bind(x=ones(2, 3, device="meta")),
        BindError,
        (
            "'x' is on device 'meta', where kernels do not run\n"
            "move the tensors to the CPU or to a CUDA or ROCm device"
        ),
    ),
    (
        "two devices",
        lambda: scores(Q=ones(2, 3, device="meta")),
        BindError,
        "tensors are on different devices: Q on meta, K on cpu\nmove them to one device",
    ),
    (
        "CPU tensors, GPU kernel",
        lambda: eq.compile(SUM, target="sm_90", verify=False)(x=ones(2, 3)),
        BindError,
        (
            "the tensors are on the CPU, the kernel was compiled for sm_90\n"
            'move the tensors, or compile with target="auto"'
        ),
    ),
    (
        "torch and numpy",
        lambda: scores(K=np.ones((4, 3))),
        BindError,
        "torch tensors and numpy arrays are mixed: Q is torch, K is numpy\npass one kind",
    ),
    (
        "complex",
        lambda: kernel(SUM)(x=ones(2, 3, dtype=torch.complex64)),
        BindError,
        (
            "'x' has dtype torch.complex64, which the language does not have\n"
            "convert it to one of f8e4m3, f8e5m2, f16, bf16, f32, f64, i8, u8, i16, i32, i64, bool"
        ),
    ),
    (
        "uint16",
        lambda: kernel(SUM)(x=ones(2, 3, dtype=torch.uint16)),
        BindError,
        (
            "'x' has dtype torch.uint16, which the language does not have\n"
            "convert it to one of f8e4m3, f8e5m2, f16, bf16, f32, f64, i8, u8, i16, i32, i64, bool"
        ),
    ),
    (
        "numpy objects",
        lambda: kernel(SUM)(x=np.array([[None]])),
        BindError,
        (
            "'x' has dtype object, which the language does not have\n"
            "convert it to one of f8e4m3, f8e5m2, f16, bf16, f32, f64, i8, u8, i16, i32, i64, bool"
        ),
    ),
    (
        "size given twice",
        lambda: kernel(SUM)(x=ones(2, 3), sizes={"j": 4}),
        BindError,
        "axis 'j' has size 3 in x (dimension 1) and 4 in sizes\nleave 'j' out of sizes",
    ),
    (
        "size of no axis",
        lambda: kernel(SUM)(x=ones(2, 3), sizes={"q": 4}),
        BindError,
        "the program has no axis 'q'\naxes: i j",
    ),
    (
        "size that is no integer",
        lambda: kernel("y[h] = x[h // g]")(x=ones(3), g=2, sizes={"h": 2.5}),
        BindError,
        "the size of axis 'h' is 2.5\na size is an integer, 0 or more, at most 2**48",
    ),
    (
        "sizes that are no mapping",
        lambda: kernel(SUM)(x=ones(2, 3), sizes=3),
        BindError,
        'sizes is a int\npass a mapping: sizes={"i": 128}',
    ),
    (
        "division by zero in an index",
        lambda: kernel("y[h] = x[h // g]")(x=ones(3), g=0, sizes={"h": 4}),
        BindError,
        ("h // g divides by 0 (line 1)\n    y[h] = x[h // g]\n             ^^^^^^\ngive a divisor above 0"),
    ),
    (
        "fractional divisor",
        lambda: kernel("y[h] = x[h // g]")(x=ones(3), g=1.5, sizes={"h": 4}),
        BindError,
        (
            "scalar 'g' is 1.5, not an integer (line 1)\n"
            "    y[h] = x[h // g]\n"
            "                  ^\n"
            "it is used in an index: x[h // g]"
        ),
    ),
    (
        "reference, wrong rank",
        lambda: eq.reference(SUM)(x=ones(3)),
        BindError,
        (
            "'x' has 2 dimensions, the tensor given has shape (3,) (line 1)\n"
            "    y[i] = sum[j](x[i, j])\n"
            "                  ^\n"
            "the program reads x[i, j]"
        ),
    ),
]


@pytest.mark.parametrize(
    ("act", "kind", "text"), [case[1:] for case in COMPILING], ids=[case[0] for case in COMPILING]
)
def test_compiling(act: Callable[[], Any], kind: type[eq.EqfuseError], text: str) -> None:
    with pytest.raises(eq.EqfuseError) as caught:
        act()
    assert str(caught.value) == text
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("act", "kind", "text"), [case[1:] for case in CALLING], ids=[case[0] for case in CALLING]
)
def test_calling(act: Callable[[], Any], kind: type[eq.EqfuseError], text: str) -> None:
    with pytest.raises(eq.EqfuseError) as caught:
        act()
    assert str(caught.value) == text
    assert type(caught.value) is kind


def test_a_bad_call_after_a_good_one_of_the_same_shapes() -> None:
    """What is remembered about a call's shapes does not let a bad scalar pass."""
    assert scores().shape == (2, 4)
    with pytest.raises(BindError, match="'scale' is a NoneType, not a number"):
        scores(scale=None)
    with pytest.raises(BindError, match="'scale' is a complex, not a number"):
        scores(scale=1j)


def test_a_bad_call_leaves_the_kernel_usable() -> None:
    with pytest.raises(eq.EqfuseError):
        kernel(SUM)(x=ones(3))
    assert kernel(SUM)(x=ones(2, 3)).tolist() == [3.0, 3.0]
