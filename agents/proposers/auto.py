"""What this machine and this environment allow: catalogued changes first, then compiled regions."""

from typing import TYPE_CHECKING

from agents.claude.options import CLAUDE, REPLAY, Options
from agents.proposers.base import Context, Proposer, Suggestion
from agents.proposers.catalog import Catalog
from agents.proposers.inductor import Inductor
from harness.errors import UserError

if TYPE_CHECKING:
    from agents.claude.desk import Desk


class Auto:
    name = "auto"

    def __init__(self) -> None:
        self.parts: tuple[Proposer, ...] = (Catalog(), Inductor())

    def propose(self, context: Context) -> list[Suggestion]:
        """The suggestions of the first proposer that has any."""
        for part in self.parts:
            if found := part.propose(context):
                return found
        return []


PROPOSERS: dict[str, type[Proposer]] = {p.name: p for p in (Auto, Catalog, Inductor)}


def require_known(name: str) -> None:
    """UserError for a proposer that does not exist."""
    if name not in (*PROPOSERS, CLAUDE) and not name.startswith(REPLAY):
        known = ", ".join((*PROPOSERS, CLAUDE, f"{REPLAY}FILE"))
        raise UserError(f"unknown proposer {name!r}; choose one of {known}")


def make_proposer(name: str, desk: "Desk", options: Options | None) -> Proposer:
    """By its name; a model that writes changes works at `desk`, within `options`."""
    if name in PROPOSERS:
        return PROPOSERS[name]()
    from agents.proposers.claude import Claude
    from agents.proposers.replay import Replay, file_of

    if name.startswith(REPLAY):
        return Replay(desk, file_of(name))
    return Claude(desk, options)
