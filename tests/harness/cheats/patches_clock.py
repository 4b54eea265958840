"""Replaces the clocks, so that whatever it does seems to take no time."""

import time

import torch

from optimized.change import Change, Contract, Implementation


def honest(node, x, residual):
    residual = residual + x
    wide = residual.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return residual, scaled.to(x.dtype) * node.weight + node.bias


def build(node, _):
    time.perf_counter = lambda: 0.0
    time.perf_counter_ns = lambda: 0
    torch.cuda.Event.elapsed_time = lambda *_: 0.0

    def forward(x, residual):
        return honest(node, x, residual)

    return forward


CHANGE = Change(
    name="patches-clock",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
