"""tools/setup.sh says at once what is missing, and does nothing twice."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.layout import ROOT

INPUTS = "pyproject.toml", "constraints.txt", "setup.py"
Setup = Callable[..., subprocess.CompletedProcess[str]]


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the set-up reads, and nothing of ours to install."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "tools")
    for name in INPUTS:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def setup(checkout: Path) -> Setup:
    """Call the set-up in `checkout`, in an environment with `variables` changed."""

    def call(chosen: str = "core", **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": sys.executable, **variables}
        return subprocess.run(
            ["bash", "tools/setup.sh", chosen],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
        )

    return call


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of a refusal."""
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_refuses_an_unknown_set(setup: Setup) -> None:
    assert "choose core, test or lint" in refused(setup("everything"))


def test_refuses_a_python_that_is_not_there(setup: Setup) -> None:
    assert "PYTHON=no-such-python is not a program" in refused(setup(PYTHON="no-such-python"))


def test_refuses_an_old_python(setup: Setup, checkout: Path) -> None:
    old = program(checkout / "bin" / "python3", "exit 1")  # as one that fails the version check
    assert "older than Python 3.11" in refused(setup(PYTHON=str(old)))


def test_says_which_pythons_it_looked_for(setup: Setup, checkout: Path) -> None:
    names = "python3 python3.11 python3.12 python3.13 python3.14 python".split()
    for name in names:
        program(checkout / "bin" / name, "exit 1")
    line = refused(setup(PYTHON="", PATH=f"{checkout / 'bin'}:{os.environ['PATH']}"))
    assert "no Python 3.11 or newer" in line
    assert all(name in line for name in names)
    assert not (checkout / ".venv").exists()


def test_takes_a_newer_python_where_python3_is_old(setup: Setup, checkout: Path) -> None:
    program(checkout / "bin" / "python3", "exit 1")
    program(checkout / "bin" / "python3.12", f'exec {sys.executable} "$@"')
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    line = refused(setup(PYTHON="", PATH=path, CXX="no-such-compiler"))
    assert "no C++ compiler" in line  # it went past the search for Python


def test_refuses_a_python_without_venv(setup: Setup, checkout: Path) -> None:
    text = f'case "$*" in *venv*) exit 1 ;; esac\nexec {sys.executable} "$@"'
    bare = program(checkout / "bin" / "python3", text)
    assert "has no venv module" in refused(setup(PYTHON=str(bare)))


def test_refuses_a_machine_without_a_compiler(setup: Setup, checkout: Path) -> None:
    assert "no C++ compiler" in refused(setup(CXX="no-such-compiler"))
    assert not (checkout / ".venv").exists()


def test_refuses_a_compiler_that_cannot_compile(setup: Setup, checkout: Path) -> None:
    broken = program(checkout / "bin" / "g++", "exit 1")
    assert "cannot compile C++ with OpenMP" in refused(setup(CXX=str(broken)))


def test_refuses_a_disk_that_is_too_small(setup: Setup, checkout: Path) -> None:
    program(checkout / "bin" / "df", "echo; echo x x x 5242880 x x")  # 5 GB in KB
    line = refused(setup(PATH=f"{checkout / 'bin'}:{os.environ['PATH']}"))
    assert "only 5 GB free here, 6 GB are needed" in line
    assert not (checkout / ".venv").exists()


def test_says_when_the_package_index_cannot_be_reached(setup: Setup, checkout: Path) -> None:
    done = setup(
        PIP_CONFIG_FILE=os.devnull,
        PIP_FIND_LINKS="",
        PIP_EXTRA_INDEX_URL="",
        PIP_INDEX_URL="http://127.0.0.1:9/simple",  # nothing listens on the discard port
    )
    assert "the package index cannot be reached" in refused(done)
    assert not list((checkout / ".venv").glob(".installed-*"))


@pytest.mark.parametrize("changed", INPUTS)
def test_is_done_once_until_its_inputs_change(setup: Setup, checkout: Path, changed: str) -> None:
    """With its stamp in place nothing is looked at, so a Python that is not there is no error."""
    content = b"".join((checkout / name).read_bytes() for name in INPUTS)
    sums = subprocess.run(["cksum"], input=content, capture_output=True, check=True).stdout
    stamp = checkout / ".venv" / f".installed-core-{sums.decode().strip().replace(' ', '-')}"
    stamp.parent.mkdir()
    stamp.touch()
    done = setup(PYTHON="no-such-python")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    with (checkout / changed).open("a") as file:
        file.write("# changed\n")
    assert "no-such-python" in refused(setup(PYTHON="no-such-python"))


@pytest.mark.parametrize("done, held", [("lint", 3), ("test", 2), ("core", 1)])
def test_a_set_holds_the_smaller_ones(setup: Setup, checkout: Path, done: str, held: int) -> None:
    """Nothing is installed here: the Python makes a .venv whose pip does nothing."""
    venv = 'mkdir -p "$3/bin"; printf "#!/bin/sh\n" >"$3/bin/python"; chmod +x "$3/bin/python"'
    python = program(
        checkout / "bin" / "python3",
        f'[ "$*" = "-m venv .venv" ] || exec {sys.executable} "$@"\n{venv}',
    )
    assert "installed" in setup(done, PYTHON=str(python)).stdout
    sets = "core", "test", "lint"
    again = [setup(name, PYTHON="no-such-python").returncode for name in sets]
    assert again == [0] * held + [2] * (3 - held)


@pytest.mark.parametrize("kind", ["bdist_wheel", "sdist"])
def test_a_wheel_is_refused_with_the_reason(checkout: Path, kind: str) -> None:
    shutil.copy(ROOT / "README.md", checkout)
    shutil.copy(ROOT / "LICENSE", checkout)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", kind], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "installed editable only" in done.stderr
    assert not list(checkout.glob("dist/*"))
