"""The noise of products: what belongs to it, and what a kernel must not do all the same."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.noise import (
    CHAIN,
    Perturbation,
    _copies,
    _in_terms,
    bf16_terms,
    chained_product,
    is_bf16,
    tensor_core_product,
)
from harness.policy import Policy
from harness.region import RegionCases
from harness.replay import Noise
from optimized.change import Contract
from tests.harness.judged import change, judged, toy

EPS = 2.0**-24  # half a unit in the last place of FP32, at 1


def draw(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


@pytest.mark.parametrize(
    "x",
    [
        draw(64, 65),
        draw(64, 65).exp() * 1e-30,
        torch.tensor([1.0, -0.0, 3.0e38, 1 + 2.0**-23, 2.0**-140, 1e-45]),
    ],
    ids=["normal", "small", "edges"],
)
def test_three_bf16_terms_sum_to_an_fp32_value(x: Tensor) -> None:
    terms = bf16_terms(x)
    assert terms is not None
    assert all(term.dtype == torch.bfloat16 for term in terms)
    total = sum(term.double() for term in reversed(terms))
    missing = (total - x.double()).abs()
    assert missing.max() < torch.finfo(torch.float32).tiny
    assert not missing[x.abs() > 1e-20].any()
    assert not is_bf16(x)
    assert is_bf16(terms[0].float())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3.4e38])
def test_what_bf16_cannot_hold_has_no_terms(value: float) -> None:
    assert bf16_terms(torch.tensor([1.0, value])) is None


def test_a_product_of_two_fp32_operands_stays_in_fp32() -> None:
    """Neither may be rounded to BF16 to get it onto tensor cores."""
    a, b = draw(8, 32), draw(32, 8, seed=1)
    assert torch.equal(tensor_core_product(a, b), a @ b)


def test_on_a_cpu_products_are_only_reordered() -> None:
    a, b = draw(16, 256), draw(256, 16, seed=1).bfloat16().float()
    exact = a.double() @ b.double()
    for seed in range(16):
        perturbation = Perturbation(Noise(seed=seed))
        error = (perturbation.product(a, b) - exact).abs()
        assert error.max() < 256 * EPS * (a.abs() @ b.abs()).max()
        assert perturbation.tensor_cores is None


def emulated(a: Tensor, b: Tensor) -> Tensor:
    """BF16 a @ b as tensor cores do it: 16 exact products at a time are aligned to the largest of
    them and of the sum so far, cut off below 25 bits, added, and cut to FP32."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in range(0, a.shape[1], 16):
        terms = a[:, k : k + 16, None].double() * b[None, k : k + 16].double()
        top = torch.maximum(terms.abs().amax(1), total.abs()).clamp_min(2.0**-126)
        unit = torch.exp2(torch.floor(torch.log2(top)) - 24)
        cut = ((terms / unit[:, None]).trunc().sum(1) + (total / unit).trunc()) * unit
        near = cut.float()
        total = torch.where(near.abs() > cut.abs(), near.nextafter(torch.zeros(())), near).double()
    return total.float()


def test_orders_of_fp32_sums_do_not_show_what_tensor_cores_do() -> None:
    """Why they are drawn on CUDA: over a long sum they change more results than any order does,
    and still far fewer than a rounded operand would."""
    p, v = draw(48, 4096).softmax(-1), draw(4096, 64, seed=1).bfloat16()
    plain = p @ v.float()
    terms = bf16_terms(p)
    assert terms is not None
    found = sum(emulated(term, v) for term in terms)

    def share(x: Any) -> float:
        return float((x.bfloat16() != plain.bfloat16()).float().mean())

    orders = [Perturbation(Noise(seed=seed)).product(p, v.float()) for seed in range(16)]
    assert share(found) > max(map(share, orders)) > 0
    assert share(p.bfloat16().float() @ v.float()) > 4 * share(found)


def test_one_long_sum_on_tensor_cores_is_noisier_than_a_split_one() -> None:
    """Why replays have a kind of their own for it: the terms of an FP32 operand, one after the
    other, are cut off three times as often; a sum in eight parts is cut off on small sums."""
    p, v = draw(48, 2048).softmax(-1), draw(2048, 64, seed=1).bfloat16()
    exact = p.double() @ v.double()
    terms = _in_terms(p, v.float())
    assert terms is not None and [x.shape for x, _ in terms] == [(48, 2048)] * 3
    joined = torch.cat([x for x, _ in terms], -1), torch.cat([y for _, y in terms])

    def error(x: Any) -> float:
        return float((x - exact).norm() / exact.norm())

    assert error(joined[0].double() @ joined[1].double()) < EPS
    chain = error(emulated(*joined))
    apart = error(sum(emulated(x, y) for x, y in terms))
    assert 3 < chain / apart < 6
    x = draw(48, 2048, seed=2).bfloat16()
    exact = x.double() @ v.double()
    pieces = zip(x.tensor_split(8, -1), v.tensor_split(8), strict=True)
    assert error(emulated(x, v)) > 2 * error(sum(emulated(*piece) for piece in pieces))


@pytest.mark.parametrize(
    ("rows", "columns", "copies"),
    [(3, 5, (171, 1)), (5, 3, (1, 171)), (260, 5, (1, 52)), (9, 512, (1, 1)), (1, 300, (256, 1))],
)
def test_a_product_is_widened_until_a_card_is_full(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, copies: tuple[int, int]
) -> None:
    """Four tiles: of the smaller operand so many copies."""
    card = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    a, b = draw(rows, 64).bfloat16(), draw(64, columns, seed=1).bfloat16()
    assert _copies(a, b) == copies
    assert torch.equal(chained_product(a, b), a @ b)


