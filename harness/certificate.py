"""A certificate of a kept change: all that it takes to judge it again and to compare, torch-free.

`certificate.json` holds the change and the plan before it, seeds, contract, verdicts with the
domain they hold for, the paired latencies, the environment, and the SHA-256 of every file of the
kernel, of the oracle (the model's file and what it imports of `reference/`) and of the judge
(`harness/`).
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.records import SCHEMA, Environment, Latency, Record, Verdict
from optimized.domain import Domain
from optimized.plan_text import slug

ROOT = Path(__file__).resolve().parents[1]
NAME = "certificate.json"
FOLDER = "prs"  # of a run: what belongs to each kept change
STANDS_ON = "stands_on"  # of a run's first event: the plan that its own changes were tried on
EVERY = "every output"
GENERATED = "generated source"
COMPILE_NUMBER = re.compile(r"^# AOT ID: .*$", re.MULTILINE)  # of the graph, in its process

KnobValues = dict[str, dict[str, int | str | bool | float]]


@dataclass(frozen=True, kw_only=True)
class Applied(Record):
    """A change as a plan enables it; `name` may be the path of a change file."""

    name: str
    backend: str
    knobs: KnobValues
    domain: Domain | None


@dataclass(frozen=True, kw_only=True)
class Promise(Record):
    """The change's contract."""

    numerics: dict[str, str]  # by output, or one for EVERY output
    elides: dict[str, str]
    adds: dict[str, str]
    batch_invariant: bool


@dataclass(frozen=True, kw_only=True)
class Hashes(Record):
    """SHA-256 by file, relative to the project's folder, of outside files by their name."""

    kernel: dict[str, str]  # and of the GENERATED source, where a compiler made the kernel
    oracle: dict[str, str]
    judge: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Certificate(Record):
    """What was judged, how, and what came of it."""

    schema: int
    change: Applied  # without a domain: the verdict has it
    region: str
    parents: tuple[Applied, ...]  # the plan before it
    model: str
    preset: str
    seed: int  # of the weights
    region_seed: int
    model_seed: int | None
    layers_per_kind: int | None  # of the model's verdict; None: all
    timed: dict[str, str]  # targets by "decode" and "prefill"
    contract: Promise
    region_verdict: Verdict
    model_verdict: Verdict | None
    latency: Latency | None
    environment: Environment
    hashes: Hashes
    allows: tuple[str, ...] = ()  # that the policy allowed beyond the default: `Policy.allowing`

    def save(self, folder: Path) -> Path:
        """Write the certificate to `folder`; the same certificate gives the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        path.write_text(self.text())
        return path

    def text(self) -> str:
        return json.dumps(self.to_json(), indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Certificate":
        """Read one; UserError in one line if `path` is none."""
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; name a {NAME}") from error
        except ValueError as error:
            raise UserError(f"{path} is not a certificate: {error}; name a {NAME}") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise UserError(
                f"{path} is not a certificate of schema {SCHEMA} (it has {schema}); "
                "certify it with the version that wrote it"
            )
        try:
            return cls.from_json(data)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            first = str(error).splitlines()[0]
            raise UserError(f"{path} is not a certificate: {first}; name a {NAME}") from error


def folder_of(run: Path, index: int, name: str) -> Path:
    """Where a run keeps what belongs to the change it tried `index`-th: prs/NN-slug."""
    return run / FOLDER / f"{index:02d}-{slug(Path(name).name.removesuffix('.py'))}"


def place_of(file: str) -> str:
    """Where a change file from outside lies once it is taken into the repository."""
    return f"optimized/{slug(Path(file).stem).replace('-', '_')}.py"


def taken_in(made: Certificate) -> Certificate:
    """The same, where change files that are gone from where they were judged lie in optimized/
    now: under their new place."""

    def moved(name: str) -> str:
        new = ROOT / place_of(name)
        gone = name.endswith(".py") and not Path(name).is_file()
        return str(new) if gone and new.is_file() else name

    change = replace(made.change, name=moved(made.change.name))
    if change.name == made.change.name:
        kernel = made.hashes.kernel
    else:
        file = Path(made.change.name).name
        kernel = {
            place_of(file) if Path(path).name == file else path: digest
            for path, digest in made.hashes.kernel.items()
        }
    return replace(
        made,
        change=change,
        parents=tuple(replace(parent, name=moved(parent.name)) for parent in made.parents),
        hashes=replace(made.hashes, kernel=kernel),
    )


def hashes(change_file: Path, model_file: Path, generated: str | None) -> Hashes:
    """Of the files as they are now; `generated` is what a compiler made for the change."""
    kernel = _of_files(imported(change_file, "optimized"))
    if generated is not None:
        kernel[GENERATED] = _sha256(COMPILE_NUMBER.sub("", generated).encode())
    return Hashes(
        kernel=kernel,
        oracle=_of_files(imported(model_file, "reference")),
        judge=_of_files((ROOT / "harness").glob("*.py")),
    )


def imported(start: Path, package: str, root: Path = ROOT) -> set[Path]:
    """`start` and every file of the top-level `package` of the tree at `root` that it imports,
    directly or not."""
    found, todo = set[Path](), [start.resolve()]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for name in _modules(ast.parse(path.read_text())):
            file = root / f"{name.replace('.', '/')}.py"
            if name.split(".")[0] == package and file.is_file():
                todo.append(file)
    return found


def _modules(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a file imports, and those that may be modules among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _of_files(paths: Iterable[Path]) -> dict[str, str]:
    def key(path: Path) -> str:
        return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name

    return {key(path): _sha256(path.read_bytes()) for path in sorted(paths)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def changed_hashes(there: Hashes, here: Hashes) -> list[str]:
    """What differs, such as "kernel: optimized/gemv.py"."""
    found = []
    for part in fields(Hashes):
        a, b = getattr(there, part.name), getattr(here, part.name)
        for name in sorted({*a, *b}):
            if a.get(name) != b.get(name):
                what = " is new" if name not in a else " is gone" if name not in b else ""
                found.append(f"{part.name}: {name}{what}")
    return found


def differences(there: Any, here: Any, path: str = "") -> list[str]:
    """Where two JSON values differ, field by field: "outputs[0].elements: 3, here 5"."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        found = []
        for key in {**there, **here}:
            step = f"{path}.{key}" if path else str(key)
            if key not in there or key not in here:
                found.append(f"{step}: {'absent' if key not in there else 'present'}, here not so")
            else:
                found += differences(there[key], here[key], step)
        return found
    if isinstance(there, (list, tuple)) and isinstance(here, (list, tuple)):
        found = [] if len(there) == len(here) else [f"{path}: {len(there)} items, here {len(here)}"]
        for i, (a, b) in enumerate(zip(there, here, strict=False)):
            found += differences(a, b, f"{path}[{i}]")
        return found
    same = repr(there) == repr(here) if type(there) is type(here) else there == here
    return [] if same else [f"{path}: {there!r}, here {here!r}"]
