"""The closing table on the terminal."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from reports.run import Run
from reports.terminal import print_run


def printed(run: Run | Path, **options) -> str:
    out = io.StringIO()
    print_run(run, Console(file=out, **options))
    return out.getvalue()


def test_plain_has_one_line_per_change_in_order(cpu_run: Path) -> None:
    lines = printed(Run.load(cpu_run)).splitlines()
    assert [line.split()[:2] for line in lines[1:6]] == [
        ["kept", "residual_boundary"],
        ["rejected", "inductor:swiglu"],
        ["rejected", "qk_norm_rope"],
        ["failed", "inductor:router"],
        ["kept", "parallel_projection"],
    ]
    slower = lines[2]
    for part in ("55.0 µs", "−74.0 µs [−82.0, −66.0] µs", "924.0 µs", "9.000 ms", "slower by 74.0"):
        assert part in slower
    decode = next(line for line in lines if line.startswith("decode: "))
    assert "1.000 → 0.760 ms [0.752, 0.768] ms" in decode
    assert "1.32× [1.29, 1.34] eager" in decode
    assert "no graph (CUDA graphs need a GPU)" in decode
    assert "0.921× [0.903, 0.940] compile" in decode
    assert "controls: 2 of 2 refused" in lines


def test_plain_has_no_escapes_and_takes_a_directory(cuda_run: Path) -> None:
    text = printed(cuda_run)
    assert "\x1b" not in text
    assert "Ran on the GPU: NVIDIA H200." in text
    assert "1.02× [1.00, 1.04] graph" in text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_terminal_shows_every_reason(cpu_run: Path, width: int) -> None:
    text = printed(cpu_run, force_terminal=True, width=width, color_system="standard")
    assert "\x1b[32mkept" in text
    assert "rounds once where the reference rounds at post_norm" in text
    assert "<script>" in text  # text, not markup


@pytest.mark.parametrize("width", [100, 120, 150, 160, 200, 300])
def test_no_width_loses_a_figure_or_a_reason(cpu_run: Path, width: int) -> None:
    """At 160 columns the reasons once took all the room, and no figure was left."""
    ledger = cpu_run / "ledger.jsonl"
    long = "slower by 74.0 us, " + "and here is why " * 6 + "which is the end"
    ledger.write_text(ledger.read_text().replace("slower by 74.0 us", long))
    shown = printed(cpu_run, force_terminal=True, width=width, color_system="standard")
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    row = next(line for line in lines if line.startswith("rejected  inductor:swiglu"))
    assert "55.0 µs  −74.0 µs [−82.0, −66.0] µs  924.0 µs  9.000 ms" in row
    assert any("which is the end" in line for line in lines)
    assert ("which is the end" in row) == (width == 300)


def test_no_color_is_respected(cpu_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(cpu_run, force_terminal=True, width=100)
    assert "\x1b[3" not in text
    assert "kept" in text


def test_ascii_terminal_gets_ascii(cpu_run: Path) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    print_run(cpu_run, Console(file=out))
    out.flush()
    text = raw.getvalue().decode("ascii")
    assert "1.000 -> 0.760 ms" in text
    assert "-74.0 us" in text


def test_unfinished_run_says_so(unfinished_run: Path) -> None:
    text = printed(unfinished_run)
    assert "decode: 1.000 ms, nothing kept" in text
    assert "This run is unfinished" in text
