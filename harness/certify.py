"""Making a certificate, and judging again what one certifies."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from harness.certificate import EVERY, Applied, Certificate, Hashes, Promise, hashes
from harness.domains import judge_with_domain
from harness.errors import UserError
from harness.judge import judge_model
from harness.records import SCHEMA, Environment, Latency, Verdict
from harness.workload import Workload
from optimized.catalog import FOLDER, file_of
from optimized.change import Change, apply_change, limit, share
from optimized.inductor import region_source
from optimized.plan import INDUCTOR, Enabled, apply_enabled, make_knobs


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One change judged on a plan: what a certificate certifies but for its times."""

    change: Change
    base: nn.Module  # the model with the plan before it
    candidate: nn.Module  # and with the change, in its tested domain
    region_verdict: Verdict
    model_verdict: Verdict | None
    generated: str | None  # what a compiler made of the region, up to its verdict


def judge_change(
    workload: Workload,
    enabled: Enabled,
    parents: Sequence[Enabled] = (),
    *,
    targets: Sequence[str],
    region_seed: int,
    model_seed: int | None = None,
    layers_per_kind: int | None = None,
) -> Judged:
    """Judge `enabled` on the model with `parents`, as a run does: its region on calls drawn from
    `region_seed` and those of `targets`, then, with a `model_seed` and if that passed, the model's
    layers. UserError where the plan does not fit the model."""
    reference = workload.model
    base = share(reference)
    try:
        for parent in parents:
            apply_enabled(base, parent)
        change = enabled.change()
        candidate = share(base)
        apply_change(candidate, change, enabled.backend, make_knobs(change, enabled))
    except ValueError as error:
        raise UserError(str(error)) from error
    verdict = judge_with_domain(
        reference, candidate, change, enabled.backend, workload, region_seed, targets=targets
    )
    generated = region_source(candidate, change.region)
    if verdict.domain is not None:
        limit(candidate, change, verdict.domain)
    layers = None
    if model_seed is not None and verdict.passed:
        layers = judge_model(reference, candidate, workload, model_seed, per_kind=layers_per_kind)
    return Judged(
        change=change,
        base=base,
        candidate=candidate,
        region_verdict=verdict,
        model_verdict=layers,
        generated=generated,
    )


def certificate(
    workload: Workload,
    enabled: Enabled,
    parents: Sequence[Enabled],
    *,
    region_verdict: Verdict,
    model_verdict: Verdict | None,
    latency: Latency | None,
    environment: Environment,
    timed: dict[str, str],
    layers_per_kind: int | None,
    generated: str | None,
) -> Certificate:
    """The certificate of a change that was kept, with the hashes of the files as they are."""
    change = enabled.change()
    return Certificate(
        schema=SCHEMA,
        change=_applied(enabled, with_domain=False),
        region=change.region,
        parents=tuple(_applied(parent) for parent in parents),
        model=workload.name,
        preset=workload.preset,
        seed=workload.seed,
        region_seed=region_verdict.seed,
        model_seed=None if model_verdict is None else model_verdict.seed,
        layers_per_kind=layers_per_kind,
        timed=timed,
        contract=promise(change),
        region_verdict=region_verdict,
        model_verdict=model_verdict,
        latency=latency,
        environment=environment,
        hashes=hashes_of(enabled.name, workload, generated),
        allows=workload.policy.allows,
    )


def hashes_of(name: str, workload: Workload, generated: str | None) -> Hashes:
    """Of the files of the change called `name` (or a path), of the model and of the judge.

    UserError if there is no such change."""
    try:
        file = FOLDER / "inductor.py" if name.startswith(INDUCTOR) else file_of(name)
    except ValueError as error:
        raise UserError(str(error)) from error
    if not file.is_file():
        raise UserError(f"no change file at {file}; certify it where it lies")
    model_file = getattr(workload.file, "__file__", None)
    assert model_file is not None  # `models.load` imported it from a file
    return hashes(file, Path(model_file), generated)


def promise(change: Change) -> Promise:
    contract = change.contract
    one = isinstance(contract.numerics, str)
    return Promise(
        numerics={EVERY: contract.numerics} if one else dict(contract.numerics),  # type: ignore[arg-type]
        elides=dict(contract.elides),
        adds=dict(contract.adds),
        batch_invariant=contract.batch_invariant,
    )


def enabled_of(applied: Applied) -> Enabled:
    """The line of a plan that a certificate's entry stands for."""
    return Enabled(
        name=applied.name, backend=applied.backend, knobs=applied.knobs, domain=applied.domain
    )


def _applied(enabled: Enabled, *, with_domain: bool = True) -> Applied:
    domain = enabled.domain if with_domain else None
    return Applied(name=enabled.name, backend=enabled.backend, knobs=enabled.knobs, domain=domain)
