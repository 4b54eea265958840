"""Tensors between two processes: written to memory that both see, described beside it.

The judge makes the memory, seals its size, and keeps a margin of known bytes around every tensor,
which shows writes past an end. On a CPU it is a file in memory (memfd); on CUDA a block of the
card's memory through CUDA IPC or, where that does not work, a file in memory that both sides copy
from and to.
"""

import contextlib
import fcntl
import io
import mmap
import os
import pickle
import warnings
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from harness.trees import VECTOR, once

ALIGNMENT = 256  # bytes; no kernel wants more
MARGIN = 256  # bytes of PATTERN on each side of a tensor
PATTERN = 0xA5
FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
READ_ONLY = fcntl.F_SEAL_WRITE | FIXED_SIZE | fcntl.F_SEAL_SEAL
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


class Block:
    """Bytes that two processes see: `bytes` is a uint8 tensor [size]."""

    def __init__(self, size: int, device: torch.device, *, ipc: bool = False) -> None:
        """`ipc` puts it into the card's own memory."""
        self.size = max(size, mmap.PAGESIZE)
        self.fd: int | None = None
        self.map: mmap.mmap | None = None
        self.card = b""
        if ipc:
            self.bytes = torch.empty(self.size, dtype=torch.uint8, device=device)
            return
        self.fd = os.memfd_create("handover", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, FIXED_SIZE)
        self.map = mmap.mmap(self.fd, self.size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def seal(self) -> None:
        """Let nobody write to it any more, the other side's mappings included."""
        assert self.fd is not None and self.map is not None
        del self.bytes
        self.map.close()
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, READ_ONLY)
        self.map = mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ)
        self.bytes = frozen(self.map)

    def ticket(self) -> tuple[bytes, list[int]]:
        """What the other side opens it by: a pickle of the judge's own, and files."""
        if self.fd is not None:
            return pickle.dumps(("file", self.size)), [self.fd]
        if not self.card:
            self.card = card_ticket(self.bytes)
        return self.card, []

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self.map is not None:
            with contextlib.suppress(BufferError):  # a view of it is still alive; it goes with it
                self.map.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def card_ticket(tensor: Tensor) -> bytes:
    """What another process opens a tensor's memory on the card by."""
    storage: Any = tensor.untyped_storage()
    return pickle.dumps(("ipc", storage._share_cuda_()))


