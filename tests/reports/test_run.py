"""Reading a ledger: typed, tolerant of what has not happened, strict about damage."""

import json
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.ledger import Ledger
from harness.records import Status
from reports.render import facts
from reports.run import Run


def test_run_holds_what_the_ledger_says(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    assert (run.header.model, run.header.preset, run.header.target) == (
        "beam",
        "mini",
        "decode-bs1",
    )
    assert [a.index for a in run.attempts] == [1, 2, 3, 4, 5, 6, 7]
    assert [a.name for a in run.changes(Status.KEPT)] == [
        "residual_boundary",
        "parallel_projection",
    ]
    assert [c.control for c in run.controls] == ["identity", "slowed"]
    assert [m.name for m in run.measured] == ["residual_boundary", "parallel_projection"]
    assert run.final is not None and run.final.decode.median_us == 760.0
    assert run.effect == {"decode_us": 12.5, "prefill_us": 80.0}
    assert run.stopped == "done"
    assert run.hypothesis(run.attempts[2]) == "nine launches become one"
    assert run.hypothesis(run.attempts[3]) is None


@pytest.mark.parametrize(
    ("fixture", "decode", "prefill"),
    [("cpu_run", "eager", "eager"), ("cuda_run", "graph", "eager")],
)
def test_before_is_the_reference_run_as_candidates_are(
    fixture: str, decode: str, prefill: str, request: pytest.FixtureRequest
) -> None:
    run = Run.load(request.getfixturevalue(fixture))
    befores = run.before("decode"), run.before("prefill")
    assert [b.name for b in befores if b is not None] == [decode, prefill]


def test_unfinished_run_says_what_is_missing(unfinished_run: Path) -> None:
    run = Run.load(unfinished_run)
    assert (run.finished, run.stopped, run.after) == (False, None, None)
    assert run.in_progress == "residual_boundary"
    assert run.changes() == []


def test_half_a_last_line_is_not_an_event(cpu_run: Path) -> None:
    path = cpu_run / Ledger.NAME
    path.write_text(path.read_text()[:-5])
    assert Run.load(cpu_run).stopped is None


def test_continued_run_counts_sessions_and_keeps_the_anchor(cpu_run: Path) -> None:
    ledger, run = Ledger.open(cpu_run), Run.load(cpu_run)
    assert run.environment is not None and run.final is not None
    ledger.append("resumed", run.environment)
    anchor = {"decode": run.final.decode.to_json(), "prefill": run.final.prefill.to_json()}
    ledger.append("anchor", anchor)
    run = Run.load(cpu_run)
    # The closing figures stand until another change is tried.
    assert (run.sessions, run.finished, run.stopped) == (2, True, None)
    assert run.anchors[0].decode.median_us == 760.0
    ledger.append("attempt", run.attempts[-1])
    run = Run.load(cpu_run)
    assert run.finished is False
    assert run.after is not None and run.after.decode.median_us == 761.0  # measured, not final


def test_what_a_preset_says_about_itself_is_in_the_report(cpu_run: Path) -> None:
    assert "Which is" not in dict(facts(Run.load(cpu_run)))
    path = cpu_run / Ledger.NAME
    path.write_text(path.read_text().replace('"preset": ', '"note": "half of it", "preset": ', 1))
    assert dict(facts(Run.load(cpu_run)))["Which is"] == "half of it"


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run: it has no ledger.jsonl"):
        Run.load(tmp_path)


def test_another_schema(cpu_run: Path) -> None:
    path = cpu_run / Ledger.NAME
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2', 1))
    with pytest.raises(UserError, match="has schema 2, this version reads schema 1"):
        Run.load(cpu_run)


def _damage(line: str, how: str) -> str:
    event = json.loads(line)
    if how == "status":
        event["data"]["status"] = "won"
    elif how == "field":
        event["data"]["luck"] = 1
    elif how == "list":
        event["data"] = []
    else:
        return "{not json\n"
    return json.dumps(event) + "\n"


@pytest.mark.parametrize("how", ["status", "field", "list", "json"])
def test_damage_names_the_line(cpu_run: Path, how: str) -> None:
    path = cpu_run / Ledger.NAME
    lines = path.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"kind": "attempt"' in line)
    lines[at] = _damage(lines[at], how)
    path.write_text("".join(lines))
    with pytest.raises(UserError, match=rf"ledger.jsonl:{at + 1} is not a") as caught:
        Run.load(cpu_run)
    assert "\n" not in str(caught.value)


def test_missing_field_is_named(cpu_run: Path) -> None:
    path = cpu_run / Ledger.NAME
    path.write_text(path.read_text().replace('"preset"', '"size"', 1))
    with pytest.raises(UserError, match="not a valid 'run' event \\(lacks 'preset'\\)"):
        Run.load(cpu_run)


def test_binary_ledger(cpu_run: Path) -> None:
    path = cpu_run / Ledger.NAME
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(UserError, match="restore the file, or start a new run"):
        Run.load(cpu_run)
