"""What Nsight Compute says of a change, from a program that plays it; what can be had without."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from agents.claude import profiled
from agents.claude.profile import (
    ALL,
    CASE,
    METRICS,
    STALL,
    Profiler,
    command,
    failure,
    kernels,
    refused,
    table,
)
from harness.workload import Workload
from optimized import swiglu
from optimized.change import region_of
from tests.agents import fake_ncu, killers

FILE = """
import os, socket
from pathlib import Path
import torch
import torch.nn.functional as F
from optimized.change import Change, Contract, Implementation


def tries(what):
    try:
        what()
    except PermissionError:
        return
    raise RuntimeError("not refused")


def build(node, knobs):
    def forward(x):
        tries(lambda: Path({elsewhere!r}).write_text("x"))
        tries(lambda: socket.socket())
        assert "MY_SECRET" not in os.environ
        Path({inside!r}).write_text(f"{{tuple(x.shape)}} {{node.weight.dtype}}")
        return x
    return forward


CHANGE = Change(
    name="tries",
    region="scaled_norm",
    summary="tries",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
)
"""


def test_metrics_become_one_line_for_each_kernel() -> None:
    """In one unit, with the stalls that cost most; what a card lacks stays open."""
    first, second = kernels(fake_ncu.table())
    assert first.values["gpu__time_duration.sum"] == pytest.approx(3.488)
    assert "dram__throughput.avg.pct_of_peak_sustained_elapsed" not in second.values
    assert table([first, second]).splitlines() == [
        "Nsight Compute: 2 kernels, 4.74 us in all",
        "us | DRAM % | L2 hit % | SM % | occupancy % | registers | shared memory, B | "
        "3 most frequent stalls | kernel",
        "3.49 | 61.3 | 33.0 | 12.5 | 75.0 | 40 | 16380 | "
        "long_scoreboard 9.3, barrier 2.5, wait 1.9 | triton_norm_kernel",
        "1.25 | ? | ? | ? | ? | 16 | ? | ? | void at::native::elementwise<float, int>(int, T1)",
    ]


def test_no_figures_are_explained_in_the_words_of_ncu() -> None:
    said = (
        "==PROF== Connected to process 7\n"
        "==ERROR== An error was reported by the counter measurement library:\n"
        "==ERROR== Failed to initialize the profiler: LibraryNotLoaded.\n"
        "==ERROR== The application returned an error code (9).\n"
    )
    assert kernels(said) == []
    assert failure(said, 9) == (
        "ncu gave no figures (exit code 9): An error was reported by the counter measurement "
        "library:; Failed to initialize the profiler: LibraryNotLoaded."
    )
    assert failure("", 3) == "ncu gave no figures (exit code 3): it said nothing"


def test_without_the_right_to_read_counters_one_line_says_who_can_give_it() -> None:
    said = (
        "==PROF== Connected to process 1722 (/usr/bin/python3)\n"
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
        "Performance Counters on the target device 0. For instructions on enabling permissions and "
        "to get more information see ERR_NVGPUCTRPERM\n"
    )
    assert kernels(said) == [] and refused(said, ALL) == set()
    assert failure(said, 1) == (
        "ncu may not read this card's performance counters (ERR_NVGPUCTRPERM); an administrator "
        "allows it with the driver's option NVreg_RestrictProfilingToAdminUsers=0, or a container "
        "with --cap-add=SYS_ADMIN"
    )


def test_metrics_that_a_card_lacks_are_told_from_ncus_errors() -> None:
    first, second = (STALL.format(reason) for reason in ("imc_miss", "wait"))
    listed = f"==ERROR== Failed to access the following 2 metrics: {first}, dram__bytes.sum\n"
    assert refused(listed, ALL) == {first}
    assert refused(f"==WARNING== {first}\n", ALL) == set()
    name = second.partition(".")[0]
    regex = (
        f"==ERROR== Failed to find metric regex:^{name}\\.(sum|min|max|avg|pct|ratio|max_rate)$\n"
    )
    assert refused(regex, ALL) == {second}


def test_ncu_is_asked_for_the_call_that_is_marked(tmp_path: Path) -> None:
    line = command("/usr/bin/ncu", tmp_path / CASE, "beam", "cuda")
    assert line[:6] == [
        "/usr/bin/ncu",
        "--csv",
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
    ]
    wanted = line[line.index("--metrics") + 1].split(",")
    assert {*METRICS.values()} < {*wanted} and len(wanted) == len({*wanted}) == 25
    module = sys.executable, "-m", "agents.claude.profiled"
    assert line[-7:] == [*module, "call", str(tmp_path / CASE), "beam", "cuda"]


def test_a_change_is_profiled_in_a_process_that_gave_up_its_rights(tmp_path, monkeypatch) -> None:
    """Found on PATH, through the helper; the call has the model's own module and arguments."""
    program = tmp_path / "bin" / "ncu"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_ncu.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("MY_SECRET", "a-secret")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    profiler = Profiler("cuda")
    assert (profiler.absent, profiler.ncu) == (None, str(program))
    profiler.device = "cpu"
    profiler.connect()
    try:
        inside, elsewhere = profiler.folder / "seen", tmp_path / "elsewhere"
        file = tmp_path / "tries.py"
        file.write_text(FILE.format(inside=str(inside), elsewhere=str(elsewhere)))
        model = Workload.load(killers.TOY, "toy", "cpu", 0).model
        node, x = model.get_submodule("blocks.1.norm"), torch.ones(1, 3, 64, dtype=torch.bfloat16)
        facts = {"file": str(file), "backend": "torch"}
        profiled.save(profiler.case, node, (x,), **facts)
        monkeypatch.chdir(Path(killers.TOY).parent)
        assert profiler.profile(Path(killers.TOY).name) == table(kernels(fake_ncu.table()))
        assert inside.read_text() == "(1, 3, 64) torch.bfloat16"
        file.write_text(file.read_text().replace("return x", "raise KeyError('own words')"))
        profiled.save(profiler.case, node, (x,), **facts)
        with pytest.raises(ValueError, match=r"no figures .exit code 1.: KeyError: 'own words'"):
            profiler.profile(killers.TOY)
    finally:
        profiler.close()
    assert not elsewhere.exists() and not profiler.folder.exists()


