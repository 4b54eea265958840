"""What the recorder notes of a step: operators, module calls, direct launches, and their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from traces.costs import distinct_bytes, storage_key
from traces.footprint import Footprint, Key, Spec
from traces.trace import Access

Product = tuple[frozenset[int], int]  # the values that enter a matrix product, its operations


@dataclass(frozen=True, kw_only=True)
class Work:
    """A cost with numbered values in place of tensors."""

    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    flops: int = 0
    matmul: bool = False
    peak: str = "fp32"
    products: tuple[Product, ...] = ()  # of a module call: its matrix products, part of `flops`
    known: frozenset[int] = frozenset()  # of a module call: all values that cross its border


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
    values: dict[Key, int]
    first_launch: int  # index of the first kernel launch that happens inside

    def located(self, found: Footprint) -> Work:
        def numbered(table: Mapping[Key, int]) -> tuple[Access, ...]:
            sums: dict[int, int] = {}
            for key, count in table.items():  # several views of one storage are one value
                sums[self.values[key]] = sums.get(self.values[key], 0) + count
            return tuple(sums.items())

        return Work(
            reads=numbered(found.reads),
            writes=numbered(found.writes),
            flops=found.flops,
            matmul=found.matmul,
            peak=found.peak,
            products=tuple(
                (frozenset(self.values[key] for key in keys), flops)
                for keys, flops in found.products.items()
            ),
            known=frozenset(self.values.values()),
        )


@dataclass(kw_only=True)
class Launch:
    """A kernel launched past PyTorch's dispatcher by code that Triton told us of."""

    name: str
    call: int | None
    source: str | None
    written: bool
    storages: dict[int, int] | None = None  # bytes of each storage that it is given, by its key
    given: dict[int, int] | None = None  # the same by value, once the call around it has ended


@dataclass
class Values:
    """Numbers for tensor storages; a storage made anew gets a new number even at an old address.

    A weak reference keeps each key from being used again, and no memory of the tensor.
    """

    known: dict[int, int] = field(default_factory=dict)
    count: int = 0
    given: list[int] = field(default_factory=list)  # values that nothing in the step made
    held: dict[int, StorageWeakRef] = field(default_factory=dict)

    def number(self, tensor: Tensor) -> int:
        key = self.key(tensor)
        if key not in self.known:
            self.given.append(self.fresh(key))
        return self.known[key]

    def key(self, tensor: Tensor) -> int:
        """The storage's key, its own for as long as this lives."""
        key = storage_key(tensor)
        if key not in self.held:
            self.held[key] = StorageWeakRef(tensor.untyped_storage())
        return key

    def fresh(self, key: int) -> int:
        self.known[key] = self.count
        self.count += 1
        return self.known[key]

    def made(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Give new numbers to outputs that are no views of the inputs."""
        for key in {self.key(t) for t in outputs} - {storage_key(t) for t in inputs}:
            self.fresh(key)

    def storages(self, tensors: list[Tensor]) -> dict[int, int]:
        """Bytes of each storage that these tensors show, by its key; equal views count once."""
        views = {(self.key(t), t.data_ptr(), t.shape, t.stride(), t.dtype): t for t in tensors}
        found: dict[int, int] = {}
        for (key, *_), tensor in views.items():
            whole = tensor.untyped_storage().nbytes()
            found[key] = min(found.get(key, 0) + distinct_bytes(tensor), whole)
        return found

    def located(self, storages: dict[int, int]) -> dict[int, int]:
        """The same by value; what is met here first was made where nobody saw it."""
        return {
            self.known[key] if key in self.known else self.fresh(key): count
            for key, count in storages.items()
        }
