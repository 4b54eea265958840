"""Audits: is the executable that was timed the module that was judged?

The judge runs a candidate's module layer by layer, on tensors of its own. What is timed is another
thing: a captured graph, or the module called again and again on tensors that it knows. So the very
step is run once more, on inputs that were drawn after it was built and written into its tensors,
with its outputs poisoned before. Its outputs, and all that its arguments then hold, must be, bit
for bit, what the module gives when it runs eagerly on the same inputs at other addresses.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.conflicts import Conflicts
from harness.left import Digests, Result, distinct, holding, where
from harness.operators import is_real
from harness.records import AuditedCall
from harness.replay import named_arguments, named_results
from harness.step import HasArgs, Step
from harness.trees import bits, leaves, same_bits
from harness.workload import StepInputs, Target, Workload

AMONG, AFTER = "among the timed calls", "after timing"
EAGER = "the module run eagerly, bit for bit"
SPREAD = "several runs of the module, which differ from each other, within their spread"
RECAPTURED = (
    "a second graph of the module, bit for bit: on this machine the unchanged model, too, gives "
    "other bits in a graph than eagerly"
)
EAGER_RUNS = 3  # of a module that does not repeat itself
SEED_BITS = 48

Fresh = Callable[[int], HasArgs | tuple[Any, ...]]


@dataclass
class Auditor:
    """One audit of `step`, whose module is `model`. `call` runs the step, `check` the module.

    `fresh(seed)` makes inputs of the step's shapes, the same ones for the same seed. `trusted`, the
    reference, is run too, if given, after timing and where something differs, to see which rows of
    the arguments are to be written (the module could leave out what the step leaves out), and where
    their content is not specified. `control`
    says whether the unchanged model's own step passes: asked only where a graph gives other bits
    than its module does eagerly, and a second graph gives the same.
    """

    step: Step
    model: Callable[..., Any]
    fresh: Fresh
    name: str = "step"
    when: str = AFTER
    seed: int = field(default_factory=lambda: secrets.randbits(SEED_BITS))
    trusted: Callable[..., Any] | None = None
    control: Callable[[], bool] | None = None
    digests: Digests = field(default_factory=Digests)
    time_us: float | None = None  # of the call, where it was made as the timed ones are
    remembers: str | None = None  # why its time holds for inputs that it knows only
    _loose: dict[str, Tensor] = field(default_factory=dict)
    _start: dict[str, Tensor] = field(default_factory=dict)
    _last: dict[str, Tensor] = field(default_factory=dict)
    _seen: Result | None = None
    _returned_again: bool = False

    def call(self, run: Callable[[], object] | None = None) -> None:
        """Run the step once on the drawn inputs, by `run` if given; afterwards its tensors hold
        what they held before."""
        mine, theirs = self._named(self.step.args), self._named(arguments(self.fresh(self.seed)))
        kept = self.step.output  # alive, so that its memory is not handed out again
        self._last = self._copies(kept)
        with holding(mine, theirs):
            self._start = self._rows(mine)
            self._poison(kept)
            (run or self.step)()
            self._wait()
            self._seen = Result(self._copies(self.step.output), self._rows(mine))
            self._returned_again = _addresses(kept) == _addresses(self.step.output)

    @contextmanager
    def unknown(self) -> Iterator[None]:
        """The step's tensors hold inputs that were never run."""
        args = arguments(self.fresh(secrets.randbits(SEED_BITS)))
        with holding(self._named(self.step.args), self._named(args)):
            yield

    def check(self) -> AuditedCall:
        """Compare the call with what the module gives."""
        if self._seen is None:
            raise ValueError("check() comes after call()")
        expected = self._eager(self.model)
        places = None
        if self.trusted is not None and (self.when == AFTER or not self._seen.same(expected)):
            places = self._trusted(expected)
        broken = self._broken(expected)
        if broken is None and places is not None:
            broken = self._misplaced(places)
        broken = broken or self.remembers
        reason, compared_with = broken, EAGER
        if broken is None and not self._seen.same(expected):
            reason, compared_with = self._second_opinion(expected)
        return AuditedCall(
            step=self.name,
            when=self.when,
            seed=self.seed,
            compared_with=compared_with,
            reason=reason,
        )

    def _eager(self, model: Callable[..., Any]) -> Result:
        """`model` on inputs of its own."""
        args = arguments(self.fresh(self.seed))
        tensors = self._named(args)
        if any(not torch.equal(r, self._start[n]) for n, r in self._rows(tensors).items()):
            raise ValueError(f"fresh({self.seed}) makes other values each time")
        with torch.no_grad():
            output = model(*args)
        self._wait()
        return Result(self._copies(output), self._rows(tensors))

    def _trusted(self, expected: Result) -> Result:
        """What the trusted model leaves; from now on, rows that it stores to more than once (see
        `harness.conflicts`) count nowhere."""
        assert self.trusted is not None and self._seen is not None
        args = arguments(self.fresh(self.seed))
        tensors = self._named(args)
        with torch.no_grad(), Conflicts(tensors) as conflicts:
            output = self.trusted(*args)
        self._wait()
        self._loose = conflicts.rows
        for rows in (self._start, self._seen.rows, expected.rows):
            rows.update({name: self._kept(name, digest) for name, digest in rows.items()})
        return Result(self._copies(output), self._rows(tensors))

    def _broken(self, expected: Result) -> str | None:
        """What no run-to-run spread explains: results that do not come from these inputs."""
        assert self._seen is not None
        for name, want in expected.outputs.items():
            got = self._seen.outputs.get(name)
            if got is None or (got.shape, got.dtype) != (want.shape, want.dtype):
                return f"{name} has another shape or dtype than the module's"
            last = self._last.get(name)
            if is_real(want.dtype) and want.numel() and last is not None and same_bits(got, last):
                return (
                    f"{name} is what an earlier call gave, not the result of these inputs: "
                    "a stale graph, or a memoised result"
                )
            if same_bits(got, want):
                continue
            empty = int((_poisoned(got) & ~_poisoned(want)).sum())
            if empty and self._returned_again and self.step.mode == "eager":
                return f"{name} is the very tensor that an earlier call returned: memoised"
            if empty:
                return f"{name}: {empty} of {got.numel()} elements were not written"
        return self._misplaced(expected)

    def _misplaced(self, expected: Result) -> str | None:
        """Rows that were not written where `expected` is, or the other way round."""
        assert self._seen is not None
        for name, want in expected.rows.items():
            got, start = self._seen.rows[name], self._start[name]
            skipped = (got == start) & (want != start)
            if skipped.any():
                return f"{name} was not written {where(skipped)}, as the model does"
            stray = (got != start) & (want == start)
            if stray.any():
                return f"{name} was written {where(stray)}, which the model leaves alone"
        return None

    def _second_opinion(self, expected: Result) -> tuple[str | None, str]:
        """Other bits: excused where the module does not repeat itself, within its own spread, or
        where graphs of the unchanged model have other bits, too."""
        assert self._seen is not None
        runs = [expected, *(self._eager(self.model) for _ in range(EAGER_RUNS - 1))]
        pairs = [a.apart(b) for i, a in enumerate(runs) for b in runs[:i]]
        limit = {name: max(pair[name] for pair in pairs) for name in pairs[0]}
        reason = self._differs(expected)
        if any(limit.values()):
            for run in runs:
                apart = self._seen.apart(run)
                if all(apart[name] <= most for name, most in limit.items()):
                    return None, SPREAD
            return f"{reason}, further than its own runs are apart", SPREAD
        if self.step.mode != "graph":
            return reason, EAGER
        again = self._recaptured()
        if again.same(expected):
            return f"{reason}; a second graph gives what the module gives", EAGER
        if not self._seen.same(again):
            return f"{reason}; a second graph differs from both", EAGER
        if self.control is not None and not self.control():
            return None, RECAPTURED
        return f"{reason}; a second graph gives the same: captured, it computes otherwise", EAGER

    def _differs(self, expected: Result) -> str:
        assert self._seen is not None
        for name, want in expected.outputs.items():
            wrong = bits(self._seen.outputs[name]) != bits(want)
            if wrong.any():
                return (
                    f"{int(wrong.sum())} of {wrong.numel()} elements of {name} are not what the "
                    "module gives on these inputs"
                )
        for name, want in expected.rows.items():
            wrong = self._seen.rows[name] != want
            if wrong.any():
                return f"{name} holds other values {where(wrong)} than the module writes"
        raise AssertionError("the two agree")

    def _recaptured(self) -> Result:
        """A second graph of the module, on inputs of its own; capturing runs it, so they are
        written once more before it counts."""
        with Step(self.model, arguments(self.fresh(self.seed)), "graph") as again:
            other = Auditor(again, self.model, self.fresh, seed=self.seed, digests=self.digests)
            other._loose = self._loose
            other.call()
            assert other._seen is not None
            return other._seen

    def _named(self, args: tuple[Any, ...]) -> dict[str, Tensor]:
        return distinct(named_arguments(self.model, args, {}))

    def _copies(self, output: Any) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in named_results(self.model, output).items()}

    def _rows(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._kept(name, self.digests(t)) for name, t in tensors.items()}

    def _kept(self, name: str, digest: Tensor) -> Tensor:
        loose = self._loose.get(name)
        return digest if loose is None else digest.masked_fill(loose.view_as(digest), 0)

    def _poison(self, output: Any) -> None:
        """Fill what the last call returned, unless that is an argument's or a weight's memory."""
        known = {t.untyped_storage().data_ptr() for _, t in leaves(self.step.args)}
        if isinstance(self.model, nn.Module):
            state = (*self.model.parameters(), *self.model.buffers())
            known |= {t.untyped_storage().data_ptr() for t in state}
        for _, tensor in leaves(output):
            if tensor.untyped_storage().data_ptr() not in known:
                tensor.fill_(torch.nan if is_real(tensor.dtype) else -1)

    def _wait(self) -> None:
        if self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)


