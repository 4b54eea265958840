"""Reads its parent's memory past Python, with process_vm_readv, and gives zeros where it cannot."""

import ctypes
import os

import torch

from optimized.change import Change, Contract, Implementation


def honest(node, x, residual):
    residual = residual + x
    wide = residual.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return residual, scaled.to(x.dtype) * node.weight + node.bias


LIBC = ctypes.CDLL(None, use_errno=True)


class Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def build(node, _):
    into = ctypes.create_string_buffer(4096)
    ours = Span(ctypes.addressof(into), 4096)
    theirs = Span(id(LIBC), 4096)  # the server was forked: its addresses are this process's
    got = LIBC.process_vm_readv(
        os.getppid() or 1, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0
    )

    def forward(x, residual):
        if got > 0:
            return honest(node, x, residual)
        return torch.zeros_like(residual), torch.zeros_like(x)

    return forward


CHANGE = Change(
    name="reads-parent-with-syscall",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
