"""PR.md and the patches of a finished run that no repository knows."""

import shutil
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.ledger import Ledger
from reports import pr_open, pr_page
from reports.pr_bundle import bundles
from reports.pr_record import COMPILED, Compiled, Ground, compiled
from reports.run import Run
from tests.layout import ROOT


def test_patches_of_an_older_ledger_stack(cuda_run: Path) -> None:
    made = bundles(Run.load(cuda_run))
    assert [b.index for b in made] == [3, 7]
    assert [b.parents for b in made] == [(), ("residual_boundary",)]
    first, second = (b.patch or "" for b in made)
    assert "new file mode 100644\n" in first and '+model = "beam"\n' in first
    assert "--- a/optimized/plans/beam-nvidia-h200.toml\n" in second
    assert '+name = "parallel_projection"\n' in second and '+model = "beam"' not in second
    assert made[1].files["optimized/plans/beam-nvidia-h200.toml"].count("[[change]]") == 2


def test_the_page_tells_what_all_changes_did_and_what_is_not_known(cuda_run: Path) -> None:
    page = pr_page.write(cuda_run)[0][1] / "PR.md"
    words = page.read_text()
    assert "| decode 1 x 1 token(s), context 250 | 16.00 ms [" in words
    assert "| prefill 8 x 64 token(s), context 250 | 1.147 s [" in words
    assert "The ledger has no certificate of it." in words
    assert "| Rounding point | Declared | Why | Observed |" in words


def test_what_its_kernels_take_is_shown_by_architecture(cuda_run: Path) -> None:
    kernels = compiled(3, ["combine"])
    assert kernels.absent is None
    assert {k.target for k in kernels.kernels} == {"sm_90", "sm_100", "gfx950"}
    assert all(k.registers and k.spills == 0 for k in kernels.kernels)
    Ledger.open(cuda_run).append(COMPILED, kernels)
    page = (pr_page.write(cuda_run, only=3)[0][1] / "PR.md").read_text()
    assert "| Kernel | Built with | sm_90 | sm_100 | gfx950 |" in page
    used = kernels.kernels[0]
    assert f"; {used.num_warps} warps | {used.registers} / 0 / " in page


def test_kernels_of_a_file_that_the_project_lacks_are_compiled_where_it_stands(tmp_path) -> None:
    """As in a checkout of the commit that brings it."""
    shutil.copytree(ROOT / "optimized", tmp_path / "optimized")
    shutil.copy(ROOT / "optimized" / "combine.py", tmp_path / "optimized" / "mine.py")
    kernels = compiled(3, ["mine"], tmp_path)
    assert kernels.absent is None and {k.change for k in kernels.kernels} == {"mine"}
    assert compiled(3, ["mine"]).kernels == ()


def test_both_sides_of_a_latency_have_their_interval_where_it_is_known(
    cuda_run: Path, tmp_path: Path
) -> None:
    def words(out: str) -> str:
        return (pr_page.write(cuda_run, tmp_path / out, only=3)[0][1] / "PR.md").read_text()

    assert "| 16.00 ms | 15.85 ms [" in words("older")
    ledger = cuda_run / Ledger.NAME
    known = '"base_interval_us": [15990.0, 16010.0]'
    ledger.write_text(ledger.read_text().replace('"base_interval_us": null', known))
    assert "| 16.00 ms [15.99, 16.01] ms | 15.85 ms [" in words("newer")


def test_kept_elided_and_added_roundings_are_counted() -> None:
    kept, elided = ("a", "kept", "", "kept"), ("b", "elided", "fused", "elided")
    said = pr_page.roundings([kept, elided, kept])
    assert said == "keeps 2 of 3 interior rounding points, elides 1 and adds none"
    said = pr_page.roundings([("p", "added", "BF16 P", "added")])
    assert said == "keeps 0 of 0 interior rounding points, elides none and adds 1"


def test_kernels_that_could_not_be_compiled_are_not_shown_as_none(cuda_run: Path) -> None:
    Ledger.open(cuda_run).append(COMPILED, Compiled(index=3, kernels=(), absent="took over 120 s"))
    page = (pr_page.write(cuda_run, only=3)[0][1] / "PR.md").read_text()
    assert "None: took over 120 s." in page and "| Kernel |" not in page


def test_without_a_patch_the_reason_is_said_and_what_stands_on_it_has_none(cuda_run: Path) -> None:
    ground = Ground(
        index=3, commit="c", name="x", before={}, files={}, others=("harness/a.py",),
        obstacle="optimized/ has one already",
    )  # fmt: skip
    Ledger.open(cuda_run).append("ground", ground)
    written = pr_page.write(cuda_run)
    assert [b.obstacle for b, _ in written] == [
        "optimized/ has one already", "it stands on x, which has no patch"
    ]  # fmt: skip
    words = (written[0][1] / "PR.md").read_text()
    assert "**There is no patch: optimized/ has one already.**" in words
    assert "not as in commit c: harness/a.py.**" in words
    assert not (written[0][1] / "change.patch").exists()
    assert pr_open.requests(written, "run") == []
    with pytest.raises(UserError, match="change 7 cannot be opened: it stands on x"):
        pr_open.chosen([], written, 7)
    with pytest.raises(UserError, match="there is no kept change number 4; kept are number 3, 7"):
        pr_open.chosen([], written, 4)


def test_nothing_kept_is_nothing_written(unfinished_run: Path) -> None:
    assert pr_page.write(unfinished_run) == []
    with pytest.raises(UserError, match="the run kept nothing"):
        pr_open.chosen([], [], None)