def frozen(buffer: Any) -> Tensor:
    """A uint8 tensor over memory that must not be written to: doing so ends the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it may not be written is the point
        return torch.frombuffer(buffer, dtype=torch.uint8)


class View:
    """The other side of a block, opened by its ticket; it lives as long as a tensor of it does."""

    def __init__(self, ticket: bytes, fds: Sequence[int], *, writable: bool) -> None:
        kind, what = pickle.loads(ticket)
        self.map: mmap.mmap | None = None
        if kind == "ipc":
            torch.cuda.init()
            storage = torch.UntypedStorage._new_shared_cuda(*what)
            self.bytes = flat(storage)
            return
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.map = mmap.mmap(fds[0], what, prot=protection)
        os.close(fds[0])
        self.bytes = frozen(self.map)

    def tensor(self, spot: dict[str, Any]) -> Tensor:
        """The tensor at `spot`, in a storage that ends where the tensor does where that is possible
        (a file, not the card's memory)."""
        nbytes = spot["nbytes"]
        if self.map is None or not nbytes:
            return place(self.bytes, spot)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = torch.frombuffer(
                self.map, dtype=DTYPES[spot["dtype"]], offset=spot["offset"],
                count=nbytes // DTYPES[spot["dtype"]].itemsize,
            )  # fmt: skip
        return own.as_strided(tuple(spot["shape"]), tuple(spot["stride"]))


def flat(storage: torch.UntypedStorage) -> Tensor:
    """A storage's bytes, uint8 [n]."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


def extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * s for n, s in pairs)) * tensor.element_size()


def place(block: Tensor, spot: dict[str, Any]) -> Tensor:
    """The tensor at `spot` of a block. ValueError if it would lie outside."""
    dtype = DTYPES[spot["dtype"]]
    shape, offset = tuple(spot["shape"]), spot["offset"]
    if any(type(n) is not int or n < 0 for n in (*shape, offset)):
        raise ValueError("a tensor with a negative size")
    stride = spot.get("stride") or torch.empty(shape, device="meta").stride()
    span = 0
    if all(shape):
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    nbytes = span * dtype.itemsize
    if offset % dtype.itemsize or offset + nbytes > block.numel():
        raise ValueError("a tensor outside the memory that was handed over")
    return block[offset : offset + nbytes].view(dtype).as_strided(shape, stride)


class Layout:
    """Where tensors lie in a block: each with margins around it, with its own strides, and as far
    from a boundary as it is, so that the other side gets the call that the judge made."""

    def __init__(self) -> None:
        self.end = MARGIN
        self.spots: list[dict[str, Any]] = []
        self.tensors: list[Tensor] = []
        self.by_id: dict[int, int] = {}

    def add(self, tensor: Tensor) -> int:
        """The tensor's index; one that was added before has one already."""
        if id(tensor) in self.by_id:
            return self.by_id[id(tensor)]
        stride = tensor.stride()
        if not tensor.numel():
            stride = torch.empty(tensor.shape, device="meta").stride()
        spot = {
            "offset": self.end + tensor.data_ptr() % VECTOR,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tuple(tensor.shape),
            "stride": tuple(stride),
        }
        nbytes = extent(
            torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
        )
        self.end = -(-(spot["offset"] + nbytes + MARGIN) // ALIGNMENT) * ALIGNMENT
        self.spots.append(spot | {"nbytes": nbytes})
        self.tensors.append(tensor)
        self.by_id[id(tensor)] = len(self.tensors) - 1
        return len(self.tensors) - 1

    def gaps(self) -> list[tuple[int, int]]:
        """The margins, as [first, last) bytes."""
        found, before = [], 0
        for spot in self.spots:
            found.append((before, spot["offset"]))
            before = spot["offset"] + spot["nbytes"]
        return [*found, (before, self.end)]

    def write(self, block: Tensor) -> None:
        """Copy every tensor to its place, and the pattern around them."""
        for first, last in self.gaps():
            block[first:last] = PATTERN
        for tensor, spot in zip(self.tensors, self.spots, strict=True):
            once(place(block, spot)).copy_(once(tensor))

    def read_back(self, block: Tensor) -> int:
        """Copy every tensor from its place; returns how many bytes of the margins were changed."""
        for tensor, spot in zip(self.tensors, self.spots, strict=True):
            if tensor.numel():
                once(tensor).copy_(once(place(block, spot)))
        return self.changed(block)

    def changed(self, block: Tensor) -> int:
        """How many bytes of the margins are not what they were."""
        margins = torch.cat([block[first:last] for first, last in self.gaps()])
        return int((margins != PATTERN).sum())


class Packer(pickle.Pickler):
    """Pickles the judge's own objects; their tensors go to a layout, or stay where they are.

    `known` maps storages that the other side has (`_cdata`) to their index there.
    """

    def __init__(self, file: io.BytesIO, layout: Layout, known: dict[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.layout, self.known = layout, known

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        parameter = isinstance(obj, nn.Parameter)
        device = str(obj.device)
        index = self.known.get(obj.untyped_storage()._cdata)
        if index is not None:
            geometry = str(obj.dtype), tuple(obj.shape), obj.stride(), obj.storage_offset()
            return "known", id(obj), index, geometry, parameter, device
        return "new", id(obj), self.layout.add(obj), None, parameter, device


def pack(value: Any, layout: Layout, known: dict[int, int]) -> bytes:
    file = io.BytesIO()
    Packer(file, layout, known).dump(value)
    return file.getvalue()


class Unpacker(pickle.Unpickler):
    """The other side of Packer; used by the worker alone, on what the judge wrote.

    A tensor that belongs on another device than the block is copied there; `moved` lists such
    copies with their originals, for `settle` to copy back.
    """

    def __init__(self, blob: bytes, tensors: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(blob))
        self.tensors, self.known = tensors, known
        self.made: dict[int, Tensor] = {}
        self.moved: list[tuple[Tensor, Tensor]] = []

    def persistent_load(self, pid: Any) -> Tensor:
        kind, identity, index, geometry, parameter, device = pid
        if identity not in self.made:
            if kind == "known":
                dtype, shape, stride, offset = geometry
                typed = self.known[index].view(DTYPES[dtype.removeprefix("torch.")])
                tensor = typed.as_strided(shape, stride, offset)
            else:
                tensor = self.tensors[index]
                if device != str(tensor.device):
                    there = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                    ).copy_(tensor)
                    self.moved.append((there, tensor))
                    tensor = there
            if parameter:
                tensor = nn.Parameter(tensor, requires_grad=False)
            self.made[identity] = tensor
        return self.made[identity]

    def settle(self) -> None:
        for there, here in self.moved:
            here.copy_(there)

    def refresh(self) -> None:
        for there, here in self.moved:
            there.copy_(here)


def storages_of(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Each storage once, as flat uint8, by `_cdata`."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in found:
            found[storage._cdata] = flat(storage)
    return found


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """A result as JSON: tensors by their place in `tensors`, all else by its shape."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names: Any = value._fields  # type: ignore[attr-defined]
        return {"object": {n: encode(getattr(value, n), tensors) for n in names}}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[key, encode(item, tensors)] for key, item in value.items()]}
    return {"object": {n: encode(item, tensors) for n, item in vars(value).items()}}


def decode(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The result that `encode` described. ValueError, KeyError or IndexError if it is none."""
    ((kind, what),) = value.items()
    if kind == "tensor":
        return tensors[what]
    if kind == "value":
        return what
    if kind in ("tuple", "list"):
        items = [decode(item, tensors) for item in what]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: decode(item, tensors) for key, item in what}
    if kind == "object":
        return SimpleNamespace(**{name: decode(item, tensors) for name, item in what.items()})
    raise ValueError(f"a result of kind {kind!r}")
