"""How far a model drifts from the reference when every layer feeds the next: a finding, no gate.

The reference runs a prefill and some decode steps; beside it the candidate, and the reference
itself under noise, each on hidden states and caches of its own, all fed the same tokens. With
forced routes every choice is taken from the reference's run: what is left is rounding.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from harness.carried import Carried
from harness.cases import storages
from harness.drift_record import Drift, DriftRow
from harness.operators import is_real
from harness.replay import NATIVE, Noise, Plan, Run, named_arguments, replay
from harness.routing import Router, forcing, routers
from harness.steps import LabelledStep
from harness.trees import leaves, map_tensors

DECODES = 4  # decode steps of a full drift; each takes three replays of the whole model
FREE, FORCED = "free", "forced"
RESULT, REFERENCE = "result", "reference"


@dataclass
class _Sums:
    """Pooled over the steps of one kind."""

    apart: Tensor  # by layer: sums of squares
    norm: Tensor
    divergences: list[Tensor] = field(default_factory=list)
    flips: list[Tensor] = field(default_factory=list)


def drift(
    reference: nn.Module,
    candidate: nn.Module,
    *,
    names: list[str],
    inputs: Iterable[LabelledStep],
    decodes: int,
    seed: int,
    forced: bool,
) -> Drift:
    """Run the first step of `inputs`, a prefill, and the `decodes` after it, which continue its
    cache; compare after each layer of `names` that they call, and the logits. With `forced`, also
    on the reference's routes."""
    first, *later = [step for _, step in itertools.islice(inputs, 1 + decodes)]
    kinds = [(RESULT, FREE), (REFERENCE, FREE)]
    kinds += [(RESULT, FORCED), (REFERENCE, FORCED)] * forced
    caches = {who: map_tensors(torch.clone, first.cache) for who in (None, *kinds)}
    sums: dict[tuple[str, str, str], _Sums] = {}
    unforced: str | None = None  # why not
    for number, step in enumerate([first, *later]):
        args = {who: (step.ids, step.positions, cache) for who, cache in caches.items()}
        real = step.positions >= 0
        noise = Plan(noise=Noise(seed=seed * 100_003 + number))
        truth, run, chosen = _Watched(reference, names, real), None, []
        if forced:
            with routers(reference, storages(reference)) as chosen:
                run = truth.replayed(args[None], NATIVE, None)
            if not chosen:
                unforced = "no submodule returns choices"
        else:
            truth.called(args[None])
        if number == 0:  # encoders, for example, stand idle without their inputs
            names = [name for name in names if name in truth.hidden] or names
        for who in kinds:
            if who[1] == FORCED and unforced is not None:
                continue
            seen = _Watched(candidate if who[0] == RESULT else reference, names, real, truth)
            if who[0] == REFERENCE:
                seen.replayed(args[who], noise, run if who[1] == FORCED else None)
            elif who[1] == FREE:
                with opened(candidate):
                    seen.called(args[who])
            else:
                with opened(candidate):
                    unforced = _call_forced(seen, args[who], reference, chosen)
                if unforced is not None:
                    continue
            key = *who, "decode" if number else "prefill"
            _pool(sums, key, seen, truth)
    rows = tuple(_row(key, s) for key, s in sums.items() if key[1] == FREE or unforced is None)
    return Drift(layers=tuple(names), decodes=decodes, seed=seed, rows=rows, unforced=unforced)


@contextmanager
def opened(candidate: nn.Module) -> Iterator[None]:
    """Let a tree whose modules are called in another process run here, save those that a change
    replaced, so that hooks see its layers and its choices."""
    away = {
        module: vars(module)["forward"]
        for module in candidate.modules()
        if hasattr(vars(module).get("forward"), "integers") and not hasattr(module, "applied")
    }
    for module in away:
        del module.forward
    try:
        yield
    finally:
        for module, forward in away.items():
            module.forward = forward


def describe(found: Drift) -> list[str]:
    """The free-running figures as sentences."""
    notes = []
    for step in ("prefill", "decode"):
        rows = {r.of: r for r in found.rows if (r.routes, r.step) == (FREE, step)}
        if rows:
            notes.append(
                f"free-running {step}: {_words(rows[RESULT])}; the reference against itself under "
                f"noise: {_words(rows[REFERENCE])}"
            )
    return notes


def _words(row: DriftRow) -> str:
    last = row.layers[-1] if row.layers else None
    relative = "unknown" if last is None else f"{last:.2g}"
    return f"relative {relative}, KL {row.kl_mean:.2g}, {row.flips} of {row.tokens} top-1 flip(s)"


