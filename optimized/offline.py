"""Compiling kernels without a GPU: do they compile for every target, and do they spill?

`python -m optimized.offline [NAME...]` compiles every kernel of every change in this folder (or of
the files called NAME) for every target and prints its registers, spills and shared memory. Kernels
that the interpreter runs (TRITON_INTERPRET=1) cannot be compiled, so unset it, or call `report`
which starts a process of its own. Kernels in CuTe DSL are compiled for NVIDIA's targets where that
library is installed; where it is not, a line says so.
"""

import argparse
import contextlib
import importlib
import io
import itertools
import json
import logging
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError

from optimized.triton_support import EXACT, INTERPRETED, OfflineCase, tf32_precision
from optimized.wgmma_operands import overwritten

log = logging.getLogger(__name__)

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
    "sm_100": GPUTarget("cuda", 100, 32),  # B200, GB200
    "gfx950": GPUTarget("hip", "gfx950", 64),  # MI350
}


class CompileError(Exception):
    """A kernel does not compile for a target; the message holds the compiler's own words."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one thread (registers, spills) and one thread block (shared memory) take.

    `spills` are bytes of local memory on NVIDIA, spilled registers on AMD. The last two count
    instructions ahead of the wait for the previous kernel; None where the kernel never waits.
    `overwritten` are those that write to registers which a Hopper product in flight still reads.
    """

    registers: int
    spills: int
    shared_bytes: int
    loads_before_wait: int | None = None
    stores_before_wait: int | None = None
    overwritten: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel compiled for one target; `error` instead of `resources` where that failed."""

    change: str
    kernel: str
    constexprs: Mapping[str, Any]
    num_warps: int
    target: str
    resources: Resources | None
    error: str | None


def resources(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: str,
    num_warps: int = 4,
    registers: int | None = None,
) -> Resources:
    """Compile `kernel` for `target`, one of `TARGETS`, and read what it takes from the binary.

    Pointers are taken as 16-byte aligned, as PyTorch's are, and so are integers of type "i32:16" as
    multiples of 16. Raises CompileError, also where LLVM
    prints an error and returns a binary all the same, and ValueError for an unknown target.
    """
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; choose one of {', '.join(TARGETS)}")
    if INTERPRETED:
        raise ValueError("TRITON_INTERPRET is set, so kernels cannot be compiled; unset it")
    if "PDL" in kernel.arg_names:  # dependent launch is NVIDIA's
        signature = {**signature, "PDL": "constexpr"}
        constexprs = {**constexprs, "PDL": TARGETS[target].backend == "cuda"}
    if "PRECISION" in kernel.arg_names:
        signature = {**signature, "PRECISION": "constexpr"}
        constexprs = {
            **constexprs,
            "PRECISION": tf32_precision(hip=TARGETS[target].backend == "hip"),
        }
    names = list(signature)
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or kind.endswith(":16")
    }
    kinds = {name: kind.removesuffix(":16") for name, kind in signature.items()}
    source = ASTSource(kernel, kinds, dict(constexprs), aligned)
    options: dict[str, Any] = {"num_warps": num_warps, **EXACT}
    if registers is not None and TARGETS[target].backend == "cuda":
        options["maxnreg"] = registers
    compiled = failure = None
    with _captured_output() as printed:
        try:
            compiled = triton.compile(source, target=TARGETS[target], options=options)
        except (TritonError, RuntimeError) as error:  # the front end, and LLVM or an assembler
            failure = error
    if compiled is None or "error" in printed[0].lower():
        raise CompileError(f"{type(failure).__name__}: {failure}\n{printed[0]}") from failure
    shared = int(compiled.metadata.shared)
    if TARGETS[target].backend == "cuda":
        return _nvidia(compiled.asm["cubin"], compiled.asm["ptx"], shared)
    return _amd(compiled.asm["amdgcn"], shared)


def _nvidia(cubin: bytes, ptx: str, shared: int) -> Resources:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def dump(what: str) -> str:
            command = [str(tool), what, file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        text = dump("--dump-resource-usage")
        sass = dump("--dump-sass") if "wgmma.mma_async" in ptx else ""
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    spills = used["STACK"] + used["LOCAL"]
    early, wait, _ = ptx.partition("griddepcontrol.wait")
    copies = r"\b(?:ld\.global|cp\.async\.(?:c[ag]|bulk\.(?:tensor|shared)))"
    loads = len(re.findall(copies, early)) if wait else None
    stores = len(re.findall(r"\b(?:st\.global|atom\.|red\.)", early)) if wait else None
    return Resources(
        registers=used["REG"],
        spills=spills,
        shared_bytes=shared,
        loads_before_wait=loads,
        stores_before_wait=stores,
        overwritten=tuple(overwritten(sass)),
    )


def _amd(assembly: str, shared: int) -> Resources:
    def value(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        if found is None:
            raise CompileError(f"the gfx assembly has no .{name}")
        return int(found.group(1))

    spills = value("vgpr_spill_count") + value("sgpr_spill_count")
    return Resources(registers=value("vgpr_count"), spills=spills, shared_bytes=shared)


@contextlib.contextmanager
def _captured_output() -> Iterator[list[str]]:
    """Collect what is printed to file descriptor 2, as LLVM does, and to sys.stdout, as Triton does
    when the assembler fails; in the list afterwards."""
    sys.stderr.flush()
    kept = os.dup(2)
    printed: list[str] = []
    with tempfile.TemporaryFile() as file, contextlib.redirect_stdout(io.StringIO()) as stdout:
        os.dup2(file.fileno(), 2)
        try:
            yield printed
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            printed.append(file.read().decode(errors="replace") + stdout.getvalue())


def cases(names: Sequence[str] = ()) -> Iterator[tuple[str, OfflineCase]]:
    """Every case of every module in this folder that has `offline_cases()`, with its name; of those
    called `names` if there are any."""
    for name in _modules("offline_cases", names):
        for case in importlib.import_module(f"optimized.{name}").offline_cases():
            yield name, OfflineCase(*case)


def cute_rows(names: Sequence[str] = ()) -> Iterator[Row]:
    """The same of modules that have `cute_cases()`, compiled for NVIDIA's targets; none, and a
    warning, without the library."""
    for name in _modules("cute_cases", names):
        try:
            found = importlib.import_module(f"optimized.{name}").cute_cases()
        except ImportError as error:
            log.warning("kernels of %s are left out: %s; install nvidia-cutlass-dsl", name, error)
            continue
        for case, target in itertools.product(found, TARGETS):
            if TARGETS[target].backend != "cuda":
                continue
            used = error = None
            try:
                used = _nvidia(*case.binary(target), case.shared_bytes)
            except ValueError as failure:
                error = str(failure)
            yield Row(
                change=name,
                kernel=case.kernel,
                constexprs=dict(case.constexprs),
                num_warps=case.num_warps,
                target=target,
                resources=used,
                error=error,
            )


def _modules(function: str, names: Sequence[str]) -> Iterator[str]:
    """The modules of this folder that define `function`; of `names` if there are any."""
    folder = Path(__file__).parent
    for info in pkgutil.iter_modules([str(folder)]):
        if info.ispkg or (names and info.name not in names):
            continue
        if f"\ndef {function}()" in (folder / f"{info.name}.py").read_text():
            yield info.name


def compile_all(names: Sequence[str] = (), *, brief: bool = False) -> Iterator[Row]:
    """Compile every case (of the modules called `names`) for every target, one row each; with
    `brief`, a Triton kernel's other cases than its first for the first target alone."""
    seen: set[str] = set()
    for change, case in cases(names):
        every = not brief or case.kernel.__name__ not in seen
        seen.add(case.kernel.__name__)
        for target in list(TARGETS)[: None if every else 1]:
            used = error = None
            try:
                used = resources(
                    case.kernel,
                    case.signature,
                    case.constexprs,
                    target,
                    case.num_warps,
                    case.registers,
                )
            except CompileError as failure:
                error = str(failure)
            yield Row(
                change=change,
                kernel=case.kernel.__name__,
                constexprs=dict(case.constexprs),
                num_warps=case.num_warps,
                target=target,
                resources=used,
                error=error,
            )
    yield from cute_rows(names)


