"""What runs beside a candidate in its process: answers the judge's orders, one at a time.

The change file is imported here and nowhere else. Its contract goes back as data, its results as
bytes in memory that the judge made.
"""

import logging
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from harness import confine, wire
from harness.handover import Layout, Unpacker, View, encode, place
from harness.observe import poisoned, watching_integers
from harness.step import Mode, Step
from harness.tripwires import Tripwires, reference_calls
from optimized.catalog import load_change
from optimized.change import Change, Contract, apply_change, limit, nodes
from optimized.domain import Domain

PLAIN = Tensor, nn.Parameter


class Refused(Exception):
    """What the candidate did is no answer; the text says what."""


def main(sock: socket.socket, order: dict[str, Any], mechanisms: list[Any]) -> None:
    """Answer orders until the judge closes the connection or says so."""
    worker = Worker(order)
    wire.send(sock, {"mechanisms": mechanisms})
    while True:
        try:
            message, blob, fds = wire.receive(sock, most=1 << 40, fds=4)
        except wire.Closed:
            os._exit(0)
        operation = message.pop("op")
        if operation == "stop":
            wire.send(sock, {})
            os._exit(0)
        try:
            answer = getattr(worker, f"do_{operation}")(blob, fds, **message)
        except Refused as error:
            answer = {"refused": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises is a finding
            answer = {"error": first_line(error), "trace": traceback.format_exc()[-2000:]}
        wires = worker.wires
        if wires is not None:
            wires.look()
            answer |= {"faults": list(wires.faults), "notes": list(wires.notes)}
        wire.send(sock, answer)


def first_line(error: BaseException) -> str:
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text}"


