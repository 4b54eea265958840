"""What a command found, printed and, with `--out DIR`, kept with what it was found on.

DIR gets NAME.json, with the command, the environment and one record a line, and NAME.txt, the
tables as they are printed.
"""

import argparse
import contextlib
import io
import json
import shlex
from collections.abc import Callable
from typing import Any

from harness.environment import environment
from harness.workload import pick_device


def give(
    a: argparse.Namespace, found: dict[str, Any], show: Callable[[], None], seconds: float
) -> None:
    """Print `found` as JSON or, by `show`, as tables, as the arguments ask, and keep both."""
    if a.json:
        print(json.dumps(found, indent=1))
    else:
        show()
    if a.out is None:
        return
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        show()
    head = {
        "command": f"python -m harness {shlex.join(a.words)}",
        "environment": environment(pick_device(a.device)).to_json(),
        "jobs": a.jobs,
        "seconds": round(seconds, 1),
    }
    folder = a.out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{a.command}.json").write_text(lines(head | found))
    (folder / f"{a.command}.txt").write_text(table.getvalue())


def lines(found: dict[str, Any]) -> str:
    """JSON with one line for each entry, and one for each record of a list."""
    texts = []
    for name, value in found.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
        texts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(texts) + "\n}\n"
