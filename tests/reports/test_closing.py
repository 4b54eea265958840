"""The verdict on the model as a run ends is shown, and a failed one is not to be overlooked."""

import re
from dataclasses import replace

import pytest

from harness.ledger import Ledger
from harness.records import Latency, Paired, Verdict
from reports.latency import latency
from reports.markdown import markdown
from reports.page import page
from reports.run import Run
from reports.summary import summary
from reports.terminal import headline

NBSP = "\u00a0"


def add(directory, passed: bool) -> Run:
    reason = None if passed else "out[0] differs in 0.3 of its elements"
    verdict = Verdict(
        scope="model", passed=passed, reason=reason, cases=30, seed=1, outputs=(), points=()
    )
    Ledger.open(directory).append("model_verdict", verdict)
    return Run.load(directory)


@pytest.mark.parametrize("render", [markdown, page], ids=["md", "html"])
def test_a_failed_closing_verdict_is_a_banner(render, cpu_run):
    assert "failed its verdict" not in render(add(cpu_run, True))
    shown = render(add(cpu_run, False))
    assert "The model as it ended failed its verdict: out[0] differs in 0.3" in shown


PAIR = Paired(
    base_us=18_000.0,
    candidate_us=15_000.0,
    candidate_interval_us=(14_900.0, 15_100.0),
    gain_us=3_000.0,
    gain_interval_us=(2_900.0, 3_100.0),
    mde_us=50.0,
    pairs=40,
    base_interval_us=(17_900.0, 18_100.0),
)


def test_a_speed_up_within_noise_is_not_in_bold(cuda_run):
    ledger = Ledger.open(cuda_run)
    final = dict(ledger.last("final") or {})
    hidden = replace(PAIR, mde_us=4_000.0)
    ledger.append("final", {**final, "pairs": Latency(decode=PAIR, prefill=hidden).to_json()})
    run = Run.load(cuda_run)
    words = markdown(run).replace(NBSP, " ")
    assert words.count("**1.20×** [1.19, 1.21]") == 1  # decode, in the graph
    assert words.count("1.20× [1.19, 1.21]") == 1  # prefill, eager
    assert "<b>1.20×</b>" in page(run) and ">1.20×<span" in page(run)


def test_closing_pairs_without_a_baseline_to_name_are_shown_nowhere(cuda_run):
    ledger = Ledger.open(cuda_run)
    final = dict(ledger.last("final") or {})
    ledger.append("final", {**final, "pairs": Latency(decode=PAIR, prefill=PAIR).to_json()})
    path = cuda_run / "ledger.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"kind": "baseline"' not in line]
    path.write_text("\n".join(lines) + "\n")
    run = Run.load(cuda_run)
    assert run.before("decode") is None
    assert "decode: not measured" in headline(run)
    assert "18.00" not in markdown(run) and "18.00" not in page(run)


def test_closing_pairs_give_the_speed_up_over_the_model_as_it_was(cuda_run):
    """16 ms at the start and 15.76 at the end; in pairs at the end, 18 against 15: the machine
    had become slower, and only the pairs know."""
    ledger = Ledger.open(cuda_run)
    final = dict(ledger.last("final") or {})
    before = summary(Run.load(cuda_run))["speedup"]
    ledger.append("final", {**final, "pairs": Latency(decode=PAIR, prefill=PAIR).to_json()})
    found = summary(Run.load(cuda_run))
    assert found["speedup"]["decode"]["vs_graph"] == pytest.approx(1.2)
    assert found["speedup_interval"]["decode"]["vs_graph"] == pytest.approx(
        [1 + 2_900 / 15_100, 1 + 3_100 / 14_900]
    )
    assert found["speedup"]["prefill"]["vs_eager"] == pytest.approx(1.2)
    assert found["speedup"]["decode"]["vs_eager"] == before["decode"]["vs_eager"]
    # What stands beside the speed-up is what it is of, wherever it is shown.
    run, path = Run.load(cuda_run), "18.00 → 15.00 ms"
    decode = next(line for line in headline(run) if line.startswith("decode: "))
    assert decode.startswith(f"decode: {path} [14.90, 15.10] ms; against the baselines ")
    assert "1.20× [1.19, 1.21] graph" in decode
    assert re.search(r"[\d.]+× \[[\d., ]+\] eager \(of 15\.76 ms alone\)", decode)
    assert "as they were: decode 15.76 ms, prefill" in markdown(run).replace(NBSP, " ")
    assert f"**Decode: {path}** ([17.90, 18.10] ms plain PyTorch" in markdown(run).replace(
        NBSP, " "
    )
    picture = latency(run)
    assert picture is not None and path in picture.replace(NBSP, " ")


def test_the_closing_verdict_is_in_the_summary_and_on_the_terminal(cpu_run):
    run = add(cpu_run, True)
    assert "every layer of the result judged: passed" in headline(run)
    assert run.closing_verdict is not None
    some = replace(run.closing_verdict, notes=("judged 6 of 52 layers: layers.0, layers.2",))
    said = headline(replace(run, closing_verdict=some))
    assert "6 of 52 layers of the result judged: passed" in said
    if run.final is not None:
        final = summary(run)["final"]
        assert final["verdict"]["cases"] == 30
