"""Whether a change file can be one, told from its text alone: nothing of it is run. Torch-free."""

import ast
from pathlib import Path

from harness.errors import UserError

NAME = "CHANGE"
HINT = 'optimized/README.md has an example, "A change file"'


def require_change(path: Path) -> None:
    """UserError unless `path` is a text file that parses as Python and names a CHANGE."""
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"no change file at {path}; give the path of a .py file")
    try:
        text = path.read_bytes().decode()
        tree = ast.parse(text)
    except SyntaxError as error:
        where = "" if error.lineno is None else f":{error.lineno}"
        raise UserError(f"{path}{where} is not Python: {error.msg}; {HINT}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # bytes, a null byte, nesting
        raise UserError(f"{path} is no text of Python ({error}); {HINT}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a file that can be") from error
    if not any(_names(node) for node in ast.walk(tree)):
        what = "is empty" if not tree.body else f"defines no {NAME}"
        raise UserError(f"{path} {what}; a change file defines one {NAME}: {HINT}")


def _names(node: ast.AST) -> bool:
    """Whether the node may define CHANGE, by assignment, import, or in a way of its own."""
    match node:
        case ast.alias(name=name, asname=other):
            return name == "*" or NAME in (name, other)
        case ast.Name(id=name) | ast.Constant(value=name):
            return name == NAME
    return False
