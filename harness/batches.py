"""Batch invariance: does a sequence get the same bits alone as in company?"""

from torch import nn

from harness.cases import Case, axes, cut
from harness.examine import Examination
from harness.observe import CandidateError, observe
from harness.steps import BATCH
from harness.trees import same_bits


def batch_variance(exam: Examination, ours: nn.Module, mine: nn.Module, calls: list[Case]) -> None:
    """Compare the first sequence of a call with the same sequence called alone; a note says what
    came out, and it is a fault where the contract promises invariance."""
    pair = _pair(calls)
    if pair is None or exam.faults.reason is not None:
        return
    call, single = pair
    try:
        together = observe(mine, ours, call, exam.fixed).results
        alone = observe(mine, ours, single, exam.fixed).results
    except CandidateError as error:
        exam.faults.add("call", f"raises {error} ({call.node}, {single.name})")
        return
    different = [
        name
        for name, tensor in together.items()
        if tensor.ndim
        and tensor.shape[0] == BATCH
        and alone[name].shape[0] == 1
        and not same_bits(tensor[:1], alone[name])
    ]
    if different:
        text = f"{', '.join(different)} of one sequence depend on the batch ({call.node})"
        exam.notes.append(text)
        if exam.contract.batch_invariant:
            exam.faults.add("batch", f"{text}; its contract says they do not")
    else:
        text = f"batch-invariant at {BATCH} and 1 sequences, unless noted"
        if text not in exam.notes:
            exam.notes.append(text)


def _pair(calls: list[Case]) -> tuple[Case, Case] | None:
    """A call of several sequences and its first sequence alone."""
    for call in calls:
        for other in calls:
            where = axes([call, other])
            if where.sequences and not where.tokens:
                return call, cut(call, where.sequences, 1, f"first sequence of {call.name}")
    return None
