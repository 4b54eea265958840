"""Registers of products in flight: found where a loop overwrites them, across its end as well."""

import pytest

from optimized.wgmma_operands import overwritten

LOOP = """
        /*0100*/                   FMNMX R120, R92, R21, !PT ;        /* 0x0 */
        /*0110*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR4], RZ, !UPT, gsb0 ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0130*/                   F2FP.BF16.F32.PACK_AB R121, R41, R22 ;
        /*0140*/       HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR12].tnspB, R24, gsb0 ;
        /*0150*/                   STG.E.128 desc[UR16][R122.64], R120 ;
        /*0160*/              @!P0 BRA 0x100 ;
        /*0170*/                   EXIT ;
"""


def test_a_product_still_reads_its_operand_in_the_next_round():
    assert overwritten(LOOP) == ["100 FMNMX R120, R92, R21, !PT"]
    assert overwritten(LOOP.replace("FMNMX R120", "FMNMX R124")) == []
    assert overwritten(LOOP.replace("@!P0 BRA 0x100", "NOP")) == []


@pytest.mark.parametrize(
    ("instruction", "found"),
    [
        ("MUFU.EX2 R123, R5", True),
        ("LDG.E.128 R117, desc[UR4][R6.64]", True),
        ("IMAD.WIDE R119, R5, 0x2, R8", True),
        ("LDG.E.64 R118, desc[UR4][R6.64]", False),
        ("LDGSTS.E.BYPASS.128 [R120], desc[UR4][R6.64]", False),
    ],
    ids=str,
)
def test_what_is_written(instruction, found):
    assert bool(overwritten(LOOP.replace("FMNMX R120, R92, R21, !PT", instruction))) is found


def test_a_wait_may_leave_the_last_groups_unfinished():
    one = LOOP.replace("FMNMX R120, R92, R21, !PT", "WARPGROUP.DEPBAR.LE gsb0, 0x0")
    assert overwritten(one.replace("F2FP.BF16.F32.PACK_AB R121", "FADD R120")) == []
    late = LOOP.replace("gsb0, 0x0 ;", "gsb0, 0x1 ;").replace("FMNMX R120", "FADD R9")
    assert overwritten(late) == []  # the scores are one group, the product before is done
    assert overwritten(late.replace("gsb0, 0x1 ;", "gsb0, 0x2 ;"))