def test_without_a_card_or_ncu_that_is_said(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert Profiler("cuda").absent == "Nsight Compute is not installed here: no ncu on PATH"
    profiler = Profiler("cpu")
    profiler.connect()
    with pytest.raises(ValueError, match="this run is on a CPU; Nsight Compute profiles a card's"):
        profiler.profile("beam")


@pytest.mark.long
def test_kernels_are_compiled_without_a_card(tmp_path: Path) -> None:
    """In a confined process, from the file's own list of cases."""
    file = tmp_path / "kernel.py"
    elsewhere = tmp_path / "elsewhere"
    file.write_text(
        "import socket\n"
        "from pathlib import Path\n"
        "from optimized import soft_cap\n"
        "from optimized.soft_cap import CHANGE\n"
        "found = []\n"
        f"for what in (socket.socket, lambda: Path({str(elsewhere)!r}).touch()):\n"
        "    try:\n"
        "        what()\n"
        "    except PermissionError:\n"
        "        found.append(1)\n"
        "assert len(found) == 2\n"
        "def offline_cases():\n"
        "    return soft_cap.offline_cases()[:1]\n"
    )
    head, columns, *rows = profiled.resources(str(file)).splitlines()
    assert head == "compiled without a card:"
    assert columns.startswith("kernel | card | registers | spills | shared memory, B | ")
    cells = [row.split(" | ") for row in rows]
    assert [cell[1] for cell in cells] == ["sm_90", "sm_100", "gfx950"]
    assert all(0 < int(registers) < 256 for _, _, registers, *_ in cells)
    assert all(spills == "0" for _, _, _, spills, *_ in cells)
    assert not elsewhere.exists()


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("ncu") is None, reason="no ncu on PATH")
def test_a_triton_kernel_is_profiled_on_a_card(tmp_path: Path) -> None:
    """Its registers and its time, where the card's counters may be read; else ncu's own words."""
    model = Workload.load("beam", "mini", "cuda", 0).model
    node = next(m for m in model.modules() if region_of(m) == "swiglu")
    x = torch.randn(64, 512, device="cuda").bfloat16()
    file = str(Path(swiglu.__file__))
    profiler = Profiler("cuda")
    profiler.connect()
    try:
        profiled.save(profiler.case, node, (x, x), file=file, backend="triton")
        text = profiler.profile("beam")
    except ValueError as error:
        pytest.skip(str(error))
    finally:
        profiler.close()
    head, columns, *rows = text.splitlines()
    assert head.startswith("Nsight Compute: 1 kernels, ") and columns.startswith("us | DRAM %")
    (cells,) = (row.split(" | ") for row in rows)
    assert "swiglu" in cells[-1]
    assert 0.5 < float(cells[0]) < 1000 and 8 <= float(cells[5]) <= 255
