"""`python -m reports`, as its users call it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import UserError
from reports.__main__ import main
from reports.files import write_text

ROOT = Path(__file__).parents[2]


def reports(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "reports", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("command", "name"), [("html", "report.html"), ("md", "report.md")])
def test_writes_beside_the_ledger_and_prints_the_path(
    cpu_run: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    assert main([command, str(cpu_run)]) == 0
    assert capsys.readouterr().out == f"{cpu_run / name}\n"
    assert "residual_boundary" in (cpu_run / name).read_text()


def test_output_goes_where_it_is_told(cpu_run: Path, tmp_path: Path) -> None:
    done = reports("md", cpu_run, "-o", tmp_path / "other.md")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'other.md'}\n")
    assert not (cpu_run / "report.md").exists()


def test_not_a_run_is_one_line_and_exit_2(tmp_path: Path) -> None:
    done = reports("html", tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "is not a run" in done.stderr


def test_unwritable_output_is_one_line(cpu_run: Path, tmp_path: Path) -> None:
    done = reports("html", cpu_run, "-o", tmp_path / "missing" / "page.html")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot write" in done.stderr
    assert f"there is no folder {tmp_path / 'missing'}; make it, or name" in done.stderr


def test_a_folder_for_pictures_is_made(cpu_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "one"
    done = reports("pictures", cpu_run, "-o", folder)
    assert done.returncode == 0
    assert done.stdout.split() == [str(folder / "latency.svg"), str(folder / "layer.svg")]
    (tmp_path / "file").touch()
    done = reports("pictures", cpu_run, "-o", tmp_path / "file" / "x")
    assert done.returncode == 2 and done.stderr.startswith("error: cannot make the folder ")


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    (tmp_path / "report.md").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        write_text(tmp_path / "report.md", "new")
    assert os.listdir(tmp_path) == ["report.md"]


def test_no_report_imports_torch() -> None:
    modules = [f"reports.{p.stem}" for p in sorted((ROOT / "reports").glob("*.py"))]
    code = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; "
        "print(sorted({'torch', 'triton', 'plotly', 'optuna'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
    assert len(modules) >= 10
