"""Every change's kernels compiled for every GPU target, without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from optimized import offline
from optimized.offline import TARGETS, Row, report
from optimized.triton_support import INTERPRETED

NVIDIA = "sm_90", "sm_100"
CUTE = {"gemv_cute_kernel", "gemv_cute_shared_kernel", "few_rows_cute_kernel"}  # with their library


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return report(brief=True)


def test_every_kernel_compiles_for_every_target(rows):
    assert [row for row in rows if row.error] == []
    kernels = {row.kernel for row in rows}
    wanted = {(k, t) for k in kernels for t in (NVIDIA if k in CUTE else TARGETS)}
    assert {(row.kernel, row.target) for row in rows} == wanted
    compiled = {(row.change, row.kernel, str(row.constexprs)) for row in rows}
    first = [row for row in rows if row.target == next(iter(TARGETS))]
    assert len(first) == len(compiled) > len(kernels)  # all cases for one target


def test_every_kernel_is_among_them(rows):
    """Whatever is called a kernel in optimized/ is compiled by somebody's offline case."""
    sources = [path.read_text() for path in Path(offline.__file__).parent.glob("*.py")]
    kernels = set(re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", "\n".join(sources)))
    assert {"residual_boundary_kernel", "output_gate_kernel", "swiglu_kernel"} <= kernels
    assert kernels == {row.kernel for row in rows} - CUTE


def test_nothing_spills_on_nvidia(rows):
    used = {(r.kernel, str(r.constexprs), r.target): r.resources for r in rows}
    spilled = {key: r for key, r in used.items() if key[2] in NVIDIA and r and r.spills}
    assert spilled == {}


def test_resources_are_plausible(rows):
    """At most 255 registers a thread on NVIDIA and 512 on AMD, 227 KiB of shared memory."""
    used = [(row.target, row.resources) for row in rows if row.resources is not None]
    assert used
    for target, resources in used:
        assert 0 < resources.registers <= (255 if target in NVIDIA else 512)
        assert 0 <= resources.shared_bytes <= 227 * 1024


def test_no_operand_of_a_product_in_flight_is_overwritten(rows):
    used = {(r.kernel, str(r.constexprs)): r.resources for r in rows if r.target == "sm_90"}
    assert {key: r.overwritten for key, r in used.items() if r and r.overwritten} == {}


def test_nothing_but_weights_is_touched_before_the_previous_kernel_is_done(rows):
    """A kernel that starts early may read only what no kernel of the step writes, or what is known
    to be done (the choice of experts). All other loads, and every store, come after the wait."""
    used = [(r.kernel, r.resources) for r in rows if r.target in NVIDIA and r.resources]
    assert len(used) > 30
    waiting = [(kernel, r) for kernel, r in used if r.loads_before_wait is not None]
    assert len(waiting) == len(used)
    assert {r.stores_before_wait for _, r in waiting} == {0}
    early = {"residual_boundary_kernel", "gemv_kernel"}
    early |= {"experts_down_kernel", "experts_down_across_kernel"}
    early |= {"boundary_router_kernel", "gated_projection_kernel", "router_choose_kernel"}
    early |= {"step_attention_kernel", "step_stream_kernel"}  # positions of earlier steps
    early |= {"combine_gate_kernel"}
    early |= {"norm_combine_kernel", "pair_product_kernel", "row_norm_kernel"}
    early |= {"route_pool_kernel", "choose_norm_kernel"}
    assert {k for k, r in waiting if r.loads_before_wait} - CUTE == early


def test_kernels_wait_for_nothing_where_there_is_no_dependent_launch(rows):
    amd = [r.resources for r in rows if r.target not in NVIDIA and r.resources]
    assert amd and {r.loads_before_wait for r in amd} == {None}


SPILLING = """
import triton, triton.language as tl
from optimized.offline import resources

@triton.jit
def many(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, x * tl.sum(x, axis=0))

@triton.jit
def broken(x_ptr):
    tl.store(x_ptr, tl.inline_asm_elementwise(
        "no.such.instruction $0, $1;", "=r,r", [tl.load(x_ptr)], tl.int32, True, 1))

print(resources(many, {"x_ptr": "*fp32", "N": "constexpr"}, {"N": 8192}, "sm_90", 1).spills)
for target in ("sm_90", "gfx950"):
    try:
        print(resources(broken, {"x_ptr": "*i32"}, {}, target))
    except Exception as error:
        print(type(error).__name__, "no.such.instruction" in str(error))
"""


def test_spills_and_assembler_errors_are_seen(tmp_path):
    """256 values held by one thread spill; an unknown instruction fails on both vendors, also
    where LLVM only prints."""
    script = tmp_path / "script.py"
    script.write_text(SPILLING)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.getcwd()
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert int(lines[0]) > 0
    assert lines[1:] == ["CompileError True", "CompileError True"]


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="choose one of sm_90, sm_100, gfx950"):
        offline.resources(None, {}, {}, "sm_70")
    if INTERPRETED:
        with pytest.raises(ValueError, match="TRITON_INTERPRET"):
            offline.resources(None, {}, {}, "sm_90")


def test_words_that_cannot_be_used_are_one_line(capsys):
    for words, says in (
        (["nope"], "error: optimized/ has no file nope.py; it has: attention_step, "),
        (["--nope"], "error: unrecognized arguments: --nope; see python -m optimized.offline"),
    ):
        with pytest.raises(SystemExit) as ended:
            offline.main(words)
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.startswith(says) and error.count("\n") == 1
