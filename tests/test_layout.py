"""The tree keeps its own rules: what stands where, who imports whom, what no file says."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.layout import PACKAGES, ROOT, imported, own_files, read, sources, words

LONGEST = 350  # lines of a Python file outside tests/; style asks for about 250


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def found(pattern: str, *, besides: tuple[str, ...] = ()) -> list[str]:
    """`file:line: text` wherever one of our files matches the pattern, but in `besides`."""
    hits = []
    for path in own_files():
        if relative(path) in besides or (text := read(path)) is None:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if re.search(pattern, line):
                hits.append(f"{relative(path)}:{number}: {line.strip()[:80]}")
    return hits


@pytest.mark.parametrize(
    "name",
    [
        *PACKAGES,
        "tests",
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "LICENSE",
        ".ci/run",
        ".github/workflows/ci.yml",
    ],
)
def test_the_top_level_is_what_the_design_says(name: str) -> None:
    assert (ROOT / name).exists()


def test_packages_load_nothing_when_imported() -> None:
    starts = {relative(p): p.read_text() for p in sources(*PACKAGES) if p.name == "__init__.py"}
    loads = {
        path
        for path, text in starts.items()
        if any(not isinstance(node, ast.FunctionDef) for node in ast.parse(text).body[1:])
    }
    assert loads == set()


def test_files_stay_small() -> None:
    lengths = {relative(p): len(p.read_text().splitlines()) for p in sources(*PACKAGES)}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


def test_no_tolerance_is_typed_in() -> None:
    assert found(r"\b[ar]tol\s*=\s*[-+.\d]") == []


def test_no_file_names_a_host() -> None:
    """Where packages come from is the user's setting; links rot and leak."""
    loopback = r"(?:127\.0\.0\.1|localhost)"
    namespace = r"www\.w3\.org/"  # SVG's and XHTML's names are spelt like addresses
    assert found(rf"https?://(?!{loopback}|{namespace})\w", besides=("LICENSE",)) == []
    host = r"(?<![\w@/.])[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:org|com|net|io)(?![\w(\[=.])"
    hits = found(host, besides=("LICENSE",))
    assert [hit for hit in hits if not re.search(namespace, hit)] == []


def test_no_file_names_a_place_of_one_machine() -> None:
    assert found(r"(?<![\w.$}])/(?:home|root|Users|work|opt|mnt|srv)/[\w.]") == []


def test_reference_imports_torch_only() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "reference"}
    beyond = {
        (relative(path), name)
        for path in sources("reference")
        for name in imported(path)
        if name not in allowed
    }
    assert beyond <= {("reference/checkpoint.py", "safetensors")}


def region_names() -> set[str]:
    """What the reference's modules call their regions."""
    names = set()
    for path in sources("reference"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "region":
                    names.add(ast.literal_eval(line.value))
    return names


def model_names() -> set[str]:
    return {
        path.stem.replace("_", "-")
        for path in sources("reference")
        if "\nconfigs" in path.read_text()
    }


def test_region_and_model_names_are_found_in_the_reference() -> None:
    assert {"residual_boundary", "qk_norm_rope", "output_gate", "swiglu"} <= region_names()
    assert "beam" in model_names()


# What the judge calls any submodule that returns integers: a class of its own, no region's name.
ALLOWED = {("harness/routing.py", "Router"), ("harness/drift.py", "Router")}


@pytest.mark.parametrize("package", ["agents", "traces", "harness"])
def test_no_region_or_model_is_named(package: str) -> None:
    """What to fuse follows from the trace of any model, never from a name known beforehand."""
    names = {n.replace("-", "_") for n in region_names() | model_names()}
    pattern = re.compile(rf"(?<![a-z0-9])(?:{'|'.join(sorted(names))})(?![a-z0-9])", re.IGNORECASE)
    hits = [
        f"{relative(path)}:{line}: {word[:60]}"
        for path in sources(package)
        for line, word in words(path)
        if pattern.search(word.replace("-", "_")) and (relative(path), word) not in ALLOWED
    ]
    assert hits == []


def torch_free_modules() -> list[str]:
    """The modules that pyproject.toml's import contracts declare free of torch."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    declared = {
        name
        for contract in settings["contracts"]
        if contract["type"] == "forbidden"
        for name in contract["source_modules"]
    }
    reports = {
        relative(p)[: -len(".py")].replace("/", ".")
        for p in sources("reports")
        if p.name not in ("__init__.py", "__main__.py")
    }
    return sorted(declared | reports)


@pytest.mark.parametrize("module", torch_free_modules())
def test_runs_where_torch_is_not_installed(module: str) -> None:
    code = (
        "import sys, importlib\n"
        "sys.modules['torch'] = sys.modules['triton'] = None\n"
        f"print(importlib.import_module('{module}').__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == module, done.stderr
