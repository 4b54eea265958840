"""Replays against eager mode: bit for bit where they must be, and visible where they should be."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from harness.carried import Carried
from harness.replay import GOLDEN, NATIVE, ROUNDED, Noise, Plan, named_results, replay
from harness.trees import map_tensors, same_bits
from tests.harness.judged import case_of, mini, recorded, regions

# Their products are summed in another order than eager mode's BF16 kernels do.
PRODUCTS = "mm", "bmm", "_grouped_mm"


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("region", list(regions()))
def test_rounded_replay_is_eager_bit_for_bit(region: str) -> None:
    checked = 0
    for case in (c for c in recorded() if c.node in regions()[region]):
        node = mini().model.get_submodule(case.node)
        first = replay(node, case.args, Plan(carry=None, name=True))
        rounded = replay(node, case.args, ROUNDED, first)
        args, _ = case.clones(set())
        for name, expected in named_results(node, node(*args)).items():
            assert same_bits(first.outputs[name], expected), (case.name, name)
        sums = any(p.operator in PRODUCTS for p in first.points)
        for name, expected in first.results.items():
            if sums:  # only the order of accumulation differs, and what follows from that
                assert (rounded.results[name] != expected).float().mean() < 0.01
            else:
                assert same_bits(rounded.results[name], expected), (case.name, name)
            checked += expected.numel()
    assert checked > 1000


def test_one_elided_rounding_shows_in_a_third_of_the_elements() -> None:
    case = case_of("residual_boundary")
    node = mini().model.get_submodule(case.node)
    first = replay(node, case.args, Plan(carry=None, name=True))
    shares = {}
    for point in first.points:
        plan = Plan(elide=frozenset((point.name,)))
        elided = replay(node, case.args, plan, first).outputs["h"]
        shares[point.name] = (elided != first.outputs["h"]).float().mean().item()
    assert 0.2 < shares["h * self.h_scale"] < 0.45
    assert shares["rms_norm(h, pre_weight, self.eps)"] == 0.0  # the other output's rounding
    both = frozenset(("y * self.y_scale", "h * self.h_scale"))
    elided = replay(node, case.args, Plan(elide=both), first).outputs["h"]
    args = case.args
    y, h = args[0].float(), args[1].float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + node.eps) * args[2].float()
    by_hand = (y.bfloat16().float() * node.y_scale + h * node.h_scale).bfloat16()
    assert same_bits(elided, by_hand)


class Writer(nn.Module):
    """Every way to write in place, through views of its argument and of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.store = nn.Buffer(torch.zeros(6, 4, dtype=torch.bfloat16))
        self.count = nn.Buffer(torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor, cache: Tensor, at: Tensor):
        self.count += at.numel()
        row = cache[1]
        row.mul_(x[0]).add_(0.1)
        cache[2:4].copy_(x[:2].float() * 0.3)
        cache.index_copy_(0, at, x[: at.numel()] / 3)
        cache[4][x[4] > 0] = -1.0
        cache.view(-1)[:2].zero_()
        self.store[at] = x[: at.numel()] * 1.1
        self.store.index_add_(0, at, x[: at.numel()])
        return row + self.store.sum(0), self.count.clone(), cache[None, 0].expand(2, -1)


def test_writes_reach_the_carried_cache_and_never_the_callers() -> None:
    module, x, cache, at = Writer(), bf16(6, 4), bf16(6, 4, seed=1), torch.tensor([0, 5])
    before = cache.clone()
    for plan in (NATIVE, ROUNDED):
        run = replay(module, (x, cache, at), plan)
        assert same_bits(cache, before)
        assert not module.store.any() and not module.count.any()
        eager, copy = Writer(), cache.clone()
        expected = eager(x, copy, at)
        assert run.written.keys() == {"cache"}
        assert same_bits(run.written["cache"], copy)
        for mine, theirs in zip(run.outputs.values(), expected, strict=True):
            assert same_bits(mine, theirs)


