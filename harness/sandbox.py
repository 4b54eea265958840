"""The sandbox for one reference model: its weights, handed over once, and workers for candidates.

In host memory the weights are a sealed file that nobody can write to. On a card they are the
judge's own memory, mapped through CUDA IPC, which can be written to: so they are checksummed after
every candidate.
"""

from pathlib import Path

import torch
from torch import nn

from harness.confine import ROOT, Limits
from harness.errors import UserError
from harness.handover import Block, Layout, card_ticket, pack, storages_of
from harness.observe import CandidateError, checksum
from harness.process import Process, Server
from harness.protections import Protection, require
from harness.remote import Candidate
from harness.workload import free_bytes


class Sandbox:
    """Runs candidates for one reference model. Use as a context manager.

    `ipc` says how tensors on a card are handed over, once known: through CUDA IPC, or by copies in
    host memory.
    """

    def __init__(
        self,
        reference: nn.Module,
        device: torch.device,
        *,
        model: str | None = None,
        limits: Limits | None = None,
        required: bool = False,
        root: Path = ROOT,
    ) -> None:
        """`model` names the model's file. With `required`, a missing protection is a UserError.
        Workers run the project's files at `root`, which must be those of this process."""
        self.reference, self.device, self.required = reference, device, required
        self.limits = limits or Limits()
        self.model_file = str(Path(model).resolve()) if model and model.endswith(".py") else None
        self.server = Server([model] if model else [], root)
        tensors = [*reference.parameters(), *reference.buffers()]
        self.storages = storages_of(tensors)
        self.known = {key: index for index, key in enumerate(self.storages)}
        self.ipc = device.type == "cuda"
        self.shared: list[bytes] = []
        self.pool: list[Block] = []
        self.no_ipc = ""  # why it does not work
        self.weights: Block | None = None
        self.layout, self.skeleton = Layout(), b""
        self.protections: tuple[Protection, ...] = ()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.server.close()
        if self.weights is not None:
            self.weights.close()

    def open(self, change: str | None, backend: str | None = None) -> Candidate:
        """A worker with `change` (a name, or a change file's path) applied; None applies nothing.

        UserError for what the user got wrong, CandidateError for what the candidate did.
        """
        try:
            return Candidate(self, change, backend)
        except NoIpc as error:
            self.ipc, self.no_ipc = False, str(error)
            return Candidate(self, change, backend)

    def start(self, files: dict[str, str]) -> Process:
        readable = [self.model_file] if self.model_file else []
        process = Process(self.server, self.limits, files, readable)
        self.protections = process.protections
        if self.required:
            try:
                require(process.protections)
            except UserError:
                process.close()
                raise
        return process

    def give_weights(self, process: Process) -> None:
        """Let a worker see the reference's weights: read-only in host memory, or the card's own."""
        if self.weights is None:
            self._fill_weights()
        assert self.weights is not None
        count = 0 if self.ipc else len(self.storages)
        ticket, fds = self.weights.ticket()
        message = {
            "op": "weights",
            "spots": self.layout.spots,
            "known": count,
            "device": str(self.device),
        }
        told = process.ask(message, ticket, fds, seconds=self.limits.load_s)
        if "error" in told:
            raise CandidateError(told["error"])
        if not self.ipc:
            return
        for ticket in self.tickets():
            told = process.ask({"op": "card"}, ticket, seconds=self.limits.load_s)
            if "error" in told:
                process.end("cannot map the card's memory")
                self.weights = None
                raise NoIpc(told["error"])

    def _fill_weights(self) -> None:
        self.layout = Layout()
        if not self.ipc:
            size = sum(t.nbytes for t in self.storages.values())
            if size > free_bytes(torch.device("cpu")) // 2:
                raise UserError(
                    f"the weights take {size / 2**30:.0f} GiB, too many to copy for the sandbox; "
                    "choose a smaller preset"
                )
            for storage in self.storages.values():
                self.layout.add(storage)
        self.skeleton = pack(self.reference, self.layout, self.known)
        self.weights = Block(self.layout.end, torch.device("cpu"))
        self.layout.write(self.weights.bytes)
        self.weights.seal()

    def tickets(self) -> list[bytes]:
        """What workers open the card's weights by. Each storage is shared once: PyTorch counts."""
        if not self.shared:
            self.shared = [card_ticket(storage) for storage in self.storages.values()]
        return self.shared

    def take(self, size: int) -> Block:
        """Memory for one worker. On a card it is used again, cleared: what was once shared through
        CUDA IPC is never given back."""
        for block in sorted(self.pool, key=lambda b: b.size):
            if block.size >= size:
                self.pool.remove(block)
                block.bytes.zero_()
                return block
        return Block(size, self.device, ipc=self.ipc)

    def give_back(self, block: Block) -> None:
        """Of a worker that has ended."""
        if block.fd is None:
            self.pool.append(block)
        else:
            block.close()

    def checksums(self) -> list[tuple[int, int]]:
        return [checksum(storage) for storage in self.storages.values()]


class NoIpc(Exception):
    """CUDA IPC does not work between this process and its workers."""
