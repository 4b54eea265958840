"""What a change is: a region, a numerical contract, and one or more implementations.

A change file in this folder defines one `CHANGE`. Nothing is registered by hand:
`optimized.catalog` finds it by that name.
"""

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import nn

from optimized.domain import Domain
from optimized.guards import limited

log = logging.getLogger(__name__)

KnobValue = int | str | bool | float
Numerics = Literal["exact", "transcendental", "reduction"]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a change promises about rounding.

    `numerics` is the class of its outputs (one word for all, or one per output name). Interior
    rounding points are kept unless `elides` names them; `adds` names roundings that the reference
    lacks. Both map the point's name to the reason. `mutates` lists the positional arguments that
    the region writes in place.
    """

    numerics: Numerics | Mapping[str, Numerics]
    elides: Mapping[str, str] = field(default_factory=dict)
    adds: Mapping[str, str] = field(default_factory=dict)
    batch_invariant: bool = False


class Knobs(Protocol):
    """Launch knobs of one implementation: a frozen dataclass with these three."""

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "Knobs": ...
    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]: ...
    def is_valid(self, shape: Mapping[str, int]) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute the region.

    `build(node, knobs)` returns the function that replaces `node.forward`, with its signature.
    `guard(node, *args)` says why the kernel cannot take a call, or None; what it was tested on is
    told by a `Domain`, on top.
    `prepare(parent, node)` runs once when the change is applied (weight packing); it may move
    parameters to other storage, never change their values or names.
    `unsupported(node)` says why it cannot serve a node of the region in any call, or None: one
    whose parts are another model's.
    """

    backend: str  # "triton", "inductor", "torch", "cutedsl", "flashinfer"
    devices: tuple[str, ...]  # device types: "cpu", "cuda"
    build: Callable[[nn.Module, Any], Callable[..., Any]]
    guard: Callable[..., str | None] | None = None
    prepare: Callable[[nn.Module, nn.Module], None] | None = None
    knobs: type[Any] | None = None
    shape: Callable[..., dict[str, int]] | None = None  # (node, *args) -> sizes for knobs
    unsupported: Callable[[nn.Module], str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A fused replacement for every node of `region`.

    One that goes `around` calls what it leaves as it is through the node's own modules, so that
    what has replaced those serves on.
    """

    name: str
    region: str
    summary: str
    contract: Contract
    implementations: tuple[Implementation, ...]
    around: bool = False

    def implementation(self, backend: str) -> Implementation:
        for implementation in self.implementations:
            if implementation.backend == backend:
                return implementation
        have = ", ".join(i.backend for i in self.implementations)
        raise ValueError(f"change {self.name} has no backend {backend!r}; it has: {have}")


def shape_key(shape: Mapping[str, int]) -> str:
    """The sizes that knobs depend on as text: {"T": 1, "D": 5120} -> "D=5120,T=1"."""
    return ",".join(f"{name}={shape[name]}" for name in sorted(shape))


def region_of(module: nn.Module) -> str:
    """The region a module belongs to: its class's `region`, else the class's name in snake case."""
    name = getattr(type(module), "region", None)
    if name is not None:
        return name
    letters = type(module).__name__
    return "".join(
        "_" + c.lower() if c.isupper() and i and not letters[i - 1].isupper() else c.lower()
        for i, c in enumerate(letters)
    )


def nodes(model: nn.Module, region: str) -> list[str]:
    """Qualified names of the model's modules that belong to `region`, in order."""
    return [name for name, module in model.named_modules() if name and region_of(module) == region]


def served(model: nn.Module, region: str, implementation: Implementation) -> list[str]:
    """The nodes of `region` that the implementation can serve."""
    unsupported = implementation.unsupported
    names = nodes(model, region)
    if unsupported is None:
        return names
    return [name for name in names if unsupported(model.get_submodule(name)) is None]


def applied(model: nn.Module) -> set[str]:
    """The names of the changes that were applied to `model`."""
    return {name for m in model.modules() if (name := getattr(m, "applied", None))}


def reached(
    model: nn.Module, names: Sequence[str], closed: Collection[str] = frozenset()
) -> list[str]:
    """Those of `names` that lie in no replaced module: what is inside one is not called, unless its
    change goes `around` its parts and is not one of `closed`."""
    shut = {
        name
        for name, m in model.named_modules()
        if (by := getattr(m, "applied", None)) and (by in closed or not getattr(m, "around", False))
    }
    return [n for n in names if not any(n.startswith(f"{other}.") for other in shut)]


def share(model: nn.Module) -> nn.Module:
    """A second module tree over the same parameters and buffers. Replaced modules of it are made
    anew, so that they call its own parts: hooks on these see what runs."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    return _of_one_piece(copy.deepcopy(model, memo))


def _of_one_piece(module: nn.Module) -> nn.Module:
    """`module`, in which what was replaced is made anew around the parts that are seen there."""
    for name, part in list(module.named_children()):
        setattr(module, name, _of_one_piece(part))
    return _anew(module)


def _anew(module: Any) -> nn.Module:
    """A replaced module again, around the parts that it has now; others as they are."""
    if getattr(module, "remade", None) is None:
        return module
    inner = shallow(module.replaces())
    inner._modules = dict(module._modules)
    return module.remade(inner)


def apply_change(
    model: nn.Module,
    change: Change,
    backend: str,
    knobs: Mapping[str, Any] | None = None,
    domain: Domain | None = None,
) -> list[str]:
    """Replace every node of the change's region in `model`, in place; returns the nodes' names.

    `knobs` maps shapes (`shape_key`) to tuned launch knobs; other shapes use the heuristic. Outside
    `domain`, what the change was tested on, the reference runs; without one nothing is outside.
    A node inside one that is replaced stays as it is, unless that one's change goes around its
    parts: then it is made anew, around the new part. A node that another change already replaced
    is a conflict and raises ValueError, as does a region without nodes to replace. The state dict
    keeps its names and shapes.
    """
    implementation = change.implementation(backend)
    found = nodes(model, change.region)
    if not found:
        raise ValueError(f"change {change.name}: the model has no region {change.region!r}")
    names = reached(model, found)
    if not names:
        raise ValueError(f"change {change.name}: all of {change.region!r} is inside replaced nodes")
    before = {name: tensor.shape for name, tensor in model.state_dict().items()}
    said: set[str] = set()  # once for all nodes
    for name in names:
        if (other := getattr(model.get_submodule(name), "applied", None)) is not None:
            raise ValueError(f"change {change.name}: {name} was already replaced by {other}")

        def replaced(parent: nn.Module, node: nn.Module) -> nn.Module:
            if implementation.prepare is not None:
                implementation.prepare(parent, node)
            return replace_forward(node, change, implementation, knobs, said)

        put(model, name, replaced)
        log.info("%s (%s) replaces %s", change.name, backend, name)
    after = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if before != after:
        raise ValueError(f"change {change.name} altered the state dict's layout")
    if domain is not None:
        limit(model, change, domain)
    return names


def limit(model: nn.Module, change: Change, domain: Domain) -> None:
    """From now on, let `change`, which is applied to `model`, run inside `domain` only."""
    for name in nodes(model, change.region):
        if getattr(model.get_submodule(name), "applied", None) == change.name:
            put(model, name, lambda _, node: node.remade(node.replaces(), domain))


def put(module: nn.Module, name: str, made: Callable[[nn.Module, Any], nn.Module]) -> nn.Module:
    """`module`, in place, with `made(parent, node)` where its node `name` was; a replaced module
    on the way is made anew around it."""
    first, _, rest = name.partition(".")
    part = getattr(module, first)
    setattr(module, first, put(part, rest, made) if rest else made(module, part))
    return _anew(module)


def shallow(module: nn.Module) -> nn.Module:
    """A module with the same parameters, buffers, children and hooks, each in a list of its own."""
    other = copy.copy(module)
    for name, own in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules") or "_hooks" in name:
            setattr(other, name, copy.copy(own))
    return other


def replace_forward(
    node: nn.Module,
    change: Change,
    implementation: Implementation,
    knobs: Mapping[str, Any] | None = None,
    said: set[str] | None = None,
    domain: Domain | None = None,
) -> nn.Module:
    """A module with `node`'s parameters and children whose forward is the implementation's, inside
    `domain`.

    Why its guard or the domain left a call to the reference is logged unless `said`, which its
    change's other nodes share, has it already.
    """
    fast = _by_shape(node, implementation, knobs)
    guard = implementation.guard
    warned = set[str]() if said is None else said
    if guard is None:
        forward = fast
    else:

        def forward(*args: Any) -> Any:
            outside = guard(node, *args)
            if outside is None:
                return fast(*args)
            if outside not in warned:
                warned.add(outside)
                log.warning("%s: the reference runs instead: %s", change.name, outside)
            return node(*args)

        forward.region = getattr(fast, "region", None)  # type: ignore[attr-defined]

    if domain is not None:
        forward = limited(forward, node, domain, change.name, warned)

    def remade(other: nn.Module, within: Domain | None = domain) -> nn.Module:
        return replace_forward(other, change, implementation, knobs, warned, within)

    made: Any = shallow(node)
    made.forward = forward
    made.applied = change.name
    made.around = change.around
    made.remade = remade  # the same around another node, or within a domain
    made.knobs = dict(knobs or {})
    made.contract = change.contract
    made.replaces = lambda: node  # a module set here would become a part of the model
    made.declines = (lambda *args: guard(node, *args)) if guard is not None else None
    return made


def _by_shape(
    node: nn.Module, implementation: Implementation, knobs: Mapping[str, Any] | None
) -> Callable[..., Any]:
    """The implementation's function, with tuned knobs where a call's shape was tuned."""
    default = implementation.build(node, None)
    if not knobs:
        return default
    shape = implementation.shape
    if shape is None:
        raise ValueError(f"the {implementation.backend} implementation has no shape to tune by")
    tuned = {key: implementation.build(node, chosen) for key, chosen in knobs.items()}

    def forward(*args: Any) -> Any:
        return tuned.get(shape_key(shape(node, *args)), default)(*args)

    return forward
