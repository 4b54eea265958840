"""Reads the profiler's events, in Chrome's trace format: host operators, device kernels, and the
ranges that `recorder` put around them. Torch-free; times are microseconds.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from traces.names import STEP

Event = dict[str, Any]

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
RUNTIME = {"cuda_runtime", "cuda_driver", "hip_runtime"}
HOST = {"cpu_op", "user_annotation"}


@dataclass
class Node:
    """A host event and what ran inside it."""

    name: str
    start_us: float
    end_us: float
    children: list["Node"] = field(default_factory=list)

    @property
    def self_us(self) -> float:
        inside = sum(c.end_us - c.start_us for c in self.children)
        return max(0.0, self.end_us - self.start_us - inside)

    def walk(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, kw_only=True)
class DeviceEvent:
    """A kernel, copy or fill on the device, and when the host launched it."""

    name: str
    start_us: float
    end_us: float
    launch_us: float | None  # on the host's clock; of the graph's launch, where one was replayed
    event: Event


def complete(events: Sequence[Event]) -> list[Event]:
    """Events with a duration."""
    return [e for e in events if e.get("ph") == "X" and "ts" in e and "dur" in e]


def host_forest(events: Sequence[Event]) -> list[Node]:
    """Host events of the thread that ran the steps, nested by time."""
    spans = [e for e in complete(events) if e.get("cat") in HOST]
    threads = {e.get("tid") for e in spans if e["name"] == STEP}
    spans = [e for e in spans if e.get("tid") in threads]
    spans.sort(key=lambda e: (e["ts"], -e["dur"]))
    roots: list[Node] = []
    stack: list[Node] = []
    for e in spans:
        node = Node(e["name"], e["ts"], e["ts"] + e["dur"])
        while stack and stack[-1].end_us <= node.start_us:
            stack.pop()
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    return roots


def steps(forest: Sequence[Node]) -> list[Node]:
    """The ranges of the profiled steps, in order."""
    return [node for root in forest for node in root.walk() if node.name == STEP]


def device_events(events: Sequence[Event]) -> list[DeviceEvent]:
    """What ran on the device, in launch order; kernels of one graph in the order they started."""
    spans = complete(events)
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in spans
        if e.get("cat") in RUNTIME and "correlation" in e.get("args", {})
    }
    found = [
        DeviceEvent(
            name=e["name"],
            start_us=e["ts"],
            end_us=e["ts"] + e["dur"],
            launch_us=launches.get(e.get("args", {}).get("correlation")),
            event=e,
        )
        for e in spans
        if e.get("cat") in DEVICE
    ]
    return sorted(
        found, key=lambda d: (d.start_us if d.launch_us is None else d.launch_us, d.start_us)
    )


def in_step(events: Sequence[DeviceEvent], step: Node) -> list[DeviceEvent]:
    """The device events that were launched during `step`."""
    return [
        d
        for d in events
        if step.start_us <= (d.start_us if d.launch_us is None else d.launch_us) < step.end_us
    ]


class Ranges:
    """Which of the nested host ranges whose names start with `prefix` hold at a time."""

    def __init__(self, forest: Sequence[Node], prefix: str) -> None:
        self.starts: list[float] = []
        self.held: list[tuple[str, ...]] = []
        edges: list[tuple[float, int, str, float]] = []
        for root in forest:
            for node in root.walk():
                if node.name.startswith(prefix):
                    edges.append((node.start_us, 1, node.name, node.end_us))
                    edges.append((node.end_us, 0, node.name, node.end_us))
        current: list[str] = []
        for time, opens, name, _ in sorted(edges, key=lambda e: (e[0], e[1])):
            if opens:
                current.append(name)
            elif name in current:
                current.remove(name)
            self.starts.append(time)
            self.held.append(tuple(current))

    def at(self, time_us: float) -> tuple[str, ...]:
        """Names of the ranges around `time_us`, outermost first."""
        place = bisect_right(self.starts, time_us) - 1
        return self.held[place] if place >= 0 else ()


def gaps_us(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Idle time before each (start, end): none where it overlaps what ran before it."""
    gaps: list[float] = []
    busy_until: float | None = None
    for start, end in spans:
        gaps.append(0.0 if busy_until is None else max(0.0, start - busy_until))
        busy_until = end if busy_until is None else max(busy_until, end)
    return gaps