def test_what_fills_a_card_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a model's head are as large as what is free beside it."""
    card = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch, "cat", None)
    a, b = draw(9, 64).bfloat16(), draw(64, 128, seed=1).bfloat16()
    assert torch.equal(chained_product(a, b), a @ b)


def test_only_sums_that_tensor_cores_may_compute_are_chained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FP64 sums stay FP64, BF16 values or not; no result has no terms; a tensor of a GPU model
    that is on the CPU is only reordered."""
    card = SimpleNamespace(multi_processor_count=1)
    a, b = draw(4, 32).bfloat16().double(), draw(32, 8, seed=1).bfloat16().double()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: card)
        assert torch.equal(chained_product(a, b), a @ b)
    assert _in_terms(a.float()[:0], b.float()) is None
    a, b = a.round().bfloat16(), b.round().bfloat16()  # of whole numbers any order gives the sum
    found = Perturbation(Noise(seed=0, kind=CHAIN)).product(a, b)
    assert found.any() and torch.equal(found, a @ b)


def test_every_kind_is_replayed_in_every_typical_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that some cases lack would get its rate from the others."""
    for module in "region", "examine":
        monkeypatch.setattr(f"harness.{module}.kinds", lambda _: 5)
    given = Contract(numerics="reduction"), toy(), 1, Policy(permutations=1)
    cases = RegionCases.prepare(toy().model, "add_norm", *given, keep=False)
    assert cases.judge(toy().model).passed
    noise = [n for output in cases.measured.noise.values() for n in output.cases.values()]
    typical = [set(n.kinds) for n in noise if n.typical and n.size]
    assert len(typical) > 5 and all(found == {0, 1, 2, 3, 4} for found in typical)


@pytest.mark.gpu
class TestGpu:
    @pytest.mark.parametrize("shape", [(), (3,)], ids=["mm", "bmm"])
    @pytest.mark.parametrize("narrow", ["a", "b", "both"])
    def test_one_long_sum_rounds_nothing(self, shape: tuple[int, ...], narrow: str) -> None:
        """Further from FP64 than the library's own, and closer by far than with an operand rounded
        to BF16; of two BF16 operands the result is BF16, too."""
        a, b = draw(*shape, 6, 4096, device="cuda"), draw(*shape, 4096, 48, seed=1, device="cuda")
        a = a if narrow == "b" else a.bfloat16().float()
        b = b if narrow == "a" else b.bfloat16().float()
        exact = a.double() @ b.double()
        if narrow == "both":
            found = chained_product(a.bfloat16(), b.bfloat16())
            assert found.dtype == torch.bfloat16
            assert float((found != exact.bfloat16()).float().mean()) < 0.05
            return
        error = float((chained_product(a, b) - exact).norm() / exact.norm())
        rounded = a.bfloat16().double() @ b.bfloat16().double()
        assert error * 2**5 < float((rounded - exact).norm() / exact.norm())
        assert error > float(((a @ b) - exact).norm() / exact.norm())

    @pytest.mark.parametrize("shape", [(), (3,)], ids=["mm", "bmm"])
    @pytest.mark.parametrize("narrow", ["a", "b"])
    def test_tensor_cores_round_nothing(self, shape: tuple[int, ...], narrow: str) -> None:
        """Closer to FP64 by far than with either operand rounded to BF16, or to TF32."""
        a, b = draw(*shape, 48, 4096, device="cuda"), draw(*shape, 4096, 48, seed=1, device="cuda")
        a, b = (a.bfloat16().float(), b) if narrow == "a" else (a, b.bfloat16().float())
        exact = a.double() @ b.double()
        found = tensor_core_product(a, b)
        assert not torch.equal(found, a @ b)
        error = float((found - exact).norm() / exact.norm())
        rounded = a.bfloat16().double() @ b.bfloat16().double()
        assert error * 2**6 < float((rounded - exact).norm() / exact.norm())

    def test_most_replays_that_do_not_sum_in_a_chain_use_them(self) -> None:
        a, b = draw(16, 256, device="cuda"), draw(256, 16, seed=1, device="cuda")
        b = b.bfloat16().float()
        used = 0
        for seed in range(64):
            perturbation = Perturbation(Noise(seed=seed, kind=seed % CHAIN))
            perturbation.product(a, b)
            used += bool(perturbation.tensor_cores)
        assert 32 < used < 64

    def test_attention_on_tensor_cores_is_honest_and_rounded_probabilities_are_not(self) -> None:
        from harness.judge import judge_region
        from harness.workload import Workload
        from optimized.change import apply_change, share
        from optimized.decode_attention import CHANGE

        work = Workload.load("beam", "mini", "cuda")
        for seed in range(4):
            candidate = share(work.model)
            apply_change(candidate, CHANGE, "triton")
            verdict = judge_region(work.model, candidate, CHANGE, "triton", work, seed)
            assert verdict.passed, verdict.reason
        rounds = change(CHANGE.region, rounded_probabilities)
        assert not judged(work, rounds).passed


def rounded_probabilities(node: Any) -> Callable[..., Tensor]:
    """What fast kernels do: P in BF16."""

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None or q.shape[1] > 1:
            return node.forward(q, k, v, mask)
        group = q.shape[2] // k.shape[2]
        keys, values = (y.float().repeat_interleave(group, dim=2) for y in (k, v))
        scores = torch.einsum("bthd,bshd->bths", q.float(), keys) * node.scale
        scores = scores.masked_fill(~mask[:, :, None], torch.finfo(torch.float32).min)
        weights = torch.softmax(scores, dim=-1).bfloat16().float()
        return torch.einsum("bths,bshd->bthd", weights, values).to(q.dtype)

    return forward
