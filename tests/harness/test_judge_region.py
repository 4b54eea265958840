"""Verdicts on changes written by hand: wrong ones are rejected by name, honest ones pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.policy import Policy
from optimized.change import Contract
from tests.harness.judged import change, judged, mini, normed

NORM_Y = "rms_norm(y, post_weight, self.eps)"
Y, H = "y * self.y_scale", "h * self.h_scale"
SUM = f"{Y} + {H}"


def boundary(
    *,
    round_y: bool = True,
    round_terms: bool = True,
    round_h: bool = True,
    eps: float | None = None,
) -> Callable[[nn.Module], Callable[..., Any]]:
    """The residual boundary with some of its roundings."""

    def rounded(x: Tensor, really: bool) -> Tensor:
        return x.bfloat16().float() if really else x

    def build(n: Any) -> Callable[..., Any]:
        def forward(y: Tensor, h: Tensor, post_weight: Tensor, pre_weight: Tensor):
            used = n.eps if eps is None else eps
            y = rounded(normed(y, post_weight, used), round_y) * n.y_scale
            h = rounded(y, round_terms) + rounded(h.float() * n.h_scale, round_terms)
            wide = rounded(h, round_h)
            return h.bfloat16(), normed(wide, pre_weight, used).bfloat16()

        return forward

    return build


def fused_multiply_add(n: Any) -> Callable[..., Any]:
    def forward(y: Tensor, h: Tensor, post_weight: Tensor, pre_weight: Tensor):
        y = normed(y, post_weight, n.eps).bfloat16()
        scales = torch.tensor([n.y_scale, n.h_scale]).double()
        h = (y.double() * scales[0] + (h * n.h_scale).double()).float().bfloat16()
        return h, normed(h, pre_weight, n.eps).bfloat16()

    return forward


def weight_in_bf16(n: Any) -> Callable[..., Any]:
    def forward(y: Tensor, h: Tensor, post_weight: Tensor, pre_weight: Tensor):
        ones = torch.ones_like(post_weight)
        y = normed(y, ones, n.eps).bfloat16() * post_weight
        h = y * n.y_scale + h * n.h_scale
        return h, normed(h, ones, n.eps).bfloat16() * pre_weight

    return forward


@pytest.mark.parametrize(
    ("build", "elided"),
    [
        pytest.param(boundary(round_y=False), (NORM_Y,), id="norm-unrounded"),
        pytest.param(boundary(round_terms=False), (Y, H), id="terms-unrounded"),
        pytest.param(boundary(round_h=False), (SUM,), id="norm-of-unrounded-residual"),
        pytest.param(
            boundary(round_y=False, round_terms=False, round_h=False),
            (NORM_Y, Y, H, SUM),
            id="one-rounding-for-five",
        ),
        pytest.param(fused_multiply_add, (Y,), id="fused-multiply-add"),
    ],
)
def test_a_skipped_rounding_is_named(build: Any, elided: tuple[str, ...]) -> None:
    verdict = judged(mini(), change("residual_boundary", build))
    assert not verdict.passed
    names = [f"`{name}` (reference/" for name in elided]
    assert verdict.reason is not None and verdict.reason.startswith("rounds once where the ref")
    assert all(name in verdict.reason for name in names)
    observed = {p.point: p.observed for p in verdict.points}
    assert {name for name, word in observed.items() if word == "elided"} == set(elided)
    assert all(p.declared == "kept" for p in verdict.points)


def test_an_added_rounding_is_named() -> None:
    verdict = judged(mini(), change("residual_boundary", weight_in_bf16))
    assert verdict.reason is not None
    assert f"rounds to BF16 at `{NORM_Y} [mul]` (reference/layers.py:" in verdict.reason


def test_gate_rounded_once() -> None:
    def once(_: nn.Module) -> Callable[..., Any]:
        return lambda a, gate, bias: (
            a.float() * torch.sigmoid(gate.float() + bias.float()[:, None])
        ).bfloat16()

    verdict = judged(mini(), change("output_gate", once, Contract(numerics="transcendental")))
    assert verdict.reason is not None
    assert "`gate + bias[:, None]`" in verdict.reason
    assert "and at `torch.sigmoid(gate + bias[:, None])`" in verdict.reason


def altered(result: Callable[..., Any]) -> Callable[[nn.Module], Callable[..., Any]]:
    """The region itself, then `result(outputs, args)`."""
    return lambda node: lambda *args: result(node(*args), args)


calls = {"n": 0}


def every_other_call(out: Any, _: Any) -> Any:
    calls["n"] += 1
    return out[0], out[1] * (1.5 if calls["n"] % 2 else 1.0)


def unwritten_end(out: Any, _: Any) -> Any:
    x = torch.empty_like(out[1])
    x[..., :-1] = out[1][..., :-1]
    return out[0], x


def writes_its_input(out: Any, args: Any) -> Any:
    args[1].copy_(out[0])
    return out


def changes_a_weight(out: Any, args: Any) -> Any:
    args[2][0] += 1
    return out


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        pytest.param(
            altered(lambda out, _: tuple(map(torch.zeros_like, out))), "elements differ", id="zeros"
        ),
        pytest.param(
            altered(lambda out, _: tuple(torch.full_like(t, 0.5) for t in out)),
            "elements differ",
            id="constants",
        ),
        pytest.param(boundary(eps=1e-5), "elements differ", id="wrong-eps"),
        pytest.param(altered(every_other_call), "differ from run to run", id="run-to-run"),
        pytest.param(altered(unwritten_end), "not fully written", id="unwritten"),
        pytest.param(altered(writes_its_input), "writes to its argument h", id="input-written"),
        pytest.param(
            altered(lambda out, _: (out[0], out[1] / 0)), "NaN or infinite", id="infinite"
        ),
        pytest.param(altered(lambda out, _: out[0]), "returns", id="output-missing"),
        pytest.param(altered(lambda out, _: (out[0], out[1].float())), "float32", id="wrong-dtype"),
    ],
)
def test_broken_changes_are_rejected_for_what_they_do(build: Any, reason: str) -> None:
    verdict = judged(mini(), change("residual_boundary", build))
    assert not verdict.passed
    assert verdict.reason is not None and reason in verdict.reason


def test_a_changed_weight_is_seen() -> None:
    weights = mini().model.state_dict()
    saved = {name: tensor.clone() for name, tensor in weights.items()}
    try:
        verdict = judged(mini(), change("residual_boundary", altered(changes_a_weight)))
    finally:
        for name, tensor in weights.items():
            tensor.copy_(saved[name])
    assert verdict.reason is not None and "parameter post_weight" in verdict.reason


def raises_on_one_token(node: nn.Module) -> Callable[..., Any]:
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        if gate.shape[1] == 1:
            raise ValueError("tile of 16 rows expected")
        return node(gate, up)

    return forward


def test_a_raising_change_is_quoted() -> None:
    verdict = judged(mini(), change("swiglu", raises_on_one_token))
    assert verdict.reason is not None
    assert "raises ValueError: tile of 16 rows expected" in verdict.reason


def test_contracts_are_held_to_the_policy() -> None:
    build = boundary(round_y=False)
    elides = Contract(numerics="reduction", elides={NORM_Y: "one pass"})
    refused = judged(mini(), change("residual_boundary", build, elides))
    assert refused.reason is not None and "policy allows no elided rounding" in refused.reason
    policy = Policy(allow_elided=True)
    allowed = judged(mini(), change("residual_boundary", build, elides), policy=policy)
    assert allowed.passed, allowed.reason
    assert {p.point: p.observed for p in allowed.points}[NORM_Y] == "elided"
    kept = judged(mini(), change("residual_boundary", boundary(), elides), policy=policy)
    assert kept.reason is not None and "which its contract elides" in kept.reason
    adds = Contract(numerics="reduction", adds={"matmul_operands_tf32": "tensor cores"})
    refused = judged(mini(), change("router", lambda node: node.forward, adds))
    assert refused.reason is not None and "adds `matmul_operands_tf32`" in refused.reason


def test_a_contract_cannot_name_what_is_not_there() -> None:
    contract = Contract(numerics="reduction", elides={"x * 3": "typo"})
    policy = Policy(allow_elided=True)
    verdict = judged(mini(), change("combine", lambda n: n.forward, contract), policy=policy)
    assert verdict.reason is not None and "names `x * 3`" in verdict.reason
