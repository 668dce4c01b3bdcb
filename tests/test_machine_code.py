"""Registers of Hopper kernels that some way reads before it sets them."""

from __future__ import annotations

import pytest

from eqfuse.tile.gluon.machine_code import unset_registers

SKIPPED = """
    /*0000*/                   ISETP.NE.U32.AND P1, PT, R2, RZ, PT ;
    /*0010*/              @!P1 BRA 0x40 ;
    /*0020*/                   UIADD3 UR46, UP0, UR4, 0x2, URZ ;
    /*0030*/                   UIADD3.X UR47, URZ, 0x40000040, URZ, UP0, !UPT ;
    /*0040*/                   HGMMA.64x64x16.F32.BF16 R152, R24, gdesc[UR44].tnspB, R152 ;
    /*0050*/                   EXIT ;
"""
"""A branch past what sets the descriptor of a product's right operand."""


def _listing(*lines: str) -> str:
    return "\n".join(f"    /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(lines))


def test_a_branch_past_what_sets_a_register_is_found() -> None:
    found = unset_registers(SKIPPED)
    assert len(found) == 2 and "UR4, 0x2" in found[0] and "gdesc[UR44]" in found[1]


@pytest.mark.parametrize(
    "lines",
    [
        ("ULDC.64 UR4, c[0x0][0x210]", "R2UR UR6, R3", "UIMAD UR8, UR5, UR6, UR4", "EXIT"),
        ("UMOV UR4, 0x1", "BRA 0x30", "UIADD3 UR5, UR9, 0x1, URZ", "UIADD3 UR5, UR4, 0x1, URZ", "EXIT"),
        ("UMOV UR4, 0x1", "UIADD3 UR4, UR4, 0x1, URZ", "@P0 BRA 0x10", "EXIT"),
        (
            "UMOV UR4, URZ",
            "UMOV UR5, URZ",
            "UMOV UR6, URZ",
            "UMOV UR7, URZ",
            "HGMMA.64x64x16.F32 R8, gdesc[UR4], RZ",
            "EXIT",
        ),
    ],
)
def test_what_is_set_on_every_way_is_not(lines: tuple[str, ...]) -> None:
    assert unset_registers(_listing(*lines)) == []


@pytest.mark.parametrize(
    ("lines", "read"),
    [
        (("UMOV UR4, URZ", "UMOV UR5, URZ", "HGMMA.64x64x16.F32 R8, gdesc[UR4], RZ", "EXIT"), "gdesc[UR4]"),
        (("@P0 EXIT", "UIADD3 UR4, UR4, 0x1, URZ", "EXIT"), "UIADD3"),
        (("@P0 BRA 0x30", "UMOV UR4, URZ", "BRA 0x30", "USHF.L.U32 UR5, UR4, 0x2, URZ", "EXIT"), "USHF"),
        (("UISETP.NE.AND UP0, UPT, UR4, URZ, UPT", "EXIT"), "UISETP"),
    ],
)
def test_what_is_set_on_some_ways_alone_is_found(lines: tuple[str, ...], read: str) -> None:
    (found,) = unset_registers(_listing(*lines))
    assert read in found
