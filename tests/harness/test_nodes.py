"""Which nodes of a region stand for the others."""

import torch
from torch import nn

from harness.nodes import behaviour, one_of_each


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
