"""Which errors mean that the card answers the run's process no more."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agents.faults import card_is_lost

ROOT = Path(__file__).parents[2]
ILLEGAL = "an illegal memory access was encountered"
ERRORS = {
    "pytorch": (RuntimeError(f"CUDA error: {ILLEGAL}"), True),
    "triton": (RuntimeError(f"Triton Error [CUDA]: {ILLEGAL}"), True),
    "accelerator": (torch.AcceleratorError("device-side assert triggered"), True),
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
    "shapes": (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), False),
    "resources": (ValueError("out of resource: shared memory, Required: 300000"), False),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card that works is asked, not the words")
@pytest.mark.parametrize("error, lost", ERRORS.values(), ids=ERRORS.keys())
def test_without_a_card_the_words_decide(error: Exception, lost: bool) -> None:
    assert card_is_lost(error) is lost


@pytest.mark.gpu
def test_a_card_is_lost_after_a_fault_in_a_kernel_and_not_after_a_refused_call() -> None:
    code = """
import torch
from agents.faults import card_is_lost
there = torch.zeros(2, device="cuda")
print(card_is_lost(RuntimeError("CUDA error: invalid configuration argument")))
try:
    there[torch.tensor([5], device="cuda")]
    torch.cuda.synchronize()
except RuntimeError as error:
    print(card_is_lost(error))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
