"""compute-sanitizer's findings, from output of the form that it prints."""

import sys
from pathlib import Path

import pytest

from harness import memcheck
from harness.memcheck import Asked, Checked, Ran, check, check_all, read
from harness.records import Verdict
from harness.workload import Workload
from tests.harness.judged import TOY, toy

CLEAN = """========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors
"""
WRONG = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at _swiglu_kernel+0x2d0 in swiglu.py:61
=========     by thread (96,0,0) in block (7,0,0)
=========     Address 0x7f5c4be01000 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f5c4be00000 of size 4096 bytes
========= ERROR SUMMARY: 32 errors
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _sum_kernel+0x150 in combine.py:70
=========     and Read access at _sum_kernel+0x1f0 in combine.py:74 [16 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
WARNED = WRONG[:0] + "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n"
PASSED = Verdict(
    scope="model", passed=True, reason=None, cases=1, seed=0, outputs=(), points=(), notes=("a",)
)
CHANGE = """
from optimized.change import Change, Contract, Implementation

CHANGE = Change(
    name="tells", region="add_norm", summary="says that it was called",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(
        backend="torch", devices=("cpu", "cuda"),
        build=lambda node, _: lambda *args: (print("CALLED", len(args)), node.forward(*args))[1],
    ),),
)
"""


def asked(change: str = "nope", region: str = "add_norm") -> Asked:
    return Asked(change=change, region=region, backend="torch", seed=0)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program of that name that is Python, first on the path, on a device that it is for."""
    program = folder / "bin" / memcheck.PROGRAM
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport subprocess, sys, time\n{body}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(memcheck, "applies", lambda device: True)


def test_findings_are_read_in_words() -> None:
    assert read(CLEAN.splitlines()) == Ran(0, "")
    wrong, race = read(WRONG.splitlines()), read(RACE.splitlines())
    assert wrong.errors == 32 and wrong.said.startswith(
        "Invalid __global__ write of size 2 bytes; at _swiglu_kernel+0x2d0 in swiglu.py:61; by"
    )
    assert race.errors == 1 and "combine.py:70; and Read access" in race.said
    assert read(WARNED.splitlines()).errors == 0
    assert read(["", "========= Error: No supported GPU", ""]) == Ran(
        None, "Error: No supported GPU"
    )
    assert read([]).errors is None


def test_nothing_is_checked_on_a_cpu_and_an_absent_tool_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check(toy(), asked()) == Checked()
    monkeypatch.setattr(memcheck, "applies", lambda device: True)
    monkeypatch.setenv("PATH", "")
    told = check(toy(), asked())
    assert told.reason is None and told.notes[0].startswith("compute-sanitizer is not installed")
    assert told.joined(PASSED).passed and told.joined(PASSED).notes == ("a", *told.notes)


def test_a_tool_has_a_folder_to_write_in_and_says_nothing_of_refused_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"""import os
folder = os.environ["TMPDIR"]
assert os.path.isdir(folder) and not os.listdir(folder), folder
tool = sys.argv[sys.argv.index("--tool") + 1]
quiet = "--report-api-errors no" in " ".join(sys.argv)
assert quiet == (tool == "memcheck"), sys.argv
print({CLEAN!r})
"""
    install(tmp_path, monkeypatch, body)
    found = check(toy(), asked())
    assert found.notes == tuple(
        f"compute-sanitizer {tool}: no error in 2 calls of add_norm"
        for tool in ("memcheck", "racecheck")
    )


def test_an_error_of_the_change_alone_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"""tool = sys.argv[sys.argv.index("--tool") + 1]
wrong = tool == "racecheck" and "--plain" not in sys.argv
print({RACE!r} if wrong else {CLEAN!r})
"""
    install(tmp_path, monkeypatch, body)
    found = check(toy(), asked())
    assert found.reason is not None
    assert found.reason.startswith("compute-sanitizer racecheck: 1 error(s): Error: Race reported")
    assert found.notes == ("compute-sanitizer memcheck: no error in 2 calls of add_norm",)
    refused = found.joined(PASSED)
    assert not refused.passed and refused.reason == found.reason


def test_an_error_of_the_reference_too_and_a_tool_that_hangs_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"""if sys.argv[2] == "racecheck":
    time.sleep(60)
print({WRONG!r})
"""
    install(tmp_path, monkeypatch, body)
    found = check(toy(), asked(), limit_s=1.0)
    assert found.reason is None
    assert found.notes == (
        "compute-sanitizer memcheck: errors, but the reference has them, too",
        "compute-sanitizer racecheck: not done: it took longer than 1 s",
    )


def test_the_change_s_own_calls_run_under_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    body = f"""child = sys.argv[sys.argv.index("-m") - 1 :]
child = subprocess.run(child, capture_output=True, text=True)
open({str(log)!r}, "a").write(child.stdout + child.stderr)
print({CLEAN!r})
"""
    install(tmp_path, monkeypatch, body)
    monkeypatch.setattr(memcheck, "TOOLS", ("memcheck",))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret")
    path = tmp_path / "tells.py"
    path.write_text(CHANGE)
    assert toy().name == TOY
    assert check(toy(), asked(str(path))).reason is None
    assert log.read_text() == "CALLED 2\nCALLED 2\n"


def test_several_changes_share_a_process_until_something_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second's fault is laid to it alone, by a process for each."""
    log = tmp_path / "log"
    body = f"""tool, words = sys.argv[2], sys.argv[sys.argv.index("-m") + 2 :]
folders = [w[-2:] for w in words if w != "--plain"]
plain = "--plain" in sys.argv
open({str(log)!r}, "a").write(f"{{tool}} {{' '.join(folders)}}{{' plain' * plain}}\\n")
print({WRONG!r} if tool == "memcheck" and "01" in folders and not plain else {CLEAN!r})
"""
    install(tmp_path, monkeypatch, body)
    first, second, third = check_all(toy(), [asked(), asked("bad"), asked(region="mixture")])
    assert first == Checked(None, tuple(
        f"compute-sanitizer {tool}: no error in 2 calls of add_norm"
        for tool in ("memcheck", "racecheck")
    ))  # fmt: skip
    assert second.notes == () and str(second.reason).startswith("compute-sanitizer memcheck: 32 ")
    assert third.reason is None and third.notes[1].endswith("no error in 2 calls of mixture")
    assert log.read_text().splitlines() == [
        "memcheck 00 01 02",
        "memcheck 00",
        "memcheck 01",
        "memcheck 01 plain",
        "memcheck 02",
        "racecheck 00 02",
    ]
    told = second.named("bad").joined(PASSED)
    assert not told.passed and str(told.reason).startswith("bad: compute-sanitizer memcheck")


def test_nobody_is_run_where_nothing_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "raise SystemExit(9)")
    assert check_all(toy(), []) == []


