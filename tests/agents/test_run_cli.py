"""Bad input to the main command: one line on stderr, exit 2, nothing written, nothing lost."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agents.run import given, main, parser, recall
from harness import cli
from harness.ledger import Ledger

TOY = str(Path(__file__).with_name("toy_model.py"))
ROOT = Path(__file__).parents[2]


def run(*arguments: str, cwd: Path, preexec=None, **environment: str):
    return subprocess.run(
        [sys.executable, "-m", "agents.run", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=preexec,
    )


# A model whose forward always fails.
CALLED = str(Path(__file__).with_name("uncallable_model.py"))


def older_run(tmp_path: Path) -> str:
    ledger = Ledger.create(tmp_path / "old")
    ledger.append("run", {"schema": 0, "target": "decode-bs1"})
    return str(ledger.directory)


BAD = {
    "unknown-model": (("--model", "bream"), "unknown model 'bream'; known: beam"),
    "model-file-missing": (("--model", "nowhere.py"), "no model file at nowhere.py"),
    "unknown-target": (("--target", "decode-bs3"), "unknown target 'decode-bs3'; choose one of"),
    "unknown-preset": (("--preset", "huge"), "has no preset 'huge'; choose one of"),
    "unknown-device": (("--device", "tpu"), "unknown device 'tpu'; choose auto, cpu or cuda"),
    "unknown-proposer": (("--proposer", "oracle"), "unknown proposer 'oracle'; choose one of auto"),
    "no-time": (("--budget-minutes", "0"), "'0' is not a finite number above 0"),
    "no-changes": (("--max-changes", "0"), "'0' is not a whole number of at least 1"),
    "no-patience": (("--stall-minutes", "0"), "'0' is not a finite number above 0"),
    "change-missing": (("--change", "nowhere.py"), "no change file at nowhere.py; give the path"),
    "change-no-python": (("--change", __file__ + "c"), "give the path of a .py file"),
    "changes-of-one-name": (("--change", TOY, "--change", TOY), "two change files are called toy_"),
    "not-a-run": (("--resume", "."), "is not a run: it has no ledger.jsonl"),
    "another-card-of-a-new-run": (("--other-card",), "give --resume, or leave it out"),
    "two-directories": (("--resume", ".", "--run-dir", "x"), "leave --run-dir out"),
    "does-not-fit": (("--preset", "full", "--device", "cpu"), "GiB for its weights and"),
    "cannot-be-called": (("--model", CALLED), "forward of 2 x 4 token(s) raised RuntimeError"),
}


@pytest.mark.parametrize("words, says", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_2(words, says, tmp_path, monkeypatch, capfd):
    """In this process; that the command is no other, the tests below show."""
    target = () if "--target" in words or "--resume" in words else ("--target", "decode-bs1")
    monkeypatch.chdir(tmp_path)
    assert cli.run(lambda: main([*target, *words])) == 2
    told = capfd.readouterr()
    assert says in told.err
    assert told.err.count("\n") == 1 and told.out == ""
    assert list(tmp_path.iterdir()) == []


def test_missing_target_says_what_to_give(tmp_path):
    done = run(cwd=tmp_path)
    assert done.returncode == 2
    assert "--target is missing" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("words", "minutes"), [([], 7.5), (["--budget-minutes", "3"], 3.0)])
def test_a_continued_run_has_the_budget_that_it_was_started_with(tmp_path, words, minutes):
    ledger = begun(tmp_path)
    arguments = parser().parse_args(["--resume", str(tmp_path / "run"), *words])
    recall(arguments, ledger)
    assert arguments.budget_minutes == minutes


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "toy.py"], "a run with --model beam, not toy.py; leave --model out"),
        (["--preset", "full"], "a run with --preset mini, not full; leave --preset out"),
        (["--device", "cuda"], "a run with --device cpu, not cuda; leave --device out"),
        (["--seed", "7"], "a run with --seed 0, not 7; leave --seed out, or start a new run"),
        (["--proposer", "catalog"], "a run with --proposer auto, not catalog; leave"),
        (["--target", "decode-bs8"], "a run with --target decode-bs1, not decode-bs8; leave"),
    ],
)
def test_a_continued_run_is_not_given_another_beginning(tmp_path, words, says, capfd):
    begun(tmp_path)
    before = (tmp_path / "run" / Ledger.NAME).read_bytes()
    assert cli.run(lambda: main(["--resume", str(tmp_path / "run"), *words])) == 2
    told = capfd.readouterr().err
    assert says in told and told.count("\n") == 1
    assert (tmp_path / "run" / Ledger.NAME).read_bytes() == before


def test_what_a_run_was_begun_with_may_be_said_again(tmp_path):
    ledger = begun(tmp_path)
    line = ["--resume", str(tmp_path / "run"), "--model", "beam", "--preset", "auto", "--seed", "0"]
    arguments = parser().parse_args(line)
    recall(arguments, ledger, given(parser(), line))
    assert (arguments.preset, arguments.device, arguments.seed) == ("mini", "cpu", 0)


def begun(tmp_path: Path) -> Ledger:
    """A run of seven and a half minutes that has only its first event."""
    ledger = Ledger.create(tmp_path / "run")
    said = {"target": "decode-bs1", "model": "beam", "preset": "mini", "device": "cpu"}
    said |= {"schema": 1, "proposer": "auto", "seed": 0, "options": {"budget_minutes": 7.5}}
    ledger.append("run", said)
    return ledger


def test_run_of_another_schema_is_refused(tmp_path, capfd):
    assert cli.run(lambda: main(["--resume", older_run(tmp_path)])) == 2
    assert "has schema 0, this version reads schema 1" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_gpu_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert cli.run(lambda: main(["--target", "decode-bs1", "--device", "cuda"])) == 2
    error = capfd.readouterr().err
    assert "no CUDA device is visible" in error and error.count("\n") == 1


def test_without_a_compiler_nothing_starts(tmp_path):
    done = run("--target", "decode-bs1", "--model", TOY, cwd=tmp_path, PATH=str(tmp_path), CXX="")
    assert done.returncode == 2
    assert "no C++ compiler" in done.stderr and done.stderr.count("\n") == 1


def test_existing_run_directory_is_not_overwritten(tmp_path, capfd):
    directory = older_run(tmp_path)
    before = (Path(directory) / Ledger.NAME).read_bytes()
    words = ["--target", "decode-bs1", "--model", TOY, "--run-dir", directory]
    assert cli.run(lambda: main(words)) == 2
    assert "already holds a run; continue it with --resume" in capfd.readouterr().err
    assert (Path(directory) / Ledger.NAME).read_bytes() == before


def test_full_disk_stops_with_one_line_and_keeps_what_was_written(tmp_path):
    """No file may grow beyond 700 bytes: the ledger fills up as a disk would. No compiled file is
    written then: Python would leave it cut off, and fail in each later process that reads it."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))

    directory = tmp_path / "run"
    words = ("--target", "decode-bs1", "--model", TOY, "--run-dir", str(directory))
    done = run(*words, cwd=tmp_path, preexec=limit, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 2, done.stderr
    assert "free space, then continue with --resume" in done.stderr.splitlines()[-1]
    kinds = [event.kind for event in Ledger.open(directory).events()]
    assert kinds[0] == "run"


def test_dry_run_says_what_would_be_run_and_writes_nothing(tmp_path):
    words = ("--target", "decode-bs1", "--model", TOY, "--dry-run", "--device", "cpu")
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "toy on cpu" in done.stdout and "decode 1 x 1 token(s)" in done.stdout
    assert list(tmp_path.iterdir()) == []
