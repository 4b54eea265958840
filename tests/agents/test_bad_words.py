"""Words and files that cannot be used, told without PyTorch, before anything is written."""

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from agents import lock, mcp, run
from agents.pulse import Pulse
from harness.errors import UserError
from tests.agents import killers
from tests.layout import ROOT

TARGET = "--target", "decode-bs1"
BINARY = bytes(range(256))
FILES = {
    "old/ledger.jsonl": b"{}\n",
    "empty.py": b"",
    "binary.py": BINARY,
    "binary.jsonl": BINARY,
    "empty.jsonl": b"",
    "broken.jsonl": b'{"kind": "answer", "message": {"content": []}}\n',
}
BAD = {
    "seed": (("--seed", "99999999999999999999"), "'99.*' is not a whole number from 0 to 21474836"),
    "seed-below-0": (("--seed", "-1"), "'-1' is not a whole number from 0 to 2147483647"),
    "seed-no-number": (("--seed", "x"), "'x' is not a whole number from 0 to 2147483647"),
    "nan-minutes": (("--budget-minutes", "nan"), "'nan' is not a finite number above 0"),
    "inf-minutes": (("--budget-minutes", "inf"), "'inf' is not a finite number above 0"),
    "old-directory": (
        ("--run-dir", "old"),
        "old already holds a run; continue it with --resume",
    ),
    "no-directory": (("--run-dir", "empty.py"), "--run-dir empty.py: File exists; name a folder"),
    "unknown-flag": (("--nope",), "unrecognized arguments: --nope; see python -m agents"),
}
OF_RUN = {
    "nan-patience": (("--stall-minutes", "nan"), "'nan' is not a finite number above 0"),
    "nan-dollars": (("--budget-usd", "nan"), "'nan' is not a finite number above 0"),
    "nan-share": (("--floor-share", "nan"), "'nan' is not a share above 0, at most 1"),
    "effort": (("--effort", "nope"), "invalid choice: 'nope' .choose from .*; see python -m agent"),
    "empty-change": (("--change", "empty.py"), "empty.py is empty; a change file defines one"),
    "binary-change": (("--change", "binary.py"), "binary.py is no text of Python"),
    "binary-record": (("--proposer", "replay:binary.jsonl"), "binary.jsonl:1 is no line of a tra"),
    "empty-record": (("--proposer", "replay:empty.jsonl"), "empty.jsonl holds no answer of a mod"),
    "broken-record": (("--proposer", "replay:broken.jsonl"), "answer 1 has no content or no usag"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(read, words: tuple[str, ...], says: str, folder: Path) -> None:
    with pytest.raises(UserError, match=says) as error:
        read([*TARGET, *words])
    assert "\n" not in str(error.value)
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == FILES.keys()


@pytest.mark.parametrize("read", [run.words, mcp.words], ids=["run", "mcp"])
@pytest.mark.parametrize(("words", "says"), BAD.values(), ids=BAD.keys())
def test_words_of_both_commands(read, words, says, folder: Path) -> None:
    refused(read, words, says, folder)


@pytest.mark.parametrize(("words", "says"), OF_RUN.values(), ids=OF_RUN.keys())
def test_words_of_a_run(words, says, folder: Path) -> None:
    refused(run.words, words, says, folder)


DAMAGED = {
    "binary": (BINARY, 1, "ledger line"),
    "attempt": (b'{"kind": "attempt", "time_s": 1, "data": {"index": 1}}\n', 2, "'attempt' event"),
    "baseline": (b'{"kind": "baseline", "time_s": 1, "data": {}}\n', 2, "'baseline' event"),
    "no-target": (b'{"kind": "run", "time_s": 1, "data": {"schema": 1}}\n', 1, "'run' event"),
}


@pytest.mark.parametrize("read", [run.words, mcp.words], ids=["run", "mcp"])
@pytest.mark.parametrize(("text", "line", "says"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_ledger_is_not_continued(read, text, line, says, tmp_path: Path) -> None:
    path = killers.begun(tmp_path / "run").path
    first = path.read_bytes().splitlines(keepends=True)[: line - 1]
    path.write_bytes(b"".join(first) + text)
    with pytest.raises(UserError, match=f"{path}:{line} is not a.*{says}"):
        read(["--resume", str(path.parent)])


HOLDS = """
import os, sys
from pathlib import Path
from agents import lock
from harness.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]))
lock.take(ledger)
if not os.fork():
    lock.take(ledger)  # the forked process has it from the first
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_works_on_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = killers.begun(tmp_path / "run")
    before, directory = ledger.path.read_bytes(), str(ledger.directory)
    a = run.words(["--resume", directory])
    waited: list[int] = []
    command = [sys.executable, "-c", HOLDS, directory]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == b"holds\n"
        assert other.wait(30) == 0  # only what it forked is left
        with pytest.raises(UserError, match="another process works on .*/run; wait for its end"):
            lock.take(ledger, 0.0, lambda: waited.append(1))
        monkeypatch.setattr(lock, "PATIENCE_S", 0.0)
        with pytest.raises(UserError, match="another process works on"):
            run.live(a, ledger.directory, 0.0, Pulse())
    lock.take(ledger, 10.0)
    lock.take(ledger, 0.0)
    lock.let_go()
    assert (ledger.path.read_bytes(), waited) == (before, [])
