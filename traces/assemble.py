"""Puts a trace together: times from the timed steps, origins and costs from the recorded one."""

import statistics
from collections import Counter
from collections.abc import Sequence

from harness.records import Ceilings
from traces.align import Match, align
from traces.observed import Work
from traces.origins import Launched, Span, Timed
from traces.recorder import Recorder
from traces.split import Part, split
from traces.trace import Call, Kernel, Outline, Trace


def assemble(
    recorder: Recorder,
    launches: Sequence[Launched],
    timed: Sequence[Timed],
    *,
    outline: Outline,
    device: str,
    mode: str,
    step_times_us: Sequence[float],
    title: str,
    ceilings: Ceilings | None = None,
) -> Trace:
    """The trace of the step that most timed steps agree on; times are medians over those."""
    usual, _ = Counter(t.names for t in timed).most_common(1)[0]
    agreeing = [t for t in timed if t.names == usual]
    totals = [t.total_us for t in agreeing]
    typical = min(agreeing, key=lambda t: abs(t.total_us - statistics.median(totals)))
    owners = _owned(typical.spans, launches)
    works = _works(recorder, typical.spans, [owner for owner, _ in owners])
    kernels = []
    for i, (span, (owner, ambiguous)) in enumerate(zip(typical.spans, owners, strict=True)):
        work = works[i] or Work()
        kernels.append(
            Kernel(
                name=span.name,
                op=owner.op,
                call=owner.call,
                source=owner.source,
                start_us=round(span.start_us, 3),
                end_us=round(span.start_us + span.time_us, 3),
                time_us=round(statistics.median(t.spans[i].time_us for t in agreeing), 3),
                gap_us=round(statistics.median(t.spans[i].gap_us for t in agreeing), 3),
                reads=work.reads,
                writes=work.writes,
                flops=None if works[i] is None else work.flops,
                costed=works[i] is not None,
                matmul=work.matmul,
                peak=work.peak,
                ambiguous=ambiguous,
                written=owner.written,
            )
        )
    return Trace(
        device=device,
        mode=mode,
        steps=len(agreeing),
        step_us=round(statistics.median(step_times_us), 3),
        fastest_step_us=round(min(step_times_us), 3),
        profiled_step_us=round(statistics.median(totals), 3),
        kernels=tuple(kernels),
        calls=tuple(
            Call(module=c.module, parent=c.parent, opaque=c.opaque) for c in recorder.calls
        ),
        given=tuple(recorder.values.given),
        outputs=recorder.outputs,
        outline=outline,
        title=title,
        ceilings=ceilings,
        must_read_bytes=_compulsory(recorder),
    )


def _owned(spans: Sequence[Span], launches: Sequence[Launched]) -> list[tuple[Launched, bool]]:
    """For each span its origin, and whether that is in doubt."""
    nobody = Launched(name="", operator=None, call=None, source=None)
    if any(span.owner for span in spans):
        return [(span.owner or nobody, span.ambiguous or span.owner is None) for span in spans]
    matches: list[Match] = align(
        [s.name for s in spans], [x.name for x in launches], [x.origin for x in launches]
    )
    return [(nobody if m.index is None else launches[m.index], m.ambiguous) for m in matches]


def _works(
    recorder: Recorder, spans: Sequence[Span], owners: Sequence[Launched]
) -> list[Work | None]:
    """Each kernel's cost, None where it is not known. The longest kernel of an operator carries the
    operator's cost; the kernels of an opaque call share the call's, see `split`."""
    found: list[Work | None] = [None] * len(spans)
    operators: dict[int, list[int]] = {}
    calls: dict[int, list[int]] = {}
    for i, owner in enumerate(owners):
        if owner.operator is not None:
            operators.setdefault(owner.operator, []).append(i)
        elif (call := _opaque_call(recorder, owner.call)) is not None:
            calls.setdefault(call, []).append(i)
    for index, own in operators.items():
        longest = max(own, key=lambda i: spans[i].time_us)
        for i in own:
            found[i] = recorder.operators[index].work if i == longest else Work()
    for index, own in calls.items():
        work = recorder.calls[index].work
        assert work is not None  # see _opaque_call
        parts = [Part(time_us=spans[i].time_us, given=owners[i].given) for i in own]
        for i, share in zip(own, split(work, parts), strict=True):
            found[i] = share
    return found


def _compulsory(recorder: Recorder) -> int:
    """Bytes that any implementation of the step must read: of each value that it is given, the
    most that one operator or opaque call reads."""
    touched: dict[int, int] = dict.fromkeys(recorder.values.given, 0)
    works = (x.work for x in (*recorder.operators, *recorder.calls))
    for work in works:
        for value, count in () if work is None else work.reads:
            if value in touched:
                touched[value] = max(touched[value], count)
    return sum(touched.values())


def _opaque_call(recorder: Recorder, call: int | None) -> int | None:
    """The call around `call` (or itself) whose cost stands for what it launches."""
    while call is not None:
        if recorder.calls[call].work is not None:
            return call
        call = recorder.calls[call].parent
    return None
