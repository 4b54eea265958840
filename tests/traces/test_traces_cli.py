"""`python -m traces`: on a model file that the product does not know, and with bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.workload import Workload
from tests.layout import ROOT
from traces.__main__ import changed, main

MODEL = ROOT / "tests" / "agents" / "toy_model.py"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "toy.json.gz"
    assert main(["capture", "--model", str(MODEL), "--no-ceilings", "-o", str(path)]) == 0
    return path


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(argv) == 0
    return capsys.readouterr().out


def test_table_adds_up(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(printed(capsys, "table", str(file), "--json"))
    assert whole["attributed_share"] == 1.0
    assert len(whole["rows"]) == whole["kernels"]
    by_region = json.loads(printed(capsys, "table", str(file), "--by", "region", "--json"))
    assert sum(r["time_us"] for r in by_region["rows"]) == pytest.approx(whole["kernel_us"])
    assert "scaled_norm" in {r["region"] for r in by_region["rows"]}


def test_tables_for_people(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "table", str(file), "--by", "module", "--top", "3")
    lines = text.splitlines()
    assert "100.00% of kernel time attributed" in text
    header = next(n for n, line in enumerate(lines) if line.startswith("kernel "))
    assert lines[header + 4].endswith("more rows; --top shows as many as you ask for")
    layer = printed(capsys, "layer-map", str(file))
    assert ": 1" not in layer.splitlines()[0]
    assert layer.splitlines()[0].startswith("0 (")
    page = file.with_name("diff.html")
    same = printed(capsys, "diff", str(file), str(file), "--top", "1", "--html", str(page))
    assert "+0.0" in same
    assert page.read_text().count("<article>") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["table"], "either a trace file or --model"),
        (["table", "nowhere.json.gz"], "cannot read the trace nowhere.json.gz"),
        (["table", str(MODEL)], "is not a trace"),
        (["table", "--by", "colour", "x"], "invalid choice: 'colour'"),
        (["capture", "--model", "nobody", "-o", "x.json.gz"], "unknown model 'nobody'"),
        (["capture", "--model", "x.py", "-o", "no/where.json.gz"], "there is no folder no"),
        (["candidates", "FILE"], "--no-ceilings"),
        (["table", "FILE", "--top", "0"], "--top: '0' is not a whole number of at least 1"),
        (["diff", "x", "y", "--top", "-5"], "--top: '-5' is not a whole number of at least 1"),
        (["diff", "x", "y", "--html", "/proc/x"], "--html /proc/x: "),
        (["diff", "x", "y", "--html", "."], "--html . is a folder; name a file"),
        (["capture", "--model", "beam", "-o", "."], "-o . is a folder; name a file"),
        (["capture", "--model", "beam", "-o", "/proc/x"], "-o /proc/x: "),
        (
            ["table", "--model", "beam", "--seed", "-1"],
            "is not a whole number from 0 to 2147483647",
        ),
        ([], "required: command"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(
    argv: list[str], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(file) if a == "FILE" else a for a in argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_compiled_region_can_be_traced() -> None:
    workload = Workload.load(str(MODEL), "auto", "cpu", 0)
    model = changed(workload, ["inductor:scaled_norm"])
    assert model is not workload.model
    with pytest.raises(UserError, match="unknown change 'nothing'"):
        changed(workload, ["nothing"])


def test_reading_a_file_needs_no_torch(file: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from traces.__main__ import main\n"
        f"sys.exit(main(['layer-map', {str(file)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "blocks.0" in done.stdout or "layers.0" in done.stdout
