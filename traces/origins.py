"""Where each kernel of a step came from, and when it ran: the profiler's events in our terms.

`recorded` events are those of the step that the recorder watched, `timed` ones those of the steps
that ran alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traces import kineto
from traces.align import align
from traces.hostops import HostEvent, plain_events, recorded_events
from traces.kineto import DeviceEvent, Event, Node
from traces.names import CALL, LAUNCH, OPERATOR, RANGE, index_of
from traces.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A kernel of the recorded step and where it came from; `operator` indexes the recorder's."""

    name: str
    operator: int | None
    call: int | None
    source: str | None
    op: str | None = None
    written: bool = False
    given: Mapping[int, int] | None = None  # bytes of each value that it is given, where noted

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


def read(
    recorder: Recorder, recorded: Sequence[Event], timed: Sequence[Event], device: str
) -> tuple[list[Launched], list[Timed]]:
    """The launches of the recorded step, and the timed steps without the first, which is slower."""
    steps = kineto.steps(kineto.host_forest(timed))[1:]
    if device == "cpu":
        return host_timed(recorder, recorded, steps)
    events = kineto.device_events(timed)
    return (
        launched(recorder, recorded),
        [Timed.of_device(kineto.in_step(events, step), step) for step in steps],
    )


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
                given=launch.given,
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


def _outer_gaps(events: Sequence[HostEvent]) -> list[float]:
    """Idle time before each event; inside another event the host is not idle."""
    outer = [i for i, e in enumerate(events) if e.outer]
    found = kineto.gaps_us([(events[i].start_us, events[i].end_us) for i in outer])
    gaps = [0.0] * len(events)
    for i, gap in zip(outer, found, strict=True):
        gaps[i] = gap
    return gaps
