"""Plans survive their file, apply in order, and refuse what they cannot mean."""

import pytest
import torch

from harness.command_peers import load_plan
from harness.errors import UserError
from optimized.catalog import changes
from optimized.change import nodes, share
from optimized.plan import Enabled, Plan
from reference import beam

TUNABLE = next((c, i) for c in changes().values() for i in c.implementations if i.knobs and i.shape)


def test_round_trip(tmp_path):
    change, implementation = TUNABLE
    plan = Plan(
        model="beam",
        device='a "quoted" card',
        changes=(
            Enabled(name="inductor:swiglu", backend="inductor"),
            Enabled(
                name=change.name,
                backend=implementation.backend,
                knobs={"D=5120,T=1": {"warps": 8, "split": True}},
            ),
        ),
    )
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan


def test_applying_a_plan_replaces_the_nodes_and_leaves_the_reference_alone():
    model = beam.build(beam.configs["mini"], "cpu", 0)
    candidate = share(model)
    Plan(
        model="beam", device="cpu", changes=(Enabled(name="inductor:swiglu", backend="inductor"),)
    ).apply(candidate)
    names = nodes(model, "swiglu")
    assert all(candidate.get_submodule(n).applied == "inductor:swiglu" for n in names)
    assert not any(hasattr(model.get_submodule(n), "applied") for n in names)
    assert candidate.state_dict().keys() == model.state_dict().keys()
    gate, up = torch.randn(2, 1, 64).bfloat16()
    node = model.get_submodule(names[0])
    assert torch.equal(candidate.get_submodule(names[0])(gate, up), node(gate, up))


def test_unknown_change_and_knob_are_named():
    with pytest.raises(ValueError, match="no-such-change"):
        Enabled(name="no-such-change", backend="triton").change()
    change, implementation = TUNABLE
    wrong = Enabled(name=change.name, backend=implementation.backend, knobs={"T=1": {"warp": 3}})
    plan = Plan(model="beam", device="cpu", changes=(wrong,))
    with pytest.raises(ValueError, match=f"knobs of {change.name}.*warp"):
        plan.apply(beam.build(beam.configs["mini"], "cpu", 0))


@pytest.mark.parametrize("text", ["", "model = 1\n[[", 'model = "m"\ndevice = "d"\n[[change]]\n'])
def test_a_file_that_is_no_plan_is_one_line(text, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a plan"):
        Plan.load(path)


def test_a_run_that_kept_nothing_has_no_plan(tmp_path):
    with pytest.raises(UserError, match="has no plan.toml, for nothing was kept there"):
        load_plan(str(tmp_path), "beam", "cpu")
    Plan(model="beam", device="cpu", changes=()).save(tmp_path / "plan.toml")
    loaded = load_plan(str(tmp_path), "beam", "cpu")
    assert loaded is not None and loaded.changes == ()
