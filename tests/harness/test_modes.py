"""PyTorch's causal attention bias can be made, and serves, under every dispatch mode there is."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right

from harness.bench_jobs import Moved
from harness.conflicts import Conflicts
from harness.floors import Least
from reference.attend import PrefillAttend
from traces.capture import capture


def calls() -> tuple[Tensor, Tensor, Tensor, None]:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 3, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16)
    q, k, v = (torch.randn(s, generator=draw).bfloat16() for s in shapes)
    return q, k, v, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = PrefillAttend(0.25)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return self.attend(q, k, v, mask)


@pytest.mark.parametrize(
    "mode", [lambda: Moved([]), lambda: Conflicts({}), lambda: Least(nn.Linear(1, 1))]
)
def test_attention_under_a_mode_is_attention(mode) -> None:
    model, args = Model(), calls()
    expected = model(*args)
    with mode(), mode():
        assert torch.equal(model(*args), expected)
    assert "__new__" not in CausalBias.__dict__
    assert causal_lower_right(3, 7).seq_len_kv == 7


def test_a_step_with_causal_attention_is_traced() -> None:
    trace = capture(Model(), calls())
    assert trace.summary()["attributed_share"] == 1.0
    assert "attend" in {trace.module(kernel) for kernel in trace.kernels}
