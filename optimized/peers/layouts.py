"""Tensors as libraries take them: rows in two dimensions, halves side by side, keys with values."""

from typing import Any

import torch
from torch import Tensor


def rows(x: Tensor) -> Tensor:
    """[..., d] as [rows, d], contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def no_rows(node: Any, x: Tensor, *rest: Tensor) -> str | None:
    """Why a kernel that cannot be launched for nothing cannot take the call, or None."""
    return None if x.numel() else "no rows"


def tokens(x: Tensor) -> Tensor:
    """[B, T, H, d] as [B T, H d], contiguous."""
    return x.flatten(0, 1).flatten(1).contiguous()


def side_by_side(gate: Tensor, up: Tensor) -> Tensor:
    """[..., F] twice -> [rows, 2 F]: what one packed projection leaves."""
    return torch.cat((rows(gate), rows(up)), dim=-1)


def flat_slots(slots: Tensor, per_sequence: int) -> Tensor:
    """Slots [B, T] of each sequence's cache as slots [B T] of all of them in a row."""
    first = torch.arange(slots.shape[0], device=slots.device) * per_sequence
    return (slots + first[:, None]).flatten()


def joined_cache(k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Caches [B, S, Hkv, d] -> one copy [B, Hkv, S, 2 d] with each key beside its value, in which
    tokens lie further apart than heads."""
    return torch.cat((k_cache, v_cache), dim=-1).transpose(1, 2)


def split_cache(joined: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Copy a joined cache back."""
    k, v = joined.transpose(1, 2).chunk(2, dim=-1)
    k_cache.copy_(k)
    v_cache.copy_(v)
