"""The ledger loses nothing that it said it wrote, and says in one line what it cannot read."""

import json
import os
import signal
import subprocess
import sys

import pytest

from harness.errors import UserError
from harness.ledger import Ledger
from harness.records import SCHEMA, Timing

RUN = {"schema": SCHEMA, "target": "decode-bs1"}
TIMING = Timing(median_us=10.5, interval_us=(10.0, 11.0), samples=40)


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", RUN)
    return ledger


def kinds(ledger: Ledger) -> list[str]:
    return [event.kind for event in ledger.events()]


def test_round_trip(ledger):
    ledger.append("measured", TIMING)
    ledger.append("effect", {"decode_us": 1.5})
    again = Ledger.open(ledger.directory)
    assert kinds(again) == ["run", "measured", "effect"]
    assert again.all("measured", Timing) == [TIMING]
    assert again.last("effect") == {"decode_us": 1.5}
    assert again.last("attempt") is None


def test_last_is_the_latest(ledger):
    for value in (1, 2):
        ledger.append("effect", {"decode_us": value})
    assert ledger.last("effect") == {"decode_us": 2}


def test_a_line_cut_by_a_kill_is_no_event_and_is_mended(ledger):
    ledger.append("effect", {"decode_us": 1.5})
    whole = ledger.path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[1])):
        ledger.path.write_bytes(whole[:-cut])
        assert kinds(Ledger.open(ledger.directory)) == ["run"]
        ledger.append("measured", TIMING)
        assert kinds(ledger) == ["run", "measured"]
        assert ledger.path.read_bytes().startswith(whole.splitlines(keepends=True)[0])


def test_kill_9_while_writing_loses_no_line_that_was_acknowledged(tmp_path):
    code = (
        "import sys; from pathlib import Path; from harness.ledger import Ledger\n"
        f"ledger = Ledger.create(Path(sys.argv[1])); ledger.append('run', {RUN!r})\n"
        "for i in range(10**6):\n"
        "    ledger.append('effect', {'i': i}); print(i, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(20)]
        os.kill(process.pid, signal.SIGKILL)
        said += [int(line) for line in process.stdout.read().split()]
    written = [e.data["i"] for e in Ledger.open(tmp_path / "run").events() if e.kind == "effect"]
    assert written[: len(said)] == said == list(range(len(said)))


def test_a_full_disk_is_one_line_that_says_how_to_go_on(tmp_path):
    run = tmp_path / "run"
    ledger = Ledger.create(run)
    ledger.path.symlink_to("/dev/full")
    with pytest.raises(UserError) as caught:
        ledger.append("run", RUN)
    assert str(caught.value) == (
        f"cannot write {ledger.path}: No space left on device; "
        f"free space, then continue with --resume {run}"
    )


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match="is not a run: it has no ledger.jsonl"):
        Ledger.open(tmp_path)


def test_a_run_of_another_schema(ledger):
    ledger.path.write_text(json.dumps({"kind": "run", "time_s": 0, "data": {"schema": 99}}) + "\n")
    with pytest.raises(UserError, match=f"has schema 99, this version reads schema {SCHEMA}"):
        Ledger.open(ledger.directory)


def test_an_empty_ledger(ledger):
    ledger.path.write_text("")
    with pytest.raises(UserError, match="is empty; start a new run"):
        Ledger.open(ledger.directory)


BROKEN = [
    b"not json",
    b"[1]",
    b'{"kind": "run"}',
    b'{"kind": "run", "time_s": 0, "data": [1]}',
    b'{"kind": "\xff"}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("line", BROKEN, ids=lambda line: repr(line[:40]))
def test_a_broken_line_in_the_middle_is_named(ledger, line):
    with ledger.path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError, match="ledger.jsonl:2 is not a ledger line"):
        list(ledger.events())


def test_a_binary_file_is_no_ledger(ledger):
    ledger.path.write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="ledger.jsonl:1 is not a ledger line"):
        Ledger.open(ledger.directory)


@pytest.mark.parametrize("data", [{}, {"median_us": 1}, {"nope": 1}, {"interval_us": 3}], ids=str)
def test_an_event_that_is_no_record_is_named(ledger, data):
    ledger.append("measured", TIMING)
    ledger.append("measured", data)
    with pytest.raises(UserError, match="ledger.jsonl:3 is not a valid 'measured' event") as caught:
        ledger.all("measured", Timing)
    assert str(caught.value).endswith("; restore the file, or start a new run")


WHOLE = RUN | {"model": "beam", "preset": "mini", "device": "cpu", "proposer": "auto", "seed": 0}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"target": None}, "its target is None"),
        ({"seed": "0"}, "its seed is '0'"),
        ({"options": [1]}, r"its options are \[1\]"),
    ],
    ids=str,
)
def test_a_first_event_that_lacks_something_is_named(tmp_path, more, says):
    ledger = Ledger.create(tmp_path)
    ledger.append("run", WHOLE)
    assert ledger.header() == WHOLE
    ledger.path.write_text("")
    ledger.append("run", WHOLE | more)
    with pytest.raises(UserError, match=f"ledger.jsonl:1 is not a valid 'run' event \\({says}\\)"):
        ledger.header()


def test_a_run_is_not_overwritten(ledger):
    with pytest.raises(UserError, match="already holds a run; continue it with --resume"):
        Ledger.create(ledger.directory)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the run directory .*: Not a directory"):
        Ledger.create(tmp_path / "file" / "run")
