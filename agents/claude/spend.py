"""What a conversation costs, and what it may cost. Torch-free.

A budget is hard: before each request its largest possible cost is worked out (a byte of a request
is at most one token, an answer at most `max_tokens`), and what does not fit is not asked.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from harness.errors import UserError
from harness.records import Record

PRICES_OF = "October 2026"


@dataclass(frozen=True)
class Price:
    """US dollars for a million tokens; a cache write is the one that lasts five minutes."""

    input: float
    output: float
    cache_write: float
    cache_read: float


# From the provider's model pages, as of PRICES_OF. Of a model that is not here only the tokens are
# counted. Where a price was lowered since, the dearer one stands.
PRICES = {
    "claude-opus-5-5": Price(4.0, 20.0, 5.0, 0.20),
    "claude-opus-5": Price(5.0, 25.0, 6.25, 0.50),
    "claude-sonnet-5-5": Price(2.0, 10.0, 2.50, 0.20),
}
MOST_OUTPUT = 32_000  # tokens of one answer
LEAST_OUTPUT = 1_000  # with fewer left, asking is no use


@dataclass(frozen=True, kw_only=True)
class Spent(Record):
    """Tokens by how they are billed."""

    input: int = 0
    output: int = 0
    cache_write: int = 0
    cache_read: int = 0

    @classmethod
    def of(cls, usage: dict[str, Any]) -> "Spent":
        """From a Messages API `usage`."""

        def count(name: str) -> int:
            return int(usage.get(name) or 0)

        return cls(
            input=count("input_tokens"),
            output=count("output_tokens"),
            cache_write=count("cache_creation_input_tokens"),
            cache_read=count("cache_read_input_tokens"),
        )

    def __add__(self, other: "Spent") -> "Spent":
        names = "input", "output", "cache_write", "cache_read"
        return replace(self, **{n: getattr(self, n) + getattr(other, n) for n in names})

    def __sub__(self, other: "Spent") -> "Spent":
        names = "input", "output", "cache_write", "cache_read"
        return replace(self, **{n: getattr(self, n) - getattr(other, n) for n in names})

    def shares(self, count: int) -> list["Spent"]:
        """In `count` equal parts; the first ones get what is left over."""
        parts = []
        for index in range(count):
            own = {f.name: getattr(self, f.name) for f in fields(self)}
            parts.append(Spent(**{n: v // count + (index < v % count) for n, v in own.items()}))
        return parts

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    @property
    def prompt(self) -> int:
        return self.input + self.cache_write + self.cache_read

    def usd(self, price: Price) -> float:
        millionths = (
            self.input * price.input
            + self.output * price.output
            + self.cache_write * price.cache_write
            + self.cache_read * price.cache_read
        )
        return millionths / 1e6


@dataclass(kw_only=True)
class Purse:
    """What may be spent on `model`, and what was. UserError where a limit cannot be held."""

    model: str
    most_usd: float | None = None
    most_tokens: int | None = None
    spent: Spent = Spent()

    def __post_init__(self) -> None:
        if self.most_usd is None and self.most_tokens is None:
            raise UserError("say what the model may use up: --budget-usd or --budget-tokens")
        if self.most_usd is not None and self.price is None:
            raise UserError(
                f"the price of {self.model} is not known here, so --budget-usd cannot be held; "
                f"give --budget-tokens, or one of {', '.join(PRICES)}"
            )

    @property
    def price(self) -> Price | None:
        return PRICES.get(self.model)

    def output_left(self, prompt: int) -> int:
        """The longest answer, tokens, to a prompt of at most `prompt` tokens that surely fits; 0
        where none does."""
        limits = [MOST_OUTPUT]
        if self.most_tokens is not None:
            limits.append(self.most_tokens - self.spent.tokens - prompt)
        if self.most_usd is not None and self.price is not None:
            dearest = max(self.price.input, self.price.cache_write)
            left_usd = self.most_usd - self.spent.usd(self.price) - prompt * dearest / 1e6
            limits.append(int(left_usd * 1e6 / self.price.output))
        return min(limits) if min(limits) >= LEAST_OUTPUT else 0

    def describe(self, spent: Spent | None = None) -> str:
        """`12,345 tokens (…), $0.12` of `spent`, by default of all."""
        s = self.spent if spent is None else spent
        text = (
            f"{s.tokens:,} tokens ({s.input:,} new, {s.cache_write:,} written to and "
            f"{s.cache_read:,} read from the cache, {s.output:,} answered)"
        )
        if self.price is None:
            return f"{text}; no price of {self.model} is known here"
        return f"{text}, ${s.usd(self.price):.4f} at the prices of {PRICES_OF}"

    def limits(self) -> str:
        words = []
        if self.most_usd is not None:
            words.append(f"${self.most_usd:g}")
        if self.most_tokens is not None:
            words.append(f"{self.most_tokens:,} tokens")
        return " and ".join(words)
