"""`python -m reports ci` as jobs call it: exit codes, files, a commit built beside the tree."""

import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.errors import UserError
from harness.git import Git
from harness.ledger import Ledger
from harness.records import Latency
from reports import ci, rigs, trend
from reports.__main__ import main
from reports.regression import Outcome
from reports.run import KINDS, Run
from tests.layout import ROOT
from tests.reports.conftest import paired
from tests.reports.test_pictures import EVIDENCE

TOY = "tests/agents/toy_model.py"


def close(directory: Path, decode: float = 760.0, points: dict[str, str] | None = None) -> None:
    """Closing pairs and fingerprints for a run that has a final event."""
    ledger = Ledger.open(directory)
    final = ledger.last("final")
    assert final is not None
    pairs = Latency(decode=paired(1000.0, decode), prefill=paired(9000.0, 7900.0))
    ledger.append("final", {**final, "pairs": pairs.to_json()})
    marks = points or {"reference, decode: norm": "a", "result, decode: mixer": "b"}
    ledger.append("fingerprint", {"points": marks, "unstable": []})


@pytest.fixture
def run(cpu_run: Path) -> Path:
    close(cpu_run)
    return cpu_run


def test_a_baseline_file_is_written_and_then_holds(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, junit = tmp_path / "new" / "baseline.json", tmp_path / "junit.xml"
    words = ["ci", "--baseline", str(file), "--current", str(run)]
    assert main([*words, "--update-baseline"]) == 0
    assert "Nothing was compared" in capsys.readouterr().out
    assert main([*words, "--junit", str(junit)]) == 0
    page = capsys.readouterr().out
    assert "**No regression.**" in page and "2 rounding points bit for bit the same" in page
    suite = ElementTree.parse(junit).getroot()[0]
    assert [case.get("name") for case in suite] == [
        "bits", "latency, decode", "latency, prefill", "environment",
    ]  # fmt: skip
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "0")


