"""What a peer is: a public function that does a region's job, called as its library means it to be.

A peer file in this folder defines `PEERS`, a tuple. Its library is imported when the peer is asked
for, never before, and nothing in this project depends on it.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from optimized.change import Change, Contract, Implementation

FOLDER = Path(__file__).parent
# What a library raises on import of which a part is missing or does not fit.
BROKEN = ImportError, OSError, AttributeError, RuntimeError, ValueError, TypeError, LookupError


def unchanged(found: Any) -> Any:
    return found


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A peer's function with one call's arguments, laid out as it wants them.

    `run` makes the public call and nothing else; it may be captured and replayed. `finish` turns
    what it returned into the region's results, and writes what the region writes.
    """

    run: Callable[[], Any]
    finish: Callable[[Any], Any] = unchanged


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A public function for the job of `region`.

    `bind(node, *args)` does what an engine does once, at load or once a step (packing weights,
    planning, laying out a cache), so that it is not timed. `guard(node, *args)` says why the
    function cannot take a call, or None; `broken()` why the installed version must not be called.
    """

    name: str
    region: str
    library: str  # the module that has to be importable
    bind: Callable[..., Bound]
    guard: Callable[..., str | None] | None = None
    broken: Callable[[], str | None] | None = None
    devices: tuple[str, ...] = ("cuda",)

    def absent(self, device_type: str) -> str | None:
        """Why the peer cannot run here, or None; imports its library."""
        if device_type not in self.devices:
            return f"runs on {' or '.join(self.devices)}, this is {device_type}"
        try:
            importlib.import_module(self.library)
        except BROKEN as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"{self.library} cannot be imported: {first}"
        return self.broken() if self.broken is not None else None

    def change(self, contract: Contract) -> Change:
        """The peer as a candidate for its region, under somebody's `contract`."""

        def build(node: nn.Module, knobs: None) -> Callable[..., Any]:
            def forward(*args: Any) -> Any:
                bound = self.bind(node, *args)
                return bound.finish(bound.run())

            return forward

        implementation = Implementation(
            backend=self.library.partition(".")[0],
            devices=self.devices,
            build=build,
            guard=self.guard,
        )
        return Change(
            name=self.name,
            region=self.region,
            summary=f"{self.name}, a public function",
            contract=contract,
            implementations=(implementation,),
        )


def peers() -> list[Peer]:
    """Every peer of this folder, whether its library is installed or not."""
    found: list[Peer] = []
    for info in pkgutil.iter_modules([str(FOLDER)]):
        if "\nPEERS" in (FOLDER / f"{info.name}.py").read_text():
            found += importlib.import_module(f"optimized.peers.{info.name}").PEERS
    return found
