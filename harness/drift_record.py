"""What a verdict records of a model's drift, torch-free."""

from dataclasses import dataclass

from harness.record import Record


@dataclass(frozen=True, kw_only=True)
class DriftRow(Record):
    """A free-running model against the reference, over one kind of step."""

    of: str  # "result": the candidate; "reference": the reference itself under noise
    routes: str  # "free", or "forced": every choice taken from the reference's run
    step: str  # "prefill" or "decode"
    # ||x - reference|| / ||reference|| after each layer; None where it was not seen
    layers: tuple[float | None, ...]
    kl_mean: float  # nats, of the reference's next-token distribution from the other
    kl_max: float
    flips: int  # of the most likely token
    tokens: int  # how many distributions were compared


@dataclass(frozen=True, kw_only=True)
class Drift(Record):
    """How far a model drifts from the reference when nothing is corrected: a finding, no gate."""

    layers: tuple[str, ...]
    decodes: int  # decode steps after the prefill, fed the same tokens
    seed: int
    rows: tuple[DriftRow, ...]
    unforced: str | None = None  # why routes could not be forced
