"""Errors become one line and an exit code; tables are plain off a terminal."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli
from harness.errors import ExitCode, SelfTestError, UserError

ROOT = Path(__file__).parents[2]


class OutOfMemoryError(RuntimeError):
    """Looks as torch's does to a module that must not import torch."""


def raising(error: BaseException):
    def main() -> int:
        raise error

    return main


CASES = [
    (UserError("unknown preset 'x';\nchoose mini"), 2, "error: unknown preset 'x'; choose mini"),
    (SelfTestError("the replay differs"), 4, "error: the replay differs"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (
        OSError(errno.ENOSPC, "No space left on device", "/data/run"),
        2,
        "error: /data/run: No space left on device; free space there, or write elsewhere",
    ),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "error: /x: Permission denied"),
    (MemoryError(), 2, "error: out of memory; choose a smaller preset"),
    (
        OutOfMemoryError("CUDA out of memory. Tried 9 GiB.\nmore"),
        2,
        "error: CUDA out of memory. Tried 9 GiB. Choose a smaller preset or target",
    ),
]


@pytest.mark.parametrize(("error", "code", "line"), CASES, ids=lambda c: type(c).__name__)
def test_an_error_is_one_line_and_a_code(error, code, line, capfd):
    assert cli.run(raising(error)) == code
    assert capfd.readouterr().err == line + "\n"


COMMANDS = [
    ["harness", "ceilings"],
    ["agents.run", "--target", "decode-bs1"],
    ["reports", "md", "x"],
    ["traces", "candidates", "--model", "beam"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_missing_package_is_one_line(words):
    """Python without site-packages."""
    command = [sys.executable, "-S", "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert " is not installed for " in done.stderr and "use .venv/bin/python" in done.stderr


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["bench", "--peers", "nope"], "python -m harness bench"),
        (["--nope", "bench"], "python -m harness"),
    ],
    ids=["after-the-subcommand", "before-it"],
)
def test_what_is_not_known_refers_to_the_help_of_the_command(words, where):
    parser = cli.Parser(prog="python -m harness")
    parser.add_subparsers().add_parser("bench").add_argument("--peers", action="store_true")
    with pytest.raises(UserError) as raised:
        parser.parse_args(words)
    given = next(word for word in words if "nope" in word)
    assert str(raised.value) == f"unrecognized arguments: {given}; see {where} --help"


def test_a_missing_module_of_ours_is_our_mistake():
    with pytest.raises(ModuleNotFoundError):
        cli.run(raising(ModuleNotFoundError("No module named", name="harness.gone")))
    with pytest.raises(ModuleNotFoundError):
        cli.end_without(ModuleNotFoundError("No module named", name="torch"), "agents.run")


def test_our_own_mistakes_keep_their_traceback():
    with pytest.raises(RuntimeError, match="not the user's fault"):
        cli.run(raising(RuntimeError("not the user's fault")))


def test_results_pass_through():
    assert cli.run(lambda: None) == ExitCode.DONE
    assert cli.run(lambda: ExitCode.FOUND) == 1


def run_python(code: str, **options) -> subprocess.CompletedProcess[str]:
    program = f"import sys\nfrom harness import cli\n{code}"
    return subprocess.run([sys.executable, "-c", program], text=True, **options)


def test_a_full_disk_behind_stdout_is_one_line():
    code = "sys.exit(cli.run(lambda: print('figures')))"
    with open("/dev/full", "w") as full:
        done = run_python(code, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == ("error: No space left on device; free space there, or write elsewhere\n")


def test_a_reader_that_leaves_early_is_no_error():
    code = "sys.exit(cli.run(lambda: print('line\\n' * 1_000_000)))"
    read, write = os.pipe()
    os.close(read)
    done = run_python(code, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_is_clean():
    code = (
        "import os, signal\nsys.exit(cli.run(lambda: os.kill(os.getpid(), signal.SIGINT) or None))"
    )
    done = run_python(code, capture_output=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_nothing_heavy_is_imported():
    code = "print(sorted({'torch', 'rich', 'numpy'} & set(sys.modules)))"
    assert run_python(code, capture_output=True).stdout == "[]\n"


def test_caches_go_where_the_caller_says(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert cli.cache_environment(tmp_path) == {
        "TORCHINDUCTOR_CACHE_DIR": "/elsewhere",
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    cli.set_cache_environment(tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_a_table_is_plain_text_off_a_terminal(capsys):
    cli.print_table("times", ("name", "us"), [("eager", 12.5), ("graph [1]", 7)])
    assert capsys.readouterr().out == "times\nname         us\neager      12.5\ngraph [1]     7\n"


def test_an_empty_table_has_its_head(capsys):
    cli.print_table("none", ("a", "b"), [])
    assert capsys.readouterr().out == "none\na  b\n"
