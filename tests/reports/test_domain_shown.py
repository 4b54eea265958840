"""A change's section says on which calls it was tested."""

import dataclasses
from pathlib import Path

import pytest

from optimized.domain import NONE, TENSOR, ArgumentDomain, CallDomain, Domain
from reports.markdown import markdown
from reports.page import page
from reports.run import Run

X = ArgumentDomain(
    kind=TENSOR,
    dtype="bfloat16",
    device="cuda",
    sizes=((1, 128), (5120, 5120)),
    layouts=("contiguous", "gaps around 1"),
    alignment=16,
)
DOMAIN = Domain((CallDomain({"x": X, "mask": ArgumentDomain(kind=NONE)}), CallDomain({"x": X})))
TEXT = "bfloat16 [1 to 128, 5120] on cuda, contiguous or gaps around 1, 16-byte"


@pytest.fixture
def run(cpu_run: Path) -> Run:
    found = Run.load(cpu_run)
    kept = found.attempts[2]
    assert kept.region_verdict is not None and kept.region_verdict.domain is None
    verdict = dataclasses.replace(kept.region_verdict, domain=DOMAIN)
    found.attempts[2] = dataclasses.replace(kept, region_verdict=verdict)
    return found


def test_the_page_lists_the_domain_by_kind_of_call(run: Run) -> None:
    text = page(run)
    assert text.count("Tested on; outside it the reference runs") == 1
    assert text.count(TEXT) == 2
    assert '<td class="num">1</td><td><code>mask</code></td><td>None</td>' in text
    assert f'<td class="num">2</td><td><code>x</code></td><td>{TEXT}</td>' in text


def test_so_does_the_markdown(run: Run) -> None:
    text = markdown(run)
    assert f"| 1 | x | {TEXT} |\n| 1 | mask | None |\n| 2 | x | {TEXT} |\n" in text


def test_a_run_of_before_has_none(cpu_run: Path) -> None:
    assert "Tested on" not in page(Run.load(cpu_run))
