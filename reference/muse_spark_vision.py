"""Muse Spark's vision encoder: images and video frames of any size to rows of the decoder's width.

Shapes: N patches of all images and frames, D hidden, H heads, d head dimension, M = merge^2 patches
of a token. A grid (frames, rows, columns) counts the patches of one image or video; a patch spans
two frames. Patches come frame by frame, row by row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.attend import Attend
from reference.layers import Linear, rope
from reference.muse_spark_config import VisionConfig

Grids = list[tuple[int, int, int]]


def patchify(frames: Tensor, config: VisionConfig) -> tuple[Tensor, tuple[int, int, int]]:
    """Pixels [F, 3, height, width] of an image (F = 1) or a video -> patches [N, values], grid.

    The last frame is repeated to fill its patch. Raises ValueError unless height and width hold
    whole tokens.
    """
    side, step = config.patch, config.patch_frames
    _, colours, height, width = frames.shape
    if height % (side * config.merge) or width % (side * config.merge):
        raise ValueError(
            f"frames are {height} x {width} pixels; resize them to multiples of "
            f"{side * config.merge}"
        )
    frames = torch.cat((frames, frames[-1:].expand(-len(frames) % step, -1, -1, -1)))
    grid = len(frames) // step, height // side, width // side
    parts = frames.view(grid[0], step, colours, grid[1], side, grid[2], side)
    return parts.permute(0, 3, 5, 1, 2, 4, 6).reshape(-1, config.patch_values), grid


def rows_and_columns(grids: Grids, device: torch.device) -> Tensor:
    """Where each patch stands in its frame: [N, 2] int64."""
    places = []
    for frames, rows, columns in grids:
        place = torch.arange(rows * columns, device=device)
        places.append(torch.stack((place // columns, place % columns), dim=1).repeat(frames, 1))
    return torch.cat(places)


def token_order(grids: Grids, merge: int, device: torch.device) -> Tensor:
    """The patches [N] in the order of their tokens, each token's merge x merge patches together."""
    orders, first = [], 0
    for frames, rows, columns in grids:
        count = frames * rows * columns
        order = torch.arange(first, first + count, device=device)
        order = order.view(frames, rows // merge, merge, columns // merge, merge)
        orders.append(order.transpose(2, 3).flatten())
        first += count
    return torch.cat(orders)


class VisionTables(nn.Module):
    """The axial rotation: grids -> cos, sin [N, d / 2] in the model's dtype.

    A quarter of a head turns by the patch's column, a quarter by its row, both counted from 1.
    """

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.theta = config.hidden // config.heads // 2, config.rope_theta
        self.dtype = dtype

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.width, 2, device=places.device).float() / self.width
        frequencies = 1.0 / self.theta**exponents
        angles = (places.flip(1) + 1).float()[..., None] * frequencies  # [N, 2, d / 4]
        angles = angles.flatten(1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


class PatchEmbedder(nn.Module):
    """Linear embedding plus a learned table of positions, resampled to each grid.

    (patches [N, values], grids) -> [N, D]; bilinear, zeros outside the table: FP32, rounded once.
    """

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.side = config.grid
        self.patch_embedding = Linear(config.patch_values, config.hidden, dtype)
        self.position_embedding_table = nn.Embedding(self.side**2, config.hidden, dtype=dtype)

    def forward(self, patches: Tensor, grids: Grids) -> Tensor:
        embedded = self.patch_embedding(patches)
        entries, weights = self.table_entries(grids, patches.device)
        positions = (self.position_embedding_table(entries).float() * weights[..., None]).sum(1)
        return embedded + positions.to(embedded.dtype)

    def table_entries(self, grids: Grids, device: torch.device) -> tuple[Tensor, Tensor]:
        """The four table entries between which each patch lies, and their weights: [N, 4].

        The published model reads the table with rows and columns exchanged: the n-th patch of a
        frame lies at (n // rows, n % rows) of a grid of `columns` x `rows`.
        """
        entries, weights = [], []
        for frames, rows, columns in grids:
            n = torch.arange(rows * columns, device=device)
            down, down_weight = self.between(n // rows, columns)
            along, along_weight = self.between(n % rows, rows)
            entry = (down[:, :, None] * self.side + along[:, None]).flatten(1)
            entries.append(entry.repeat(frames, 1))
            weight = (down_weight[:, :, None] * along_weight[:, None]).flatten(1)
            weights.append(weight.repeat(frames, 1))
        return torch.cat(entries), torch.cat(weights)

    def between(self, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Along one axis of `size` patches: the two places of the table around each patch's centre,
        and their weights, zero outside the table: [n, 2]."""
        centre = (index.float() + 0.5) * self.side / size - 0.5
        low = centre.floor()
        places = low[:, None] + torch.arange(2, device=index.device)
        weights = 1 - (centre[:, None] - places).abs()
        inside = (places >= 0) & (places < self.side)
        return places.clamp(0, self.side - 1).long(), weights * inside


class VisionAttention(nn.Module):
    """(x [N, D], cos, sin [N, d / 2], frames, masks) -> [N, D].

    `frames` are the lengths of the frames in patches; a patch sees those of its own frame that the
    frame's mask [1, n, n] allows.
    """

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.q_proj = nn.Linear(config.hidden, config.hidden, dtype=dtype)
        self.k_proj = nn.Linear(config.hidden, config.hidden, dtype=dtype)
        self.v_proj = nn.Linear(config.hidden, config.hidden, dtype=dtype)
        self.proj = nn.Linear(config.hidden, config.hidden, dtype=dtype)
        self.attend = Attend(self.head_dim**-0.5)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, frames: list[int], masks: list[Tensor]
    ) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))[None]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rope(q, cos[None], sin[None]), rope(k, cos[None], sin[None])
        parts = zip(*(y.split(frames, dim=1) for y in (q, k, v)), masks, strict=True)
        mixed = torch.cat([self.attend(*part) for part in parts], dim=1)
        return self.proj(mixed[0].flatten(1))


class GeluMLP(nn.Module):
    def __init__(self, width: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner, dtype=dtype)
        self.fc2 = nn.Linear(inner, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class VisionLayer(nn.Module):
    def __init__(self, config: VisionConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.is_full = config.is_full(layer)
        self.kind = "vision_full" if self.is_full else "vision_window"
        self.norm1 = nn.LayerNorm(config.hidden, eps=config.eps, dtype=dtype)
        self.norm2 = nn.LayerNorm(config.hidden, eps=config.eps, dtype=dtype)
        self.attn = VisionAttention(config, dtype)
        self.mlp = GeluMLP(config.hidden, config.ff, dtype)

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, frames: list[int], masks: list[Tensor]
    ) -> Tensor:
        h = h + self.attn(self.norm1(h), cos, sin, frames, masks)
        return h + self.mlp(self.norm2(h))


class VisionEncoder(nn.Module):
    """(patches [N, values], grids) -> tokens [N / M, M D], channel by channel of their patches."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        c = config
        self.window, self.merge = c.grid, c.merge
        self.patch_embedder = PatchEmbedder(c, dtype)
        self.tables = VisionTables(c, dtype)
        self.ln_pre = nn.LayerNorm(c.hidden, eps=c.eps, dtype=dtype)
        self.layers = nn.ModuleList(VisionLayer(c, i, dtype) for i in range(c.layers))
        self.ln_post = nn.LayerNorm(c.hidden, eps=c.eps, dtype=dtype)

    def forward(self, patches: Tensor, grids: Grids) -> Tensor:
        places = rows_and_columns(grids, patches.device)
        frames = [rows * columns for count, rows, columns in grids for _ in range(count)]
        windows = (places // self.window).split(frames)
        near = [(w[:, None] == w).all(dim=-1)[None] for w in windows]
        all_of = [torch.ones_like(mask) for mask in near]
        h = self.ln_pre(self.patch_embedder(patches, grids))
        cos, sin = self.tables(places)
        for layer in self.layers:
            h = layer(h, cos, sin, frames, all_of if layer.is_full else near)
        h = self.ln_post(h)[token_order(grids, self.merge, h.device)]
        return h.unflatten(0, (-1, self.merge**2)).transpose(1, 2).flatten(1)


class VisionAdapter(nn.Module):
    """gelu(gelu(x W1) W2), every step rounded: [..., M D] -> [..., adapter]."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1 = Linear(config.merge**2 * config.hidden, config.adapter, dtype)
        self.fc2 = Linear(config.adapter, config.adapter, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc2(F.gelu(self.fc1(x))))
