"""A model cheats, breaks a rounding point, then submits an honest change, all in one round of a run
that is killed at every stage: what is kept is a pull request that a clean clone reproduces."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from agents import base
from agents.claude.spend import MOST_OUTPUT
from harness.git import Git
from harness.ledger import Ledger
from harness.records import Status
from reports.run import Run
from tests.agents import killers
from tests.agents.agent_run import (
    attempts,
    begun,
    clone,
    committed,
    environment,
    goes_on,
    results,
    trajectory,
)
from tests.agents.fake_api import FakeApi, Step, call, calls
from tests.agents.test_claude_run import BREAKS, CHEATS, HONEST, submits, words, writes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # one fixture: a whole run

# Operators that change nothing: a change without them is faster on any machine, and measured for so
# long it is surely faster on a busy one, too.
NEEDLESS = "        for _ in range(100):\n            wide = wide * 1.0\n"
DECODE_S = "1.5"
# In the user's checkout, from the start or from one of the lives on. Whoever imports it, hears it.
BROKEN = "raise RuntimeError('this is being edited')\n"
LATER = "harness/points.py", "agents/loop.py", "optimized/inductor.py"
EDITED = 2
WHERE = 'raise RuntimeError("optimized is at " + __import__("optimized").__path__[0])'
# A life ends after each of these events: while the model is asked, while regions are judged, in an
# attempt, while what was kept is certified, before the model is told, in the closing measurements.
# The last one goes on to the end. A life that ends between the model's calls is in
# test_claude_run.py.
KILLED = (
    "asked",
    "ledger:evaluated",
    "ledger:started",
    "ledger:committed",
    "round",
    "ledger:final",
)
STEPS = (
    Step([call("region", region="scaled_norm"), writes("where", WHERE),
          call("verify", file="where.py")]),
    Step([writes("cheats", CHEATS), submits("cheats"), writes("breaks", BREAKS),
          submits("breaks")]),
    Step([writes("honest", HONEST), call("verify", file="honest.py"), submits("honest")]),
    calls("give_up", reason="nothing is left"),
)  # fmt: skip


class Shown(NamedTuple):
    upstream: Path  # a clone that holds this very tree in a commit
    mine: Path  # the user's clone, in which work goes on; the run's files are its own
    before: dict[str, bytes]  # all that was in it, without Python's caches
    run: Path
    asked: int  # answers that were paid for
    said: str  # by all lives of the run


def state(root: Path) -> dict[str, bytes]:
    files = (p for p in root.rglob("*") if p.is_file() and p.parent.name != "__pycache__")
    return {str(p.relative_to(root)): p.read_bytes() for p in files}


def break_files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).write_text(BROKEN)


def wasteful(folder: Path) -> Path:
    """The toy model with needless work in its norm."""
    text = Path(killers.TOY).read_text()
    last = "        return (wide * self.weight.float()).to(x.dtype)\n"
    assert text.count(last) == 1
    file = folder / "wasteful.py"
    file.write_text(text.replace(last, NEEDLESS + last))
    return file


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Shown:
    folder = tmp_path_factory.mktemp("shown")
    upstream = committed(folder / "upstream")
    mine = clone(upstream.root, folder / "mine")
    (mine.root / "README.md").write_text("being edited\n")
    (mine.root / "CHANGELOG.md").write_text("staged\n")
    mine.run("add", "CHANGELOG.md")
    (mine.root / "optimized" / "notes.txt").write_text("mine\n")
    break_files(mine.root, "harness/judge.py", "reference/cache.py")
    before = state(mine.root)
    (folder / "tmp").mkdir()

    run = begun(folder / "run", "claude", str(wasteful(folder)))
    said = ""
    with FakeApi(*STEPS) as api, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODE_S", DECODE_S)
        patch.setenv("TMPDIR", str(folder / "tmp"))
        for number, killed in enumerate((*KILLED, "")):
            if number == EDITED:
                break_files(mine.root, *LATER)
                before |= {name: BROKEN.encode() for name in LATER}
            done = goes_on(run, api, "--budget-usd", "2", killed=killed, root=mine.root)
            said += done.stderr
            assert done.returncode == (-9 if killed else 0), f"{killed}: {done.stderr}"
    assert not list((folder / "tmp").glob(f"{base.PREFIX}*"))  # of killed lives neither
    return Shown(upstream.root, mine.root, before, run, len(api.asked), said)


def test_two_are_refused_for_the_right_reasons_and_the_honest_one_is_kept(shown: Shown) -> None:
    cheats, breaks, honest = attempts(shown.run)
    assert [a.status for a in (cheats, breaks)] == [Status.REJECTED] * 2
    assert cheats.reason.startswith("region verdict: remembers results: ")
    point = "`wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) [mul]`"
    assert f"region verdict: rounds to BF16 at {point} (" in breaks.reason
    assert honest.status is Status.KEPT and honest.latency is not None
    assert honest.reason.startswith("decode gained ") and honest.model_verdict is not None
    told = results(shown.run)
    place = rf"RuntimeError: optimized is at \S+/{base.PREFIX}\d+-\w+/tree/optimized"
    assert re.search(place, told[2])
    assert told[4].startswith("candidate 1 of at most 3 in this round; ")
    assert told[9].startswith("round 1, 3 candidates: 1 kept, 2 rejected, 0 failed\n")
    assert "the best: honest-" in told[9] and "the most instructive failure: " in told[9]
    assert "one call: " in told[9]


def test_killed_at_every_stage_it_ends_in_the_same_state_and_nothing_is_paid_twice(shown) -> None:
    events = list(Ledger.open(shown.run).events())
    kinds = [e.kind for e in events]
    assert shown.asked == len(STEPS) == sum(e["kind"] == "answer" for e in trajectory(shown.run))
    assert kinds.count("evaluated") == 3 and kinds.count("round") == 1
    assert [a.index for a in attempts(shown.run)] == [3, 4, 5]
    commits = {e.data["commit"] for e in events if e.kind == "committed"}
    assert kinds.count("committed") == 2 and len(commits) == 1 and None not in commits
    assert kinds.count("certificate") == 1 and kinds.count("final") == 1
    assert (kinds[-1], events[-1].data["reason"]) == ("stopped", "done")
    done = [e["id"] for e in trajectory(shown.run) if e["kind"] == "result"]
    assert len(done) == len(set(done)) == 10
    run = Run.load(shown.run)
    # What was asked when the first life ended may have been answered: it counts as its most.
    most = MOST_OUTPUT // 2  # for each of the two that the next answers submitted
    assert [s.tokens.output for s in run.spending] == [most + 50, most + 50, 50, 50]
    assert run.closing_verdict is not None and run.closing_verdict.passed
    summary = json.loads((shown.run / "summary.json").read_text())
    assert summary["spent"]["output"] == MOST_OUTPUT + 200


def test_the_users_checkout_stays_byte_for_byte_as_it_was(shown: Shown) -> None:
    assert state(shown.mine) == shown.before
    head = Git(shown.upstream).commit("HEAD")
    assert head is not None
    judged = f"candidates are judged by a checkout of commit {head[:12]}, without what was edited: "
    for edited in (
        "harness/judge.py, reference/cache.py\n",
        "harness/judge.py, harness/points.py, ",
    ):
        assert judged + edited in shown.said
    assert not (shown.run / "worktrees").exists()
    own = Git(shown.run / "repository", shown.run / "repository")
    assert own.run("diff", "--name-only", f"{head}..kept").startswith("optimized/honest_")
    message = own.run("log", "-1", "--format=%B", "kept")
    assert message.startswith("perf(honest): decode ") and "% interval" not in message
    for part in ("device   ", "before ", "after ", "gain ", "(95%)"):
        assert part in message


@pytest.mark.long
def test_its_record_is_replayed_without_key_or_network_to_the_same_decisions(shown, tmp_path):
    """Its first answers, up to the honest change."""
    lines = trajectory(shown.run)
    third = [i for i, e in enumerate(lines) if e["kind"] == "answer"][2]
    record = tmp_path / "record.jsonl"
    record.write_text("".join(json.dumps(event) + "\n" for event in lines[:third]))
    model = Ledger.open(shown.run).header()["model"]
    again = begun(tmp_path / "again", f"replay:{record}", model)
    done = goes_on(again, None, root=shown.mine)
    assert done.returncode == 0, done.stderr
    before, now = attempts(shown.run)[:2], attempts(again)
    assert [(a.status, words(a)) for a in now] == [(a.status, words(a)) for a in before]
    assert [Path(a.name).name for a in now] == [Path(a.name).name for a in before]
    assert "the model's work ended: the record has no more answers" in done.stderr
    compared = [e["how"] for e in trajectory(again) if e["kind"] == "compared"]
    assert len(compared) == 7 and compared.count("differ") == 1  # one says where its files lie


def test_a_clean_clone_takes_the_patch_and_reproduces_the_certificate(shown, tmp_path) -> None:
    (bundle,) = (shown.run / "prs").iterdir()
    page = (bundle / "PR.md").read_text()
    assert "- Written by a language model: " in page and "There is no patch" not in page
    git = clone(shown.upstream, tmp_path / "clone")
    git.run("am", "--quiet", bundle / "change.patch", fallback_identity=True)
    (shown.run / "candidates").rename(shown.run / "gone")  # the clone has the file itself now
    done = subprocess.run(
        [sys.executable, "-m", "harness", "certify", bundle / "certificate.json"],
        cwd=git.root, env=environment(None, git.root), capture_output=True, text=True,
    )  # fmt: skip
    (shown.run / "gone").rename(shown.run / "candidates")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"judging {git.root}/optimized/honest_" in done.stderr
    assert done.stdout.splitlines()[-1] == "reproduced"
