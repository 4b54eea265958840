"""What the figures are measured on: device, driver, clocks, versions, commit."""

import importlib.util
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from harness.records import Environment

ROOT = Path(__file__).parents[1]


def environment(device: torch.device) -> Environment:
    """The environment of `device` now; what cannot be told here is None."""
    is_gpu = device.type == "cuda"
    return Environment(
        device=device.type,
        device_name=device_name(device),
        cpu_threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda,
        git_commit=git_commit(ROOT),
        **(gpu_state(device) if is_gpu else dict.fromkeys(GPU_FIELDS)),
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


GPU_FIELDS = (
    "gpu_uuid",
    "driver",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "power_w",
    "temperature_c",
)


def gpu_state(device: torch.device) -> dict[str, Any]:
    """`GPU_FIELDS` of a CUDA device, read through nvidia-ml-py; None for each that is not told."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    state: dict[str, Any] = dict.fromkeys(GPU_FIELDS) | {"gpu_uuid": uuid}
    if importlib.util.find_spec("pynvml") is None:
        return state
    import pynvml as nvml

    def ask(question: Any, *args: Any) -> Any:
        try:
            return question(*args)
        except nvml.NVMLError:  # this card or this container does not tell
            return None

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver library
        return state
    try:
        handle = ask(nvml.nvmlDeviceGetHandleByUUID, uuid)
        driver = ask(nvml.nvmlSystemGetDriverVersion)
        state["driver"] = driver.decode() if isinstance(driver, bytes) else driver
        if handle is None:
            return state
        state["sm_clock_mhz"] = ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        state["memory_clock_mhz"] = ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM)
        milliwatts = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        state["power_w"] = None if milliwatts is None else milliwatts / 1e3
        state["temperature_c"] = ask(
            nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
        )
    finally:
        nvml.nvmlShutdown()
    return state


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_commit(root: Path) -> str | None:
    """The commit checked out in `root`, with "+dirty" where tracked files differ from it; None
    where `root` is no git checkout."""
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):  # no git, or a checkout of another user
        return None
    return head + ("+dirty" if changed else "")


def _git(root: Path, *words: str) -> str:
    # Without the lock, asking for the status does not write to the user's index.
    command = ["git", "--no-optional-locks", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
