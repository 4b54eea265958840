"""`python -m reports notebook NAME`: a notebook of this package, executed with parameters."""

import argparse
import ast
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import cli
from harness.arguments import require_file
from harness.certificate import ROOT
from harness.errors import ExitCode, SelfTestError, UserError
from reports.files import write_text

FOLDER = Path(__file__).parent / "notebooks"
LIBRARIES = "papermill", "nbformat", "ipykernel"
INSTALL = "pip install -c constraints.txt -e '.[notebooks]'"
REQUIRED = "required: "  # how the comment of a parameter without a default begins
SAID = {kind.__name__: kind for kind in (UserError, SelfTestError)}  # of cells, in one line
QUIET = ["--log-level=50"]  # the kernel's own messages, on stderr


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A line of a notebook's cell of parameters; `words` is its comment."""

    name: str
    default: Any
    words: str

    @property
    def required(self) -> bool:
        return self.words.startswith(REQUIRED)

    def read(self, value: str) -> Any:
        """`value` in the default's type; UserError if it has another."""
        kind = type(self.default)
        if kind is bool:
            if value.lower() not in ("true", "false"):
                raise UserError(f"{self.name} is {value!r}; give true or false")
            return value.lower() == "true"
        try:
            return kind(value)
        except ValueError as error:
            word = {int: "a whole number", float: "a number"}[kind]
            raise UserError(f"{self.name} is {value!r}; give {word}") from error


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("name", metavar="NAME", help=f"one of {', '.join(names())}")
    p.add_argument(
        "-p", "--parameter", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"),
        dest="parameters", help="may be repeated; the notebook's first cell lists them",
    )  # fmt: skip
    p.add_argument("--out", type=Path, required=True, metavar="FILE.ipynb")


def run(a: argparse.Namespace) -> int:
    require_file(a.out, "--out")
    print(execute(a.name, dict(a.parameters), a.out))
    return ExitCode.DONE


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def execute(name: str, given: Mapping[str, str], out: Path, *, where: Path | None = None) -> Path:
    """Execute the notebook `name` and write it with its outputs to `out`.

    It runs in the folder `where`, by default the caller's. `given` holds parameters as text.
    UserError for an unknown name or parameter, for a library that is not installed, and for what a
    cell raises as such, as SelfTestError; nothing is written then.
    """
    if name not in names():
        raise UserError(f"unknown notebook {name!r}; choose one of {', '.join(names())}")
    if out.suffix != ".ipynb" or not out.parent.is_dir():
        raise UserError(f"cannot write {out}; name a FILE.ipynb in a folder that exists")
    require_installed()
    import nbformat
    import papermill

    values = read(name, given)
    with kernels():
        try:
            done = papermill.execute_notebook(
                str(FOLDER / f"{name}.ipynb"),
                None,
                parameters=values,
                progress_bar=False,
                cwd=None if where is None else str(where),
                extra_arguments=QUIET,
            )
        except papermill.PapermillExecutionError as error:
            if error.ename not in SAID:
                raise
            raise SAID[error.ename](f"notebook {name}: {error.evalue}") from error
    for part in (done, *done.cells):
        part.metadata.pop("papermill", None)  # times and paths of this machine
    return write_text(out, nbformat.writes(done) + "\n")


def parameters(name: str) -> dict[str, Parameter]:
    """What the notebook's cell of parameters sets."""
    import papermill

    found = papermill.inspect_notebook(str(FOLDER / f"{name}.ipynb"))
    return {
        key: Parameter(name=key, default=ast.literal_eval(line["default"]), words=line["help"])
        for key, line in found.items()
    }


def read(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The given values in their parameters' types; UserError for what the notebook has not."""
    known = parameters(name)
    for key in given:
        if key not in known:
            raise UserError(f"{name} has no parameter {key!r}; it has: {', '.join(known)}")
    for key, parameter in known.items():
        if parameter.required and not given.get(key):
            what = parameter.words.removeprefix(REQUIRED)
            raise UserError(f"{name} needs -p {key} VALUE: {what}")
    return {key: known[key].read(value) for key, value in given.items()}


def missing() -> list[str]:
    """The libraries that executing a notebook takes and that are not installed."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


def require_installed() -> None:
    if absent := missing():
        raise UserError(f"executing a notebook needs {', '.join(absent)}; install it: {INSTALL}")


@contextmanager
def kernels() -> Iterator[None]:
    """Kernels that are started here import this project's packages, wherever they are started, and
    keep what they compile in the checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    wanted = {"PYTHONPATH": os.pathsep.join(paths), **cli.cache_environment(ROOT / ".cache")}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
