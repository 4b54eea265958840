"""An architecture that the product does not know, from another library, in one file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from agents.budget import Budget
from agents.loop import Loop
from agents.progress import Progress
from agents.proposers.base import Suggestion
from agents.session import Session
from harness.judge import judge_region, self_test
from harness.ledger import Ledger
from harness.records import Status
from harness.selftest import regions
from harness.workload import Workload
from optimized.change import Change, Contract, Implementation, apply_change, share
from reports.run import Run
from tests.agents import killers
from tests.agents.agent_run import attempts, committed, results, started
from tests.agents.fake_api import FakeApi, Step, call, calls

FILE = str(Path(__file__).with_name("qwen3_moe.py"))
NORM = "qwen3_moe_rmsnorm"
# The library's norm with operators that change nothing: a change without them is faster on any
# machine. It rounds where the library's does.
WASTEFUL = """

class Qwen3MoeRMSNorm(modeling.Qwen3MoeRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.float32)
        for _ in range(60):
            wide = wide * 1.0
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * scale).to(hidden_states.dtype)


build_qwen3 = build


def build(config, device, seed):
    model = build_qwen3(config, device, seed)
    for module in model.modules():
        if type(module) is modeling.Qwen3MoeRMSNorm:
            module.__class__ = Qwen3MoeRMSNorm
    return model
"""
CHANGE_FILE = """
import torch.nn.functional as F
from optimized.change import Change, Contract, Implementation


def build(node, knobs):
    def forward(x):
        wide = F.rms_norm(x.float(), x.shape[-1:], eps=node.variance_epsilon)
        return {result}
    return forward


