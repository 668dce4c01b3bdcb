"""Helpers of Gluon kernels that are others than those of Triton: for NVIDIA GPUs alone, in their assembly."""

from __future__ import annotations

from collections.abc import Mapping

PACK = 8
"""Elements that one branch is for."""


def _tanh() -> str:
    """The text of a hyperbolic tangent. The odd polynomial of Triton's takes no special function; what is not near 0 takes two,
    in a branch that threads with none such leave out."""
    x, out = [f"${PACK + k}" for k in range(PACK)], [f"${k}" for k in range(PACK)]
    lines = ["{", f".reg .f32 s<{PACK}>, u, m;", ".reg .pred near, whole;"]
    for k in range(PACK):
        lines += [
            f"mul.f32 s{k}, {x[k]}, {x[k]};",
            f"fma.rn.f32 u, s{k}, 0f{NINTH}, 0f{SEVENTH};",
            f"fma.rn.f32 u, s{k}, u, 0f{FIFTH};",
            f"fma.rn.f32 u, s{k}, u, 0f{THIRD};",
            f"mul.f32 u, s{k}, u;",
            f"fma.rn.f32 {out[k]}, {x[k]}, u, {x[k]};",
        ]
    lines.append("mov.f32 m, s0;")
    lines += [f"max.f32 m, m, s{k};" for k in range(1, PACK)]
    lines += ["setp.lt.f32 whole, m, 0f3E800000;", "@whole bra done;"]
    for k in range(PACK):
        lines += [
            f"mul.f32 u, {x[k]}, 0f4038AA3B;",
            "ex2.approx.ftz.f32 u, u;",
            "add.f32 u, u, 0f3F800000;",
            "rcp.approx.ftz.f32 u, u;",
            "fma.rn.f32 u, u, 0fC0000000, 0f3F800000;",
            f"setp.lt.f32 near, s{k}, 0f3E800000;",
            f"selp.f32 {out[k]}, {out[k]}, u, near;",
        ]
    lines += ["done:", "}"]
    asm = "\n".join(f"        {line}" for line in lines)
    constraints = ",".join(["=&f"] * PACK + ["f"] * PACK)
    return f'''
def tanh(x):
    # Near 0 an odd polynomial, the best one to x**9 below 0.5; elsewhere 1 - 2 / (1 + exp(2 x)), which threads leave out
    # whose elements are all near 0.
    return gl.inline_asm_elementwise(
        """
{asm}
        """,
        "{constraints}",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack={PACK},
    )
'''


def _bits(number: float) -> str:
    """A number as assembly writes it."""
    import struct

    return struct.pack(">f", number).hex().upper()


THIRD, FIFTH, SEVENTH, NINTH = map(
    _bits, (-0.3333314838499458, 0.1332598744771635, -0.05305296073958027, 0.017257011546749024)
)

HELPERS: Mapping[str, str] = {"tanh": _tanh()}
"""Helper sources by name; all others are Triton's."""
