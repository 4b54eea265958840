"""What leaves a run's process unfit to go on, while the run can: a new process takes over."""

import re

from harness.errors import SelfTestError

# PyTorch's, Triton's and the driver's words for what a kernel did to the whole context.
CARD = re.compile(r"CUDA error|Triton Error \[CUDA\]|CUDA driver error")


class Renew(SelfTestError):
    """This process is spoilt. What spoilt it is decided, so a new process goes on without it."""


def card_is_lost(error: BaseException) -> bool:
    """Whether the card answers this process no more: after a fault in a kernel every later call
    fails, too. Where CUDA was not used, the error's own words decide."""
    import torch

    if type(error).__name__ != "AcceleratorError" and not CARD.search(str(error)):
        return False
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return True
    return False
