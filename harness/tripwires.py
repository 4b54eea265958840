"""What gives a cheat away inside the candidate's own process: attempts, and things replaced.

None of the sandbox depends on it. A candidate shares its process with these wires and could cut
them with effort; the kernel and the judge's own process hold without them. They name what was
tried. Torch's functions are looked up by name, so that this works on any version.
"""

import gc
import importlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FAMILIES = socket.AF_INET, socket.AF_INET6
ANYONES = "/dev/", "/proc/self/", "/proc/thread-self/"
OTHERS_MEMORY = re.compile(r"/proc/(\d+|self)/(task/\d+/)?(mem|environ|fd|root|cwd)\b")
ALTERING = {
    "os.remove", "os.rename", "os.truncate", "os.mkdir", "os.rmdir", "os.chmod", "os.chown",
    "os.symlink", "os.link", "shutil.rmtree", "shutil.move", "shutil.copyfile",
}  # fmt: skip
LISTING = {"os.listdir", "os.scandir", "glob.glob"}
SEARCHING = {"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames"}
# What a comparison or a clock of the judge would use, if the judge were here.
WATCHED = {
    "time": ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns"),
    "torch": ("allclose", "equal", "isclose", "empty", "empty_like"),
    "torch.testing": ("assert_close",),
    "torch.Tensor": ("allclose", "equal", "clone", "copy_", "isnan", "sum"),
    "torch.cuda": ("synchronize", "Event", "CUDAGraph", "current_stream"),
    "torch.cuda.Event": ("record", "elapsed_time", "synchronize", "query"),
    "torch.cuda.CUDAGraph": ("replay",),
    "torch.nn.Module": ("__call__",),
}
OWN = "harness.worker", "harness.handover", "harness.observe", "harness.wire", "harness.tripwires"


class Tripwires:
    """`faults` and `notes` of one candidate, in the order in which they were seen."""

    def __init__(self, change_file: str, folder: str, readable: Iterable[str]) -> None:
        self.change_file, self.folder = change_file, folder
        self.readable = tuple(readable)
        self.faults: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.state = threading.local()
        self.originals: list[tuple[str, Any, str, Any]] = []

    def arm(self, model: nn.Module) -> None:
        """Remember what must not be replaced, and listen to Python's audit events from now on."""
        for place, names in WATCHED.items():
            owner = _find(place)
            self._remember(place, owner, [n for n in names if hasattr(owner, n)])
        for name in OWN:
            module = sys.modules[name]
            self._remember(name, module, [n for n, v in vars(module).items() if callable(v)])
        for cls in {type(module) for module in model.modules()}:
            self._remember(cls.__name__, cls, ["forward", "__call__"])
        sys.addaudithook(self._hear)

    def _remember(self, place: str, owner: Any, names: Iterable[str]) -> None:
        for name in names:
            self.originals.append((f"{place}.{name}", owner, name, getattr(owner, name)))

    def look(self) -> None:
        """Whether anything that was remembered has been replaced."""
        for place, owner, name, original in self.originals:
            now = getattr(owner, name, None)
            if now is not original and now != original:
                self.faults.setdefault(f"replaces {place}")

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if getattr(self.state, "busy", False):
            return
        self.state.busy = True
        try:
            self._judge(event, args)
        except (TypeError, ValueError, IndexError, RecursionError):
            return  # an event with other arguments than the documented ones
        finally:
            self.state.busy = False

    def _judge(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            self._open(args)
        elif event in ALTERING:
            path = _path(args[0])
            if path and not self._mine(path):
                self.faults.setdefault(f"alters {path}")
        elif event in LISTING:
            path = _path(args[0])
            if path and not self._may_read(path):
                self.notes.setdefault(f"lists {path}")
        elif event == "socket.__new__":
            if args[1] in FAMILIES:
                self.faults.setdefault("opens a network socket")
        elif event in ("os.kill", "os.killpg"):
            if self._called_by_change():
                self.faults.setdefault("sends a signal to another process")
        elif event == "sys._getframe":
            if self._called_by_change():
                self.faults.setdefault("looks into the frames of its callers")
        elif event in SEARCHING and self._called_by_change():
            self.faults.setdefault("searches the process for others' objects")

    def _open(self, args: tuple[Any, ...]) -> None:
        path, mode, flags = _path(args[0]), args[1], args[2]
        if not path:
            return
        if OTHERS_MEMORY.match(path):
            self.faults.setdefault(f"opens {path}")
        elif (isinstance(mode, str) and set(mode) & set("wax+")) or (flags or 0) & WRITING:
            if not self._mine(path) and not path.startswith(ANYONES):
                self.faults.setdefault(f"opens {path} for writing")
        elif not self._may_read(path):
            self.notes.setdefault(f"reads {path}")

    def _mine(self, path: str) -> bool:
        return path == self.folder or path.startswith(self.folder + "/")

    def _may_read(self, path: str) -> bool:
        if self._mine(path) or path.startswith(ANYONES):
            return True
        return any(path == allowed or path.startswith(allowed + "/") for allowed in self.readable)

    def _called_by_change(self) -> bool:
        """Whether the change file made this call itself, or through `inspect` or the like."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and Path(frame.f_code.co_filename).name in ("inspect.py", "gc.py"):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename == self.change_file


def _path(value: Any) -> str:
    """An absolute path; "" for a file descriptor or nothing."""
    if isinstance(value, bytes):
        value = os.fsdecode(value)
    if not isinstance(value, (str, os.PathLike)):
        return ""
    return os.path.abspath(value)


def _find(place: str) -> Any:
    """A module or a class by its dotted name."""
    try:
        return importlib.import_module(place)
    except ImportError:
        module, _, name = place.rpartition(".")
        return getattr(_find(module), name)


def reference_calls(
    originals: dict[int, nn.Module], run: Callable[[], Any]
) -> tuple[Any, list[str]]:
    """Call `run`, and say which classes' forward it ran on modules of `originals` (by id)."""
    codes = {type(m).forward.__code__ for m in originals.values()}
    seen: dict[str, None] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])
            if id(owner) in originals:
                seen.setdefault(type(owner).__name__)

    was = sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        result = run()
    finally:
        sys.setprofile(was)
        threading.setprofile(None)  # type: ignore[arg-type]
    gc.collect(0)
    return result, list(seen)
