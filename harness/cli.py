"""What every command line shares, torch-free: errors as one line, exit codes, caches, tables."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import ExitCode, SelfTestError, UserError

BROKEN_PIPE = 128 + 13  # what a shell reports for a process that SIGPIPE ended
OURS = "reference", "optimized", "harness", "traces", "agents", "reports", "tests"
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class Parser(argparse.ArgumentParser):
    """A parser whose usage errors are one line like all others: `error` raises UserError, and what
    a subcommand does not know refers to its own help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def run(main: Callable[[], int | None]) -> int:
    """Call `main` and turn what went wrong for the user into one line on stderr and an exit code.

    Bad input, a full disk and exhausted memory give 2, a failed self-test 4, Ctrl-C 130. Anything
    else is our mistake and keeps its traceback.
    """
    try:
        code = main()
        sys.stdout.flush()  # a full disk shows here, not in the interpreter's exit
        return ExitCode.DONE if code is None else code
    except UserError as error:
        return fail(str(error), ExitCode.BAD_INPUT)
    except SelfTestError as error:
        return fail(str(error), ExitCode.SELF_TEST)
    except ModuleNotFoundError as error:
        return fail(not_installed(error), ExitCode.BAD_INPUT)
    except KeyboardInterrupt:
        return fail("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except OSError as error:
        _drop_stdout()
        return fail(describe_os_error(error), ExitCode.BAD_INPUT)
    except MemoryError:
        return fail("out of memory; choose a smaller preset", ExitCode.BAD_INPUT)
    except RuntimeError as error:
        # torch.OutOfMemoryError, told by its name because this module must not import torch
        if type(error).__name__ != "OutOfMemoryError":
            raise
        first = str(error).splitlines()[0]
        return fail(f"{first} Choose a smaller preset or target", ExitCode.BAD_INPUT)


def not_installed(error: ModuleNotFoundError) -> str:
    """What to do about a package that is not there; raises `error` where the module is ours."""
    package = (error.name or "").partition(".")[0]
    if package in ("", *OURS):
        raise error
    return (
        f"{package} is not installed for {sys.executable}; use .venv/bin/python, which make run "
        "sets up, or install with pip install -c constraints.txt -e ."
    )


def end_without(error: ModuleNotFoundError, importer: str) -> NoReturn:
    """For a command's module whose own imports fail: the same line and exit code as in `run`. Who
    imports it otherwise gets the error."""
    if importer != "__main__":
        raise error
    sys.exit(fail(not_installed(error), ExitCode.BAD_INPUT))


def fail(message: str, code: ExitCode) -> int:
    """Print `message` as one line on stderr; returns `code`."""
    print("error: " * (code != ExitCode.INTERRUPTED) + " ".join(message.split()), file=sys.stderr)
    return code


def describe_os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    what = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}{what}; free space there, or write elsewhere"
    return f"{where}{what}"


def _drop_stdout() -> None:
    """Let the interpreter's last flush of stdout go nowhere, since it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def cache_environment(directory: Path) -> dict[str, str]:
    """Variables that keep what torch.compile and Triton compile under `directory`; those that the
    caller's environment sets already stay as they are."""
    wanted = {name: str((directory / folder).resolve()) for name, folder in CACHES.items()}
    return {name: os.environ.get(name) or path for name, path in wanted.items()}


def set_cache_environment(directory: Path) -> dict[str, str]:
    """Put `cache_environment(directory)` into this process's environment, and return it."""
    variables = cache_environment(directory)
    os.environ.update(variables)
    return variables


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1
) -> None:
    """A table on stdout, `left` columns aligned to the left and the others to the right: drawn on a
    terminal (without colour where NO_COLOR is set), plain aligned text elsewhere."""
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i < left else "right")
        for row in cells:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    print(title)
    for row in (columns, *cells):
        texts = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(texts).rstrip())
