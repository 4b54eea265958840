"""Weights of sibling layers in one buffer: packed once, at load, without a copy staying behind.

Each parameter keeps its name, shape and values; its storage becomes a slice of the buffer. The
Parameter objects stay the same, so every module tree that shares them sees the buffer. Addresses
do change: a CUDA graph captured before reads memory that is gone.
"""

import torch
from torch import Tensor, nn


def are_adjacent(weights: tuple[Tensor, ...]) -> bool:
    """Whether weights [Oi, D] follow each other in one storage, in this order."""
    first = weights[0]
    following = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for weight in weights:
        same = weight.shape[1:] == first.shape[1:] and weight.dtype == first.dtype
        inside = weight.untyped_storage().data_ptr() == storage
        if not (same and inside and weight.is_contiguous() and weight.data_ptr() == following):
            return False
        following += weight.nbytes
    return True


def packed(weights: tuple[Tensor, ...]) -> Tensor:
    """Adjacent weights [Oi, D] as one view [sum of Oi, D]."""
    rows = sum(weight.shape[0] for weight in weights)
    return weights[0].detach().as_strided((rows, weights[0].shape[1]), (weights[0].shape[1], 1))


def pack(parameters: tuple[nn.Parameter, ...]) -> None:
    """Move parameters [Oi, D] into one buffer; nothing happens if they are adjacent already.

    ValueError if their widths, dtypes or devices differ.
    """
    if are_adjacent(parameters):
        return
    kinds = {(p.shape[1], p.dtype, p.device) for p in parameters}
    if len(kinds) > 1:
        raise ValueError(f"weights of several widths, dtypes or devices cannot be packed: {kinds}")
    with torch.no_grad():
        buffer = torch.cat([p.detach() for p in parameters])
        slices = buffer.split([p.shape[0] for p in parameters])
        for parameter, part in zip(parameters, slices, strict=True):
            parameter.data = part
