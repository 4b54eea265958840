"""The verdict on the model as a run ends is shown, and a failed one is not to be overlooked."""

import pytest

from harness.ledger import Ledger
from harness.records import Verdict
from reports.markdown import markdown
from reports.page import page
from reports.run import Run
from reports.summary import summary
from reports.terminal import headline


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


def test_the_closing_verdict_is_in_the_summary_and_on_the_terminal(cpu_run):
    run = add(cpu_run, True)
    assert "every layer of the result judged: passed" in headline(run)
    if run.final is not None:
        final = summary(run)["final"]
        assert final["verdict"]["cases"] == 30
