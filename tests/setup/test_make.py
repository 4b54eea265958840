"""The make targets run what the README says; `make -n` shows it without doing it."""

import os
import re
import shlex
import subprocess
import tomllib

import pytest

from tests.conftest import SELECTED
from tests.layout import ROOT


def make(*arguments: str) -> str:
    """What make prints, called as a person would, not as a part of `make test`."""
    inherited = {"ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"}
    done = subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in inherited},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    "target, installs, commands",
    [
        ("run", "core", ["python -m agents.run --target decode-bs1"]),
        ("test", "test", ["python -m pytest -n 2"]),
        ("lint", "lint", ["ruff check", "ruff format --check", "pyright", "lint-imports"]),
        ("bench", "core", ["python -m harness ceilings", "python -m harness bench"]),
    ],
)
def test_target(target: str, installs: str, commands: list[str]) -> None:
    steps = make("-n", target).splitlines()
    assert steps[0] == f"tools/setup.sh {installs}"
    rest = "\n".join(steps[1:])
    places = [rest.find(command) for command in commands]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("target", ["run", "test", "bench"])
def test_arguments_are_passed_on(target: str) -> None:
    assert make("-n", target, "ARGS=--one 1 --two").splitlines()[-1].endswith(" --one 1 --two")


@pytest.mark.parametrize("selected, mark", SELECTED.items(), ids=["slow", "long"])
def test_what_make_selects_is_spelt_out_in_its_files(selected: str, mark: str) -> None:
    """No file hands a mark on to another, which would not be imported."""
    assert f"-m {shlex.quote(selected)} " in make("-n", mark.removeprefix("mark.")).replace(
        '"', "'"
    )
    holders = [p for p in ROOT.glob("tests/**/*.py") if f"{'pytest.'}{mark}" in p.read_text()]
    assert len(holders) > 5 and all(p.name.startswith("test_") for p in holders)


def test_help_names_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert phony is not None
    listed = re.findall(r"^make (\w+) +\S", make(), flags=re.MULTILINE)
    assert listed == phony.group(1).split()


def test_every_dependency_of_the_tests_is_pinned() -> None:
    """What `make run`, `make test` and `make lint` install by name has one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["dev"]]
    names = {re.split(r"[\[<>=; ]", line)[0].lower() for line in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert names <= {line.partition("==")[0].lower() for line in pins}


def test_the_build_backend_is_the_pinned_one() -> None:
    """The set-up installs it without build isolation, so the two must agree."""
    (needed,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert needed in (ROOT / "constraints.txt").read_text().splitlines()