def test_a_folder_of_baselines_has_one_for_each_device(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ci", "--baseline", str(tmp_path), "--current", str(run)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "**Nothing was compared.**" in out and "**Not compared: bits.**" in out
    assert f"there is no baseline {tmp_path / 'intel-xeon-8481c.json'}" in err
    assert main([*words, "--update-baseline"]) == 0
    assert ", it is made now" in capsys.readouterr().err
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert ("**No regression.**" in out, err) == (True, "")


def test_a_regression_is_exit_1_and_a_failed_case(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, junit, history = (tmp_path / name for name in ("base.json", "junit.xml", "log.jsonl"))
    words = ["ci", "--baseline", str(file), "--current", str(run), "--history", str(history)]
    assert main([*words, "--update-baseline"]) == 0
    close(run, 800.0, {"reference, decode: norm": "a", "result, decode: mixer": "other"})
    capsys.readouterr()
    assert main([*words, "--junit", str(junit)]) == 1
    page = capsys.readouterr().out
    assert "**Regression: bits changed, latency, decode got slower.**" in page
    assert "first in result, decode: mixer" in page
    assert "- result, decode: mixer: b → other" in page
    suite = ElementTree.parse(junit).getroot()[0]
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["bits", "latency, decode"]
    lines = trend.load(history)
    assert [line["findings"].get("latency, decode") for line in lines] == [None, "slower"]
    svg = history.with_suffix(".svg").read_text()
    assert svg.count("<circle") == 5 and svg.count('fill="var(--failed)"') == 2  # one in the key
    assert [line["decode_us"] for line in lines] == [760.0, 800.0]  # the times that were judged
    assert main([*words, "--update-baseline"]) == 0  # accepted on purpose
    assert main(words) == 0


def test_three_percent_are_found_against_the_committed_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for factor, code, said in ((1.0, 0, "same"), (1.03, 1, "slower"), (1 / 1.03, 0, "faster")):
        run = tmp_path / f"times-{factor:.2f}"
        shutil.copytree(EVIDENCE, run)
        final = Ledger.open(run).last("final")
        assert final is not None
        decode = final["pairs"]["decode"]
        decode["candidate_us"] *= factor
        decode["gain_us"] = decode["base_us"] - (decode["base_us"] - decode["gain_us"]) * factor
        decode["candidate_interval_us"] = [us * factor for us in decode["candidate_interval_us"]]
        Ledger.open(run).append("final", final)
        words = ["ci", "--baseline", str(ROOT / "reports" / "baselines"), "--current", str(run)]
        assert main(words) == code
        page = capsys.readouterr().out
        outcome = f"**{said}**" if code else said
        assert f"| latency, decode | {outcome} | 6.109 → " in page
        assert "| latency, prefill | same |" in page


def test_bad_input_is_refused(run: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"schema": 1}')
    for words, said in (
        (["--baseline", str(broken)], "is no baseline"),
        (["--baseline", "no-such-commit"], "no commit of"),
        (["--baseline", str(run), "--update-baseline"], "writes a file"),
        (["--baseline", str(run), "--rounds", "0"], "of at least 1"),
        (["--baseline", "HEAD", "--junit", str(tmp_path / "no" / "j.xml")], "there is no folder"),
    ):
        with pytest.raises(UserError, match=said):
            main(["ci", "--current", str(run), *words])


def test_a_baseline_of_other_work_is_refused(run: Path, cuda_run: Path) -> None:
    with pytest.raises(UserError, match="compare the same model, preset, target and seed"):
        main(["ci", "--current", str(run), "--baseline", str(cuda_run)])


def test_a_run_of_another_commit_gets_no_fingerprint_of_this_one(cpu_run: Path) -> None:
    run, why = ci.fingerprinted(Run.load(cpu_run))
    assert run.points == {} and why is not None and "is of commit 417aea4+dirty" in why


def test_a_run_of_this_commit_gets_its_fingerprint_once(cpu_run: Path) -> None:
    ledger = cpu_run / Ledger.NAME
    text = ledger.read_text().replace('"model": "beam"', f'"model": "{TOY}"', 1)
    text = text.replace('"preset": "mini"', '"preset": "toy"', 1)
    ledger.write_text(text.replace("417aea4", str(Git.open(ROOT).commit("HEAD"))))
    run, why = ci.fingerprinted(Run.load(cpu_run))
    assert why is None and run.unstable == ()
    assert "result, decode after it: blocks.1.mixer" in run.points
    assert Run.load(cpu_run).points == run.points
    size = ledger.stat().st_size
    assert ci.fingerprinted(Run.load(cpu_run))[0].points == run.points
    assert ledger.stat().st_size == size


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The last commit, and on top, not committed: a norm that rounds once more, and a pause."""
    top = tmp_path / "clone"
    Git(tmp_path).run("clone", "--quiet", "--shared", ROOT, top)
    model, text = top / TOY, (top / TOY).read_text()
    for old, new in (
        ("(wide * self.weight.float()).to(x.dtype)", "wide.to(x.dtype) * self.weight"),
        ("        h = self.embed(ids)", "        time.sleep(0.01)\n        h = self.embed(ids)"),
        ("from dataclasses", "import time\nfrom dataclasses"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    model.write_text(text)
    return top


@pytest.mark.long
def test_a_commit_is_built_beside_the_tree_and_both_are_found(
    cpu_run: Path, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = cpu_run / Ledger.NAME
    text = ledger.read_text().replace('"model": "beam"', f'"model": "{TOY}"', 1)
    ledger.write_text(text.replace('"preset": "mini"', '"preset": "toy"', 1))
    run = Run.load(cpu_run)
    found, pairs, here = ci.in_turns("HEAD", run, rounds=1, seconds=0.05, root=clone)
    assert capsys.readouterr().err == "round 1 of 1; about 0 s left\n"
    outcomes = {finding.name: finding for finding in found}
    assert outcomes["bits"].outcome is Outcome.CHANGED
    assert "first in result, ragged prefill: blocks.0.norm" in outcomes["bits"].words
    assert any("blocks.0.norm" in line for line in outcomes["bits"].details)
    assert not any("embed" in line for line in outcomes["bits"].details)
    assert outcomes["latency, decode"].outcome is not Outcome.UNKNOWN
    assert outcomes["environment"].outcome is Outcome.SAME
    assert set(pairs) == set(KINDS) and pairs["decode"].gain_us < -5_000
    assert here.environment is not None and here.environment.device == "cpu"
    # The worktree is gone, and the change in the clone's own files is still there.
    assert len(Git(clone).run("worktree", "list").splitlines()) == 1
    assert "time.sleep" in (clone / TOY).read_text()


def test_a_model_file_of_the_project_is_each_trees_own(cpu_run: Path, tmp_path: Path) -> None:
    run = Run.load(cpu_run)
    for given, expected in (
        (TOY, TOY),
        (str(ROOT / TOY), TOY),
        (str(tmp_path / "own.py"), str(tmp_path / "own.py")),
        ("beam", "beam"),
    ):
        run.header = replace(run.header, model=given)
        assert rigs.order_for(run)["model"] == expected
