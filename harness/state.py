"""What a replay in progress knows: carried tensors, routes, points. `harness.engine` acts on it."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness import added
from harness.carried import Box, Carried, carry, unrounded
from harness.naming import module_names, site
from harness.noise import Perturbation
from harness.operators import LOW, is_real
from harness.policy import IN
from harness.replay import Choice, Plan, Point
from harness.trees import map_tensors

RESULT = "the result"  # of the replayed function, as a reader of rounding points


class State:
    """The state of one replay."""

    def __init__(self, plan: Plan, routes: list[Any] | None, root: nn.Module | None) -> None:
        super().__init__()
        self.plan = plan
        self.forced = routes
        self.routes: list[Any] = [] if routes is None else routes
        self.next_route = 0
        self.points: list[Point] = []
        self.wides: list[Point] = []
        self.fusable: list[Point] = []
        self.choices: list[Choice] = []
        self.recorded: list[Tensor] = []
        self.consumed: set[int] = set()
        self.count = 0
        self.labels: Counter[str] = Counter()
        self.naming = plan.name or bool(plan.elide)
        self.modules = module_names(root)
        self.rounded = {n for n in plan.add if n.partition(IN)[0] not in added.ADDED}
        known = set(self.modules.values())
        self.uses, self.added_in = by_module(plan.elide, known), by_module(plan.add, known)
        self.readers: dict[int, set[str]] = {}  # of each rounding point, if they are named
        self.noise = Perturbation(plan.noise) if plan.noise else None
        self.boxes: dict[int, tuple[Box, Tensor]] = {}  # storage -> box, and its caller's tensor
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}  # integer storage -> our copy
        self.made: dict[int, Tensor] = {}  # integer storage made during the replay
        self.sorted_by: dict[int, Choice] = {}  # storage of a sort's indices -> the sort

    def adopt_tree(self, tree: Any) -> Any:
        return map_tensors(lambda t: self.adopt(t) if is_real(t.dtype) else t, tree)

    def adopt(self, tensor: Tensor) -> Carried:
        """A carried alias of a caller's tensor."""
        if isinstance(tensor, Carried):
            return tensor
        plain = tensor.detach()
        key = plain.untyped_storage()._cdata
        if key not in self.boxes:
            box = Box(plain, external=True)
            box.low = plain.dtype if plain.dtype in LOW else None
            self.boxes[key] = box, tensor
        box = self.boxes[key][0]
        wrapped = carry(plain, plain.dtype, box)
        wrapped._version_seen = 0  # the caller's storage; a newer version is our copy of it
        return wrapped

    def resolve(self, tensor: Tensor) -> Tensor:
        """Our copy of a caller's integer tensor if the replay wrote to it, else the tensor."""
        found = self.copies.get(tensor.untyped_storage()._cdata) if self.copies else None
        if found is None:
            return tensor
        return found[0].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def settle(self, tensor: Tensor) -> Tensor:
        """A result as a plain tensor of its own in its advertised dtype; wide if nothing rounds."""
        if not is_real(tensor.dtype):
            return self.resolve(tensor).clone()
        tensor = self.adopt(tensor)
        dtype = tensor.dtype if self.plan.rounds else self.plan.wide(tensor.dtype)
        return tensor.value.to(dtype, copy=True)

    def written(self, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
        """The arguments that were written to, as they are now."""
        found = {}
        for name, tensor in arguments.items():
            key = tensor.untyped_storage()._cdata
            if key in self.copies:
                found[name] = self.settle(tensor)
            elif key in self.boxes and self.boxes[key][0].dirty:
                found[name] = self.settle(self.adopt(tensor))
        return found

    def unspecified(self, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
        """Where the content of written arguments depends on the order of conflicting writes."""
        found = {}
        for name, tensor in arguments.items():
            box = self.boxes.get(tensor.untyped_storage()._cdata, (None,))[0]
            if box is not None and box.unspecified is not None:
                shape = tensor.shape, tensor.stride(), tensor.storage_offset()
                found[name] = box.unspecified.as_strided(*shape).clone()
        return found

    def read(self, tensor: Carried) -> Carried:
        """The tensor as the operator that is about to run reads it."""
        box = tensor.box
        if box.point is None or not (self.plan.name or box.readers):
            return tensor
        module = site(self.modules).module
        self.readers.setdefault(box.point, set()).add(module)
        return unrounded(tensor) if is_inside(module, box.readers) else tensor

    def added_here(self) -> frozenset[str]:
        """The added roundings of the operator that is about to run."""
        if not self.added_in:
            return self.plan.add
        module = site(self.modules).module
        here = (name for name, where in self.added_in.items() if is_inside(module, where))
        return self.plan.add.union(here)

    def note_results(self, results: Iterable[Tensor]) -> None:
        """The function's results read the rounding points that they are."""
        for tensor in results:
            if isinstance(tensor, Carried) and tensor.box.point is not None:
                self.readers.setdefault(tensor.box.point, set()).add(RESULT)

    def finished_points(self) -> list[Point]:
        found = []
        for p in self.points:
            readers = self.readers.get(p.index, set())
            apart = sorted(readers - {RESULT, ""}) if len(readers) > 1 else []
            interior = p.index in self.consumed
            found.append(replace(p, interior=interior, readers=tuple(apart)))
        return found

    def values(self, tree: Any, wide: bool, swap: dict[int, Tensor] | None = None) -> Any:
        """Carried tensors as real ones, widened for arithmetic or as they are held; `swap` names
        others to put in their places, by id."""
        if isinstance(tree, Tensor):
            if swap is not None and id(tree) in swap:
                return swap[id(tree)]
            if not isinstance(tree, Carried):
                return tree
            return tree.value.to(self.plan.wide(tree.dtype)) if wide else tree.value
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.values(v, wide, swap) for v in tree)
        if isinstance(tree, dict):
            return {k: self.values(v, wide, swap) for k, v in tree.items()}
        return tree

    def wrap(self, value: Tensor, dtype: torch.dtype, box: Box | None = None) -> Tensor:
        if not is_real(value.dtype):
            self.made[value.untyped_storage()._cdata] = value
            return value
        return carry(value, dtype, box or Box(value))

    def wrap_plain(self, result: Any) -> Any:
        """A result that owes nothing to carried values."""
        if isinstance(result, (list, tuple)):
            return type(result)(self.wrap_plain(r) for r in result)
        return self.wrap(result, result.dtype) if isinstance(result, Tensor) else result

    def route(self, make: Callable[[], Any]) -> Any:
        """A choice that depends on floating-point values: made in the first run, later taken from
        it."""
        if self.forced is None:
            result = make()
            self.routes.append(result.clone() if isinstance(result, Tensor) else result)
            return result
        if self.next_route >= len(self.forced):
            raise RuntimeError("the replay took another path than the first run")
        self.next_route += 1
        result = self.forced[self.next_route - 1]
        return result.clone() if isinstance(result, Tensor) else result

    def copied(self, value: Tensor, sources: list[Carried]) -> Box:
        """The box of a result that only holds elements of `sources`."""
        box = Box(value)
        box.origins = frozenset().union(*(s.box.origins for s in sources))
        lows, kinds = {s.box.low for s in sources}, {s.box.kind for s in sources}
        box.low = lows.pop() if len(lows) == 1 else None
        box.kind = kinds.pop() if len(kinds) == 1 else None
        return box

    def finish(
        self,
        called: str,
        value: Tensor,
        dtype: torch.dtype,
        sources: list[Carried],
        fused: Sequence[Callable[[], Tensor]] = (),
    ) -> Any:
        """Round the result of arithmetic, or not, and wrap it; `dtype` is what it advertises,
        `fused` what fused multiply-adds would give."""
        self.consumed.update(*(s.box.origins for s in sources))
        box_kind = called if called in added.KINDS else None
        if dtype not in LOW:
            box = Box(self._intermediate(called, value, dtype, fused))
            box.kind = box_kind
            return self.wrap(box.root, dtype, box)
        index, self.count = self.count, self.count + 1
        rounds, readers = self.plan.rounds, frozenset[str]()
        if self.naming:
            point = self._point(called, value, dtype, index)
            rounds = rounds and point.name not in self.plan.elide
            readers = self.uses.get(point.name, readers)
            if self.plan.name:
                self.points.append(point)
        box = Box(value.to(dtype) if rounds else value)
        if len(self.modules) > 1:
            box.point = index
        if self.plan.record:
            self.recorded.append(box.root.clone())
        if readers and rounds:
            box.exact, box.readers = torch.empty_like(box.root, dtype=value.dtype), readers
            box.exact.copy_(value)
        box.low, box.origins, box.kind = dtype, frozenset((index,)), box_kind
        return self.wrap(box.root, dtype, box)

    def _intermediate(
        self,
        called: str,
        value: Tensor,
        dtype: torch.dtype,
        fused: Sequence[Callable[[], Tensor]],
    ) -> Tensor:
        """A result that stays in FP32 in the reference; a plan may round it to BF16, or fuse it."""
        plan = self.plan
        if not (plan.name or self.rounded or plan.fuse) or dtype != torch.float32:
            return value
        point = self._point(called, value, dtype, -1)
        for i, compute in enumerate(fused):
            name = f"{point.name} as multiply-add {i + 1}"
            if self.plan.name:
                self.fusable.append(replace(point, name=name, fused=True))
            if name in plan.fuse:
                value = compute()
        if self.plan.name:
            self.wides.append(point)
        return value.bfloat16().to(value.dtype) if point.name in self.rounded else value

    def _point(self, called: str, value: Tensor, dtype: torch.dtype, index: int) -> Point:
        where = site(self.modules)
        label = where.label if index >= 0 else f"{where.label} [{called}]"
        self.labels[label] += 1
        n = self.labels[label]
        return Point(
            name=label if n == 1 else f"{label} #{n}",
            operator=called,
            module=where.module,
            source=where.source,
            shape=tuple(value.shape),
            dtype=str(dtype).removeprefix("torch."),
            index=index,
            added=index < 0,
        )


def is_inside(module: str, others: Iterable[str]) -> bool:
    return any(module == other or module.startswith(f"{other}.") for other in others)


def by_module(names: Iterable[str], modules: set[str]) -> dict[str, frozenset[str]]:
    """Of names "POINT in MODULE" the modules by point."""
    found: dict[str, frozenset[str]] = {}
    for name in names:
        point, _, module = name.rpartition(IN)
        if point and module in modules:
            found[point] = found.get(point, frozenset()) | {module}
    return found
