"""Whether a Hopper kernel's machine code overwrites registers that a product in flight still reads.

Tensor cores read the first operand of an asynchronous product from registers until a wait for it.
A compiler that is told of it keeps them (Triton up to 3.6 writes PTX in which they may change too
early: its issue 9433), so what has to hold is looked up in the machine code itself.
"""

import re
from collections.abc import Iterator

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+?)\s*;")
TARGET = re.compile(r"BRA (?:\S+, )?0x([0-9a-f]+)")
PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
WRITTEN = re.compile(r"(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+) R(\d+)\b")
STORES = "ST", "RED", "LDGSTS", "HGMMA", "UTMA"  # their first register is read
A_REGISTERS = 4  # of a product 16 deep in BF16


def overwritten(sass: str) -> list[str]:
    """Instructions of a disassembly (`cuobjdump --dump-sass`) that write to such a register, each
    as "address instruction"; of loops too, where a product goes on into the next round."""
    code = [(int(address, 16), text) for address, text in INSTRUCTION.findall(sass)]
    found = dict.fromkeys(_written_in_flight(code))
    for address, text in code:
        target = TARGET.search(text)
        if target and int(target[1], 16) <= address:
            body = [line for line in code if int(target[1], 16) <= line[0] <= address]
            found |= dict.fromkeys(_written_in_flight(body * 2))
    return list(found)


def _written_in_flight(code: list[tuple[int, str]]) -> Iterator[str]:
    groups: list[set[int]] = [set()]  # registers read by each group of products, the open one last
    for address, text in code:
        if product := PRODUCT.search(text):
            first = int(product[1])
            groups[-1].update(range(first, first + A_REGISTERS))
        if "HGMMA" in text and "gsb0" in text:
            groups.append(set())
        elif wait := WAIT.search(text):
            groups = groups[len(groups) - 1 - int(wait[1]) :] if len(groups) > 1 else groups
        elif written := WRITTEN.match(text):
            operation, register = written[1], int(written[2])
            width = 4 if ".128" in operation else 2 if re.search(r"\.(64|WIDE)", operation) else 1
            touched = set(range(register, register + width))
            if not operation.startswith(STORES) and touched & set().union(*groups):
                yield f"{address:x} {text}"