def report(*, brief: bool = False) -> list[Row]:
    """`compile_all()` in a process of its own, where kernels are never interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "optimized.offline", "--json", *["--brief"] * brief]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr)
    rows = []
    for line in done.stdout.splitlines():
        data = json.loads(line)
        used = data.pop("resources")
        rows.append(Row(resources=Resources(**used) if used else None, **data))
    return rows


class Parser(argparse.ArgumentParser):
    """Bad usage is one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def parser() -> Parser:
    p = Parser(prog="python -m optimized.offline", description="Compile kernels without a GPU.")
    p.add_argument("names", nargs="*", metavar="NAME", help="files of optimized/; default all")
    p.add_argument("--brief", action="store_true", help="a kernel's other cases for one target")
    p.add_argument("--json", action="store_true", help="one JSON object a line")
    return p


def main(arguments: Sequence[str]) -> int:
    p = parser()
    a = p.parse_args(arguments)
    known = [info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])]
    for name in a.names:
        if name not in known:
            p.error(f"optimized/ has no file {name}.py; it has: {', '.join(known)}")
    if INTERPRETED:
        p.error("TRITON_INTERPRET is set, so kernels cannot be compiled: unset it")
    failed = False
    for row in compile_all(a.names, brief=a.brief):
        failed |= row.error is not None
        if a.json:
            print(json.dumps(asdict(row)), flush=True)
            continue
        values = " ".join(f"{name}={value}" for name, value in row.constexprs.items())
        head = f"{row.change:20} {row.kernel:28} {row.target:7} {row.num_warps:2} warps"
        if row.resources is None:
            print(f"{head}  failed: {row.error}  {values}", flush=True)
        else:
            used = row.resources
            print(
                f"{head} {used.registers:4} registers {used.spills:4} spills "
                f"{used.shared_bytes:6} B shared  {values}",
                flush=True,
            )
    return int(failed and not a.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
