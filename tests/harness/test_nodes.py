"""Which nodes of a region stand for the others."""

import torch
from torch import nn

from harness import nodes
from harness.nodes import behaviour, called_nodes, one_of_each
from harness.workload import Workload


class Node(nn.Module):
    def __init__(self, width: int, plain: bool, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.plain, self.eps = plain, eps


def test_every_behaviour_has_a_node_whatever_the_seed() -> None:
    """Edge cases once came from one node of the whole region: a wrong epsilon of a norm that only
    some of its nodes have survived, because it shows on tiny values alone."""
    model = nn.ModuleList([Node(4, True, 0.1), Node(4, False, 0.1), Node(8, True, 0.2)])
    assert behaviour(model[0]) == behaviour(model[2]) != behaviour(model[1])
    drawn = [one_of_each(model, ["0", "1", "2"], seed) for seed in range(20)]
    assert {frozenset(d) for d in drawn} == {frozenset("01"), frozenset("12")}
    assert one_of_each(model, [], 0) == set()


def test_only_nodes_that_a_step_calls_are_judged() -> None:
    """A projection packed with others is read, not called."""
    workload = Workload.load("beam", "mini", "cpu")
    attention = "model.layers.1.self_attn."
    names = [attention + n for n in ("q_proj", "attend", "o_proj", "k_proj")]
    found = called_nodes(workload.model, names, workload)
    assert found == [attention + n for n in ("attend", "o_proj")]
    assert called_nodes(workload.model, names[:1], workload) == names[:1]  # there is no other


def test_a_models_steps_run_once_to_tell(monkeypatch) -> None:
    workload = Workload.load("beam", "mini", "cpu")
    called_nodes(workload.model, [], workload)
    monkeypatch.setattr(nodes, "steps", None)
    name = "model.layers.1.self_attn.o_proj"
    assert called_nodes(workload.model, [name], workload) == [name]
