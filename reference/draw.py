"""Models with random weights, drawn where they will run: a large one never exists twice."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from reference.numerics import set_numerics

Model = TypeVar("Model", bound=nn.Module)


def random_model(
    make: Callable[[], Model],
    device: str | torch.device,
    seed: int,
    draw: Callable[[str, Tensor, torch.Generator], object],
) -> Model:
    """What `make` makes, for inference, on `device`. `draw(name, tensor, generator)` fills each
    parameter and buffer in place, in their order; nothing is drawn on "meta"."""
    set_numerics()
    with torch.device("meta"):
        model = make()
    model.eval().requires_grad_(False)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in model.state_dict().items():
        draw(name, tensor, generator)
    return model
