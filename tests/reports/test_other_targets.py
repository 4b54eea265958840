"""A kept change's other targets in PR.md, summary.json and the frames: figures, and what is not."""

from pathlib import Path

import pytest

from harness.errors import UserError
from harness.ledger import Ledger
from harness.records import Paired
from reports import frames, pr_page
from reports.other_targets import LEFT, PAIRS, STEPS, OtherPairs
from reports.pr_page import slower
from reports.run import Run
from reports.summary import summary

BS8, BS128, BS256 = WORDS = (
    "decode 8 x 1 token(s), context 100000",
    "decode 128 x 1 token(s), context 16384",
    "decode 256 x 1 token(s), context 8192",
)
NAMES = "decode-bs8", "decode-bs128", "decode-bs256"
FULL = "its KV cache needs 11.7 GiB, 6.8 GiB are free"


def pairs(base_us: float, gain_us: float, mde_us: float = 20.0) -> Paired:
    after = base_us - gain_us
    return Paired(
        base_us=base_us,
        base_interval_us=(base_us - 10, base_us + 10),
        candidate_us=after,
        candidate_interval_us=(after - 10, after + 10),
        gain_us=gain_us,
        gain_interval_us=(gain_us - 15, gain_us + 15),
        mde_us=mde_us,
        pairs=11,
    )


def with_others(run: Path, *found: OtherPairs, why: str | None = None) -> Path:
    ledger = Ledger.open(run)
    ledger.path.write_text(
        ledger.path.read_text().replace('"decode-bs8": ', '"decode-bs8, result": ')
    )
    ledger.append(STEPS, {"steps": dict(zip(NAMES, WORDS, strict=True))})
    for one in found:
        ledger.append(PAIRS, one)
    if why is not None:
        ledger.append(LEFT, {"why": why})
    return run


@pytest.fixture
def told(cuda_run: Path) -> Path:
    """Change 3 is slower at 128, its kernel serves a part of 8, and 256 has no room; of change 7
    nothing is known."""
    return with_others(
        cuda_run,
        OtherPairs(index=3, target=NAMES[0], pairs=pairs(40_000, 900), calls=52, declined=13),
        OtherPairs(index=3, target=NAMES[1], pairs=pairs(80_000, -450), calls=52),
        OtherPairs(index=3, target=NAMES[2], pairs=None, absent=FULL),
        why="the budget of 5 minutes was used up",
    )


def pages(run: Path) -> dict[int, str]:
    return {b.index: (folder / "PR.md").read_text() for b, folder in pr_page.write(run)}


def test_each_target_has_its_row_in_the_page_of_its_change(told: Path) -> None:
    page = pages(told)[3]
    table = page[page.index("## Latency") : page.index("## Contract")]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert rows[3] == (
        f"| {BS8} | 40.00 ms [39.99, 40.01] ms | 39.10 ms [39.09, 39.11] ms | "
        "900 µs [885, 915] µs | 20.0 µs | 11 |"
    )
    assert rows[4].startswith(f"| **slower:** {BS128} | 80.00 ms [")
    assert rows[5] == f"| {BS256} | not measured: {FULL} | – | – | – | – |"
    said = "13 of 52 calls are outside what the change was tested on, so the reference runs there"
    assert f"- Decode {BS8.removeprefix('decode ')}: {said}" in table and table.count(said) == 1
    assert table.count("**slower:**") == 1
    assert "The change was decided on the first two steps" in table
    assert f"| {BS8} | not measured | 32.00 ms" in table  # all changes together, by its words


def test_a_target_at_which_it_is_slower_is_said_before_all_else(told: Path) -> None:
    page = pages(told)[3]
    lost = "by 450 µs [435, 465] µs (smallest detectable effect 20.0 µs)"
    line = f"> **At another target it is slower: {BS128}, 80.00 → 80.45 ms, {lost}.**"
    assert line in page[: page.index("## What and why")].splitlines()
    assert "slower" not in pages(told)[7]


