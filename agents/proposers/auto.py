"""What this machine and this environment allow: catalogued changes first, then compiled regions,
then what a model writes, if it may use something up."""

from typing import TYPE_CHECKING

from agents.claude.options import CLAUDE, REPLAY, Options
from agents.mcp_link import MCP
from agents.proposers.base import Agent, Context, Proposer, Suggestion
from agents.proposers.catalog import Catalog
from agents.proposers.inductor import Inductor
from harness.errors import UserError

if TYPE_CHECKING:
    from agents.claude.desk import Desk


class Auto:
    name = "auto"

    def __init__(self, *more: Proposer) -> None:
        self.parts: tuple[Proposer, ...] = (Catalog(), Inductor(), *more)

    def propose(self, context: Context) -> list[Suggestion]:
        """The suggestions of the first proposer that has any."""
        for part in self.parts:
            if found := part.propose(context):
                return found
        return []


PROPOSERS: dict[str, type[Proposer]] = {p.name: p for p in (Auto, Catalog, Inductor)}


def require_known(name: str) -> None:
    """UserError for a proposer that does not exist."""
    if name not in (*PROPOSERS, CLAUDE, MCP) and not name.startswith(REPLAY):
        known = ", ".join((*PROPOSERS, CLAUDE, f"{REPLAY}FILE"))
        raise UserError(f"unknown proposer {name!r}; choose one of {known}")


def make_proposer(name: str, desk: "Desk", options: Options | None) -> Proposer:
    """By its name; a model that writes changes works at `desk`, within `options`."""
    if name in PROPOSERS and options is None:
        return PROPOSERS[name]()
    from agents.proposers.claude import Claude
    from agents.proposers.mcp import Mcp
    from agents.proposers.replay import Replay, file_of

    if name == MCP:
        return Mcp(desk)
    if name.startswith(REPLAY):
        return Replay(desk, file_of(name))
    claude = Claude(desk, options)
    return claude if name == CLAUDE else Auto(claude)


def agent_in(proposer: Proposer) -> Agent | None:
    """The part of a proposer that is an agent, if one is."""
    parts = proposer.parts if isinstance(proposer, Auto) else (proposer,)
    return next((part for part in parts if isinstance(part, Agent)), None)
