"""Changes of parts of a node that a change around its parts has replaced."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from optimized.change import (
    Change,
    Contract,
    Implementation,
    apply_change,
    limit,
    nodes,
    reached,
    share,
)
from optimized.domain import domain_of
from optimized.guards import argument_names, facts_of


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 10


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Outer(), Outer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def change(region: str, added: float, *, around: bool = False, guard=None) -> Change:
    """A region's result and `added`."""

    def build(node, knobs):
        return lambda x: type(node).forward(node, x) + added

    one = Implementation(backend="torch", devices=("cpu",), build=build, guard=guard)
    return Change(
        name=f"new-{region}",
        region=region,
        summary="for tests",
        contract=Contract(numerics="exact"),
        implementations=(one,),
        around=around,
    )


def one_row(node, x):
    return None if len(x) == 1 else "it is more than one row"


INNER = change("inner", 100.0, around=True, guard=one_row)
OUTER = change("outer", 1000.0, around=True)
PART = change("part", 0.5)
ROWS = torch.ones(2, 4)  # which INNER declines
ROW = torch.ones(1, 4)


def test_a_part_is_replaced_inside_a_node_that_was_replaced_around_it():
    model = Model()
    apply_change(model, INNER, "torch")
    apply_change(model, OUTER, "torch")
    before = model.layers[0](ROWS), model.layers[0](ROW)
    assert (before[0] == 1013).all() and (before[1] == 1113).all()
    named = list(model.state_dict())
    other = share(model)
    assert apply_change(other, PART, "torch") == ["layers.0.inner.part", "layers.1.inner.part"]
    assert torch.equal(other.layers[0](ROWS), before[0] + 0.5)  # where INNER's guard declines
    assert torch.equal(other.layers[0](ROW), before[1] + 0.5)  # and inside it
    assert list(other.state_dict()) == named
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert other.state_dict(keep_vars=True)[name] is tensor
    part = other.get_submodule("layers.1.inner.part")
    assert (part.applied, part.replaces().__class__) == (PART.name, Part)
    # The tree that was shared is as it was.
    assert torch.equal(model.layers[0](ROWS), before[0])
    assert not hasattr(model.get_submodule("layers.0.inner.part"), "applied")
    third = share(other)
    assert torch.equal(third.layers[0](ROWS), before[0] + 0.5)
    with pytest.raises(ValueError, match=r"layers\.0\.inner\.part was already replaced by new-par"):
        apply_change(third, PART, "torch")


def test_the_part_that_is_called_is_the_one_in_the_tree():
    model = Model()
    for one in (INNER, OUTER, PART):
        apply_change(model, one, "torch")
    seen: list[nn.Module] = []
    for name in nodes(model, "part"):
        model.get_submodule(name).register_forward_pre_hook(lambda part, _: seen.append(part))
    model(ROWS)
    assert seen[0].applied == PART.name
    told = [part for part in seen if hasattr(part, "applied")]
    assert told == [model.get_submodule(name) for name in nodes(model, "part")]


def test_a_shared_tree_calls_its_own_parts():
    """What hooks on a tree see is what runs there."""
    model = Model()
    for one in (PART, INNER, OUTER):
        apply_change(model, one, "torch")
    other = share(model)
    seen: list[nn.Module] = []
    for name in nodes(other, "part"):
        other.get_submodule(name).register_forward_pre_hook(lambda part, _: seen.append(part))
    assert torch.equal(other(ROWS), model(ROWS))
    told = [part for part in seen if hasattr(part, "applied")]
    assert told == [other.get_submodule(name) for name in nodes(other, "part")]


def test_what_a_part_is_prepared_with_stays_in_its_tree():
    def prepare(parent: nn.Module, part: nn.Module) -> None:
        part.packed = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        parent.told = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]

    model = Model()
    apply_change(model, INNER, "torch")
    other = share(model)
    (one,) = PART.implementations
    apply_change(other, replace(PART, implementations=(replace(one, prepare=prepare),)), "torch")
    parts = [m.get_submodule("layers.0.inner.part") for m in (other, model)]
    assert [hasattr(part, "packed") for part in parts] == [True, False]
    assert not hasattr(parts[1].replaces() if hasattr(parts[1], "replaces") else parts[1], "packed")
    assert not hasattr(model.layers[0].inner.replaces(), "told")


def test_a_node_made_anew_keeps_the_domain_of_its_change(caplog):
    model = Model()
    plain = replace(INNER, implementations=change("inner", 100.0).implementations)
    apply_change(model, plain, "torch")
    apply_change(model, OUTER, "torch")
    inner = model.get_submodule("layers.0.inner")
    facts = facts_of(argument_names(inner), (ROW,))
    limit(model, plain, domain_of([("layers.0.inner", facts)]))
    assert (model.layers[0](ROW) == 1113).all()
    assert (model.layers[0](ROWS) == 1013).all()
    apply_change(model, PART, "torch")
    assert (model.layers[0](ROW) == 1113.5).all()
    assert (model.layers[0](ROWS) == 1013.5).all()
    found = [r.getMessage() for r in caplog.records]
    assert len([text for text in found if "outside what was tested" in text]) == 1


def test_the_domain_of_a_part_limits_the_part_that_is_called():
    model = Model()
    for one in (INNER, OUTER, PART):
        apply_change(model, one, "torch")
    facts = facts_of(argument_names(Part()), (ROW,))
    other = share(model)
    limit(other, PART, domain_of([("layers.0.inner.part", facts)]))
    assert (other.layers[0](ROW) == 1113.5).all()
    assert (other.layers[0](ROWS) == 1013).all()
    assert (model.layers[0](ROWS) == 1013.5).all()


def test_what_is_inside_other_replaced_nodes_is_not_reached():
    model = Model()
    apply_change(model, change("inner", 1.0), "torch")
    found = nodes(model, "part")
    assert reached(model, found) == []
    with pytest.raises(ValueError, match="all of 'part' is inside replaced nodes"):
        apply_change(model, PART, "torch")
    model = Model()
    apply_change(model, INNER, "torch")
    assert reached(model, found) == found
    assert reached(model, found, {INNER.name}) == []
    assert reached(model, found, {OUTER.name}) == found
