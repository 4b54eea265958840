"""Applying changes: which nodes, what stays shared, conflicts, guards, knobs by shape."""

import copy
import logging
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from optimized.change import (
    Change,
    Contract,
    Implementation,
    apply_change,
    nodes,
    region_of,
    shape_key,
    share,
)


class Doubled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.by


class HTTPServer2Go(nn.Module):
    region = "named"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Doubled(2.0)
        self.layers = nn.ModuleList([Doubled(3.0), HTTPServer2Go()])
        self.counter = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layers[0]
        return layer(self.first(x))


@dataclass(frozen=True, kw_only=True)
class Offset:
    offset: float


def change(**given) -> Change:
    """Replaces `doubled` by itself plus an offset of 100, or that of the knobs."""

    def build(node, knobs):
        offset = 100.0 if knobs is None else knobs.offset
        return lambda x: type(node).forward(node, x) + offset

    options = {"backend": "torch", "devices": ("cpu",), "build": build, **given}
    return Change(
        name="offset",
        region="doubled",
        summary="for tests",
        contract=Contract(numerics="exact"),
        implementations=(Implementation(**options),),
    )


def test_regions_are_named_by_class_or_attribute():
    assert region_of(Doubled(1.0)) == "doubled"
    assert region_of(HTTPServer2Go()) == "named"
    assert region_of(nn.LayerNorm(2)) == "layer_norm"
    assert region_of(nn.MultiheadAttention(4, 1)) == "multihead_attention"
    assert nodes(Model(), "doubled") == ["first", "layers.0"]
    assert nodes(Model(), "nothing") == []


def test_every_node_is_replaced_in_place():
    model = Model()
    x = torch.ones(4)
    assert apply_change(model, change(), "torch") == ["first", "layers.0"]
    assert torch.equal(model(x), torch.full((4,), (2.0 + 100) * 3 + 100))
    assert list(model.state_dict()) == list(Model().state_dict())


def test_a_shared_tree_has_the_same_tensors_and_its_own_modules():
    model = Model()
    other = share(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert other.state_dict(keep_vars=True)[name] is tensor
    apply_change(other, change(), "torch")
    x = torch.ones(4)
    assert torch.equal(model(x), torch.full((4,), 6.0))
    model.first.weight.fill_(5.0)
    assert torch.equal(other.first(x), torch.full((4,), 110.0))


def test_a_shared_tree_of_a_changed_one_stays_changed():
    model = Model()
    apply_change(model, change(), "torch")
    other = share(model)
    x = torch.ones(4)
    assert torch.equal(other(x), model(x))
    with pytest.raises(ValueError, match="already replaced by offset"):
        apply_change(other, change(), "torch")


def test_conflicts_and_absent_things_are_errors():
    model = Model()
    with pytest.raises(ValueError, match="no backend 'triton'; it has: torch"):
        apply_change(model, change(), "triton")
    elsewhere = Change(**{**vars(change()), "region": "nowhere"})
    with pytest.raises(ValueError, match="the model has no region 'nowhere'"):
        apply_change(model, elsewhere, "torch")
    apply_change(model, change(), "torch")
    with pytest.raises(ValueError, match="first was already replaced by offset"):
        apply_change(model, change(), "torch")


def test_outside_the_guard_the_reference_runs_and_says_so_once(caplog):
    def guard(node, x):
        return None if x.ndim == 1 else f"x has {x.ndim} dimensions"

    model = Model()
    apply_change(model, change(guard=guard), "torch")
    inside, outside = torch.ones(4), torch.ones(2, 4)
    with caplog.at_level(logging.WARNING, logger="optimized.change"):
        for _ in range(3):
            assert torch.equal(model.first(inside), torch.full((4,), 102.0))
            assert torch.equal(model.first(outside), torch.full((2, 4), 2.0))
            assert torch.equal(model.layers[0](outside), torch.full((2, 4), 3.0))  # the same change
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["offset: the reference runs instead: x has 2 dimensions"]


def test_prepare_sees_the_parent_and_the_node():
    seen = []
    model = Model()
    before = copy.deepcopy(model.state_dict())

    def prepare(parent, node):
        seen.append((parent, node))
        node.weight.data = node.weight.data.clone()

    first, layers = model.first, model.layers
    apply_change(model, change(prepare=prepare), "torch")
    assert seen[0] == (model, first)
    assert seen[1][0] is layers
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_a_prepare_that_renames_parameters_is_refused():
    def prepare(parent, node):
        node.more = nn.Parameter(torch.zeros(1))

    with pytest.raises(ValueError, match="altered the state dict's layout"):
        apply_change(Model(), change(prepare=prepare), "torch")


def test_knobs_belong_to_shapes():
    model = Model()
    tuned = {shape_key({"T": 2, "D": 4}): Offset(offset=1.0)}
    assert list(tuned) == ["D=4,T=2"]

    def shape(node, x):
        return {"T": x.shape[0], "D": x.shape[1]}

    apply_change(model, change(shape=shape, knobs=Offset), "torch", tuned)
    assert torch.equal(model.first(torch.ones(2, 4)), torch.full((2, 4), 3.0))
    assert torch.equal(model.first(torch.ones(3, 4)), torch.full((3, 4), 102.0))
    with pytest.raises(ValueError, match="no shape to tune by"):
        apply_change(Model(), change(), "torch", tuned)
