"""The least that a step must read and compute, against counts made by hand."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

from harness.bench import ImpossibleTimeError
from harness.errors import SelfTestError
from harness.floors import Floors, least_work
from harness.records import Ceilings
from harness.workload import Workload
from tests.harness.judged import mini

D, F, E = 8, 12, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, D)
        self.up = nn.Linear(D, F, bias=False)
        self.bank = nn.Parameter(torch.zeros(E, D, F))
        self.requires_grad_(False)

    def forward(self, ids: Tensor, chosen: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = x @ x.transpose(-1, -2)  # no weight: a kernel may skip a masked part of it
        y = self.up(scores @ x) + self.up(x)
        return y + torch.bmm(x, self.bank[chosen])


def test_weights_that_are_touched_count_once() -> None:
    ids = torch.tensor([[1, 2, 2], [1, 1, 1]])
    nbytes, flops = least_work(Model(), (ids, torch.tensor([3, 3])))
    assert nbytes == 4 * (2 * D + D * F + D * F)  # two rows, the projection, one of the bank
    assert flops == 2 * (2 * 6 * D * F)


def test_no_floor_is_above_what_a_model_holds() -> None:
    model = mini().model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    found = {}
    for name in ("decode-bs1", "prefill-8x2048"):
        inputs = mini().inputs(mini().target(name))
        found[name] = least_work(model, inputs.args)
        assert weights / 3 < found[name][0] <= weights
    # Each weight that a token meets is one multiply-add; gathered experts are not counted.
    parameters = sum(p.numel() for p in model.parameters())
    for name, (_, flops) in found.items():
        tokens = mini().target(name).batch * mini().target(name).tokens
        assert 2 * tokens * parameters / 4 < flops < 2 * tokens * parameters


class Large(Workload):
    """A workload whose weights no cache holds, whatever their size."""

    @property
    def toy(self) -> bool:
        return False


def test_a_step_below_its_floor_is_an_error_unless_it_is_a_toys() -> None:
    large = Large(**{f.name: getattr(mini(), f.name) for f in fields(Workload)})
    target = mini().target("decode-bs1")
    inputs = mini().inputs(target)
    Floors(mini()).require(target, inputs, "a toy's decode", 1e-3)
    floors = Floors(large)
    floors.ceilings = Ceilings(
        device_name="a card",
        read_gb_per_s=1000.0,
        copy_gb_per_s=900.0,
        bf16_tflop_per_s=100.0,
        fp32_tflop_per_s=10.0,
        launch_us=1.0,
    )
    nbytes, _ = least_work(large.model, inputs.args)
    floor_us = nbytes / 1e6
    floors.require(target, inputs, "decode", 1.01 * floor_us)
    with pytest.raises(ImpossibleTimeError, match="decode took .* need .* on a card"):
        floors.require(target, inputs, "decode", 0.99 * floor_us)
    assert issubclass(ImpossibleTimeError, SelfTestError)  # one line, and exit code 4
