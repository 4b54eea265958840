"""Batch invariance: does a sequence get the same bits alone as in company?"""

import torch
from torch import nn

from harness.cases import Case, cut, widened
from harness.examine import Examination
from harness.observe import CandidateError, observe
from harness.steps import BATCH
from harness.thresholds import fits, pair
from harness.trees import same_bits

MANY = 128  # sequences: the largest batch of an interactive target


def batch_variance(
    exam: Examination, ours: nn.Module, mine: nn.Module, calls: list[Case], wide_bytes: int = 0
) -> None:
    """Compare the first sequence of a call with the same sequence called alone, and of MANY where
    their arguments take at most `wide_bytes`; a note says what came out, and it is a fault where
    the contract promises invariance."""
    found = pair(calls)
    if found is None or exam.faults.reason is not None:
        return
    call, where = found
    single = cut(call, where.sequences, 1, f"first sequence of {call.name}")
    batches = {BATCH: call}
    if wide_bytes and fits(call, MANY, wide_bytes):
        batches[MANY] = widened(call, where.sequences, MANY, f"{MANY} sequences")
    elif wide_bytes:
        _note(exam, f"batch invariance at {MANY} sequences: not measured, they do not fit")
    case = single
    try:
        alone = observe(mine, ours, single, exam.fixed).results
        for count, case in batches.items():
            together = observe(mine, ours, case, exam.fixed).results
            different = [
                name
                for name, tensor in together.items()
                if tensor.ndim
                and tensor.shape[0] == count
                and alone[name].shape[0] == 1
                and not same_bits(tensor[:1], alone[name])
            ]
            if different:
                _depends(exam, different, call.node, count)
            else:
                _note(exam, f"batch-invariant at {count} and 1 sequences, unless noted")
    except CandidateError as error:
        if torch.OutOfMemoryError.__name__ in str(error):
            _note(exam, f"{call.node}, {case.name}: too large to run")
        else:
            exam.faults.add("call", f"raises {error} ({call.node}, {case.name})")


def _depends(exam: Examination, different: list[str], node: str, count: int) -> None:
    text = f"{', '.join(different)} of one sequence depend on the batch ({node}, {count} and 1)"
    _note(exam, text)
    if exam.contract.batch_invariant:
        exam.faults.add("batch", f"{text}; its contract says they do not")


def _note(exam: Examination, text: str) -> None:
    if text not in exam.notes:
        exam.notes.append(text)
