"""A third architecture touches one file of reference/, and a plan, once something was kept."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.environment import environment
from harness.workload import pick_device
from optimized.plan_text import place
from tests.layout import PACKAGES, ROOT

FILE = Path(__file__).with_name("third.py")
ADDED = "reference/third.py"
# In the copy: what the loop would try, and a model as its plan says.
SCRIPT = """
import json
import sys
from pathlib import Path

from agents import run
from agents.stack import plan_for
from harness.judge import judge_region, self_test
from harness.workload import Workload
from optimized.catalog import for_model, load_change
from optimized.change import apply_change, share
from optimized.plan import Enabled, Plan
from reference import models

device, place = sys.argv[1:]
line = Enabled(name="parallel_projection", backend="torch")
Path(place).parent.mkdir(parents=True)
Plan(model="third", device=device, changes=(line,)).save(Path(place))

work = Workload.load("third", "mini", "cpu")
self_test(work.model, work, 0)
change, model = load_change(line.name), share(work.model)
apply_change(model, change, line.backend)
verdict = judge_region(work.model, model, change, line.backend, work, 0)
tried = sorted({c.region for c, _ in for_model(work.model, "cpu")})
begun = plan_for("auto", work)
said = {"models": models.names(), "tried": tried, "reason": verdict.reason}
print(json.dumps({**said, "begins": begun and begun.describe()}))
sys.stdout.flush()
run.main(["--model", "third", "--target", "decode-bs1", "--device", "cpu", "--dry-run"])
"""


def git(folder: Path, *words: str) -> str:
    who = "-c", "user.name=t", "-c", "user.email=t@localhost"
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages as they are, committed, with one file more."""
    skip = shutil.ignore_patterns("__pycache__", "results", "plans")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
    (tmp_path / ".gitignore").write_text("__pycache__\nrun\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "as it is")
    shutil.copyfile(FILE, tmp_path / ADDED)
    return tmp_path


def test_it_is_one_file_and_a_plan(copy: Path) -> None:
    """Found by its name, judged, served by catalogued changes, and begun with its plan."""
    device = environment(pick_device("cpu")).device_name
    plan = place("third", device)
    words = [sys.executable, "-c", SCRIPT, device, plan]
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    first, *dry = done.stdout.splitlines()
    said = json.loads(first)
    assert dry[0].startswith("third mini on cpu")
    assert said["begins"] == f"stands on {plan}: parallel_projection"
    assert "third" in said["models"]
    assert said["tried"] == ["linear", "parallel_projection", "rmsnorm", "swiglu"]
    assert said["reason"] is None
    touched = git(copy, "status", "--porcelain", "--untracked-files=all").split()[1::2]
    assert sorted(touched) == sorted([ADDED, plan])
