"""Which departures from the reference's roundings a run accepts, as data."""

from dataclasses import dataclass

from optimized.change import Contract


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a contract may declare, and how hard the judge looks.

    `permutations` noise replays are drawn for each output at least. Elided roundings make a
    kernel more exact than the reference and still another model: they are refused by default.
    """

    allow_elided: bool = False
    allow_added: frozenset[str] = frozenset({"attention_probabilities_bf16"})
    permutations: int = 64

    def refusal(self, contract: Contract) -> str | None:
        """Why the contract is not acceptable, or None."""
        if contract.elides and not self.allow_elided:
            names = ", ".join(f"`{name}`" for name in contract.elides)
            return f"its contract elides {names}; this run's policy allows no elided rounding"
        if refused := sorted(set(contract.adds) - self.allow_added):
            names = ", ".join(f"`{name}`" for name in refused)
            allowed = ", ".join(f"`{name}`" for name in sorted(self.allow_added)) or "none"
            return f"its contract adds {names}; this run's policy allows: {allowed}"
        return None


DEFAULT = Policy()
