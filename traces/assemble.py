"""Puts a trace together: times from the timed steps, origins and costs from the recorded one."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from traces import kineto
from traces.align import Match, align
from traces.hostops import plain_events, recorded_events
from traces.kineto import DeviceEvent, Event, Node
from traces.names import CALL, LAUNCH, OPERATOR, RANGE, index_of
from traces.recorder import Recorder, Work
from traces.trace import Call, Kernel, Outline, Trace


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A kernel of the recorded step and where it came from; `operator` indexes the recorder's."""

    name: str
    operator: int | None
    call: int | None
    source: str | None
    op: str | None = None
    written: bool = False

    @property
    def origin(self) -> tuple[int | None, str | None]:
        return self.call, self.source


@dataclass(frozen=True, kw_only=True)
class Span:
    """One kernel of one timed step."""

    name: str
    start_us: float  # from the start of the step
    time_us: float
    gap_us: float
    events: tuple[Event, ...] = ()
    owner: Launched | None = None  # where it is known already
    ambiguous: bool = False


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One timed step."""

    spans: tuple[Span, ...]
    total_us: float

    @classmethod
    def of_device(cls, events: Sequence[DeviceEvent], step: Node) -> "Timed":
        gaps = kineto.gaps_us([(e.start_us, e.end_us) for e in events])
        return cls(
            spans=tuple(
                Span(
                    name=e.name,
                    start_us=e.start_us - step.start_us,
                    time_us=e.end_us - e.start_us,
                    gap_us=gap,
                    events=(e.event,),
                )
                for e, gap in zip(events, gaps, strict=True)
            ),
            total_us=step.end_us - step.start_us,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(span.name for span in self.spans)


def launched(recorder: Recorder, events: Sequence[Event]) -> list[Launched]:
    """The device kernels of the recorded step in launch order, each with its origin."""
    forest = kineto.host_forest(events)
    ranges = kineto.Ranges(forest, RANGE)
    step = kineto.steps(forest)[0]
    found = []
    for event in kineto.in_step(kineto.device_events(events), step):
        time = event.start_us if event.launch_us is None else event.launch_us
        found.append(_origin(recorder, event.name, ranges.at(time)))
    return found


def _origin(recorder: Recorder, name: str, ranges: Sequence[str]) -> Launched:
    """Who launched a kernel, from the recorder's ranges around its launch, outermost first."""
    for held in reversed(ranges):
        if held.startswith(OPERATOR):
            index = index_of(held)
            operator = recorder.operators[index]
            return Launched(
                name=name,
                operator=index,
                call=operator.call,
                source=operator.source,
                op=operator.name,
            )
        if held.startswith(LAUNCH):
            launch = recorder.launches[index_of(held)]
            return Launched(
                name=name,
                operator=None,
                call=launch.call,
                source=launch.source,
                written=launch.written,
            )
        if held.startswith(CALL):
            call = index_of(held)
            return Launched(name=name, operator=None, call=call, source=recorder.calls[call].source)
    return Launched(name=name, operator=None, call=None, source=None)


def host_timed(
    recorder: Recorder, recorded: Sequence[Event], steps: Sequence[Node]
) -> tuple[list[Launched], list[Timed]]:
    """Operator calls of a CPU's recorded step, and the timed steps in terms of them."""
    opaque: set[int] = set()
    for i, call in enumerate(recorder.calls):  # parents stand before their children
        if call.opaque or call.parent in opaque:
            opaque.add(i)
    step = kineto.steps(kineto.host_forest(recorded))[0]
    events, owners = recorded_events(step, opaque)
    launches: dict[Any, Launched] = {}
    for owner in owners:
        if owner.group in launches:
            continue
        kind, index = owner.group
        if kind == "operator":
            launches[owner.group] = _origin(
                recorder, recorder.operators[index].name, [f"{OPERATOR}{index}"]
            )
        else:
            held = [] if owner.call is None else [f"{CALL}{owner.call}"]
            launches[owner.group] = _origin(recorder, owner.name, held)
    names = [e.name for e in events]
    groups = [o.group for o in owners]
    timed = []
    for one in steps:
        plain = plain_events(one)
        matches = align([e.name for e in plain], names, groups)
        order: dict[Any, list[int]] = {}
        for i, match in enumerate(matches):
            order.setdefault(None if match.index is None else groups[match.index], []).append(i)
        gaps = _outer_gaps(plain)
        spans = []
        for group, members in order.items():
            owner = launches.get(group)
            spans.append(
                Span(
                    name=owner.name if owner else plain[members[0]].name,
                    start_us=plain[members[0]].start_us - one.start_us,
                    time_us=sum(plain[i].self_us for i in members),
                    gap_us=sum(gaps[i] for i in members),
                    owner=owner,
                    ambiguous=any(matches[i].ambiguous for i in members),
                )
            )
        timed.append(Timed(spans=tuple(spans), total_us=one.end_us - one.start_us))
    return list(launches.values()), timed


def _outer_gaps(events: Sequence[Any]) -> list[float]:
    """Idle time before each event; inside another event the host is not idle."""
    outer = [i for i, e in enumerate(events) if e.outer]
    found = kineto.gaps_us([(events[i].start_us, events[i].end_us) for i in outer])
    gaps = [0.0] * len(events)
    for i, gap in zip(outer, found, strict=True):
        gaps[i] = gap
    return gaps


def assemble(
    recorder: Recorder,
    launches: Sequence[Launched],
    timed: Sequence[Timed],
    *,
    outline: Outline,
    device: str,
    mode: str,
    step_us: float,
    title: str,
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
        work, costed = works[i]
        kernels.append(
            Kernel(
                name=span.name,
                op=owner.op,
                call=owner.call,
                source=owner.source,
                start_us=round(span.start_us, 3),
                time_us=round(statistics.median(t.spans[i].time_us for t in agreeing), 3),
                gap_us=round(statistics.median(t.spans[i].gap_us for t in agreeing), 3),
                reads=work.reads,
                writes=work.writes,
                flops=work.flops if costed else None,
                costed=costed,
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
        step_us=round(step_us, 3),
        profiled_step_us=round(statistics.median(totals), 3),
        kernels=tuple(kernels),
        calls=tuple(
            Call(module=c.module, parent=c.parent, opaque=c.opaque) for c in recorder.calls
        ),
        given=tuple(recorder.values.given),
        outputs=recorder.outputs,
        outline=outline,
        title=title,
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
) -> list[tuple[Work, bool]]:
    """Each kernel's cost, and whether it is known. Several kernels of one operator, or of one
    opaque call, share one cost: the longest of them carries it."""
    nothing = Work()
    found: list[tuple[Work, bool]] = [(nothing, False)] * len(spans)
    members: dict[tuple[str, int], list[int]] = {}
    for i, owner in enumerate(owners):
        if owner.operator is not None:
            members.setdefault(("operator", owner.operator), []).append(i)
        elif (call := _opaque_call(recorder, owner.call)) is not None:
            members.setdefault(("call", call), []).append(i)
    for (kind, index), own in members.items():
        work = recorder.operators[index].work if kind == "operator" else recorder.calls[index].work
        if work is None:
            continue
        longest = max(own, key=lambda i: spans[i].time_us)
        for i in own:
            found[i] = (work if i == longest else nothing, True)
    return found


def _opaque_call(recorder: Recorder, call: int | None) -> int | None:
    """The call around `call` (or itself) whose cost stands for what it launches."""
    while call is not None:
        if recorder.calls[call].work is not None:
            return call
        call = recorder.calls[call].parent
    return None
