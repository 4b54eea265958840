"""The KV cache: one interface for layers that keep everything and layers that keep a window.

Shapes: B sequences, S slots, Hkv KV heads, D head dimension.

A full layer holds position p in slot p. A windowed layer is a ring of W slots and holds position p
in slot p mod W. Every layer has one slot more than it needs, the last one: writes of padding
(position -1), and writes that the same step would overwrite, go there, so that no step needs a
branch on data. Nothing about lengths is stored: what a ring holds follows from the positions of the
step, which live on the device, so that one captured CUDA graph replays at any position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """Keys and values of one layer, `k`, `v` [B, S + 1, Hkv, D]; `window` is W, or None if full."""

    k: Tensor
    v: Tensor
    window: int | None

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store `k`, `v` [B, T, Hkv, D] in `slots` [B, T]."""
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        self.k[rows, slots] = k
        self.v[rows, slots] = v

    def past(self, steps: int) -> tuple[Tensor, Tensor] | None:
        """A copy of a ring's keys and values [B, W, Hkv, D], to be made before a step of several
        tokens, which overwrites what its own first queries still see; None where nothing is lost.
        """
        if self.window is None or steps == 1:
            return None
        return self.k[:, :-1].clone(), self.v[:, :-1].clone()

    def seen(
        self, past: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor, extent: int
    ) -> tuple[Tensor, Tensor]:
        """What the queries of a step may see once its `k`, `v` [B, T, Hkv, D] are written: `extent`
        keys and values of a full layer, a ring's W, or its `past` and the step's own, W + T.
        """
        if past is not None:
            return torch.cat((past[0], k), dim=1), torch.cat((past[1], v), dim=1)
        end = extent if self.window is None else -1
        return self.k[:, :end], self.v[:, :end]


@dataclass
class KVCache:
    """The cache of a whole model.

    `capacity` is the number of positions a full layer holds. `extent`, a host integer of at most
    `capacity`, bounds the keys that full layers read: set it to the longest sequence after the
    step. `ends_aligned` promises that every sequence of the step ends at `extent`, which lets
    attention use a causal kernel instead of a mask.
    """

    layers: list[LayerCache]
    capacity: int
    extent: int = field(default=0)
    ends_aligned: bool = False

    def __post_init__(self) -> None:
        self.extent = self.extent or self.capacity

    @classmethod
    def empty(
        cls,
        windows: Sequence[int | None],
        batch: int,
        capacity: int,
        row: tuple[int, int],
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> "KVCache":
        """For `batch` sequences: a layer for each of `windows`, None for one that keeps all of up
        to `capacity` positions; `row` is Hkv, D."""
        layers = []
        for window in windows:
            shape = batch, (window or capacity) + 1, *row
            k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
            layers.append(LayerCache(k, v, window))
        return cls(layers, capacity)

    @property
    def nbytes(self) -> int:
        return sum(c.k.nbytes + c.v.nbytes for c in self.layers)


def write_slots(positions: Tensor, capacity: int, window: int | None) -> Tensor:
    """The slot each token of a step is written to, [B, T] int64.

    `positions` [B, T] int64 count up by one in each row; -1 marks padding at the end of a row.
    """
    spare = capacity if window is None else window
    keep = positions >= 0
    slot = positions
    if window is not None:
        last = positions.amax(dim=1, keepdim=True)
        keep = keep & (positions > last - window)
        slot = positions % window
    return torch.where(keep, slot, spare)


def ring_positions(upto: Tensor, window: int) -> Tensor:
    """The position held by each slot of a ring once `upto` [B] positions were written, [B, W].

    Negative where the slot was never written.
    """
    last = upto[:, None] - 1
    slots = torch.arange(window, device=upto.device)
    return last - (last - slots) % window


def step_keys(
    positions: Tensor, capacity: int, extent: int, window: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Where a step's keys go and which ones each query sees, from its positions [B, T] int64 alone:

    full_slots, ring_slots [B, T] int64; full_mask [B, T, extent] bool, None where `causal` says it
    all; ring_mask [B, T, W] bool for a decode, [B, T, W + T] for a prefill.
    """
    query = positions[..., None]  # [B, T, 1]
    decode = positions.shape[1] == 1
    held = ring_positions(positions[:, 0] + int(decode), window)
    held = (held if decode else torch.cat((held, positions), dim=1))[:, None]  # [B, 1, S]
    return (
        write_slots(positions, capacity, None),
        write_slots(positions, capacity, window),
        None if causal else torch.arange(extent, device=positions.device) <= query,
        (held >= 0) & (held <= query) & (held > query - window),
    )
