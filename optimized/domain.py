"""The domain of a change: the calls on which it was tested, as data, without torch.

A call is described by `Facts`: for each argument, by its path, what it is. A `Domain` is built from
the facts of the calls that were tested, and says why another call is outside it.

Within one node's calls a size that varies is a range. Where nodes differ in a size that never
varies in either, each has its own `CallDomain`, so that no size between the two counts as tested.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

ALIGNMENT = 16  # bytes: what the widest load needs, and what Triton compiles another kernel for
CONTIGUOUS = "contiguous"
KINDS = TENSOR, NONE, INTEGER, VALUE = "tensor", "none", "integer", "value"

Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One argument of one call. `kind` says which of the other fields count."""

    kind: str  # TENSOR, NONE, INTEGER (an int) or VALUE (anything else, by its repr)
    dtype: str = ""
    device: str = ""  # "cpu" or "cuda"
    sizes: tuple[int, ...] = ()
    layout: str = ""  # as `layout` tells it
    alignment: int = (
        ALIGNMENT  # the largest power of two, up to ALIGNMENT, that divides its address
    )
    integer: int = 0
    value: str = ""


Facts = Mapping[str, Fact]  # by the argument's path, such as "q" or "weights[1]"


@dataclass(frozen=True, kw_only=True)
class ArgumentDomain:
    """What one argument was tested as."""

    kind: str
    dtype: str = ""
    device: str = ""
    sizes: tuple[Range, ...] = ()  # smallest and largest, of each dimension
    layouts: tuple[str, ...] = ()
    alignment: int = 1
    integers: Range = (0, 0)  # smallest and largest
    value: str = ""

    @classmethod
    def of(cls, fact: Fact) -> Self:
        return cls(
            kind=fact.kind,
            dtype=fact.dtype,
            device=fact.device,
            sizes=tuple((n, n) for n in fact.sizes),
            layouts=(fact.layout,) if fact.kind == TENSOR else (),
            alignment=fact.alignment,
            integers=(fact.integer, fact.integer),
            value=fact.value,
        )

    @property
    def structure(self) -> tuple[Any, ...]:
        """What must be equal; all else is a range or a set."""
        return self.kind, self.dtype, self.device, len(self.sizes), self.value

    def joined(self, other: Self) -> Self:
        """The smallest domain that holds both, which have one structure."""
        return type(self)(
            kind=self.kind,
            dtype=self.dtype,
            device=self.device,
            sizes=tuple(_hull(a, b) for a, b in zip(self.sizes, other.sizes, strict=True)),
            layouts=tuple(sorted({*self.layouts, *other.layouts})),
            alignment=min(self.alignment, other.alignment),
            integers=_hull(self.integers, other.integers),
            value=self.value,
        )

    def outside(self, fact: Fact) -> str | None:
        """Why the argument is outside, as the end of a sentence that its name begins."""
        if fact.kind != self.kind:
            return f"is {_what(fact)}, tested with {self.text()}"
        if fact.kind == INTEGER and not _within(fact.integer, self.integers):
            return f"is {fact.integer}, tested {_range(self.integers)}"
        if fact.kind == VALUE and fact.value != self.value:
            return f"is {fact.value}, tested {self.value}"
        if fact.kind == TENSOR:
            return self._outside_tensor(fact)
        return None

    def _outside_tensor(self, fact: Fact) -> str | None:
        if (fact.dtype, fact.device) != (self.dtype, self.device):
            return f"is {fact.dtype} on {fact.device}, tested {self.dtype} on {self.device}"
        if len(fact.sizes) != len(self.sizes):
            return f"has {len(fact.sizes)} dimensions, tested {len(self.sizes)}"
        for dim, (size, tested) in enumerate(zip(fact.sizes, self.sizes, strict=True)):
            if not _within(size, tested):
                return f"has {size} in dimension {dim}, tested {_range(tested)}"
        if fact.layout not in self.layouts:
            return f"is {fact.layout}, tested {' and '.join(self.layouts)}"
        if fact.alignment < self.alignment:
            return f"lies at a multiple of {fact.alignment} bytes, tested {self.alignment}"
        return None

    def text(self) -> str:
        if self.kind == TENSOR:
            sizes = ", ".join(_range(r) for r in self.sizes)
            layouts = " or ".join(self.layouts)
            return f"{self.dtype} [{sizes}] on {self.device}, {layouts}, {self.alignment}-byte"
        if self.kind == INTEGER:
            return _range(self.integers)
        return "None" if self.kind == NONE else self.value


@dataclass(frozen=True)
class CallDomain:
    """Calls that are alike but for sizes: the arguments by path."""

    arguments: dict[str, ArgumentDomain]

    @property
    def structure(self) -> tuple[Any, ...]:
        return tuple((path, a.structure) for path, a in self.arguments.items())

    def joined(self, other: Self) -> Self:
        pairs = ((path, a, other.arguments[path]) for path, a in self.arguments.items())
        return type(self)({path: a.joined(b) for path, a, b in pairs})

    def fits(self, other: Self) -> bool:
        """Whether no size that is fixed in both differs."""
        return all(
            a == b or a[0] != a[1] or b[0] != b[1]
            for mine, theirs in zip(self.arguments.values(), other.arguments.values(), strict=True)
            for a, b in zip(mine.sizes, theirs.sizes, strict=True)
        )

    def outside(self, facts: Facts) -> list[str]:
        """Every reason why the call is outside."""
        missing = [f"{p} is absent, tested with it" for p in self.arguments if p not in facts]
        missing += [f"{p} is given, tested without it" for p in facts if p not in self.arguments]
        if missing:
            return missing
        reasons = ((path, a.outside(facts[path])) for path, a in self.arguments.items())
        return [f"{path} {reason}" for path, reason in reasons if reason is not None]


