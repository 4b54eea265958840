"""Nsight Compute, played: runs what it is to profile, then prints CSV as the real one does.

Separators of thousands, units that differ from row to row, "n/a" for a metric that cannot be
collected, an error for one that the card lacks (as B200 does) and figures by the user's locale are
as in ncu's own output; the figures are made up.
"""

import os
import subprocess
import sys

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
STALLED = "smsp__average_warps_issue_stalled_"
LAUNCHES = (
    (
        "triton_norm_kernel",
        {
            "gpu__time_duration.sum": ("ns", "3,488"),
            "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "61.27"),
            "lts__t_sector_hit_rate.pct": ("%", "33.04"),
            "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "12.5"),
            "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "74.96"),
            "launch__registers_per_thread": ("register/thread", "40"),
            "launch__shared_mem_per_block_static": ("byte/block", "0"),
            "launch__shared_mem_per_block_dynamic": ("Kbyte/block", "16.38"),
            f"{STALLED}long_scoreboard_per_issue_active.ratio": ("inst", "9.31"),
            f"{STALLED}wait_per_issue_active.ratio": ("inst", "1.85"),
            f"{STALLED}barrier_per_issue_active.ratio": ("inst", "2.46"),
            f"{STALLED}drain_per_issue_active.ratio": ("inst", "0.40"),
        },
    ),
    (
        "void at::native::elementwise<float, int>(int, T1)",
        {
            "gpu__time_duration.sum": ("usecond", "1.25"),
            "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("", "n/a"),
            "launch__registers_per_thread": ("register/thread", "16"),
        },
    ),
)  # fmt: skip


def table() -> str:
    lines = ["==PROF== Connected to process 19963 (/usr/bin/python3)"]
    for number, (name, _) in enumerate(LAUNCHES):
        lines.append(f'==PROF== Profiling "{name}" - {number}: 0%....50%....100% - 9 passes')
    lines += ["==PROF== Disconnected from process 19963", HEAD]
    for number, (name, metrics) in enumerate(LAUNCHES):
        for metric, (unit, value) in metrics.items():
            cells = number, 19963, "python3", "127.0.0.1", name, 1, 7, "(128, 1, 1)", "(1, 1, 1)"
            cells = *cells, 0, "9.0", "Command line profiler metrics", metric, unit, value
            lines.append(",".join(f'"{cell}"' for cell in cells))
    return "\n".join(lines)


def main() -> int:
    words = sys.argv[1:]
    asked = words[words.index("--metrics") + 1].split(",")
    gone = [metric for metric in asked if "_gmma_" in metric or "_imc_miss_" in metric]
    if gone:
        print(f"==ERROR== Failed to access the following {len(gone)} metrics: {', '.join(gone)}")
        return 1
    target = words[words.index(sys.executable) :]
    done = subprocess.run(target, capture_output=True, text=True)
    if done.returncode:
        print("==PROF== Connected to process 19963 (/usr/bin/python3)")
        print(done.stderr.strip().splitlines()[-1])
        print("==WARNING== No kernels were profiled.")
        return done.returncode
    print('"a line of the program, not of ncu"')
    print(table() if os.environ.get("LC_ALL") == "C" else table().replace(".", ","))
    return 0


if __name__ == "__main__":
    sys.exit(main())
