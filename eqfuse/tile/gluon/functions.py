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
def tanh_near_0(x):
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

_STRIPS = """\
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    EACH: gl.constexpr = 128 // tile.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = COLUMNS // EACH if COLUMNS < 32 * EACH else 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    MOST: gl.constexpr = 128 // ACROSS if ACROSS < 16 else 8
    STRIP: gl.constexpr = MOST if MOST < ROWS else ROWS
"""
"""Rows of a tile that 4 warps read at once, 16 bytes for each thread, and how they lie in registers."""

OWN: Mapping[str, str] = {
    "tanh_near_0": _tanh(),
    "not_finite": f"""
def not_finite(tile):
    # Whether a number of a tile in shared memory is an infinity or NaN: 0 times those is NaN, of all others 0.
{_STRIPS}    KIND: gl.constexpr = "f16x2" if tile.dtype == gl.float16 else "bf16x2"
    seen = gl.zeros([STRIP, COLUMNS], tile.dtype, LAYOUT)
    for n in gl.static_range(ROWS // STRIP):
        seen = gl.inline_asm_elementwise(
            "{{ .reg .b32 none; mov.b32 none, 0; fma.rn." + KIND + " $0, $1, none, $2; }}",
            "=r,r,r",
            [tile.slice(n * STRIP, STRIP).load(LAYOUT), seen],
            dtype=tile.dtype,
            is_pure=True,
            pack=2,
        )
    # Every thread gets the numbers of all warps and folds them: a reduction over warps keeps registers of its own.
    bad = gl.convert_layout(gl.max((seen != seen).to(gl.int32), 1), gl.BlockedLayout([STRIP], [32], [4], [0]))
    return gl.max(bad, 0) > 0
""",
    "clear_not_finite": f"""
def clear_not_finite(tile):
    # What is not finite of a tile in shared memory becomes 0. Matrix products see that.
{_STRIPS}    for n in gl.static_range(ROWS // STRIP):
        part = tile.slice(n * STRIP, STRIP)
        x = part.load(LAYOUT)
        part.store(gl.where(x - x == 0, x, 0.0).to(tile.dtype))
    fence_async_shared()
""",
    "column": """
def column(tile, place, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    # The column of a tile in registers at a place. The tile is converted where it is: before the loop, it would take registers.
    tile = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)
    at = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    chosen = gl.where((at == place)[None, :], tile.to(gl.float32), 0.0)
    return gl.convert_layout(gl.sum(chosen, 1), ROWS)
""",
    "anew": """
def anew(x):
    # The same number, which the assembler does not know to be the same.
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
""",
    "at_use": """
def at_use(x):
    # A position that addresses are computed from where it is read, not before all loops, where they would take registers.
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
""",
}
"""Sources of helpers that Triton kernels have not, by name; all others are Triton's."""

INSTEAD: Mapping[str, str] = {"tanh": "tanh_near_0"}
"""Those that stand for helpers of Triton's."""