class Worker:
    """One candidate: its model, its memory, its steps."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.folder = order["folder"]
        self.readable = confine.readable(order["readable"])
        torch.set_num_threads(order["threads"])
        self.wires: Tripwires | None = None
        self.known: list[Tensor] = []
        self.held: list[Tensor] = []
        self.memory: dict[str, View] = {}
        self.model: nn.Module = nn.Module()
        self.originals: dict[int, nn.Module] = {}
        self.refusals: list[str] = []
        self.pending: list[Tensor] = []
        self.slots: list[tuple[Any, ...]] = []
        self.unpacker: Unpacker | None = None
        self.step: Step | None = None
        self.like: Any = None  # what the last run returned: shapes alone
        self.node = ""
        self.change: Change | None = None

    def do_weights(
        self, blob: bytes, fds: list[int], *, spots: list[Any], known: int, device: str
    ) -> Any:
        """Map the judge's weights, read-only: `known` storages and what else the model holds. On
        another `device` the weights are copies."""
        view = View(blob, fds, writable=False)
        self.held = [view.tensor(spot) for spot in spots]
        self.known = [tensor.to(device) for tensor in self.held[:known]]
        return {}

    def do_card(self, blob: bytes, fds: list[int]) -> Any:
        """Map one storage of the judge's weights on the card."""
        self.known.append(View(blob, fds, writable=True).bytes)
        return {}

    def do_memory(self, blob: bytes, fds: list[int], *, which: str) -> Any:
        self.memory[which] = View(blob, fds, writable=True)
        return {}

    def do_load(
        self, blob: bytes, _: list[int], *, change: str | None, backend: str | None, device: str
    ) -> Any:
        """Rebuild the reference over the judge's weights and apply the change; its data."""
        self.model = Unpacker(blob, self.held, self.known).load()
        if change is None:
            return {}
        path = os.path.join(self.folder, change) if change.endswith(".py") else change
        self.wires = Tripwires(path, self.folder, self.readable)
        self.wires.arm(self.model)
        for name in ("optimized.change", "optimized.guards"):
            logging.getLogger(name).addHandler(_Refusals(self.refusals))
        self.change = found = find(path)
        backend = backend or first_backend(found, device)
        names = nodes(self.model, found.region)
        self.originals = {id(m): m for m in map(self.model.get_submodule, names)}
        replaced = apply_change(self.model, found, backend)
        contract = asdict(found.contract)
        numerics = contract["numerics"]
        contract["numerics"] = numerics if isinstance(numerics, str) else dict(numerics)
        return {
            "name": found.name,
            "region": found.region,
            "summary": found.summary,
            "backend": backend,
            "contract": contract,
            "around": found.around,
            "replaced": replaced,
        }

    def do_limit(self, _: bytes, __: list[int], *, domain: list[Any]) -> Any:
        """Let the change run inside the domain only; elsewhere the reference runs."""
        assert self.change is not None
        limit(self.model, self.change, Domain.from_json(domain))
        return {}

    def do_call(
        self,
        blob: bytes,
        _: list[int],
        *,
        node: str,
        spots: list[Any],
        poison: list[Any] | None,
        fill: bool,
        audit: bool,
    ) -> Any:
        """One call of a node on what lies in the memory "in"; its result goes to "out"."""
        module = self.model.get_submodule(node)
        unpacker = self._unpacker(blob, spots)
        args, kwargs = unpacker.load()
        dispatched: list[str] = []
        answer: dict[str, Any] = {"refusals": self.refusals}
        if hasattr(module, "declines"):  # it is replaced
            answer["declined"] = _declined(module, args)

        def run() -> Any:
            nonlocal dispatched
            if not audit:
                return module(*args, **kwargs)
            result, dispatched = reference_calls(self.originals, lambda: module(*args, **kwargs))
            return result

        with watching_integers(module) as integers, torch.no_grad():
            result = self._poisoned(run, poison, fill)
            self._wait()
        unpacker.settle()
        answer["dispatched"] = dispatched
        return answer | self._hand_over({"result": result, "integers": integers})

    def _poisoned(self, run: Callable[[], Any], poison: list[Any] | None, fill: bool) -> Any:
        if poison is None:
            return run()
        like = {
            str(i): place(torch.empty(0, dtype=torch.uint8), spot | {"offset": 0})
            if not spot["nbytes"]
            else torch.empty(
                spot["shape"], dtype=getattr(torch, spot["dtype"]), device=spot["device"]
            )
            for i, spot in enumerate(poison)
        }
        with poisoned(like, fill=fill):
            return run()

    def _unpacker(self, blob: bytes, spots: list[Any], memory: str = "in") -> Unpacker:
        tensors = [self.memory[memory].tensor(spot) for spot in spots]
        return Unpacker(blob, tensors, self.known)

    def _hand_over(self, value: Any) -> dict[str, Any]:
        """Copy the value's tensors to the memory "out", if it holds them."""
        tensors: list[Tensor] = []
        tree = encode(value, tensors)
        for tensor in tensors:
            if type(tensor) not in PLAIN:
                raise Refused(f"returns a {type(tensor).__name__}, not a plain tensor")
            if tensor.layout != torch.strided or tensor.device.type == "meta":
                raise Refused(f"returns a tensor that is {tensor.layout} on {tensor.device}")
        self.pending = tensors
        return {"tree": tree} | self.do_again(b"", [])

    def do_again(self, _: bytes, __: list[int]) -> dict[str, Any]:
        """Copy the last result once more; says how much memory it needs if there is too little."""
        layout = Layout()
        for tensor in self.pending:
            layout.add(tensor.detach().contiguous())
        memory = self.memory["out"].bytes
        if layout.end > memory.numel():
            return {"need": layout.end}
        layout.write(memory)
        self._wait()
        devices = [str(tensor.device) for tensor in self.pending]
        spots = [
            {name: spot[name] for name in ("offset", "dtype", "shape")} | {"device": device}
            for spot, device in zip(layout.spots, devices, strict=True)
        ]
        return {"spots": spots}

    def do_prepare(
        self, blob: bytes, _: list[int], *, node: str, spots: list[Any], mode: Mode
    ) -> Any:
        """Make calls of a node ready to be run again and again, on several sets of arguments."""
        self.node = node
        self.unpacker = self._unpacker(blob, spots, "slots")
        self.slots = self.unpacker.load()
        if self.step is not None:
            self.step.close()
        self.step, self.like = None, None
        if mode == "graph":
            self.step = Step(self.model.get_submodule(node), self.slots[0], mode)
        return {}

    def do_refresh(self, _: bytes, __: list[int]) -> Any:
        """The judge has written new values to the memory "slots"."""
        if self.unpacker is not None:
            self.unpacker.refresh()
        return {}

    def do_run(self, _: bytes, __: list[int], *, order: list[int], keep: list[int]) -> Any:
        """Run the slots in `order`; the results of the runs in `keep` are handed over. Where the
        results go, NaN lies before."""
        module, result = self.model.get_submodule(self.node), None
        kept, keeping = [], set(keep)
        with torch.no_grad():
            self._spoil()
            for run, slot in enumerate(order):
                result = self.step() if self.step is not None else module(*self.slots[slot])
                if run in keeping:
                    kept.append(_copied(result))
            self.like = [(t.shape, t.dtype, t.device) for t in _plain(result)]
        if self.unpacker is not None:
            self.unpacker.settle()
        self._wait()
        return self._hand_over(kept)

    def _spoil(self) -> None:
        """NaN in a graph's output, else in memory that a run of the module is likely to get."""
        if self.step is not None:
            given = {t.untyped_storage().data_ptr() for t in _plain(self.slots)}
            given |= {t.untyped_storage().data_ptr() for t in (*self.known, *self.held)}
            for tensor in _plain(self.step.output):
                if tensor.untyped_storage().data_ptr() not in given:
                    _fill(tensor)
        else:
            blocks = [torch.empty(s, dtype=d, device=on) for s, d, on in self.like or ()]
            for block in blocks:
                _fill(block)

    def do_count(self, _: bytes, __: list[int], *, order: list[int]) -> Any:
        """How many operators and kernels each run of a slot in `order` takes."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        module, counts = self.model.get_submodule(self.node), []
        with torch.no_grad():
            for slot in order:
                with profile(activities=activities) as seen:
                    module(*self.slots[slot])
                    self._wait()
                counts.append(len(seen.events() or ()))
        return {"counts": counts}

    def _wait(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _declined(module: Any, args: tuple[Any, ...]) -> str | None:
    """Why the replaced module leaves a call to the reference: its own guard, or its domain."""
    found = None if module.declines is None else module.declines(*args)
    domain = getattr(module.forward, "guard", None)
    return domain.outside(args) if found is None and domain is not None else found


def _plain(result: Any) -> list[Tensor]:
    from harness.trees import leaves

    return [t for _, t in leaves(result) if type(t) in PLAIN]


def _fill(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


def _copied(result: Any) -> Any:
    from harness.trees import map_tensors

    return map_tensors(lambda t: t.clone() if type(t) in PLAIN else t, result)


def find(change: str) -> Change:
    from optimized.inductor import PREFIX, inductor_change

    if change.startswith(PREFIX):
        return inductor_change(change.removeprefix(PREFIX))
    found = load_change(change)
    if not isinstance(found.contract, Contract):
        raise ValueError(f"the contract of {change} is a {type(found.contract).__name__}")
    return found


def first_backend(change: Change, device: str) -> str:
    for implementation in change.implementations:
        if device in implementation.devices:
            return implementation.backend
    have = ", ".join(f"{i.backend} (on {'/'.join(i.devices)})" for i in change.implementations)
    hint = "; --backend triton runs in Triton's interpreter" if "triton" in have else ""
    raise ValueError(f"change {change.name} has nothing for {device}, only {have}{hint}")


class _Refusals(logging.Handler):
    """Collects why guards sent calls to the reference."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.found) < 20:
            self.found.append(record.getMessage())
