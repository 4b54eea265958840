"""Which departures from the reference's roundings a run accepts, as data, torch-free."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimized.change import Contract

IN = " in "  # "NAME in MODULE": a rounding at that use alone
ELIDED = "elided"  # among what a policy allows: any elided rounding


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a contract may declare, and how hard the judge looks.

    `permutations` noise replays are drawn for each output at least. Elided roundings make a
    kernel more exact than the reference and still another model: they are refused by default.
    """

    allow_elided: bool = False
    allow_added: frozenset[str] = frozenset({"attention_probabilities_bf16"})
    permutations: int = 64

    @classmethod
    def allowing(cls, more: Iterable[str]) -> "Policy":
        """The default, and `more`: names of added roundings, and ELIDED for all elided ones."""
        names = frozenset(more)
        return cls(allow_elided=ELIDED in names, allow_added=cls.allow_added | names - {ELIDED})

    @property
    def allows(self) -> tuple[str, ...]:
        """What it allows beyond the default, as `allowing` takes it."""
        elided = (ELIDED,) if self.allow_elided else ()
        return *elided, *sorted(self.allow_added - Policy.allow_added)

    def refusal(self, contract: "Contract") -> str | None:
        """Why the contract is not acceptable, or None."""
        if contract.elides and not self.allow_elided:
            names = ", ".join(f"`{name}`" for name in contract.elides)
            return (
                f"its contract elides {names}; this run's policy allows no elided rounding "
                "(--allow-elided does)"
            )
        adds = {name: {name, name.partition(IN)[0]} for name in contract.adds}
        if refused := sorted(n for n, either in adds.items() if not either & self.allow_added):
            names = ", ".join(f"`{name}`" for name in refused)
            allowed = ", ".join(f"`{name}`" for name in sorted(self.allow_added)) or "none"
            return (
                f"its contract adds {names}; this run's policy allows: {allowed} "
                "(--allow-added NAME for more)"
            )
        return None


DEFAULT = Policy()


def add_options(command: argparse.ArgumentParser) -> None:
    """--allow-elided and --allow-added, of commands that judge."""
    command.add_argument(
        "--allow-elided", action="store_true", help="accept contracts that leave out roundings"
    )
    command.add_argument(
        "--allow-added",
        action="append",
        default=[],
        metavar="NAME",
        help="accept contracts that add this rounding, such as matmul_operands_tf32",
    )


def allowed(a: argparse.Namespace) -> list[str]:
    """What the options allow, as `Policy.allowing` takes it."""
    return [*([ELIDED] if a.allow_elided else []), *a.allow_added]
