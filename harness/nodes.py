"""Which nodes of a region are judged."""

import contextlib
import random
from weakref import WeakKeyDictionary

import torch
from torch import nn

from harness.cases import REFUSALS
from harness.steps import steps
from harness.workload import Workload

DRAWN = 2  # nodes besides the first, the last and one of each kind


# Names of the modules of a model that its steps call.
_CALLED: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def called_nodes(model: nn.Module, names: list[str], workload: Workload) -> list[str]:
    """Those that any of the judge's small steps calls: a packed projection, say, reads the weights
    of modules that are never called. All of them where none is."""
    if model not in _CALLED:
        seen: set[str] = set()
        with contextlib.ExitStack() as stack, torch.no_grad():
            for name, module in model.named_modules():
                hook = module.register_forward_pre_hook(lambda *_, name=name: seen.add(name))
                stack.callback(hook.remove)
            for _, inputs in steps(workload, seed=0, sizes=False):
                with contextlib.suppress(*REFUSALS):  # said where its calls are recorded
                    model(*inputs.args)
        _CALLED[model] = frozenset(seen)
    return [name for name in names if name in _CALLED[model]] or names


def pick_nodes(model: nn.Module, names: list[str], seed: int, drawn: int = DRAWN) -> list[str]:
    """The first and the last node, one of each kind, and `drawn` others by `seed`; in order."""
    if not names:
        return []
    kinds: dict[object, str] = {}
    for name in names:
        kinds.setdefault(kind(model.get_submodule(name)), name)
    chosen = {names[0], names[-1], *kinds.values()}
    rest = [n for n in names if n not in chosen]
    chosen.update(random.Random(seed).sample(rest, min(drawn, len(rest))))
    return [n for n in names if n in chosen]


def kind(node: nn.Module) -> object:
    """What tells a node from others of its region: class, parameters and settings, but no floats
    and counters, in which each layer may differ."""
    return repr((behaviour(node), [(n, t.shape, t.dtype) for n, t in node.state_dict().items()]))


def behaviour(node: nn.Module) -> object:
    """What tells a node's code path from that of others of its region: its kind, sizes aside."""
    settings = {k: v for k, v in vars(node).items() if isinstance(v, (str, bool, tuple))}
    children = tuple((n, type(m).__qualname__) for n, m in node.named_modules())
    return repr((type(node).__qualname__, sorted(settings.items()), children))


def one_of_each(model: nn.Module, names: list[str], seed: int) -> set[str]:
    """One node of every behaviour, drawn by `seed`."""
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(behaviour(model.get_submodule(name)), []).append(name)
    drawn = random.Random(seed)
    return {drawn.choice(members) for members in groups.values()}
