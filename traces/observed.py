"""What the recorder notes of a step: operators, module calls, direct launches, and their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from traces.costs import storage_key
from traces.footprint import Footprint, Key, Spec
from traces.trace import Access


@dataclass(frozen=True, kw_only=True)
class Work:
    """A cost with numbered values in place of tensors."""

    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    flops: int = 0
    matmul: bool = False
    peak: str = "fp32"


@dataclass(kw_only=True)
class Operator:
    name: str
    call: int | None
    source: str | None
    work: Work


@dataclass(kw_only=True)
class ModuleCall:
    module: str
    parent: int | None
    opaque: bool
    source: str | None  # its class's forward
    work: Work | None = None  # of the whole call, where its interior cannot be seen


@dataclass(kw_only=True)
class Pending:
    """An opaque call whose cost is still to be found; values stand for its tensors."""

    call: int
    node: nn.Module
    spec: Spec
    arguments: list[int | None]
    parameters: dict[str, int]
    outputs: list[int] = field(default_factory=list)

    def located(self, found: Footprint) -> Work:
        where = {"argument": self.arguments, "parameter": self.parameters, "output": self.outputs}

        def numbered(table: Mapping[Key, int]) -> tuple[Access, ...]:
            return tuple((where[kind][which], n) for (kind, which), n in table.items())

        return Work(
            reads=numbered(found.reads),
            writes=numbered(found.writes),
            flops=found.flops,
            matmul=found.matmul,
            peak=found.peak,
        )


@dataclass(kw_only=True)
class Launch:
    """A kernel launched past PyTorch's dispatcher by code that Triton told us of."""

    name: str
    call: int | None
    source: str | None
    written: bool


@dataclass
class Values:
    """Numbers for tensor storages; a storage made anew gets a new number even at an old address."""

    known: dict[int, int] = field(default_factory=dict)
    count: int = 0
    given: list[int] = field(default_factory=list)  # values that nothing in the step made

    def number(self, tensor: Tensor) -> int:
        key = storage_key(tensor)
        if key not in self.known:
            self.given.append(self.fresh(key))
        return self.known[key]

    def fresh(self, key: int) -> int:
        self.known[key] = self.count
        self.count += 1
        return self.known[key]

    def made(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Give new numbers to outputs that are no views of the inputs."""
        for key in {storage_key(t) for t in outputs} - {storage_key(t) for t in inputs}:
            self.fresh(key)
