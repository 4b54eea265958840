"""What all dispatch modes of the product share."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class DispatchMode(TorchDispatchMode):
    """A dispatch mode under which PyTorch's causal attention bias can be made.

    It is a tensor subclass whose constructor refuses a tensor that Python has seen, as a mode makes
    it happen (torch 2.11 to 2.13).
    """

    entered = 0  # of all modes together

    def __enter__(self) -> Any:
        DispatchMode.entered += 1
        CausalBias.__new__ = staticmethod(_unseen)  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        DispatchMode.entered -= 1
        if not DispatchMode.entered:
            del CausalBias.__new__


def _unseen(cls: type, *args: Any, **kwargs: Any) -> Tensor:
    with _disable_current_modes():
        return torch.Tensor.__new__(cls, *args, **kwargs)
