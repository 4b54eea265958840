"""Writes behind the end of what it was given."""

import ctypes

import torch

from optimized.change import Change, Contract, Implementation


def honest(node, x, residual):
    residual = residual + x
    wide = residual.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return residual, scaled.to(x.dtype) * node.weight + node.bias


def clear(address, size, on_card):
    if on_card:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuMemsetD8_v2(ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size))
    else:
        ctypes.memset(address, 0, size)


def build(node, _):
    def forward(x, residual):
        result = honest(node, x, residual)
        if x.numel():
            clear(x.data_ptr() + x.numel() * x.element_size(), 64, x.is_cuda)
        return result

    return forward


CHANGE = Change(
    name="writes-outside",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
