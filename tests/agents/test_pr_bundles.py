"""A run's kept changes as pull requests: a clean clone takes them, git and gh open them."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.errors import UserError
from harness.git import Git
from harness.ledger import Ledger
from tests.layout import ROOT, own_files

TOY = Path("tests/agents/toy_model.py")
FIRST, SECOND = "03-again-3", "04-again-4"


# Certifies the first file, looks for what is wrong with the second, and loads the clone's own plan.
CHECKS = """
import sys
from pathlib import Path
from harness.__main__ import main
from harness.certificate import Certificate, changed_hashes, taken_in
from harness.certify import hashes_of
from harness.command_peers import load_plan
from harness.workload import Workload

print(int(main(["certify", sys.argv[1]])))
there = taken_in(Certificate.load(Path(sys.argv[2])))
here = hashes_of(there.change.name, Workload.load(there.model, "toy", "cpu"), None)
print(changed_hashes(there.hashes, here))
plan = load_plan("auto", there.model, there.environment.device_name)
print([line.change().region == there.region for line in plan.changes])
"""


class Made(NamedTuple):
    upstream: Path  # a clone that holds this very tree in a commit
    run: Path


def python(where: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(where), **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def clone(source: Path, to: Path) -> Git:
    subprocess.run(["git", "clone", "--quiet", "--local", source, to], check=True)
    return Git(to)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    """A run in a clean checkout of this very tree; its change files are gone since."""
    folder = tmp_path_factory.mktemp("bundles")
    git = clone(ROOT, folder / "upstream")
    for file in own_files():
        copy = git.root / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    git.run("add", "--all")
    git.run("commit", "--quiet", "--allow-empty", "-m", "as it is", fallback_identity=True)
    done = python(git.root, "-m", "tests.agents.bundle_run", folder, TOY)
    assert done.returncode == 0, done.stderr
    for file in folder.glob("Again*.py"):
        file.unlink()
    return Made(git.root, folder / "run")


def take(git: Git, made: Made, *names: str) -> None:
    for name in names:
        git.run("am", "--quiet", made.run / "prs" / name / "change.patch", fallback_identity=True)


def plan_in(git: Git) -> dict:
    (file,) = (git.root / "optimized" / "plans").glob("*.toml")
    return tomllib.loads(file.read_text())


def test_a_clean_clone_takes_both_in_order_and_reproduces_the_certificate(made, tmp_path):
    git = clone(made.upstream, tmp_path / "clone")
    take(git, made, FIRST)
    assert [line["name"] for line in plan_in(git)["change"]] == ["again-3"]
    take(git, made, SECOND)
    assert git.run("status", "--porcelain") == ""
    plan = plan_in(git)
    assert plan["model"] == "toy_model.py"
    assert [(c["name"], c["knobs"]) for c in plan["change"]] == [
        ("again-3", {"N=1": {"warps": 3}}),
        ("again-4", {"N=1": {"warps": 4}}),
    ]
    assert all(c["domain"] for c in plan["change"])
    assert 'name="again-3"' in (git.root / "optimized" / "again_3.py").read_text()
    (evidence,) = git.root.glob(f"optimized/plans/*/{SECOND}.json")
    known = json.loads(evidence.read_text())
    assert known["stands_on"] == ["again-3"] and known["latency"]["decode"]["gain_us"] == 10.0
    message = git.run("log", "-1", "--format=%B")
    assert message.startswith("perf(again-4): decode 100.0 to 90.0 us on ")
    assert "before 100.0 us, after 90.00 us" in message and "[8.0, 12.0] us (95%)" in message

    certificate = made.run / "prs" / SECOND / "certificate.json"
    forged = json.loads(certificate.read_text())
    kernel = forged["hashes"]["kernel"]
    kernel["Again 4.py"] = kernel.pop("Again 4.py")[::-1]
    (tmp_path / "forged.json").write_text(json.dumps(forged))
    done = python(git.root, "-c", CHECKS, certificate, tmp_path / "forged.json")
    assert done.stdout.splitlines()[-4:] == [
        "reproduced", "0", "['kernel: optimized/again_4.py']", "[False, True]"
    ], done.stdout + done.stderr  # fmt: skip


def test_what_was_kept_is_committed_in_the_runs_own_repository(made):
    own = Git(made.run / "repository", made.run / "repository")
    head = Git(made.upstream).commit("HEAD")
    subjects = own.run("log", "--format=%s", f"{head}..kept").splitlines()
    assert [s.partition(":")[0] for s in subjects] == ["perf(again-4)", "perf(again-3)"]
    assert own.run("diff", "--name-only", f"{head}..kept").split() == [
        "optimized/again_3.py", "optimized/again_4.py"
    ]  # fmt: skip
    said = own.run("log", "-1", "--format=%b", f"candidate/{SECOND}")
    assert "device   " in said and "before 100.0 us, after 90.00 us" in said
    assert "gain 10.0 us [8.0, 12.0] us (95%), 9 pairs" in said
    assert max(map(len, said.splitlines())) <= 100
    assert own.run("worktree", "list").count("\n") == 0
    page = (made.run / "prs" / SECOND / "PR.md").read_text()
    assert f"commit {own.commit('kept')} of the run's `repository`, branch `candidate/" in page


def test_the_second_does_not_apply_without_the_first(made, tmp_path):
    git = clone(made.upstream, tmp_path / "clone")
    with pytest.raises(UserError, match="git am failed: .* does not exist in index"):
        take(git, made, SECOND)


def reports(where: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(where, "-m", "reports", "pr", *words, **environment)


def copy_run(made: Made, folder: Path) -> Path:
    """Its ledger alone."""
    folder.mkdir()
    shutil.copy(made.run / Ledger.NAME, folder)
    return folder


def bytes_of(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.glob("prs/*/*") if p.is_file()}


def test_rebuilt_from_the_ledger_alone_they_are_the_same(made, tmp_path):
    run = copy_run(made, tmp_path / "run")
    done = reports(made.upstream, run)
    assert done.returncode == 0, done.stderr
    assert bytes_of(run) == bytes_of(made.run)
    assert sorted(bytes_of(run)) == [
        f"prs/{name}/{file}"
        for name in (FIRST, SECOND)
        for file in ("PR.md", "certificate.json", "change.patch")
    ]
    head = Git(made.upstream).commit("HEAD")
    assert f"git worktree add -b kernelwright/run/{SECOND} " in done.stdout
    assert done.stdout.count(f" {head}\n") == 2
    assert f"--base kernelwright/run/{FIRST}" in done.stdout


def test_the_page_says_what_a_reviewer_decides_on(made):
    page = (made.run / "prs" / SECOND / "PR.md").read_text()
    assert "There is no patch" not in page and "not as in commit" not in page
    for words in (
        "and brings `optimized/again_4.py`",
        "the same \\| again",
        "3 fewer launches and 2.00 MB fewer bytes",
        "Predicted gain 12.0 µs, at most 20.0 µs; realised 10.0 µs [8.0, 12.0] µs",
        "Stands on again-3: apply their patches first",
        "| decode of decode-bs1 | 100.0 µs | 90.00 µs [89.00, 91.00] µs | 10.0 µs",
        "| prefill of prefill-8x2048 | 900.0 µs | 895.0 µs",
        "- Every output: reduction",
        "None: the change has no Triton kernel of its own (torch).",
        "On any other call the reference runs",
        "python -m harness certify certificate.json",
        "bench --curve context --model toy_model.py --preset toy --plan optimized/plans/toy-model-",
        "To take it back, revert the commit, or delete its lines from `optimized/plans/toy-model-",
    ):
        assert words in page, words


def test_an_edited_patch_is_refused_and_kept(made, tmp_path):
    run = copy_run(made, tmp_path / "run")
    assert reports(made.upstream, run).returncode == 0
    patch = run / "prs" / FIRST / "change.patch"
    edited = patch.read_text().replace("+warps = 3", "+warps = 9")
    assert edited != patch.read_text()
    patch.write_text(edited)
    done = reports(made.upstream, run, "--open")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is not the patch that the ledger gives, from line " in done.stderr
    assert patch.read_text() == edited


GH = """#!/bin/sh
printf '%s\\n' "$*" >> "$(dirname "$0")/said"
echo "pull request $(wc -l < "$(dirname "$0")/said")"
"""


def test_opened_on_branches_without_touching_the_checkout(made, tmp_path):
    """With a remote that is a folder, and a program that stands for gh."""
    git = clone(made.upstream, tmp_path / "mine")
    subprocess.run(["git", "clone", "-q", "--bare", made.upstream, tmp_path / "hub"], check=True)
    git.run("remote", "add", "hub", tmp_path / "hub")
    (git.root / "README.md").write_text("being edited\n")
    (git.root / "new.txt").write_text("new\n")
    git.run("add", "new.txt")
    state = git.run("status", "--porcelain"), git.run("rev-parse", "HEAD"), git.run("branch", "-a")
    run = copy_run(made, tmp_path / "run")
    where = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    (tmp_path / "bin").mkdir()

    done = reports(git.root, run, "--open", "--remote", "hub", **where)
    assert done.returncode == 2 and "error: gh is not on PATH" in done.stderr
    assert done.stdout == reports(git.root, run, "--remote", "hub", **where).stdout
    assert f"push hub kernelwright/run/{FIRST}\n" in done.stdout
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    done = reports(git.root, run, "--open", "--remote", "nowhere", **where)
    assert (
        done.returncode == 2 and "has no remote called nowhere (it has hub, origin)" in done.stderr
    )
    assert state[1:] == (git.run("rev-parse", "HEAD"), git.run("branch", "-a"))

    for _ in range(2):  # the second time the branches are there
        done = reports(git.root, run, "--open", "--remote", "hub", **where)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "pull request 3\npull request 4\n"
    said = (tmp_path / "bin" / "said").read_text().splitlines()
    assert f"pr create --head kernelwright/run/{FIRST} --title perf(again-3): decode " in said[0]
    assert "--base" not in said[0] and said[1].endswith(f"--base kernelwright/run/{FIRST}")
    hub = Git(tmp_path / "hub")
    names = hub.run("log", "--format=%s", f"kernelwright/run/{SECOND}", "-3").splitlines()
    assert [n.partition(":")[0] for n in names[:2]] == ["perf(again-4)", "perf(again-3)"]
    assert git.run("status", "--porcelain") == state[0]
    assert git.run("rev-parse", "HEAD") == state[1]
    assert git.run("worktree", "list").count("\n") == 0

    git.run("branch", "--force", f"kernelwright/run/{FIRST}", "HEAD")
    done = reports(git.root, run, "--open", "--remote", "hub", **where)
    assert done.returncode == 2
    assert f"a branch kernelwright/run/{FIRST} with other files; rename or delete" in done.stderr
