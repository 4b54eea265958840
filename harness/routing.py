"""Running a model on another run's routes: the choices that its submodules return are replaced."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from harness.carried import Carried
from harness.cases import copied
from harness.operators import is_real
from harness.replay import NATIVE, named_results, replay
from harness.routes import kept_rows
from harness.trees import leaves, map_tensors


@dataclass
class Router:
    """One call of a submodule that returned integers: its arguments and those results."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    integers: dict[str, Tensor]  # by path in the result


@contextmanager
def routers(model: nn.Module, fixed: set[int]) -> Iterator[list[Router]]:
    """Collect the calls, in order, of submodules that return integers next to other results. Where
    such modules hold each other, the innermost counts. Works in a replay, too."""
    found: list[Router] = []
    depth: list[int] = []

    def before(*_: Any) -> None:
        depth.append(len(found))

    def after(name: str, args: Any, kwargs: Any, result: Any) -> None:
        inside = found[depth.pop() :]
        with _disable_current_modes():
            integers = {
                path: t.clone()
                for path, t in leaves(result)
                if not is_real(t.dtype) and t.dtype != torch.bool and t.ndim
            }
            if integers and not any(r.name.startswith(f"{name}.") for r in inside):
                plain = lambda t: copied(t.value if isinstance(t, Carried) else t, fixed)  # noqa: E731
                args, kwargs = map_tensors(plain, (args, kwargs))
                found.append(Router(name, args, kwargs, integers))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                hook = lambda _, args, kwargs, result, name=name: after(name, args, kwargs, result)  # noqa: E731
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield found


@contextmanager
def forcing(
    reference: nn.Module, model: nn.Module, chosen: list[Router]
) -> Iterator[Callable[[], str | None]]:
    """Make `model` choose what `chosen` says. A row that it would have routed otherwise gets what
    the reference's submodule returns for the model's own arguments on the forced route.

    Yields a function that says, afterwards, which of the calls never came; None if all did.
    """
    left: dict[str, list[Router]] = {}
    for call in chosen:
        left.setdefault(call.name, []).append(call)

    def force(name: str, args: Any, kwargs: Any, result: Any) -> Any:
        if not left[name]:
            return None
        call = left[name].pop(0)
        mine = dict(leaves(result))
        rows = None
        for path, ours in call.integers.items():
            differs = (mine[path] != ours).reshape(-1, ours.shape[-1]).any(-1)
            rows = differs if rows is None or rows.shape != differs.shape else rows | differs
        if rows is None or not bool(rows.any()):
            return None
        node = reference.get_submodule(name)
        first = replay(node, call.args, NATIVE, None, call.kwargs)
        outputs = replay(node, args, NATIVE, first, kwargs).outputs
        forced = {id(t): outputs[n] for n, t in named_results(node, result).items()}

        def choose(t: Tensor) -> Tensor:
            keep = kept_rows(rows, t)
            return forced[id(t)] if keep is None else torch.where(keep, t, forced[id(t)])

        return map_tensors(choose, result)

    def missing() -> str | None:
        absent = [name for name, calls in left.items() if calls]
        return f"{absent[0]} is not called by itself" if absent else None

    with ExitStack() as stack:
        for name in left:
            module = model.get_submodule(name)

            def hook(called, args, kwargs, result, name=name, module=module) -> Any:
                # A replaced module shares its hooks with the one that it may call in its place.
                return force(name, args, kwargs, result) if called is module else None

            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield missing
