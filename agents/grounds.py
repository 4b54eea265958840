"""What the patch of a kept change stands on: the commit, and the files that it has otherwise."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.certificate import GENERATED, ROOT, Certificate, place_of
from harness.errors import UserError
from harness.git import Git, blob_id
from harness.records import Attempt
from optimized import plan_text
from optimized.catalog import changes, load_change
from reports.pr_bundle import commit_of
from reports.pr_record import Ground

INSIDE = "optimized/"


@dataclass(frozen=True, kw_only=True)
class Base:
    """A commit's files by path; none where there is no commit."""

    commit: str | None
    git: Git
    blobs: Mapping[str, str]

    @classmethod
    def of(cls, commit: str | None) -> "Base":
        git = Git(ROOT)
        if commit is not None and git.commit(commit) is None:
            raise UserError(f"commit {commit} of the run is not in this repository")
        return cls(commit=commit, git=git, blobs={} if commit is None else git.blobs(commit))

    def has(self, path: str, data: bytes) -> bool:
        return self.blobs.get(path) == blob_id(data)

    def text(self, path: str) -> str | None:
        data = self.git.file(self.commit, path) if self.commit and path in self.blobs else None
        return None if data is None else data.decode()


def ground_of(attempt: Attempt, made: Certificate, started: Sequence[str]) -> Ground:
    """Of a change certified just now by this very tree; `started` names the changes that the run
    took from the repository's plan."""
    commit = commit_of(made.environment)
    name = attempt.name
    try:
        base = Base.of(commit)
        if name.endswith(".py"):
            name = load_change(name).name
            if name in changes():
                raise UserError(f"optimized/ has a change called {name} already; rename this one")
        files = dict(_brought(made, base))
        plan = plan_text.place(made.model, made.environment.device_name)
        before = {p: t for p in (plan, *files) if (t := base.text(p)) is not None}
        if (names := plan_text.names(before.get(plan, ""))) != list(started):
            raise UserError(
                f"{plan} enables {', '.join(names) or 'nothing'}, which is not what this run stood "
                f"on; start a run with --plan {plan}"
            )
    except (UserError, UnicodeDecodeError) as error:
        return Ground(
            index=attempt.index, commit=commit, name=Path(name).stem, before={}, files={},
            others=(), obstacle=" ".join(str(error).split()),
        )  # fmt: skip
    return Ground(
        index=attempt.index,
        commit=commit,
        name=name,
        before=before,
        files=files,
        others=tuple(_others(made, base)) if base.commit else (),
    )


def modules_of(made: Certificate) -> list[str]:
    """The files of optimized/ that the change imports, as modules."""
    return [Path(path).stem for path in made.hashes.kernel if path.startswith(INSIDE)]


def _brought(made: Certificate, base: Base) -> Iterator[tuple[str, str]]:
    """The kernel's files that the commit lacks or has otherwise, by their place in optimized/."""
    for path in made.hashes.kernel:
        if path == GENERATED:
            continue
        if path.startswith(INSIDE):
            data = (ROOT / path).read_bytes()
            if base.commit is None:
                continue  # this tree is all there is to compare with
        else:
            data, path = Path(made.change.name).read_bytes(), place_of(path)
            if (ROOT / path).exists() and (ROOT / path).read_bytes() != data:
                raise UserError(f"there is another {path}; rename the change file")
        if base.has(path, data):
            continue
        text = data.decode()
        if "\r" in text:
            raise UserError(f"{path} has carriage returns, which a patch by mail loses")
        yield path, text


def _others(made: Certificate, base: Base) -> Iterator[str]:
    """Files of oracle and judge that are not as in the commit."""
    for path in sorted({*made.hashes.oracle, *made.hashes.judge}):
        file = ROOT / path
        if not file.is_file() or not base.has(path, file.read_bytes()):
            yield path
