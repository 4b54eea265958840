"""The residual boundary's kernel against the reference: every rounding point, every layout."""

import os
import subprocess
import sys

import pytest
import torch

from optimized.residual_boundary import CHANGE, BoundaryKnobs, piece
from reference.beam import ResidualBoundary
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    refusal,
    run_triton,
    same_bits,
)
from tests.reference.noise import assert_within, within

EPS = 1e-6
pytestmark = needs_kernels


def arguments(rows: int, width: int, scale: float = 1.0):
    y, h = bf16(1, rows, width, scale=scale, seed=1), bf16(1, rows, width, seed=2)
    weights = (torch.rand(2, width, device=DEVICE) + 0.5).to(torch.bfloat16)
    return y, h, weights[0], weights[1]


def reordered(node, args, count):
    """The reference with its two reductions in `count` other orders, per output."""
    outputs = [], []
    for seed in range(count):
        order = torch.randperm(args[0].shape[-1], generator=torch.Generator().manual_seed(seed))
        order = order.to(DEVICE)
        for output, y in zip(outputs, node(*(a[..., order] for a in args)), strict=True):
            output.append(y[..., order.argsort()])
    return outputs


def assert_matches(node, args, knobs=None, count=16):
    found = run_triton(CHANGE, node, *args, knobs=knobs)
    for ours, theirs, others in zip(found, node(*args), reordered(node, args, count), strict=True):
        assert_within(ours, theirs, others)


@pytest.mark.parametrize(
    ("rows", "width", "scale"),
    [(1, 256, 1.0), (37, 256, 1.0), (5, 320, 1.0), (3, 7, 1.0), (64, 96, 1e-4), (64, 96, 1e4)],
    ids=lambda value: str(value),
)
def test_matches_the_reference(rows, width, scale):
    assert_matches(ResidualBoundary(5, EPS), arguments(rows, width, scale))


@pytest.mark.parametrize("rows", [1, 4], ids="bf16-T{}-D5120".format)
def test_matches_at_full_width(rows):
    assert_matches(ResidualBoundary(104, EPS), arguments(rows, 5120))


def test_every_knob_gives_the_same_function():
    args = arguments(6, 320)
    seen = 0
    for rows in (6, 16384):
        for knobs in all_knobs(CHANGE, {"T": rows, "D": 320}):
            assert_matches(ResidualBoundary(2, EPS), args, knobs=knobs)
            seen += 1
    assert seen >= 8


def test_split_rows_at_full_width():
    assert piece(5120, split=True) == 1024
    assert_matches(
        ResidualBoundary(3, EPS), arguments(3, 5120), BoundaryKnobs(warps=4, rows=2, split=True)
    )


@pytest.mark.parametrize("width", [9 * 32, 320, 15 * 32])
def test_the_last_piece_may_be_partly_empty(width):
    knobs = BoundaryKnobs(warps=2, rows=2, split=True)
    assert piece(width, split=True) == 64 and knobs.is_valid({"T": 300, "D": width})
    assert_matches(ResidualBoundary(5, EPS), arguments(3, width), knobs)


def test_many_rows_of_a_width_that_is_no_power_of_two_are_not_padded():
    many, few = {"T": 16384, "D": 5120}, {"T": 1, "D": 5120}
    assert BoundaryKnobs.heuristic(many) == BoundaryKnobs(warps=4, rows=1, split=True)
    assert BoundaryKnobs.heuristic(few) == BoundaryKnobs(warps=16, rows=1, split=False)
    assert not BoundaryKnobs(warps=8, rows=1, split=True).is_valid({"T": 300, "D": 320})


LATE_LOADS = """
import re, subprocess, tempfile, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from optimized.residual_boundary import offline_cases
from optimized.triton_support import EXACT

for case in offline_cases():
    names = [*case.signature, "PDL"]
    kinds = {n: k.removesuffix(":16") for n, k in case.signature.items()} | {"PDL": "constexpr"}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in case.signature.items()
               if kind[0] == "*" or kind.endswith(":16")}
    source = ASTSource(case.kernel, kinds, {**case.constexprs, "PDL": True}, aligned)
    options = {"num_warps": case.num_warps, **EXACT}
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(done.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(tool), "--dump-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = re.findall(r"(LDG|SHFL)", text)
    print(code.count("LDG"), code.index("SHFL"))
"""


