"""On a CPU a kernel is an operator call: which profiled host events make up which call.

A profiled operator runs others inside it. A call's time is the sum of the self times of its events,
so the calls of a step add up without counting anything twice.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from traces.kineto import Node
from traces.names import CALL, OPERATOR, RANGE, STEP, index_of

# The event that PyTorch shows around a dispatch mode, where it does.
MODE = "PythonDispatchMode"
GRAPH = "## Call CompiledFxGraph"

Group = tuple[str, int]  # ("operator", its index), or ("outside", a counter) for all else


@dataclass(frozen=True, kw_only=True)
class HostEvent:
    """One event of a step in the order in which they started; `outer` if in no other event."""

    name: str
    start_us: float
    end_us: float
    self_us: float
    outer: bool


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The call that an event belongs to."""

    group: Group
    name: str
    call: int | None  # index of the module call


def plain_events(step: Node) -> list[HostEvent]:
    """The events of a step that ran without a recorder."""
    return [event for event, _ in _kept(step)]


def recorded_events(step: Node, opaque: set[int]) -> tuple[list[HostEvent], list[Owner]]:
    """The events that the same step shows without a recorder, and whose each is.

    `opaque` holds the module calls whose operators the recorder could not see.
    """
    events: list[HostEvent] = []
    places: list[_Place] = []
    for event, place in _kept(step):
        events.append(event)
        places.append(place)
    return events, _owners(events, places, opaque)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where an event stands: in which operator and module call, and inside which kept events."""

    operator: int | None
    call: int | None
    inside: tuple[int, ...]  # positions of the kept events around it, outermost first
    leaf: bool


def _kept(step: Node) -> Iterator[tuple[HostEvent, _Place]]:
    count = 0

    def visit(
        node: Node, operator: int | None, call: int | None, inside: tuple[int, ...]
    ) -> Iterator[tuple[HostEvent, _Place]]:
        nonlocal count
        if node.name.startswith(OPERATOR):
            operator = index_of(node.name)
        elif node.name.startswith(CALL):
            call, operator = index_of(node.name), None
        elif not (node.name.startswith(RANGE) or node.name == MODE or _is_outer_twin(node)):
            event = HostEvent(
                name=re.sub(r"^graph_\d+_", "", node.name),
                start_us=node.start_us,
                end_us=node.end_us,
                self_us=node.self_us,
                outer=not inside,
            )
            place = _Place(operator=operator, call=call, inside=inside, leaf=not node.children)
            inside = (*inside, count)
            count += 1
            yield event, place
        for child in node.children:
            yield from visit(child, operator, call, inside)

    assert step.name == STEP
    for child in step.children:
        yield from visit(child, None, None, ())


def _is_outer_twin(node: Node) -> bool:
    """Whether the operator was only passed to the recorder, which ran it again in its range."""
    children = node.children
    if len(children) == 1 and children[0].name == MODE:
        children = children[0].children
    ranges = [c for c in children if c.name.startswith(OPERATOR)]
    return any(inner.name == node.name for r in ranges for inner in r.children)


def _owners(events: Sequence[HostEvent], places: Sequence[_Place], opaque: set[int]) -> list[Owner]:
    owners: list[Owner | None] = []
    pools: dict[int, list[int]] = {}
    kernels: dict[int, Owner] = {}
    for i, (event, place) in enumerate(zip(events, places, strict=True)):
        call = place.call
        if place.operator is not None:
            group = ("operator", place.operator)
            owners.append(Owner(group=group, name=event.name, call=call))
        elif call is None or call not in opaque:
            owners.append(None)
        else:
            around = next((j for j in place.inside if "::" in events[j].name), None)
            compiled = any(events[j].name.startswith(GRAPH) for j in place.inside)
            if around is not None:
                owners.append(owners[around])
            elif "::" in event.name or (compiled and place.leaf):
                kernel = Owner(group=("outside", i), name=event.name, call=call)
                owners.append(kernel)
                if "::" not in event.name:
                    kernels.setdefault(call, kernel)
            else:  # the wrappers of a compiled call
                pools.setdefault(call, []).append(i)
                owners.append(None)
    for call, members in pools.items():
        graph = next((events[i].name for i in members if events[i].name.startswith(GRAPH)), None)
        name = events[members[0]].name if graph is None else f"compiled {graph[len(GRAPH) :][1:9]}"
        whole = kernels.get(call) or Owner(group=("outside", members[0]), name=name, call=call)
        for i in members:
            owners[i] = whole
    return _filled(owners)


def _filled(owners: list[Owner | None]) -> list[Owner]:
    """Give events that only lead to others (composite operators) to the call that comes next."""
    filled = list(owners)
    following: Owner | None = None
    for i in range(len(filled) - 1, -1, -1):
        following = filled[i] = filled[i] or following
    leading: Owner | None = None
    for i, owner in enumerate(filled):
        leading = filled[i] = owner or leading
    nobody = Owner(group=("outside", -1), name="", call=None)
    return [owner or nobody for owner in filled]
