"""A run as DataFrames: the columns that are promised, their types, and the ledger's figures."""

import re
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.ledger import Ledger
from reports import dataframes as module
from reports import frames
from reports.run import Run
from tests.layout import ROOT
from tests.reports.test_pictures import EVIDENCE

TABLES = {
    "changes": module.CHANGES,
    "attempts": module.ATTEMPTS,
    "kernels": module.KERNELS,
    "latency": module.LATENCY,
    "samples": module.SAMPLES,
    "others": module.OTHERS,
}


@pytest.mark.parametrize("fixture", ["cpu_run", "unfinished_run"])
def test_columns_and_types_are_those_promised(fixture: str, request: pytest.FixtureRequest) -> None:
    tables = frames(request.getfixturevalue(fixture))
    for name, columns in TABLES.items():
        table = getattr(tables, name)
        assert {c: str(t) for c, t in table.dtypes.items()} == columns


def test_changes_have_their_figures_and_what_is_missing_is_na(cpu_run: Path) -> None:
    changes = frames(str(cpu_run)).changes
    assert list(changes["status"]) == ["kept", "rejected", "rejected", "failed", "kept"]
    rows = changes.set_index("name").to_dict("index")
    kept, failed = rows["residual_boundary"], rows["inductor:router"]
    assert [kept[n] for n in ("gain_us", "gain_low_us", "mde_us")] == [150.0, 142.0, 12.5]
    assert (kept["decode_us"], kept["prefill_us"], kept["index"]) == (850.0, 8100.0, 3)
    assert failed["predicted_us"] == 20.0 and failed["gain_us"] is None
    assert list(changes["gain_us"].isna()) == [False, False, True, True, False]


def test_gains_are_of_the_target(prefill_run: Path) -> None:
    tables = frames(prefill_run)
    assert list(tables.changes["gain_us"].dropna()) == [900.0, 0.0, 1100.0]
    kept = tables.attempts.set_index("index").to_dict("index")[3]
    assert (kept["decode_gain_us"], kept["prefill_gain_us"]) == (150.0, 900.0)


def test_attempts_hold_controls_and_verdicts(cpu_run: Path) -> None:
    attempts = frames(cpu_run).attempts
    assert list(attempts["control"].dropna()) == ["identity", "slowed"]
    rows = attempts.set_index("index").to_dict("index")
    wrong = rows[5]
    assert wrong["region_passed"] is False and wrong["model_passed"] is None
    assert wrong["differing_share"] == pytest.approx(0.32)
    assert rows[3]["decode_pairs"] == 40


def test_kernels_and_latency_of_the_evidence() -> None:
    run = Run.load(EVIDENCE)
    tables = frames(run)
    by_side = tables.kernels.groupby("when")["time_us"].sum().to_dict()
    for when, kernels in run.kernels.items():
        assert float(by_side[when]) == pytest.approx(sum(row.time_us for row in kernels.rows))
    shares = list(tables.kernels["read_share"].dropna())
    assert len(shares) == 87 and min(shares) > 0
    rows = tables.latency.to_dict("records")
    decode = {row["what"]: row for row in rows if row["kind"] == "decode" and row["of"] != "kept"}
    assert decode["result"]["median_us"] == pytest.approx(6111.072063446045)
    assert {"eager", "graph", "compile", "reference"} <= set(decode)
    assert all(row["low_us"] <= row["median_us"] <= row["high_us"] for row in rows)


@pytest.mark.parametrize("name", TABLES)
def test_the_readme_has_every_column_with_its_type_and_unit(name: str) -> None:
    """Nothing is missing there, and nothing is there that a frame has not."""
    words = (ROOT / "reports" / "README.md").read_text()
    table = words[words.index(f"\n`{name}`: ") :].split("\n\n")[1]
    documented = {}
    for line in table.splitlines()[2:]:
        columns, kind, unit, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        assert meaning
        for column in re.findall(r"`([a-z_]+)`", columns):
            assert column not in documented
            assert (unit == "us a step") == column.endswith("_us"), column
            assert (kind == "Float64") <= bool(unit), column
            documented[column] = kind
    assert documented == TABLES[name]


def test_every_sample_of_a_pair_has_its_side(cpu_run: Path) -> None:
    us = {"decode": [[10.0, 8.0, 8.5, 11.0]], "prefill": [[90.0, 80.0, 80.0, 91.0]] * 2}
    Ledger.open(cpu_run).append("samples", {"index": 3, "us": us})
    samples = frames(cpu_run).samples
    assert len(samples) == 12 and set(samples["name"]) == {"residual_boundary"}
    decode = samples.query("kind == 'decode'")
    assert list(zip(decode["side"], decode["time_us"], strict=True)) == [
        ("without", 10.0), ("with", 8.0), ("with", 8.5), ("without", 11.0),
    ]  # fmt: skip
    assert list(samples.query("kind == 'prefill'")["pair"]) == [1] * 4 + [2] * 4


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run"):
        frames(tmp_path)
