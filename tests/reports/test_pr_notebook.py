"""compare.ipynb of a bundle: what the run recorded, executed where the bundle lies."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.certificate import GENERATED, NAME, Applied, Certificate, Hashes, Promise
from harness.ledger import Ledger
from harness.records import Latency
from reports import notebook, pr_notebook
from reports.__main__ import main
from tests.layout import ROOT
from tests.reports.conftest import CPU, paired, verdict
from tests.reports.test_notebooks import outputs, tables

ORACLE, KERNEL = "reference/beam.py", "optimized/residual_boundary.py"


def sha256(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()


@pytest.fixture
def made() -> Certificate:
    """What `cpu_run` kept as its third change."""
    return Certificate(
        schema=1,
        change=Applied(name="residual_boundary", backend="inductor", knobs={}, domain=None),
        region="residual_boundary",
        parents=(),
        model="beam",
        preset="mini",
        seed=0,
        region_seed=7,
        model_seed=7,
        layers_per_kind=None,
        timed={"decode": "decode-bs1", "prefill": "prefill-8x2048"},
        contract=Promise(
            numerics={"every output": "reduction"},
            elides={"x * scale": "one rounding less"},
            adds={},
            batch_invariant=False,
        ),
        region_verdict=verdict(),
        model_verdict=verdict("model", points=()),
        latency=Latency(decode=paired(1000.0, 850.0), prefill=paired(9000.0, 8100.0)),
        environment=CPU,
        hashes=Hashes(
            kernel={KERNEL: sha256(KERNEL), GENERATED: "0"},
            oracle={ORACLE: sha256(ORACLE)},
            judge={},
        ),
    )  # fmt: skip


@pytest.fixture
def bundle(cpu_run: Path, made: Certificate) -> Path:
    """The third change's folder, in a run that kept the code which a compiler made of it."""
    generated = cpu_run / "generated" / "03.py"
    generated.parent.mkdir()
    generated.write_text("def call(args): return fused_0(args)\n")
    ledger = cpu_run / Ledger.NAME
    lines = ledger.read_text().splitlines(keepends=True)
    third = next(i for i, line in enumerate(lines) if '"faster by 150.0 us' in line)
    lines[third] = lines[third].replace(
        '"generated_source": null', '"generated_source": "generated/03.py"'
    )
    ledger.write_text("".join(lines))
    us = {"decode": [[1000.0, 850.0, 850.0, 1001.0]] * 2, "prefill": [[9e3, 8.1e3, 8.1e3, 9e3]]}
    Ledger.open(cpu_run).append("samples", {"index": 3, "us": us})
    folder = cpu_run / "prs" / "03-residual-boundary"
    made.save(folder)
    return folder


def test_a_bundle_carries_its_comparison(
    bundle: Path, cpu_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pr", str(cpu_run), "--notebooks"]) == 0
    assert (
        "07-parallel-projection: no compare.ipynb: its run recorded no" in capsys.readouterr().err
    )
    book = bundle / "compare.ipynb"
    printed = "".join(outputs(book, "stream"))
    assert "residual_boundary (inductor) in place of residual_boundary; beam mini" in printed
    assert "elides x * scale: one rounding less" in printed
    assert "region: passed (12 cases, seed 7)" in printed
    (source,) = [html for html in outputs(book, "text/html") if "<pre>" in html]
    assert "class ResidualBoundary(nn.Module)" in source and "<b>generated: 03.py</b>" in source
    verdicts, points, times = tables(book)
    assert [(r["scope"], r["output"]) for r in verdicts] == [
        ("region", "h"), ("region", "x"), ("model", "h"), ("model", "x"),
    ]  # fmt: skip
    assert [p["point"] for p in points] == ["post_norm", "x_scale"]
    decode, prefill = times
    assert (decode["without_us"], decode["with_us"], decode["gain_us"]) == (
        "1000.0",
        "850.0",
        "150.0",
    )
    assert (decode["predicted_us"], prefill["predicted_us"]) == ("130.0", "NaN")
    ulps, gain, decode_times, prefill_times = outputs(book, "image/svg+xml")
    assert "decode: 4 without it, 4 with it" in printed
    assert "decode without it: median 1.00 ms" in decode_times
    assert "prefill with it: median 8.10 ms" in prefill_times
    assert "region verdict" in ulps and "prefill-8x2048" in gain
    assert str(cpu_run) not in book.read_text()  # it can be mailed
    assert [p.name for p in bundle.parent.glob("*/compare.ipynb")] == ["compare.ipynb"]


def test_sources_say_what_changed_since(bundle: Path, made: Certificate) -> None:
    (bundle.parents[1] / "generated" / "03.py").unlink()
    titles = list(pr_notebook.sources(made, bundle))
    assert titles[0] == ORACLE
    old = replace(made, hashes=replace(made.hashes, oracle={ORACLE: "0"}))
    assert list(pr_notebook.sources(old, bundle))[0] == f"{ORACLE} (changed since it was judged)"
    elsewhere = replace(made, region="no_such", change=replace(made.change, name="/gone/my.py"))
    found = pr_notebook.sources(elsewhere, bundle)
    assert found["no_such"] == "its class is in no file of this repository"
    assert re.search(r"git am change.patch brings it", found["/gone/my.py"])


def test_a_run_says_what_is_made_and_what_is_left_out(
    bundle: Path, cpu_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def write(folders: Iterable[Path]) -> None:
        made.extend(folders)
        (bundle / "compare.ipynb").write_text("{}")

    with monkeypatch.context() as nothing:
        nothing.setattr(notebook, "LIBRARIES", ("no_such_library",))
        said = pr_notebook.after_run(cpu_run)
    assert said is not None
    assert said.startswith(
        "compare.ipynb is left out of 1 pull request: executing a notebook needs"
    )
    assert said.endswith(f"then: python -m reports pr {cpu_run} --notebooks")
    monkeypatch.setattr(pr_notebook, "write", write)
    assert pr_notebook.after_run(cpu_run) == "compare.ipynb is in 1 pull request"
    assert made == [bundle]
    assert pr_notebook.after_run(cpu_run) is None  # a continued run makes what is new
    os.utime(bundle / "compare.ipynb", (0, 0))
    assert pr_notebook.after_run(cpu_run) == "compare.ipynb is in 1 pull request"


RUN = """
import os, sys
from pathlib import Path
from agents.supervised import Supervisor
from harness.ledger import Ledger
from reports import pr_notebook

folder, code, here = Path(sys.argv[1]), int(sys.argv[2]), os.getpid()
pr_notebook.after_run = lambda run: print("compared", run.name, os.getpid() == here, flush=True)

def work(directory, used_s, pulse):
    pulse.tell(directory=str(folder), budget=1.0)
    ledger = Ledger(folder) if directory else Ledger.create(folder)
    ledger.append("stopped", {"reason": "done"})
    return code

for directory in (None, folder):  # a new run, then continued
    Supervisor(work, directory, None).run()
    if os.getpid() != here:
        break
"""


@pytest.mark.parametrize(("code", "said"), [(0, ["compared run True"] * 2), (2, [])])
def test_a_run_that_came_to_its_end_is_compared_beside_its_process(
    code: int, said: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "run"), str(code)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == said, done.stderr


def test_a_bundle_out_of_its_run_has_no_attempt(made: Certificate, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "03-residual-boundary"
    made.save(folder)
    assert (folder / NAME).is_file() and pr_notebook.attempt_of(made, folder) is None
    assert "predicted_us" not in pr_notebook.times(made, None)[0]
    assert pr_notebook.samples(None, folder) == {}
