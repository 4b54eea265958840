"""Finding changes: by file, by name, by path; bad input is one clear line."""

import textwrap

import pytest
from torch import nn

from optimized.catalog import FOLDER, changes, for_model, load_change
from optimized.change import Change, Contract, nodes, served
from reference import beam, models
from reference.muse_spark_config import PRESETS

BODY = """
    from optimized.change import Change, Contract
    CHANGE = Change(name="mine", region="swiglu", summary="s",
                    contract=Contract(numerics="exact"), implementations=())
"""


def test_every_file_with_a_change_is_found():
    found = changes()
    files = [p.stem for p in FOLDER.glob("*.py") if "\nCHANGE = " in p.read_text()]
    assert len(found) == len(files)
    assert {"qk_norm_rope", "parallel_projection", "residual_boundary"} <= set(found)
    for name, change in found.items():
        assert isinstance(change, Change)
        assert change.name == name
        assert change.summary
        assert isinstance(change.contract, Contract)
        assert change.implementations


def test_changes_of_a_model_are_those_with_nodes_and_a_device():
    model = beam.build(beam.configs["mini"], "meta", 0)
    on_cpu, on_cuda = for_model(model, "cpu"), for_model(model, "cuda")
    assert {(c.name, i.backend) for c, i in on_cpu} >= {
        ("residual_boundary", "inductor"),
        ("parallel_projection", "torch"),
    }
    assert all(i.backend != "triton" for _, i in on_cpu)
    assert ("qk_norm_rope", "triton") in {(c.name, i.backend) for c, i in on_cuda}
    assert all(nodes(model, c.region) for c, _ in on_cuda)
    assert for_model(nn.Sequential(nn.Identity()), "cpu") == []


def test_a_layer_of_another_model_is_not_served():
    """All three replace regions called `layer`, which both models have."""
    layers = "boundary_router", "gated_boundary_router", "gated_boundary_router_tf32"
    offered = {
        name: {c.name for c, _ in for_model(models.load(name).build(config, "meta", 0), "cuda")}
        for name, config in (("beam", beam.configs["mini"]), ("muse-spark", PRESETS["mini"]))
    }
    assert {n: offered[n].intersection(layers) for n in offered} == {
        "beam": {"boundary_router"},
        "muse-spark": {"gated_boundary_router", "gated_boundary_router_tf32"},
    }
    model = beam.build(beam.configs["mini"], "meta", 0)
    (kernel,) = load_change("boundary_router").implementations
    with_experts = [n for n in nodes(model, "layer") if hasattr(model.get_submodule(n).mlp, "gate")]
    assert served(model, "layer", kernel) == with_experts
    assert 0 < len(with_experts) < len(nodes(model, "layer"))


def test_a_change_is_loaded_by_name():
    assert load_change("qk_norm_rope") is changes()["qk_norm_rope"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown change 'nope'; known: .*qk_norm_rope") as error:
        load_change("nope")
    assert "\n" not in str(error.value)


def test_a_change_file_is_loaded_by_path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(BODY))
    change = load_change(str(file))
    assert (change.name, change.region) == ("mine", "swiglu")
    assert "mine" not in changes()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "no change file at"),
        ("x = 1\n", "must define CHANGE"),
        ("CHANGE = 3\n", "must define CHANGE"),
        ("import nothing_of_this_name\n", "failed on import: ModuleNotFoundError"),
        ("def broken(:\n", "failed on import: SyntaxError"),
    ],
    ids=["absent", "empty", "another-type", "import", "syntax"],
)
def test_a_bad_change_file_is_refused_in_one_line(tmp_path, text, complaint):
    file = tmp_path / "bad.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=complaint) as error:
        load_change(str(file))
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)