def scalars(x: Tensor, y: Tensor):
    half, third = torch.tensor(0.5), torch.tensor(1 / 3)
    a = x * 0.1 + y / 3 - 7
    b = torch.where(x > 0, x, third) * half + x * third
    c = (x * torch.tensor(2)).pow(2) + torch.arange(x.shape[-1]) * x
    return a, b, c, x.float() * third, x * y.float(), F.silu(x) * 2, x.sigmoid(), x.sum(-1)


def test_promotion_is_eager_modes() -> None:
    x, y = bf16(5, 33), bf16(5, 33, seed=1)
    expected = scalars(x, y)
    run = replay(scalars, (x, y), ROUNDED)
    for mine, theirs in zip(run.outputs.values(), expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert same_bits(mine, theirs)


def choosing(x: Tensor):
    top = (x * 1.0001).topk(2, dim=-1)
    order = x.float().sort(dim=-1, descending=True, stable=True).indices
    best = x.argmax(-1)
    positive = x > 0
    return top.values, top.indices, order[:, :3], best, torch.where(positive, x, -x)


def test_choices_come_from_the_first_run() -> None:
    x = torch.tensor([[1.0, 1.0078125, 0.5, -3.0]]).bfloat16()
    first = replay(choosing, (x,), NATIVE)
    other = x + torch.tensor([[2.0, 0.0, 0.0, 9.0]]).bfloat16()  # would choose otherwise
    second = replay(choosing, (other,), ROUNDED, first)
    for place in (1, 2, 3):
        name = list(first.outputs)[place]
        assert torch.equal(second.outputs[name], first.outputs[name])
    assert second.outputs["out[0]"].tolist() == [[1.0078125, 3.0]]
    assert second.outputs["out[4]"].tolist() == [[3.0, 1.0078125, 0.5, -6.0]]
    assert [c.kept for c in first.choices] == [2, 3, 1]


def test_attention_runs_the_librarys_kernel_until_a_value_is_wider() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor):
        k = k * 0.5
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(3, 7))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(3, 7).bool()) + y

    args = bf16(2, 4, 3, 16), bf16(2, 4, 7, 16, seed=1), bf16(2, 4, 7, 16, seed=2)
    first = replay(attend, args, NATIVE)
    assert same_bits(first.outputs["out"], attend(*args))
    assert same_bits(replay(attend, args, ROUNDED, first).outputs["out"], first.outputs["out"])
    golden = replay(attend, args, GOLDEN, first).outputs["out"]
    expected = attend(*(a.double() for a in args))
    assert golden.dtype == torch.float64
    assert (golden - expected).norm() < 1e-12 * expected.norm()


def test_golden_replays_grouped_products_in_fp64() -> None:
    case = case_of("experts")
    node = mini().model.get_submodule(case.node)
    first = replay(node, case.args, NATIVE)
    golden = replay(node, case.args, GOLDEN, first).outputs["out"]
    x, weights, experts = case.args
    row = 5
    expected = torch.zeros(x.shape[1], dtype=torch.float64)
    for chosen, weight in zip(experts[row].tolist(), weights[row].double(), strict=True):
        gate, up = (node.gate_up_proj[chosen].double() @ x[row].double()).chunk(2)
        expected += weight * (node.down_proj[chosen].double() @ (F.silu(gate) * up))
    expected *= node.combine.scale
    assert (golden[row] - expected).norm() < 1e-12 * expected.norm()


def test_added_roundings() -> None:
    def mixed(p: Tensor, v: Tensor):
        return torch.softmax(p, -1) @ v

    p, v = torch.randn(9, 20), torch.randn(20, 8)
    first = replay(mixed, (p, v), NATIVE)
    add = frozenset(("attention_probabilities_bf16",))
    rounded = replay(mixed, (p, v), Plan(add=add), first).outputs["out"]
    assert same_bits(rounded, torch.softmax(p, -1).bfloat16().float() @ v)
    tf32 = replay(mixed, (p, v), Plan(add=frozenset(("matmul_operands_tf32",))), first)
    error = (tf32.outputs["out"] - first.outputs["out"]).abs().max().item()
    assert 2.0**-16 < error < 2.0**-8
    by_name = replay(mixed, (p, v), Plan(name=True), first).wides[0].name
    again = replay(mixed, (p, v), Plan(add=frozenset((by_name,))), first).outputs["out"]
    assert same_bits(again, rounded)