BEYOND = """
import torch, triton
import triton.language as tl
from optimized.change import Change, Contract, Implementation


@triton.jit
def _beyond(ptr, N: tl.constexpr):
    tl.store(ptr + N + tl.arange(0, 128), 1.0)


def build(node, knobs):
    def forward(*args):
        _beyond[(1,)](torch.zeros(1024, device=args[0].device), N=1024)
        return node.forward(*args)
    return forward


CHANGE = Change(
    name="beyond", region="add_norm", summary="writes behind a tensor",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cuda",), build=build),),
)
"""


@pytest.mark.gpu
def test_a_write_behind_a_tensor_is_found_on_a_card(tmp_path: Path) -> None:
    """Where the tool can look at the card at all; where not, its words are the note."""
    path = tmp_path / "beyond.py"
    path.write_text(BEYOND)
    (tells := tmp_path / "tells.py").write_text(CHANGE)
    work = Workload.load(TOY, "auto", "cuda")
    found, honest = check_all(work, [asked(str(path)), asked(str(tells))])
    if found.notes and "not done" in found.notes[0]:
        pytest.skip(f"no compute-sanitizer for this card: {found.notes[0]}")
    assert str(found.reason).startswith("compute-sanitizer memcheck: ")
    assert "Invalid __global__ write" in str(found.reason)
    assert honest.reason is None and all("no error" in note for note in honest.notes)
