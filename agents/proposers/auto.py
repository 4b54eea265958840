"""What this machine and this environment allow: catalogued changes first, then compiled regions."""

from agents.proposers.base import Context, Proposer, Suggestion
from agents.proposers.catalog import Catalog
from agents.proposers.inductor import Inductor


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
