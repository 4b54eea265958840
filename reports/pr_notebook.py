"""compare.ipynb: a kept change beside the reference, executed, from what the run recorded of it.

Nothing is judged or timed again, and torch is not needed: verdicts, times and the names of the
sources come from `certificate.json`, which lies in the same folder.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.certificate import FOLDER, GENERATED, NAME, ROOT, Certificate, folder_of, place_of
from harness.errors import UserError
from harness.ledger import Ledger
from harness.records import Attempt
from reports import notebook, text
from reports.run import Run

NOTEBOOK = "compare_change"
COMPARISON = "compare.ipynb"


def write(folders: Iterable[Path]) -> list[Path]:
    """Execute the comparison of each bundle into its folder; UserError without the libraries.

    A bundle without a certificate gets none, and a line on stderr says so.
    """
    notebook.require_installed()
    written = []
    for folder in folders:
        if (folder / NAME).is_file():
            written.append(notebook.execute(NOTEBOOK, {}, folder / COMPARISON, where=folder))
        else:
            print(f"{folder}: no {COMPARISON}: its run recorded no {NAME}", file=sys.stderr)
    return written


def after_run(run_dir: Path) -> str | None:
    """Execute what the bundles of a run lack by now; a line on what came of it, if any did."""
    folders = [path.parent for path in sorted((run_dir / FOLDER).glob(f"*/{NAME}"))]
    lacking = [folder for folder in folders if not _is_current(folder)]
    if not lacking:
        return None
    requests = text.count(len(lacking), "pull request")
    try:
        write(lacking)
    except UserError as error:
        return (
            f"{COMPARISON} is left out of {requests}: {error}; then: "
            f"python -m reports pr {run_dir} --notebooks"
        )
    return f"{COMPARISON} is in {requests}"


def _is_current(folder: Path) -> bool:
    made = folder / COMPARISON
    return made.is_file() and made.stat().st_mtime >= (folder / NAME).stat().st_mtime


@dataclass(frozen=True, kw_only=True)
class Source:
    """A text, where it stands, and whether it is the one that was judged."""

    where: str
    text: str
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.where} ({self.note})" if self.note else self.where


def sources(made: Certificate, folder: Path) -> dict[str, str]:
    """The reference's class and what replaced it, by their titles. What a compiler generated lies
    in the run's directory, two above the bundle's `folder`."""
    found = [reference(made), changed(made, folder)]
    return {source.title: source.text for source in found}


def reference(made: Certificate) -> Source:
    """The class of the region in the oracle's files."""
    for file, digest in made.hashes.oracle.items():
        path = ROOT / file
        if not path.is_file():
            continue
        code = path.read_text()
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ClassDef) and _is_of(made.region, node):
                return Source(
                    where=file,
                    text=ast.get_source_segment(code, node) or "",
                    note=_changed_since(path, digest),
                )
    return Source(where=made.region, text="its class is in no file of this repository")


def changed(made: Certificate, folder: Path) -> Source:
    """What a compiler generated for the change, or else its file."""
    if GENERATED in made.hashes.kernel:
        attempt = attempt_of(made, folder)
        path = folder.resolve().parent.parent / ((attempt and attempt.generated_source) or "")
        if path.is_file():
            return Source(where=f"generated: {path.name}", text=path.read_text())
    name = made.change.name
    for file in (f"optimized/{name}.py", place_of(name)):
        if (ROOT / file).is_file():
            digest = made.hashes.kernel.get(file)
            note = _changed_since(ROOT / file, digest) if digest else ""
            return Source(where=file, text=(ROOT / file).read_text(), note=note)
    return Source(where=name, text="its file is not here: git am change.patch brings it")


def attempt_of(made: Certificate, folder: Path) -> Attempt | None:
    """The run's own record of the change; None for a bundle that was taken out of its run."""
    run_dir = folder.resolve().parent.parent
    if not (run_dir / Ledger.NAME).is_file():
        return None
    here = folder.resolve()
    kept = (a for a in Run.load(run_dir).changes() if folder_of(run_dir, a.index, a.name) == here)
    return next(kept, None)


def samples(attempt: Attempt | None, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Every time of the change's pairs in us, by kind of step and by side; {} without any."""
    if attempt is None:
        return {}
    run = Run.load(folder.resolve().parent.parent)
    found: dict[str, dict[str, list[float]]] = {}
    for kind, pairs in run.samples.get(attempt.index, {}).items():
        found[kind] = {
            "without it": [us for a, _, _, b in pairs for us in (a, b)],
            "with it": [us for _, a, b, _ in pairs for us in (a, b)],
        }
    return found


def times(made: Certificate, attempt: Attempt | None) -> list[dict[str, Any]]:
    """A row for decode and for prefill: medians, the gain and its 95% interval, the smallest effect
    that could be told from none; us. What was predicted is of the target's step alone."""
    if made.latency is None:
        return []
    rows = []
    for kind in ("decode", "prefill"):
        pair = getattr(made.latency, kind)
        low, high = pair.gain_interval_us
        rows.append({
            "step": made.timed.get(kind, kind), "pairs": pair.pairs, "without_us": pair.base_us,
            "with_us": pair.candidate_us, "gain_us": pair.gain_us, "gain_low_us": low,
            "gain_high_us": high, "mde_us": pair.mde_us,
        })  # fmt: skip
    if attempt is not None:
        rows[0]["predicted_us"] = attempt.predicted_us
    return rows


def _is_of(region: str, node: ast.ClassDef) -> bool:
    """Whether the class says that it is the region, or has its name."""
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            if [getattr(t, "id", None) for t in line.targets] == ["region"]:
                return line.value.value == region
    return node.name.lower() == region.replace("_", "")


def _changed_since(path: Path, digest: str) -> str:
    same = hashlib.sha256(path.read_bytes()).hexdigest() == digest
    return "" if same else "changed since it was judged"
