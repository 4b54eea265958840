"""`.github/workflows/regression.yml`, executed: its `run:` steps in order, in a fresh clone.

Actions are left out, for a clone, an interpreter and a file stand in their place: checkout,
setup-python, cache and upload-artifact. Nothing is installed: what the steps ask for is there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from harness.git import Git
from tests.layout import ROOT, own_files

WORKFLOW = ROOT / ".github" / "workflows" / "regression.yml"
SEEN = "bits", "latency, decode", "latency, prefill", "environment"


@dataclass(frozen=True)
class Job:
    """What became of a job: an exit code for each `run:` step, and the job's summary."""

    codes: list[int]
    said: str
    summary: str


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    return yaml.safe_load(WORKFLOW.read_text())


@pytest.fixture
def clone(tmp_path: Path) -> Git:
    """A clone of this very tree in a commit, with an environment of its own that sees ours."""
    top = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, top], check=True)
    for path in own_files():
        copy = top / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        shutil.copymode(path, copy)
    git = Git(top)
    git.run("add", "--all")
    git.run("commit", "--quiet", "--allow-empty", "-m", "as it is", fallback_identity=True)
    venv = top / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    ours = next(p for p in sys.path if p.endswith("site-packages"))
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    sums = "cat pyproject.toml constraints.txt setup.py | cksum | tr ' ' '-'"
    stamp = subprocess.run(["bash", "-c", sums], cwd=top, capture_output=True, text=True)
    (venv / f".installed-core-{stamp.stdout.strip()}").touch()  # as tools/setup.sh leaves it
    return git


def execute(job: dict[str, Any], git: Git, values: dict[str, str], **environment: str) -> Job:
    """Run the job's steps until one fails; from then on those with `if: always()` only."""
    summary = git.root.parent / "summary.md"
    env = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", **environment}
    env |= {"PATH": f"{git.root / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env |= {name: filled(str(value), values) for name, value in job.get("env", {}).items()}
    env |= {"GITHUB_STEP_SUMMARY": str(summary)}
    codes, said = [], ""
    for step in job["steps"]:
        if "run" not in step or (any(codes) and step.get("if") != "always()"):
            continue
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", filled(step["run"], values)],
            cwd=git.root, env=env, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        codes.append(done.returncode)
        said += done.stdout + done.stderr
    return Job(codes, said, summary.read_text() if summary.exists() else "")


def filled(text: str, values: dict[str, str]) -> str:
    """The text with its ${{ }} replaced; a KeyError for one that the test does not know."""
    return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda found: values[found[1]], text)


def cases(path: Path) -> dict[str, str]:
    """What became of each case of a JUnit file."""
    suite = ElementTree.parse(path).getroot()[0]
    outcome = {"failure": "failed", "skipped": "skipped"}
    return {
        str(case.get("name")): next((outcome[c.tag] for c in case if c.tag in outcome), "passed")
        for case in suite
    }


def without(installed: str, folder: Path) -> Path:
    """A folder for PYTHONPATH in which nothing imports but what the step installs by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {re.split(r"[\[<>=; ]", line)[0].lower() for line in project["dependencies"]}
    blocked = sorted(known - set(installed.split()))
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import sys\nfor name in {blocked}:\n    sys.modules[name] = None\n"
    )
    return folder


def test_the_evidence_job_passes_with_what_it_installs(
    workflow: dict[str, Any], clone: Git, tmp_path: Path
) -> None:
    job = workflow["jobs"]["evidence"]
    (install,) = [s["run"] for s in job["steps"] if "pip install" in s.get("run", "")]
    blocked = without(install, tmp_path / "blocked")
    assert "'torch'" in (blocked / "sitecustomize.py").read_text()
    done = execute(job, clone, {}, PYTHONPATH=str(blocked), PIP_NO_INDEX="1")
    assert done.codes == [0, 0, 0, 0], done.said
    cpu, h200 = done.summary.split("## Regression check: ")[1:]
    assert cpu.startswith("beam mini, decode-bs1") and "**No regression.**" in cpu
    assert "rounding points bit for bit the same" in cpu
    assert "**No regression in what was compared; not compared: bits.**" in h200
    assert "> **Not compared: bits.** A change there passes this check unseen." in h200
    assert "warning: bits not compared: the baseline holds no fingerprint" in done.said
    assert cases(clone.root / "evidence-cpu.xml") == dict.fromkeys(SEEN, "passed")
    assert cases(clone.root / "evidence-h200.xml") == {
        **dict.fromkeys(SEEN, "passed"), "bits": "skipped",
    }  # fmt: skip


def test_the_evidence_job_fails_on_a_regression_and_still_shows_it(
    workflow: dict[str, Any], clone: Git
) -> None:
    file = clone.root / "reports" / "baselines" / "intel-r-xeon-r-processor.json"
    text = file.read_text()
    name, value = next(iter(json.loads(text)["points"].items()))
    file.write_text(text.replace(f'"{name}": "{value}"', f'"{name}": "{"0" * len(value)}"'))
    done = execute(workflow["jobs"]["evidence"], clone, {}, PIP_NO_INDEX="1")
    assert done.codes == [0, 1, 0], done.said
    assert "**Regression: bits changed.**" in done.summary
    assert f"1 of 526 rounding points have other bits, first in {name};" in done.summary
    assert cases(clone.root / "evidence-cpu.xml")["bits"] == "failed"


@pytest.mark.long
def test_the_commit_job_runs_a_toy_and_its_base_in_turns(
    workflow: dict[str, Any], clone: Git
) -> None:
    job = workflow["jobs"]["commit"]
    toy = "--model tests/agents/toy_model.py --proposer catalog --budget-minutes 2"
    values = {
        "vars.PIP_EXTRA_INDEX_URL": "",
        "vars.REGRESSION_RUN_ARGS": toy,
        "vars.REGRESSION_ROUNDS || '18'": "1",
        "github.event.pull_request.base.sha": str(clone.commit("HEAD")),
    }
    compiled = ROOT / ".cache" / "inductor"  # as `make slow` has it; a cold one costs a minute
    done = execute(job, clone, values, PIP_NO_INDEX="1", TORCHINDUCTOR_CACHE_DIR=str(compiled))
    assert len(done.codes) == 3 and done.codes[0] == 0, done.said
    # One round tells a slower build from none only if it is slower by far: it may, on a busy host.
    found = cases(clone.root / "regression.xml")
    assert tuple(found) == SEEN and found["bits"] == found["environment"] == "passed"
    assert done.codes[1] == ("failed" in found.values()) and done.codes[2] == 0
    assert done.summary.startswith("## Regression check: tests/agents/toy_model.py toy, decode-bs1")
    assert "rounding points bit for bit the same" in done.summary
    assert "in turns on one machine" in done.summary
    for name in ("history.jsonl", "history.svg", "run/report.html"):
        assert (clone.root / name).stat().st_size > 0


def test_every_action_is_pinned_and_every_job_ends(workflow: dict[str, Any]) -> None:
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 30
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/none@v1"))
    assert workflow["permissions"] == {"contents": "read"}
