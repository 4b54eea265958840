"""The judge's page cites tests, cheats and mutants that there are."""

import re
from pathlib import Path

from harness.cheats import fixtures
from harness.confine import ROOT

PAGE = (ROOT / "harness" / "README.md").read_text()


def sources(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))


def test_what_is_cited_exists() -> None:
    """In the columns that say how a protection was tried."""
    cited = {
        name
        for line in PAGE.splitlines()
        if line.startswith("| ")
        for cell in line.split("|")[3:]
        for name in re.findall(r"`([\w -]+)`", cell)
    }
    tests = {name for name in cited if name.startswith("test_")}
    defined = set(re.findall(r"def (test_\w+)", sources(ROOT / "tests")))
    assert len(tests) > 20 and tests <= defined
    cheats = {fixture.name for fixture in fixtures()}
    kinds = {name for name in cited if " " in name}
    judge = sources(ROOT / "harness")
    assert len(kinds) > 10 and {kind for kind in kinds if f'"{kind}"' not in judge} == set()
    left = cited - tests - kinds - cheats
    assert left <= {"certify", "ioctl", "protections"}