def audit(
    step: Step,
    model: Callable[..., Any],
    fresh: Fresh,
    *,
    name: str = "step",
    seed: int | None = None,
    trusted: Callable[..., Any] | None = None,
    control: Callable[[], bool] | None = None,
) -> AuditedCall:
    """Run `step` on `fresh(seed)`, by default drawn from the system's entropy, and compare.

    Costs a run of the step, one of the module and one of `trusted`, and one copy of the inputs at a
    time. The arguments are those of `Auditor`.
    """
    auditor = Auditor(step, model, fresh, name=name, trusted=trusted, control=control)
    if seed is not None:
        auditor.seed = seed
    auditor.call()
    return auditor.check()


def drawn(workload: Workload, target: Target, seed: int) -> StepInputs:
    """Inputs of `target` from `seed`: other ids and cache contents and, for a decode, other
    positions. A prefill's end where the cache does, as its inputs promise."""
    inputs = workload.inputs(target, seed=seed)
    if target.kind != "decode":
        return inputs
    generator = torch.Generator().manual_seed(seed)
    first = min(target.context // 2, target.context - 1)
    at = torch.randint(first, target.context, inputs.positions.shape, generator=generator)
    return replace(inputs, positions=at.to(inputs.positions))


def arguments(inputs: HasArgs | tuple[Any, ...]) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else inputs.args


def _addresses(output: Any) -> list[int]:
    return [tensor.data_ptr() for _, tensor in leaves(output)]


def _poisoned(tensor: Tensor) -> Tensor:
    return tensor.isnan() if is_real(tensor.dtype) else tensor == -1