@dataclass(frozen=True)
class Domain:
    """All that was tested; a call is inside if it is inside one of `calls`."""

    calls: tuple[CallDomain, ...]

    def outside(self, facts: Facts) -> str | None:
        """Why the call is outside, told against the tested calls that it is nearest to, or None."""
        if not self.calls:
            return "no call was tested"
        nearest = min((call.outside(facts) for call in self.calls), key=len)
        return nearest[0] if nearest else None

    def lines(self) -> Iterator[tuple[str, str]]:
        """(argument, what it was tested as), the kinds of calls one after the other."""
        for call in self.calls:
            for path, argument in call.arguments.items():
                yield path, argument.text()

    def to_json(self) -> list[dict[str, dict[str, Any]]]:
        """Fields at their defaults are left out."""
        return [
            {path: _set_fields(argument) for path, argument in call.arguments.items()}
            for call in self.calls
        ]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Rebuild the domain; ValueError where `data` is not one."""
        try:
            return cls(
                tuple(
                    CallDomain({path: _argument(given) for path, given in call.items()})
                    for call in data
                )
            )
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a domain: {error}") from error


def domain_of(calls: Iterable[tuple[str, Facts]]) -> Domain:
    """The domain of the tested calls, given as (node, facts)."""
    by_node: dict[tuple[Any, ...], CallDomain] = {}
    for node, facts in calls:
        call = CallDomain({path: ArgumentDomain.of(fact) for path, fact in facts.items()})
        key = node, call.structure
        by_node[key] = by_node[key].joined(call) if key in by_node else call
    found: list[CallDomain] = []
    for call in by_node.values():
        for i, other in enumerate(found):
            if other.structure == call.structure and other.fits(call):
                found[i] = other.joined(call)
                break
        else:
            found.append(call)
    return Domain(tuple(found))


def layout(sizes: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """How a tensor lies in memory, whatever its sizes: CONTIGUOUS, or what is not so.

    "gaps around 2": what dimension 2 and those inside it hold is dense, and further apart than it
    is long. "strided": so are single elements. "repeated 0": dimension 0 has stride 0. "order 2 1":
    dimension 2 is outside of dimension 1. Dimensions of size 1 do not count.
    """
    if 0 in sizes:
        return CONTIGUOUS
    real = [d for d, size in enumerate(sizes) if size > 1]
    repeated = [d for d in real if strides[d] == 0]
    order = sorted((d for d in real if strides[d] != 0), key=lambda d: (-strides[d], d))
    gaps: list[int] = []
    strided, inner, dense = False, None, 1
    for d in reversed(order):
        if strides[d] != dense:
            strided = strided or inner is None
            gaps += [] if inner is None else [inner]
        inner, dense = d, strides[d] * sizes[d]
    words = ["strided"] if strided else []
    for word, dims in (
        ("order", order if order != sorted(order) else []),
        ("gaps around", sorted(gaps)),
        ("repeated", repeated),
    ):
        if dims:
            words.append(f"{word} {' '.join(map(str, dims))}")
    return ", ".join(words) or CONTIGUOUS


def alignment(address: int) -> int:
    """The largest power of two, up to ALIGNMENT, that divides `address`."""
    return min(ALIGNMENT, address & -address) if address else ALIGNMENT


def _hull(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])


def _within(value: int, tested: Range) -> bool:
    return tested[0] <= value <= tested[1]


def _range(r: Range) -> str:
    return str(r[0]) if r[0] == r[1] else f"{r[0]} to {r[1]}"


def _what(fact: Fact) -> str:
    if fact.kind == TENSOR:
        return f"a {fact.dtype} tensor"
    return {NONE: "None", INTEGER: str(fact.integer)}.get(fact.kind, fact.value)


def _set_fields(argument: ArgumentDomain) -> dict[str, Any]:
    defaults = {f.name: f.default for f in fields(ArgumentDomain)}
    given = asdict(argument)
    return {name: value for name, value in given.items() if value != defaults[name]}


def _argument(given: dict[str, Any]) -> ArgumentDomain:
    known = dict(given)
    if known.get("kind") not in KINDS:
        raise ValueError(f"an argument's kind is {known.get('kind')!r}, not one of {KINDS}")
    if "sizes" in known:
        known["sizes"] = tuple((int(low), int(high)) for low, high in known["sizes"])
    if "layouts" in known:
        known["layouts"] = tuple(str(name) for name in known["layouts"])
    if "integers" in known:
        low, high = known["integers"]
        known["integers"] = (int(low), int(high))
    return ArgumentDomain(**known)
