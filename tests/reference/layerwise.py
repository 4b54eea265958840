"""Running a model layer by layer, each layer fed the inputs and routes recorded from another run.

A random MoE model is chaotic (one flipped bit sends a token to other experts), so BF16 runs are
compared this way.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.beam import Beam, MoE, Router
from reference.cache import KVCache
from tests.reference import small
from tests.reference.noise import undo


@dataclass
class Trace:
    """Per layer: what it got and returned [B, T, D], and the experts it chose [B, T, K]."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    routes: dict[int, Tensor] = field(default_factory=dict)

    def watch(self, model: Any) -> "Trace":
        """Record every call of the layers of `model` (ours or the published one) from now on."""
        for i, layer in enumerate(decoder(model).layers):
            chosen: list[Tensor] = []
            layer.register_forward_hook(self._layer(i, chosen))
            if hasattr(layer.mlp, "gate"):  # its last output is the experts, [B * T, K]
                layer.mlp.gate.register_forward_hook(
                    lambda _, args, out, c=chosen: c.append(out[-1])
                )
        return self

    def _layer(self, i: int, chosen: list[Tensor]) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            h = output[0] if isinstance(output, tuple) else output
            _append(self.inputs, i, args[0])
            _append(self.outputs, i, h)
            if chosen:
                _append(self.routes, i, chosen.pop().unflatten(0, h.shape[:2]))

        return hook


def decoder(model: Any) -> Any:
    """The module that holds the layers, which stands deeper in a model with encoders."""
    return getattr(model.model, "language_model", model.model)


def _append(record: dict[int, Tensor], key: int, step: Tensor) -> None:
    record[key] = torch.cat((record[key], step), dim=1) if key in record else step


class ForcedRouter(nn.Module):
    """A router whose choice is made for it: `experts` [N, K]; the weights are still its own."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.weight = router.weight
        self.e_score_correction_bias = router.e_score_correction_bias
        self.experts: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.experts is not None
        scores = torch.sigmoid(F.linear(x.float(), self.weight)).gather(-1, self.experts)
        return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20), self.experts


def force(model: Beam) -> Beam:
    """A copy of `model` whose routers must be told what to choose."""
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.gate = ForcedRouter(layer.mlp.gate)
    return other


def run_layers(
    model: Any,
    trace: Trace,
    cuts: list[int],
    order: Tensor | None = None,
    cache: KVCache | None = None,
) -> list[Tensor]:
    """Every layer's output [B, T, D] in steps that end at `cuts`, fed the inputs of `trace`.

    `order` is the hidden order of a reordered model; the outputs are in the reference's. Routers
    that can be forced follow the routes of `trace`.
    """
    batch, total, _ = trace.inputs[0].shape
    cache = cache or small.beam.cache(model.config, batch, total, "cpu")
    outputs: dict[int, Tensor] = {}
    for first, end in zip([0, *cuts], cuts, strict=False):
        step = model.step(small.positions(batch, first, end), cache)
        for i, layer in enumerate(decoder(model).layers):
            h = trace.inputs[i][:, first:end]
            h = h if order is None else h[..., order]
            for module in layer.modules():
                if isinstance(module, ForcedRouter):
                    module.experts = trace.routes[i][:, first:end].flatten(0, 1)
            norm = decoder(model).norm.weight  # of the next layer's input, which nothing here reads
            h, _ = layer(h, layer.input_layernorm(h), step, cache.layers[i], norm)
            _append(outputs, i, h if order is None else undo(h, order))
    return list(outputs.values())
