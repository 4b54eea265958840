"""An honest twin: a thread that it waits for, and a file in its own folder."""

import tempfile
import threading

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
        done = []
        worker = threading.Thread(target=lambda: done.append(honest(node, x, residual)))
        worker.start()
        worker.join()
        with tempfile.TemporaryFile() as file:
            file.write(b"scratch")
        return done[0]

    return forward


CHANGE = Change(
    name="honest-threads",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
