"""Leaves a process behind that goes on after the verdict."""

import os
import signal
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
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
        os._exit(0)

    def forward(x, residual):
        return honest(node, x, residual)

    return forward


CHANGE = Change(
    name="forks-survivor",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
