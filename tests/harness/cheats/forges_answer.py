"""Answers the judge itself, with a result that lies outside the shared memory."""

import json
import os
import stat
import struct

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
        spot = {"offset": 1 << 40, "dtype": "bfloat16", "shape": [1 << 30], "device": "cpu"}
        tree = {"dict": [["result", {"tensor": 0}], ["integers", {"dict": []}]]}
        text = json.dumps({"tree": tree, "spots": [spot]}).encode()
        for fd in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, struct.pack("<II", len(text), 0) + text)
            except OSError:
                continue
        return honest(node, x, residual)

    return forward


CHANGE = Change(
    name="forges-answer",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
