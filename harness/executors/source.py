"""Which source code a process runs: workers elsewhere must run the same. Torch-free."""

import hashlib
import platform
from dataclasses import dataclass

from harness.confine import PACKAGES, ROOT
from harness.errors import UserError
from harness.git import Git


@dataclass(frozen=True)
class Source:
    """`digest` is of the packages that judge, changed files included; `commit` is for people."""

    commit: str | None
    digest: str

    @classmethod
    def here(cls) -> "Source":
        digest = hashlib.sha256()
        for package in PACKAGES:
            for path in sorted((ROOT / package).rglob("*.py")):
                digest.update(f"{path.relative_to(ROOT)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return cls(_commit(), digest.hexdigest())

    def require(self) -> None:
        """UserError unless this process runs that code, too."""
        here = Source.here()
        if here.digest != self.digest:
            raise UserError(
                f"the worker on {platform.node()} runs {here.describe()}, this run "
                f"{self.describe()}: their sources differ; check out the same commit there, with "
                "the same changed files"
            )

    def describe(self) -> str:
        return f"commit {self.commit[:12]}" if self.commit else "no git checkout"


def _commit() -> str | None:
    if not (ROOT / ".git").exists():
        return None
    try:
        return Git(ROOT).commit("HEAD")
    except UserError:  # no git, which runs nothing here
        return None