def test_a_loss_within_noise_is_not_called_slower(cuda_run: Path) -> None:
    wide = OtherPairs(index=3, target=NAMES[0], pairs=pairs(40_000, -450, mde_us=451))
    assert "slower" not in pages(with_others(cuda_run, wide))[3]
    with pytest.raises(AssertionError):
        slower(Run.load(cuda_run).others.rows(3)[0])


def test_what_was_not_measured_has_its_reason_in_every_row(told: Path, cpu_run: Path) -> None:
    assert pages(told)[7].count("| not measured: the budget of 5 minutes was used up |") == 3
    killed = pages(with_others(cpu_run))[3]
    assert killed.count("| not measured: the run has not come to it |") == 3


def test_a_later_session_takes_back_what_an_earlier_one_left(told: Path) -> None:
    later = OtherPairs(index=7, target=NAMES[2], pairs=pairs(90_000, 30))
    Ledger.open(told).append(PAIRS, later)
    rows = Run.load(told).others.rows(7)
    assert [row.pairs for row in rows] == [None, None, later.pairs]


def test_an_older_ledger_says_that_it_has_none_and_how_to_add_them(cuda_run: Path) -> None:
    page = pages(cuda_run)[3]
    assert "at other contexts and batch sizes was not measured" in page
    assert "`python -m agents.run --resume RUN --other-targets only` adds it." in page
    assert "| decode-bs8 | not measured |" in page


def test_the_page_does_not_say_that_nothing_got_slower(told: Path, prefill_run: Path) -> None:
    for run, other in ((told, "prefill"), (prefill_run, "decode")):
        path = run / Ledger.NAME
        path.write_text(path.read_text().replace("beyond 12.5 us", "x; nothing got slower"))
        page = pages(run)[3]
        assert f"x; {other} got no slower." in page and "nothing got slower" not in page


def test_the_patch_is_the_same_before_and_after(told: Path, tmp_path: Path) -> None:
    """Whoever took it must not find another one once more is known."""
    first = pr_page.write(told)
    Ledger.open(told).append(PAIRS, OtherPairs(index=7, target=NAMES[0], pairs=pairs(1e4, 30)))
    assert [b.patch for b, _ in pr_page.write(told)] == [b.patch for b, _ in first]


def test_the_summary_and_the_frames_have_them_of_kept_changes(told: Path) -> None:
    first, *between, last = summary(Run.load(told))["changes"]
    assert list(first["other_targets"]) == list(NAMES)
    assert first["other_targets"][NAMES[1]] == {
        "step": BS128,
        **pairs(80_000, -450).to_json(),
        "base_interval_us": [79_990, 80_010],
        "candidate_interval_us": [80_440, 80_460],
        "gain_interval_us": [-465, -435],
    }
    assert first["other_targets"][NAMES[2]] == {"step": BS256, "absent": FULL}
    assert [c["other_targets"] for c in between] == [{}, {}, {}]
    why = "the budget of 5 minutes was used up"
    assert {row["absent"] for row in last["other_targets"].values()} == {why}

    table = frames(told).others
    assert list(table["index"]) == [3, 3, 3, 7, 7, 7] and list(table["target"]) == [*NAMES] * 2
    rows = table.to_dict("records")
    assert (rows[0]["gain_us"], rows[0]["gain_low_us"], rows[0]["mde_us"]) == (900, 885, 20)
    assert (rows[0]["pairs"], rows[0]["calls"], rows[0]["declined"]) == (11, 52, 13)
    assert (
        rows[2]["absent"] == FULL and table["gain_us"].isna().tolist() == [False] * 2 + [True] * 4
    )
    assert table["calls"].isna().tolist() == [False] * 2 + [True] * 4


def test_pairs_and_a_reason_for_none_exclude_each_other(told: Path) -> None:
    with pytest.raises(ValueError, match="decode-bs8: either pairs or a reason"):
        OtherPairs(index=3, target=NAMES[0], pairs=None)
    path = told / Ledger.NAME
    path.write_text(path.read_text().replace(f'"absent": "{FULL}"', '"absent": null'))
    with pytest.raises(UserError, match="is not a valid 'other_pairs' event"):
        Run.load(told)
