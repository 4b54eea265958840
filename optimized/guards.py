"""The dispatch guard of a change, generated from the domain on which it was tested.

Inside the domain the replacement runs, outside it the reference, which is logged once with what was
outside. A call like one before is let through by one comparison in C++ of all sizes, strides,
dtypes and devices, and by its tensors' addresses: 0.8 us a call of two tensors, 1.2 of four, 2.5 of
ten, 10 where arguments are nested (two shared CPU cores, 2026-11-29, torch 2.13). The first of a
kind takes 40 to 200 us. A captured CUDA graph ran the guard once, at capture.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards  # in every PyTorch since 2.0

from optimized.domain import (
    INTEGER,
    NONE,
    TENSOR,
    VALUE,
    ArgumentDomain,
    Domain,
    Fact,
    alignment,
    layout,
)

log = logging.getLogger(__name__)

KINDS_KEPT = 16  # of admitted calls, per node: sizes that come again
PLAIN = type(None), bool, int, float, str, nn.Parameter, Tensor

Known = Callable[[tuple[Any, ...]], bool]


class Guard:
    """Says whether calls of `node.forward` are inside `domain`; remembers those that were."""

    def __init__(self, node: nn.Module, domain: Domain) -> None:
        self.domain = domain
        self.names = argument_names(node)
        self.known: list[Known] = []  # the latest first

    def outside(self, args: tuple[Any, ...]) -> str | None:
        """Why the call is outside the domain, or None; a call that is inside is remembered."""
        facts = facts_of(self.names, args)
        reason = self.domain.outside(facts)
        if reason is None:
            call = next(c for c in self.domain.calls if not c.outside(facts))
            known = recognise(self.names, args, [call.arguments[path] for path in facts])
            if known is not None:
                self.known.insert(0, known)
                del self.known[KINDS_KEPT:]
        return reason


def recognise(
    names: Sequence[str], args: tuple[Any, ...], tested: Sequence[ArgumentDomain]
) -> Known | None:
    """A quick test for calls that differ from `args`, which is inside, in nothing that a domain
    tells apart; None where there is no quick one.

    `tested` is what each leaf of the arguments was tested as.
    """
    if all(type(arg) in PLAIN for arg in args):
        return _recognise(args, tested)
    leaves = _all_leaves(names, args)
    paths = [path for path, _ in leaves]
    flat = _recognise(tuple(leaf for _, leaf in leaves), tested)
    if flat is None:
        return None

    def known(args: tuple[Any, ...]) -> bool:
        leaves = _all_leaves(names, args)
        if [path for path, _ in leaves] != paths:
            return False
        return flat(tuple([leaf for _, leaf in leaves]))

    return known


def _recognise(args: tuple[Any, ...], tested: Sequence[ArgumentDomain]) -> Known | None:
    """The same for arguments that are all PLAIN; None where they are not, or where equality does
    not tell a zero's sign."""
    if any(type(arg) not in PLAIN or (type(arg) is float and arg == 0) for arg in args):
        return None
    count = len(args)
    tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    others = [(i, type(arg), arg) for i, arg in enumerate(args) if not isinstance(arg, Tensor)]
    same = TensorGuards(
        *(args[i] for i in tensors),
        dynamic_dims_sizes=[list(args[i].shape) for i in tensors],
        dynamic_dims_strides=[list(args[i].stride()) for i in tensors],
    ).check
    masks = [(i, tested[i].alignment - 1) for i in tensors if tested[i].alignment > 1]
    address = Tensor.data_ptr

    def known(args: tuple[Any, ...]) -> bool:
        if len(args) != count:
            return False
        for i, kind, value in others:
            if type(args[i]) is not kind or args[i] != value:
                return False
        if tensors and not (same(*[args[i] for i in tensors]) if others else same(*args)):
            return False
        for i, mask in masks:
            if address(args[i]) & mask:
                return False
        return True

    return known


def limited(
    forward: Callable[..., Any],
    node: nn.Module,
    domain: Domain,
    name: str,
    warned: set[str] | None = None,
) -> Callable[..., Any]:
    """`forward` inside `domain`, the reference `node` outside it.

    What was outside is logged once for all functions that share `warned`. Traced as a part of a
    larger compiled region, the domain of that region decides.
    """
    guard = Guard(node, domain)
    known = guard.known
    said = set() if warned is None else warned

    def guarded(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args)
        for before in known:
            if before(args):
                return forward(*args)
        outside = guard.outside(args)
        if outside is None:
            return forward(*args)
        if outside not in said:
            said.add(outside)
            log.warning(
                "%s: the reference runs instead, outside what was tested: %s", name, outside
            )
        return node(*args)

    guarded.region = getattr(forward, "region", None)  # type: ignore[attr-defined]
    guarded.guard = guard  # type: ignore[attr-defined]
    return guarded


def facts_of(names: Sequence[str], args: Sequence[Any]) -> dict[str, Fact]:
    """What a call's arguments are, by path; `names` as `argument_names` gives them."""
    return {path: _fact(leaf) for path, leaf in _all_leaves(names, args)}


def _all_leaves(names: Sequence[str], args: Sequence[Any]) -> list[tuple[str, Any]]:
    return [pair for i, arg in enumerate(args) for pair in _leaves(arg, _name(names, i))]


def _name(names: Sequence[str], i: int) -> str:
    """The path of the call's argument `i`."""
    if names and names[-1].startswith("*") and i >= len(names) - 1:
        return f"{names[-1][1:]}[{i - len(names) + 1}]"
    return names[i] if i < len(names) else f"[{i}]"


def argument_names(node: nn.Module) -> tuple[str, ...]:
    """The names of the positional parameters of `node`'s class's forward; "*rest" for more."""
    parameters = list(inspect.signature(type(node).forward).parameters.values())[1:]
    return tuple("*" * (p.kind is p.VAR_POSITIONAL) + p.name for p in parameters)


def _fact(leaf: Any) -> Fact:
    if isinstance(leaf, Tensor):
        sizes = tuple(leaf.shape)
        return Fact(
            kind=TENSOR,
            dtype=str(leaf.dtype).removeprefix("torch."),
            device=leaf.device.type,
            sizes=sizes,
            layout=layout(sizes, leaf.stride()),
            alignment=alignment(leaf.data_ptr()),
        )
    if leaf is None:
        return Fact(kind=NONE)
    if type(leaf) is int:
        return Fact(kind=INTEGER, integer=leaf)
    shown = repr(leaf) if isinstance(leaf, (bool, float, str, torch.dtype, torch.device)) else None
    return Fact(kind=VALUE, value=shown or type(leaf).__qualname__)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested tuples, lists, mappings and objects, with its path."""
    children: list[tuple[str, Any]] | None = None
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        children = [(f".{name}", getattr(tree, name)) for name in tree._fields]  # type: ignore[attr-defined]
    elif isinstance(tree, (tuple, list)):
        children = [(f"[{i}]", item) for i, item in enumerate(tree)]
    elif isinstance(tree, Mapping):
        children = [(f"[{key!r}]", value) for key, value in tree.items()]
    elif not isinstance(tree, (Tensor, type, nn.Module)) and hasattr(tree, "__dict__"):
        children = [(f".{name}", value) for name, value in vars(tree).items()]
    if children is None:
        yield path, tree
        return
    for step, child in children:
        yield from _leaves(child, path + step)
