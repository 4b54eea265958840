"""A candidate that runs in another process, as the judge sees it: a model that it can call.

Every module of the tree hands its calls to the module of the same name in the worker. Arguments
are written to shared memory, results and what became of the arguments are copied from it while the
worker is stopped. What the worker says is data, and checked.
"""

import contextlib
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.errors import UserError
from harness.handover import Block, Layout, decode, extent, pack, place
from harness.observe import POISON, CandidateError
from harness.records import Verdict
from harness.workload import free_bytes
from optimized.change import Change, Contract, share
from optimized.domain import Domain

if TYPE_CHECKING:
    from harness.sandbox import Sandbox

IN_BYTES, OUT_BYTES = 1 << 24, 1 << 24  # to begin with
SLACK = 1.5  # memory is made that much larger than asked for
AUDITS = 1 / 8  # of calls run under a profiler that sees the reference being called
FOREIGN = KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError


class Candidate:
    """One change in its worker. `change` is its data, without code; `model` a tree to call."""

    def __init__(self, sandbox: "Sandbox", change: str | None, backend: str | None) -> None:
        self.sandbox, self.limits = sandbox, sandbox.limits
        self.findings: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.calls: dict[str, int] = {}
        self.chance = random.Random()
        files, name = {}, change
        if change is not None and change.endswith(".py"):
            files, name = _text_of(change)
        self.process = sandbox.start(files)
        self.blocks: dict[str, Block] = {}
        self.old: list[Block] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            sandbox.give_weights(self.process)
            for which, size in (("in", IN_BYTES), ("out", OUT_BYTES)):
                self.grow(which, size)
            self.sums = sandbox.checksums() if sandbox.ipc else []
            self._load(name, backend)
            undo.pop_all()
        self.model = remote_tree(self)

    def _load(self, change: str | None, backend: str | None) -> None:
        message = {
            "op": "load",
            "change": change,
            "backend": backend,
            "device": self.sandbox.device.type,
        }
        blob = self.sandbox.skeleton
        told = self.process.ask(message, blob, seconds=self.limits.load_s)
        self.hear(told)
        if "error" in told:
            text = str(told["error"]).replace(f"{self.process.folder}/", "")
            if text.startswith("ValueError: "):
                raise UserError(text.removeprefix("ValueError: "))
            raise CandidateError(text)
        self.change, self.backend, self.replaced = None, backend, []
        if change is not None:
            try:
                contract = Contract(**told["contract"])
                self.change = Change(
                    name=str(told["name"]),
                    region=str(told["region"]),
                    summary=str(told["summary"]),
                    contract=contract,
                    implementations=(),
                    around=bool(told["around"]),
                )
                self.backend = str(told["backend"])
                self.replaced = [str(name) for name in told["replaced"]]
            except FOREIGN as error:
                raise CandidateError("its contract is none") from error

    def hear(self, answer: dict[str, Any]) -> None:
        """Take in what the worker saw the candidate do."""
        self.findings.update(dict.fromkeys(map(str, answer.get("faults", ()))))
        self.notes.update(dict.fromkeys(map(str, answer.get("notes", ()))))
        refusals = [str(text) for text in answer.get("refusals", ())]
        self.notes.update(dict.fromkeys(refusals))
        # Of a call to a replaced module its own guard says whether the reference was to run; inside
        # a larger one it may have been for any of them.
        excused = answer["declined"] if "declined" in answer else refusals
        for name in answer.get("dispatched", ()):
            if not excused:
                self.findings.setdefault(f"dispatches the reference: calls the {name} it replaces")

    def grow(self, which: str, size: int) -> None:
        """Make the memory `which` ("in" or "out") at least `size` bytes large."""
        if which in self.blocks:
            if self.blocks[which].size >= size:
                return
            self.old.append(self.blocks.pop(which))  # the worker may still have it open
            size = int(size * SLACK)
        block = self.sandbox.take(size)
        self.blocks[which] = block
        ticket, fds = block.ticket()
        message = {"op": "memory", "which": which}
        told = self.process.ask(message, ticket, fds, seconds=self.limits.load_s)
        if "error" in told:
            raise CandidateError(f"cannot map the judge's memory: {told['error']}")

    def limit(self, domain: Domain) -> None:
        """Let the change run inside `domain` only, as `optimized.change.limit` does."""
        told = self.process.ask(
            {"op": "limit", "domain": domain.to_json()}, seconds=self.limits.load_s
        )
        self.hear(told)
        if "error" in told:
            raise CandidateError(str(told["error"]))

    def call(
        self, node: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, list[Tensor]], str | None]:
        """Call a node there: its result, the integers its submodules returned, as copies, and why
        its own guard declined, if so; the tensors of the arguments become what the call left in
        them."""
        layout = Layout()
        blob = pack((args, kwargs), layout, self.sandbox.known)
        self.grow("in", layout.end)
        layout.write(self.blocks["in"].bytes)
        self.synchronize()
        count = self.calls[node] = self.calls.get(node, 0) + 1
        poison = POISON.get()
        message = {
            "op": "call",
            "node": node,
            "spots": layout.spots,
            "poison": None if poison is None else [spot_like(t) for t in poison[0]],
            "fill": poison is not None and poison[1],
            "audit": count == 2 or self.chance.random() < AUDITS,
        }
        told = self.answer(message, blob)
        with self.stopped():
            changed = layout.read_back(self.blocks["in"].bytes)
            value = self.collect(told)
        if changed:
            self.findings.setdefault(f"writes {changed} byte(s) outside its arguments")
        if not isinstance(value, dict) or value.keys() != {"result", "integers"}:
            raise CandidateError("handed over a result that is none")
        declined = told.get("declined")
        return value["result"], value["integers"], None if declined is None else str(declined)

    def answer(self, message: dict[str, Any], blob: bytes = b"") -> dict[str, Any]:
        """Ask for something that ends with results in the memory "out"."""
        return self.complete(self.process.ask(message, blob, seconds=self.limits.call_s))

    def complete(self, told: dict[str, Any]) -> dict[str, Any]:
        """An answer whose results lie in the memory "out", made larger where they do not fit."""
        self.hear(told)
        if isinstance(need := told.get("need"), int):
            if not 0 < need < free_bytes(self.sandbox.device) // 4:
                raise CandidateError(f"returns {need >> 20} MiB, more than can be handed over")
            self.grow("out", need)
            told |= self.process.ask({"op": "again"}, seconds=self.limits.call_s)
        for kind in ("error", "refused"):
            if kind in told:
                raise CandidateError(str(told[kind]))
        return told

    def collect(self, told: dict[str, Any]) -> Any:
        """The handed-over result as copies of our own. The worker must be stopped."""
        block, ours = self.blocks["out"].bytes, self.sandbox.device
        try:
            tensors = []
            for spot in told["spots"]:
                wanted = {name: spot[name] for name in ("offset", "dtype", "shape")}
                where = str(spot["device"])
                if where not in ("cpu", str(ours)):
                    raise CandidateError(f"returns a tensor on {where}")
                tensors.append(place(block, wanted).to(where, copy=True))
            self.synchronize()
            return decode(told["tree"], tensors)
        except FOREIGN as error:
            raise CandidateError("handed over a result that is none") from error

    def stopped(self) -> contextlib.ExitStack:
        """While the context lasts, nothing of the candidate runs."""
        self.process.freeze()
        stack = contextlib.ExitStack()
        stack.callback(self.process.thaw)
        return stack

    def synchronize(self) -> None:
        if self.sandbox.device.type == "cuda":
            torch.cuda.synchronize(self.sandbox.device)

    def close(self) -> list[str]:
        """End the worker; all findings about it."""
        for finding in self.process.finish():
            self.findings.setdefault(finding)
        if getattr(self, "sums", None) and self.sums != self.sandbox.checksums():
            self.findings.setdefault("changes the weights")
            self.sums = []
        for block in (*self.old, *self.blocks.values()):
            self.sandbox.give_back(block)
        self.old, self.blocks = [], {}
        return list(self.findings)

    def judged(self, verdict: Verdict) -> Verdict:
        """The verdict together with what was seen of the process: a fault, or findings."""
        fault = self.process.fault
        found = [fault] if fault and fault != "was ended" else list(self.findings)
        notes = (*verdict.notes, *(f"it {note}" for note in self.notes))
        if not found:
            return replace(verdict, notes=notes)
        numerics = "" if verdict.passed or fault else f"; its numbers: {verdict.reason}"
        return replace(verdict, passed=False, reason="; ".join(found) + numerics, notes=notes)