def test_noise_moves_few_elements_and_only_where_something_varies() -> None:
    case = case_of("output_gate")
    node = mini().model.get_submodule(case.node)
    first = replay(node, case.args, NATIVE)
    runs = [replay(node, case.args, Plan(noise=Noise(seed=i)), first) for i in range(32)]
    share = sum((r.outputs["out"] != first.outputs["out"]).sum().item() for r in runs)
    share /= 32 * first.outputs["out"].numel()
    assert 0 < share < 1e-2
    assert all(r.varied for r in runs)
    case = case_of("rank_sum")
    node = mini().model.get_submodule(case.node)
    assert not replay(node, case.args, Plan(noise=Noise(seed=0))).varied


def test_conflicting_writes_are_marked_unspecified() -> None:
    def write(cache: Tensor, x: Tensor, slots: Tensor) -> None:
        cache[torch.arange(2)[:, None], slots] = x

    cache, x = torch.zeros(2, 4, 3).bfloat16(), bf16(2, 2, 3)
    slots = torch.tensor([[0, 1], [3, 3]])
    expected = [[False] * 4, [False, False, False, True]]
    run = replay(write, (cache, x, slots), NATIVE)
    assert run.unspecified["cache"].all(-1).tolist() == expected

    def write_columns(cache: Tensor, x: Tensor, slots: Tensor) -> None:
        cache[:, slots] = x

    run = replay(write_columns, (cache, x, torch.tensor([2, 2])), NATIVE)
    assert run.unspecified["cache"].all(-1).tolist() == [[False, False, True, False]] * 2


def test_trees_rebuild_caches() -> None:
    inputs = mini().inputs(mini().target("decode-bs1"))
    copy = map_tensors(torch.clone, inputs)
    assert copy.cache is not inputs.cache and copy.cache.capacity == inputs.cache.capacity
    assert same_bits(copy.cache.layers[0].k, inputs.cache.layers[0].k)
    assert copy.cache.layers[0].k.data_ptr() != inputs.cache.layers[0].k.data_ptr()


def test_fused_multiply_adds_round_once() -> None:
    def turn(a: Tensor, b: Tensor, c: Tensor):
        return a * c - b * 0.3, a + b * c

    a, b, c = torch.randn(3, 50_000)
    first = replay(turn, (a, b, c), Plan(carry=None, name=True))
    assert len(first.fusable) == 3  # either product of the difference, and that of the sum
    third = torch.tensor(0.3).double()
    expected = [
        (a.double() * c.double() - (b * 0.3).double()).float(),
        ((a * c).double() - b.double() * third).float(),
        (a.double() + b.double() * c.double()).float(),
    ]
    for place, point, by_hand in zip((0, 0, 1), first.fusable, expected, strict=True):
        fused = replay(turn, (a, b, c), Plan(fuse=frozenset((point.name,))), first)
        name = f"out[{place}]"
        assert same_bits(fused.outputs[name], by_hand)
        assert not same_bits(fused.outputs[name], first.outputs[name])


def test_a_model_may_use_any_method_of_its_tensors() -> None:
    """`narrow` was once hidden by a property of that name."""
    x = bf16(3, 8)
    run = replay(lambda x: x.narrow(1, 2, 4) * 3, (x,), Plan(carry=None, name=True))
    assert same_bits(run.results["out"], x[:, 2:6] * 3)
    own = set(vars(Carried)) - set(vars(nn.Module))
    assert {n for n in own if not n.startswith("_") and hasattr(Tensor, n)} == set()