class _Watched:
    """One run of a model with hooks on its layers: their hidden states, or how far these are from
    those of `truth`; and the logits."""

    def __init__(
        self, model: nn.Module, names: list[str], real: Tensor, truth: "_Watched | None" = None
    ) -> None:
        self.model, self.names, self.real, self.truth = model, names, real, truth
        self.hidden: dict[str, Tensor] = {}
        self.squares: dict[str, tuple[Tensor, Tensor]] = {}  # of the distance, of the truth
        self.logits = torch.empty(0)

    def called(self, args: tuple[Any, ...]) -> None:
        """A plain call, which writes to its cache."""
        with torch.no_grad(), self._hooks():
            self.logits = _logits(self.model(*args), self.real)

    def replayed(self, args: tuple[Any, ...], plan: Plan, first: Run | None) -> Run:
        """A replay; what it wrote goes into the arguments."""
        with torch.no_grad(), self._hooks():
            run = replay(self.model, args, plan, first)
            arguments = named_arguments(self.model, args, {})
            for name, tensor in run.written.items():
                arguments[name].copy_(tensor)
        self.logits = _logits(list(run.outputs.values()), self.real)
        return run

    def _hooks(self) -> ExitStack:
        stack = ExitStack()
        for name in self.names:
            layer = self.model.get_submodule(name)
            stack.callback(layer.register_forward_hook(self._keep(name)).remove)
        return stack

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, result: Any) -> None:
            with _disable_current_modes():
                tensor = next((t for _, t in leaves(result) if is_real(t.dtype)), None)
                if tensor is None:
                    return
                value = tensor.value if isinstance(tensor, Carried) else tensor
                padded = value.shape[: self.real.ndim] == self.real.shape
                value = value[self.real] if padded else value.clone()  # without padding
                if self.truth is None:
                    self.hidden[name] = value
                elif name in self.truth.hidden:
                    ours = self.truth.hidden[name].float()
                    apart = (value.float() - ours).square().sum(dtype=torch.float64)
                    self.squares[name] = apart, ours.square().sum(dtype=torch.float64)

        return hook


def _call_forced(
    seen: _Watched, args: tuple[Any, ...], reference: nn.Module, chosen: list[Router]
) -> str | None:
    """Call the candidate on the reference's routes; says why that could not be done."""
    with forcing(reference, seen.model, chosen) as missing:
        seen.called(args)
    return missing()


def _logits(result: Any, real: Tensor) -> Tensor:
    """[tokens, V]: of every token that is no padding, or of those that the model returns."""
    logits = next(t for _, t in leaves(result) if is_real(t.dtype)).double()
    return logits[real] if logits.shape[:-1] == real.shape else logits.flatten(0, -2)


def _pool(
    sums: dict[tuple[str, str, str], _Sums],
    key: tuple[str, str, str],
    seen: _Watched,
    truth: _Watched,
) -> None:
    unseen = torch.full((), torch.nan, dtype=torch.float64, device=truth.logits.device)
    pairs = [seen.squares.get(name, (unseen, unseen)) for name in seen.names]
    apart, norm = (torch.stack(column) for column in zip(*pairs, strict=True))
    pooled = sums.setdefault(key, _Sums(torch.zeros_like(apart), torch.zeros_like(norm)))
    pooled.apart, pooled.norm = pooled.apart + apart, pooled.norm + norm
    p, q = torch.log_softmax(seen.logits, -1), torch.log_softmax(truth.logits, -1)
    pooled.divergences.append((q.exp() * (q - p)).sum(-1))
    pooled.flips.append(p.argmax(-1) != q.argmax(-1))


def _row(key: tuple[str, str, str], pooled: _Sums) -> DriftRow:
    of, routes, step = key
    divergences, flips = torch.cat(pooled.divergences), torch.cat(pooled.flips)
    squares = zip(pooled.apart.tolist(), pooled.norm.tolist(), strict=True)
    return DriftRow(
        of=of,
        routes=routes,
        step=step,
        layers=tuple(_relative(a, n) for a, n in squares),
        kl_mean=max(0.0, float(divergences.mean())),
        kl_max=max(0.0, float(divergences.max())),
        flips=int(flips.sum()),
        tokens=flips.numel(),
    )


def _relative(apart: float, norm: float) -> float | None:
    """From sums of squares; None where a layer was not seen, or all of it is zero."""
    return math.sqrt(apart / norm) if norm > 0 else None