CHANGE = Change(
    name="{name}", region="qwen3_moe_rmsnorm", summary="one operator for the norm",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
)
"""
ONCE, HONEST = "(wide * node.weight.float()).to(x.dtype)", "wide.to(x.dtype) * node.weight"


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.load(FILE, "mini", "cpu")


def normed(node: Any, _: Any) -> Callable[[Tensor], Tensor]:
    """As the reference: the normed row is rounded before its weight."""

    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + node.variance_epsilon).rsqrt()
        return (wide * scale).to(x.dtype) * node.weight

    return forward


def rounded_once(node: Any, _: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + node.variance_epsilon).rsqrt()
        return (wide * scale * node.weight.float()).to(x.dtype)

    return forward


def changing(build: Callable[..., Any]) -> Change:
    return Change(
        name=build.__name__,
        region=NORM,
        summary="the norm",
        contract=Contract(numerics="reduction"),
        implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
    )


def verdict(workload: Workload, build: Callable[..., Any]):
    change = changing(build)
    model = share(workload.model)
    assert len(apply_change(model, change, "torch")) == 9  # four a layer and the last
    return judge_region(workload.model, model, change, "torch", workload, 0)


def test_its_regions_are_found_and_replayed(workload: Workload) -> None:
    self_test(workload.model, workload, 0)
    assert NORM in regions(workload.model)


def test_a_norm_that_rounds_as_it_does_passes(workload: Workload) -> None:
    found = verdict(workload, normed)
    assert (found.passed, found.reason) == (True, None)


def test_a_norm_that_rounds_once_is_refused_by_the_librarys_own_line(workload: Workload) -> None:
    found = verdict(workload, rounded_once)
    assert not found.passed and found.reason is not None
    assert "`hidden_states.to(input_dtype)`" in found.reason
    assert "modeling_qwen3_moe.py" in found.reason


@pytest.mark.long
def test_the_loop_profiles_it_proposes_and_decides(workload: Workload, tmp_path: Path) -> None:
    budget = Budget(0.5)
    ledger = Ledger.create(tmp_path / "run")
    session = Session(workload, ledger, "decode-bs1", budget, Progress(budget))
    session.set_effects({"decode": 0.0, "prefill": 0.0})
    loop = Loop(session, "inductor", None)
    session.profile("before")
    proposed = {s.proposal.region: s for s in loop.proposer.propose(loop.context())}
    assert {NORM, "qwen3_moe_experts"} <= proposed.keys()
    assert proposed[NORM].proposal.launches_saved > 0
    suggestion = suggest_with(proposed[NORM], normed)
    attempt = loop.attempt(suggestion)
    assert attempt.region_verdict is not None and attempt.region_verdict.passed
    assert attempt.latency is not None and attempt.audit is not None
    assert attempt.audit.reason is None
    assert attempt.status in (Status.KEPT, Status.REJECTED)  # as this machine's clock has it


@pytest.fixture(scope="module")
def wasteful(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("model") / "qwen3_wasteful.py"
    library = "from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling\n"
    text = Path(FILE).read_text()
    file.write_text(text.replace("import torch\n", f"{library}import torch\n", 1) + WASTEFUL)
    return file


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_inductor_makes_of_its_norm_is_verified_and_kept(wasteful: Path, tmp_path) -> None:
    budget = Budget(5.0)
    workload = Workload.load(str(wasteful), "mini", "cpu")
    ledger = killers.begun(tmp_path / "run", str(wasteful))
    session = Session(workload, ledger, "decode-bs1", budget, Progress(budget))
    loop = Loop(session, "inductor", None)
    session.profile("before")
    proposed = {s.proposal.region: s for s in loop.proposer.propose(loop.context())}
    assert proposed[NORM].proposal.launches_saved > 60
    attempt = loop.attempt(proposed[NORM])
    assert (attempt.status, attempt.backend) == (Status.KEPT, "inductor"), attempt.reason
    assert attempt.model_verdict is not None and attempt.model_verdict.passed
    assert 'extern "C"' in (tmp_path / "run" / str(attempt.generated_source)).read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_agent_looks_writes_is_refused_mends_it_and_is_kept(wasteful: Path, tmp_path) -> None:
    """A whole run: measured, traced, judged, kept, with a pull request."""

    def writes(name: str, result: str) -> tuple[dict[str, Any], dict[str, Any]]:
        text = CHANGE_FILE.format(name=name, result=result)
        file = f"{name}.py"
        write = call("write_change", file=file, text=text)
        return write, call("submit", file=file, hypothesis="one operator for 64")

    steps = (
        Step([call("kernel_table", region=NORM), call("region", region=NORM)]),
        Step([*writes("once", ONCE), *writes("honest", HONEST), call("end_round")]),
        calls("give_up", reason="nothing is left"),
    )
    run = tmp_path / "run"
    words = "--target", "decode-bs1", "--model", str(wasteful), "--proposer", "claude"
    words = *words, "--budget-usd", "1", "--budget-minutes", "8", "--run-dir", str(run)
    root = committed(tmp_path / "tree").root
    with FakeApi(*steps) as api:
        done = started(words, api, root, DECODE_S="0.6")
    assert done.returncode == 0, done.stderr
    once, honest = attempts(run)
    assert once.status is Status.REJECTED
    assert once.reason.startswith("region verdict: ") and "`(wide * scale).to(hi" in once.reason
    assert honest.status is Status.KEPT and honest.region == NORM, honest.reason
    assert honest.region_verdict is not None and honest.region_verdict.passed
    assert honest.model_verdict is not None and honest.model_verdict.passed
    (prompt,) = api.asked[0]["messages"]
    assert f"| {NORM} |" in prompt["content"].replace(f"\n{NORM} |", f"| {NORM} |")
    table, region = results(run)[:2]
    assert "lines that launch kernels" in table and "class Qwen3MoeRMSNorm(" in region
    assert "rounding point `(wide * scale).to(hidden_states.dtype)`" in region
    (bundle,) = (run / "prs").iterdir()
    assert (bundle / "change.patch").exists() and (bundle / "certificate.json").exists()
    found = Run.load(run)
    assert found.closing_verdict is not None and found.closing_verdict.passed


def suggest_with(found: Suggestion, build: Callable[..., Any]) -> Suggestion:
    """What was proposed, carried out by `build`: no compiler's time."""
    proposal = replace(found.proposal, change=build.__name__, backend="torch")
    return Suggestion(proposal=proposal, change=changing(build))
