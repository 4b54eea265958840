"""What Nsight Compute (`ncu`) says of one call of a region with a change. Torch-free.

`ncu` speaks to the process that it profiles over the network, which the run's own process has given
up. So it is started by a helper, a process that is begun before that and takes the name of a case
in its own folder, nothing else. The profiled process (`agents.claude.profiled`) gives up its rights
before it loads what a model wrote.
"""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0  # with some metrics a kernel runs again a dozen times
MOST_KERNELS = 24  # of one call
CASE = "case.pt"
PROFILED = sys.executable, "-m", "agents.claude.profiled"

# ncu's names, as of Nsight Compute 2020 and later.
METRICS = {
    "us": "gpu__time_duration.sum",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 hit %": "lts__t_sector_hit_rate.pct",
    "SM %": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
SHARED = "launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic"
STALLS = (  # no card has all of them: B200 lacks gmma and imc_miss
    "barrier", "branch_resolve", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle",
    "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
ALL = *METRICS.values(), *SHARED, *(STALL.format(reason) for reason in STALLS)
ERROR, HEAD = "==ERROR==", '"ID",'  # how ncu's lines begin
NO_RIGHT = "ERR_NVGPUCTRPERM"
TOP = 3
US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
US |= {"nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "second": 1e6}
BYTES = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9}
NAME = 60  # letters of a kernel's


@dataclass(frozen=True)
class Kernel:
    """One launch; a metric that ncu does not give on this card is not in `values`."""

    name: str
    values: Mapping[str, float]  # by ncu's names; times in us, sizes in bytes

    def shown(self, metric: str, form: str) -> str:
        return f"{self.values[metric]:{form}}" if metric in self.values else "?"

    def row(self) -> str:
        forms = ".2f", ".1f", ".1f", ".1f", ".1f", ".0f"
        cells = [self.shown(m, form) for m, form in zip(METRICS.values(), forms, strict=True)]
        shared = [self.values[m] for m in SHARED if m in self.values]
        cells += [f"{sum(shared):.0f}" if shared else "?", self.stalls(), self.name[:NAME]]
        return " | ".join(cells)

    def stalls(self) -> str:
        """The reasons that hold warps up most, in cycles for each instruction issued."""
        found = {reason: self.values.get(STALL.format(reason), 0.0) for reason in STALLS}
        most = sorted(found, key=lambda reason: -found[reason])[:TOP]
        return ", ".join(f"{reason} {found[reason]:.1f}" for reason in most if found[reason]) or "?"


def command(
    ncu: str, case: Path, model: str, device: str, metrics: Sequence[str] = ALL
) -> list[str]:
    """What profiles the call that the process marks; its clocks are those of the run."""
    options = ["--csv", "--profile-from-start", "off", "--clock-control", "none"]
    options += ["--launch-count", str(MOST_KERNELS), "--metrics", ",".join(metrics)]
    return [ncu, *options, *PROFILED, "call", str(case), model, device]


def kernels(text: str) -> list[Kernel]:
    """From ncu's CSV, one line for each metric of each launch, between lines of its own and of the
    program that it profiles."""
    listed = text.splitlines()
    first = next((n for n, line in enumerate(listed) if line.startswith(HEAD)), len(listed))
    lines = [line for line in listed[first:] if line.startswith('"')]
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        name, values = found.setdefault(row.get("ID") or "", (row.get("Kernel Name") or "", {}))
        try:
            value = float((row.get("Metric Value") or "").replace(",", ""))
        except ValueError:
            continue  # "n/a": this card does not have it
        unit = (row.get("Metric Unit") or "").lower().partition("/")[0]
        scale = US.get(unit) or BYTES.get(unit) or 1.0
        values[row.get("Metric Name") or ""] = scale * value
    return [Kernel(name, values) for name, values in found.values()]


def table(found: Sequence[Kernel]) -> str:
    total = sum(k.values.get(METRICS["us"], 0.0) for k in found)
    columns = [*METRICS, "shared memory, B", f"{TOP} most frequent stalls", "kernel"]
    head = f"Nsight Compute: {len(found)} kernels, {total:.2f} us in all"
    if len(found) == MOST_KERNELS:
        head += f" (only the first {MOST_KERNELS})"
    return "\n".join([head, " | ".join(columns), *(k.row() for k in found)])


def refused(text: str, metrics: Sequence[str]) -> set[str]:
    """Those of `metrics` that ncu says the card has not: it then profiles nothing."""
    errors = " ".join(line for line in text.splitlines() if line.startswith(ERROR))
    return {metric for metric in metrics if metric.partition(".")[0] in errors}


def failure(text: str, code: int) -> str:
    """Why there is no table, in ncu's or the profiled process's own words."""
    if NO_RIGHT in text:
        return (
            f"ncu may not read this card's performance counters ({NO_RIGHT}); an administrator "
            "allows it with the driver's option NVreg_RestrictProfilingToAdminUsers=0, or a "
            "container with --cap-add=SYS_ADMIN"
        )
    said = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix(ERROR).strip() for line in said if line.startswith(ERROR)]
    words = errors[:2] or [line for line in said if not line.startswith("==")][-1:]
    return f"ncu gave no figures (exit code {code}): {'; '.join(words) or 'it said nothing'}"


class Profiler:
    """`absent` says why nothing can be profiled here, or is None; `case` is what is profiled."""

    def __init__(self, device: str) -> None:
        self.ncu = shutil.which("ncu")
        self.absent: str | None = None
        if device != "cuda":
            self.absent = "this run is on a CPU; Nsight Compute profiles a card's kernels"
        elif self.ncu is None:
            self.absent = "Nsight Compute is not installed here: no ncu on PATH"
        self.device = device
        self.folder = Path()
        self.helper: subprocess.Popen[str] | None = None

    @property
    def case(self) -> Path:
        return self.folder / CASE

    def connect(self) -> None:
        """Begin the helper, before this process gives up the network."""
        if self.absent is not None:
            return
        from harness.process import FOLDERS, scrubbed

        self.folder = Path(tempfile.mkdtemp(prefix="profile-"))
        environment = scrubbed(str(self.folder))
        for name in FOLDERS:
            Path(environment[name]).mkdir(parents=True, exist_ok=True)
        self.helper = subprocess.Popen(
            [sys.executable, "-m", "agents.claude.profile", str(self.ncu), str(self.folder)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def profile(self, model: str) -> str:
        """The table for what is in `case`; ValueError with the reason where there is none."""
        helper = self.helper
        if helper is None or helper.stdin is None or helper.stdout is None:
            raise ValueError(self.absent or "the process that runs ncu was not begun")
        try:
            place = str(Path(model).resolve()) if model.endswith(".py") else model
            helper.stdin.write(json.dumps({"model": place, "device": self.device}) + "\n")
            helper.stdin.flush()
            told = json.loads(helper.stdout.readline())
        except (OSError, ValueError) as error:
            raise ValueError("the process that runs ncu has ended") from error
        if found := kernels(told["out"]):
            return table(found)
        raise ValueError(failure(told["out"] + told["err"], told["code"]))

    def close(self) -> None:
        if self.helper is not None:
            self.helper.kill()
            self.helper.wait()
            for pipe in (self.helper.stdin, self.helper.stdout):
                if pipe is not None:
                    pipe.close()
            self.helper = None
            shutil.rmtree(self.folder, ignore_errors=True)


def run(
    line: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, which ends with all that it started."""
    process = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", start_new_session=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\n==ERROR== ended after {timeout_s:g} s"
    return process.returncode, out, err


def serve(ncu: str, folder: Path) -> None:
    """The helper: profile the case in `folder` whenever told to, until stdin ends."""
    metrics: Sequence[str] = ALL
    environment = os.environ | {"LC_ALL": "C"}  # elsewhere a comma may stand in figures for a point

    for text in sys.stdin:
        order = json.loads(text)
        while True:
            line = command(ncu, folder / CASE, order["model"], order["device"], metrics)
            code, out, err = run(line, TIMEOUT_S, environment)
            lacking = set() if kernels(out) else refused(out + err, metrics)
            if not lacking:
                break
            metrics = [metric for metric in metrics if metric not in lacking]
        print(json.dumps({"code": code, "out": out, "err": err}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