def test_a_row_is_asked_for_before_any_of_it_is_waited_for(tmp_path):
    """In the machine code no load follows the first exchange between threads."""
    script = tmp_path / "script.py"
    script.write_text(LATE_LOADS)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.getcwd(), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(counts) == 2
    for loads, before_exchange in counts:
        assert loads == before_exchange > 0


def test_no_rows():
    args = arguments(0, 256)
    h, x = run_triton(CHANGE, ResidualBoundary(2, EPS), *args)
    assert h.shape == x.shape == (1, 0, 256)


def test_strided_rows():
    packed = bf16(2, 5, 768)
    _, h, post, pre = arguments(10, 256)
    args = packed[..., 256:512], h.view(2, 5, 256), post, pre
    assert_matches(ResidualBoundary(2, EPS), args)


def test_zeros_keep_their_sign():
    """rms of a zero row is sqrt(eps); -0.0 + -0.0 stays -0.0."""
    y = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    y[0, 1] = -0.0
    weight = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    node = ResidualBoundary(2, EPS)
    for ours, theirs in zip(
        run_triton(CHANGE, node, y, y, weight, weight), node(y, y, weight, weight), strict=True
    ):
        assert same_bits(ours, theirs)


def _elided(node, y, h, post, pre, point):
    """The reference's equations with one of the interior roundings left out."""

    def rounded(value, name):
        return value if name == point else value.to(torch.bfloat16).float()

    def norm(value, weight):
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + EPS) * weight.float()

    normed = rounded(norm(y.float(), post), "post_norm")
    from_y = rounded(normed * node.y_scale, "y_scale")
    from_h = rounded(h.float() * node.h_scale, "h_scale")
    added = rounded(from_y + from_h, "sum")
    return added.to(torch.bfloat16), norm(added, pre).to(torch.bfloat16)


@pytest.mark.parametrize("point", ["post_norm", "y_scale", "h_scale", "sum"])
def test_one_rounding_less_would_be_noticed(point):
    node, args = ResidualBoundary(5, EPS), arguments(64, 256)
    others = reordered(node, args, 16)
    found = _elided(node, *args, point)
    passes = [within(o, r, n) for o, r, n in zip(found, node(*args), others, strict=True)]
    assert passes == ([True, False] if point == "sum" else [False, False])
    whole = _elided(node, *args, None)
    assert all(within(o, r, n) for o, r, n in zip(whole, node(*args), others, strict=True))


def test_heuristic_is_valid_for_any_shape():
    for rows in (1, 256, 257, 16384):
        for width in (1, 7, 64, 320, 768, 4096, 5120, 7168, 16384):
            sizes = {"T": rows, "D": width}
            assert BoundaryKnobs.heuristic(sizes).is_valid(sizes), sizes


def test_guard_says_why():
    node = ResidualBoundary(2, EPS)
    y, h, post, pre = arguments(4, 64)
    assert refusal(CHANGE, node, y, h, post, pre) == ""
    assert "torch.float32" in refusal(CHANGE, node, y.float(), h, post, pre)
    assert "strides" in refusal(CHANGE, node, y[..., ::2], h[..., ::2], post[::2], pre[::2])
    assert "fit together" in refusal(CHANGE, node, y, h[:, :2], post, pre)
    wide = torch.empty(1, 1, 16385, dtype=torch.bfloat16, device=DEVICE)
    assert "16385" in refusal(CHANGE, node, wide, wide, wide[0, 0], wide[0, 0])
    many = torch.empty(1, 1, 64, dtype=torch.bfloat16, device=DEVICE).expand(1, 16385, 64)
    assert "rows" in refusal(CHANGE, node, many, many, post, pre)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 128, 16384], ids="bf16-T{}-D5120".format)
def test_matches_on_cuda(rows):
    assert_matches(ResidualBoundary(54, EPS), arguments(rows, 5120), count=4 if rows > 128 else 16)


@pytest.mark.gpu
def test_every_knob_on_cuda():
    for rows in (1, 300):
        args = arguments(rows, 5120)
        for knobs in all_knobs(CHANGE, {"T": rows, "D": 5120}):
            assert_matches(ResidualBoundary(7, EPS), args, knobs=knobs)
