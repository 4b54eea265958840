"""Reading our own tree: its files, and the words its code uses."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "reference", "optimized", "harness", "traces", "agents", "reports"


def own_files() -> list[Path]:
    """Every file of the project: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def sources(*packages: str) -> list[Path]:
    """The Python files of these packages."""
    return [
        path
        for path in own_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in packages
    ]


def read(path: Path) -> str | None:
    """The file's text, or None where it is not text."""
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None


def imported(path: Path) -> Iterator[str]:
    """The top-level package of every absolute import in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def words(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each string and each name in the file's code.

    Docstrings are not code, and what an option defaults to is data.
    """
    tree = ast.parse(path.read_text())
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            skipped |= {id(word.value) for word in node.keywords if word.arg == "default"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in skipped:
                yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.lineno, node.arg
        elif isinstance(node, ast.alias):
            yield from ((node.lineno, part) for part in node.name.split("."))
