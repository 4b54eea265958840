"""The two controls compute what the reference computes, and the slowed one takes its time."""

import time

import torch

from agents.controls import identity, slowed, waiter
from optimized.change import apply_change, nodes, share
from reference import beam

REGION = beam.SwiGLU.region


def test_identity_changes_no_bit():
    model = beam.build(beam.configs["mini"], "cpu", 0)
    candidate = share(model)
    replaced = apply_change(candidate, identity(REGION, "cpu"), "torch")
    assert replaced == nodes(model, REGION)
    gate, up = torch.randn(2, 3, 64).bfloat16()
    node = model.get_submodule(replaced[0])
    assert torch.equal(candidate.get_submodule(replaced[0])(gate, up), node(gate, up))


def test_slowed_computes_the_same_and_waits_in_every_node():
    model = beam.build(beam.configs["mini"], "cpu", 0)
    candidate = share(model)
    step_us, count = 1e6, len(nodes(model, REGION))
    apply_change(candidate, slowed(REGION, torch.device("cpu"), step_us, count), "torch")
    gate, up = torch.randn(2, 3, 64).bfloat16()
    start = time.perf_counter()
    outputs = [candidate.get_submodule(n)(gate, up) for n in nodes(model, REGION)]
    elapsed_us = (time.perf_counter() - start) * 1e6
    assert 0.03 * step_us <= elapsed_us < 0.1 * step_us
    assert torch.equal(outputs[0], model.get_submodule(nodes(model, REGION)[0])(gate, up))


def test_waiter_waits_at_least_as_long_as_told():
    wait = waiter(torch.device("cpu"), 2000.0)
    start = time.perf_counter_ns()
    wait()
    assert time.perf_counter_ns() - start >= 2_000_000