def spot_like(tensor: Tensor) -> dict[str, Any]:
    """What it takes to make a tensor alike."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "nbytes": extent(tensor),
        "device": str(tensor.device),
    }


def _text_of(change: str) -> tuple[dict[str, str], str]:
    """A change file's text by its name, and the name."""
    path = Path(change)
    if not path.is_file():
        raise UserError(f"no change file at {path}; give the path of a .py file or a known name")
    try:
        return {path.name: path.read_text()}, path.name
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text, so no change file") from error


class RemoteForward:
    """The forward of one module, in the worker. Of the last call, `integers` are what submodules
    returned, and `declined` is why its guard left it to the reference."""

    def __init__(self, candidate: Candidate, node: str) -> None:
        self.candidate, self.node = candidate, node
        self.integers: dict[str, list[Tensor]] = {}
        self.declined: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result, self.integers, self.declined = self.candidate.call(self.node, args, kwargs)
        return result


def remote_tree(candidate: Candidate) -> nn.Module:
    """A tree over the reference's parameters whose every module calls its namesake there."""
    tree = share(candidate.sandbox.reference)
    for name, module in tree.named_modules():
        module.forward = RemoteForward(candidate, name)
    if candidate.change is not None:
        for name in candidate.replaced:
            node: Any = tree.get_submodule(name)
            node.applied, node.contract = candidate.change.name, candidate.change.contract
    return tree
