"""Is what was timed in a worker what a fresh process computes?

Each burst of a candidate runs on values that were drawn just before it. One of the timed bursts,
which one is drawn, too, is compared: what its last run returned and, in a decode, what its
arguments then hold must be, bit for bit, what a fresh process gives that is called once at a time.
All bursts look alike to the candidate: the seeds come from the system's entropy, once it runs.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.audit import AMONG, SEED_BITS
from harness.observe import CandidateError
from harness.operators import LOW
from harness.records import AuditedCall
from harness.remote import Candidate
from harness.trees import leaves, map_tensors, same_bits
from harness.workload import Target, Workload

if TYPE_CHECKING:
    from harness.outside import Bursts

ALONE = "a fresh process that is called once at a time, bit for bit"
LAST = 16  # a decode is drawn in the last sixteenth of its context, so that it takes as long

Slot = tuple[Any, ...]


@dataclass(kw_only=True)
class Draws:
    """Arguments of bursts, and what redraws them; `seed` starts the values anew."""

    slots: list[Slot]
    redraw: Callable[[torch.Generator], None]
    move: Callable[[torch.Generator], None] = lambda _: None
    writes: bool = False  # whether what the arguments hold afterwards is one thing, and compared
    generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self.seed(secrets.randbits(SEED_BITS))

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def values(self) -> None:
        """New inputs and contents of caches, at the same positions."""
        self.redraw(self.generator)

    def positions(self) -> None:
        """New positions; who compares times draws them once for all that are compared."""
        self.move(self.generator)


def step_draws(workload: Workload, target: Target, count: int) -> Draws:
    """`count` calls of a target's step with ids and positions of their own, over one cache."""
    first = workload.inputs(target, seed=secrets.randbits(SEED_BITS))
    slots = [(first.ids.clone(), first.positions.clone(), first.cache) for _ in range(count)]
    held = [t for _, t in leaves(first.cache) if t.is_floating_point()]
    earliest = target.context - max(1, target.context // LAST)

    def redraw(generator: torch.Generator) -> None:
        for ids, _, _ in slots:
            ids.random_(workload.vocabulary, generator=generator)
        for tensor in held:
            tensor.normal_(generator=generator)

    def move(generator: torch.Generator) -> None:
        if target.kind == "decode":
            for _, positions, _ in slots:
                positions.random_(earliest, target.context, generator=generator)

    return Draws(
        slots=slots,
        redraw=redraw,
        move=move,
        writes=target.kind == "decode",  # a prefill may write to one place more than once
        generator=torch.Generator(workload.device),
    )


def call_draws(args: Slot, fixed: set[int], count: int) -> Draws:
    """Copies of one call's arguments whose activations differ in their signs."""

    def own(tensor: Tensor) -> Tensor:
        return tensor if tensor.untyped_storage()._cdata in fixed else tensor.clone()

    slots = [map_tensors(own, args) for _ in range(count)]
    drawn = [
        t for _, t in leaves(slots) if t.dtype in LOW and t.untyped_storage()._cdata not in fixed
    ]

    def redraw(generator: torch.Generator) -> None:
        for tensor in drawn:
            signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            tensor.mul_(signs.to(tensor.device, tensor.dtype))

    return Draws(slots=slots, redraw=redraw)


class BurstAudit:
    """Of one of `among` bursts of `timed`, by what `fresh`, a second worker, computes."""

    def __init__(self, timed: "Bursts", fresh: Candidate, among: int, step: str) -> None:
        self.timed, self.fresh, self.step = timed, fresh, step
        self.seed = secrets.randbits(SEED_BITS)
        self.left = secrets.randbelow(among)  # bursts before it
        self.args: list[Slot] = []
        self.count = 0
        self.result: Any = None
        self.written: list[Tensor] = []

    def burst(self, count: int) -> float:
        """A timed burst on new values, us: the audited one if its turn has come."""
        draws, due = self.timed.draws, self.left == 0
        self.left -= 1
        if due:
            draws.seed(self.seed)
        draws.values()
        if due:
            self.args, self.count = _copies(self.timed.slots), count
        took_us, result = self.timed.burst(count, hold=due and draws.writes)
        if due:
            self.result, self.written = result, self.timed.held
            self.timed.held = []
            draws.seed(secrets.randbits(SEED_BITS))
        return took_us

    def check(self) -> AuditedCall:
        """Compare what was kept; ValueError before its turn."""
        if not self.count:
            raise ValueError("check() comes after the audited burst")
        reason = self._differs()
        return AuditedCall(
            step=self.step, when=AMONG, seed=self.seed, compared_with=ALONE, reason=reason
        )

    def _differs(self) -> str | None:
        order = self.timed.order(self.count)
        if len(self.timed.slots) == 1:
            order = order[:2]  # a decode at the same position again changes nothing
        try:
            theirs = run_alone(self.fresh, self.timed.node, self.args, order)
        except CandidateError as error:
            return f"a fresh process does not compute it: {error}"
        if (told := differs(self.result, theirs, self.count)) is not None or not self.written:
            return told
        distinct = {id(t): (path, t) for path, t in leaves(self.args)}
        for mine, (path, tensor) in zip(self.written, distinct.values(), strict=True):
            if not same_bits(mine, tensor):
                return f"what was timed leaves other values in {path} than an untimed call"
        return None


def audit(timed: "Bursts", fresh: Candidate, count: int) -> str | None:
    """Whether a burst of `count` ends with what a fresh process computes, or what differs."""
    auditor = BurstAudit(timed, fresh, 1, "call")
    auditor.burst(count)
    return auditor.check().reason


def run_alone(fresh: Candidate, node: str, args: Sequence[Slot], order: Sequence[int]) -> Any:
    """What the last of the calls returns; what one writes to a shared tensor the next finds."""
    result: Any = None
    for run in order:
        result = fresh.call(node, args[run], {})[0]
    return result


def differs(ours: Any, theirs: Any, count: int) -> str | None:
    mine, expected = dict(leaves(ours)), dict(leaves(theirs))
    if mine.keys() != expected.keys():
        return "what was timed returns something else than an untimed call"
    for path, tensor in expected.items():
        if not same_bits(mine[path], tensor):
            return f"what was timed is not what an untimed call computes (out{path}, run {count})"
    return None


def _copies(slots: Sequence[Slot]) -> list[Slot]:
    """Copies that share tensors, such as a cache, where the slots do."""
    made: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.clone()
        return made[id(tensor)]

    return [map_tensors(copy, slot) for slot in slots]
