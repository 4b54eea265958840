"""Leaves the work to a thread and returns before it is done."""

import threading
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
    def forward(x, residual):
        residual = residual + x
        out = torch.zeros_like(x)

        def work():
            time.sleep(0.05)
            out.copy_(honest(node, x, residual - x)[1])

        threading.Thread(target=work, daemon=True).start()
        return residual, out

    return forward


CHANGE = Change(
    name="returns-early",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
