"""Proposers follow the trace: the order comes from its figures, conflicts are left out."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from agents.proposers.auto import Auto
from agents.proposers.base import Context, Tried, realised
from agents.proposers.catalog import Catalog
from agents.proposers.inductor import Inductor
from harness.records import Attempt
from optimized.catalog import changes
from optimized.change import apply_change, nodes, region_of, share
from optimized.inductor import inductor_change
from reference import beam
from traces.opportunities import Opportunity

MODEL = beam.build(beam.configs["mini"], "cpu", 0)


def opportunity(region: str, predicted_us: float, launches_saved: int = 10) -> Opportunity:
    return Opportunity(
        region=region,
        node_count=len(nodes(MODEL, region)),
        launches=launches_saved + 1,
        launches_saved=launches_saved,
        bytes_saved=100,
        time_us=2 * predicted_us,
        gap_us=0.0,
        floor_us=1.0,
        predicted_us=predicted_us,
        bound_us=2 * predicted_us,
        contains=(),
        inside=(),
    )


def context(found: Iterable[Opportunity], tried=frozenset(), model=MODEL, device="cpu") -> Context:
    return Context(
        model=model, device_type=device, opportunities=list(found), tried=tried, effect_us=0.5
    )


CATALOGUED = sorted({c.region for c in changes().values() if nodes(MODEL, c.region)})


def test_the_catalogue_is_ordered_by_what_the_trace_predicts():
    found = [opportunity(region, 10.0 + i) for i, region in enumerate(CATALOGUED)]
    first = Catalog().propose(context(found))
    assert [s.proposal.predicted_us for s in first] == sorted(
        (s.proposal.predicted_us for s in first), reverse=True
    )
    slowest = first[-1].proposal.region
    slowed = [
        replace(o, predicted_us=o.predicted_us * 10) if o.region == slowest else o for o in found
    ]
    assert Catalog().propose(context(slowed))[0].proposal.region == slowest


def test_a_proposal_carries_the_figures_of_its_opportunity():
    on_cpu = Catalog().propose(context(opportunity(r, 1.0) for r in CATALOGUED))
    chosen = opportunity(on_cpu[0].proposal.region, 12.0, launches_saved=7)
    proposal = Catalog().propose(context([chosen]))[0].proposal
    assert (proposal.predicted_us, proposal.bound_us) == (12.0, 24.0)
    assert (proposal.launches_saved, proposal.bytes_saved) == (7, 100)
    assert proposal.node_count == len(nodes(MODEL, proposal.region))


def test_the_next_implementation_gets_its_turn_after_the_first_was_tried():
    several = next(
        c
        for c in changes().values()
        if nodes(MODEL, c.region) and sum("cuda" in i.devices for i in c.implementations) > 1
    )
    found = [opportunity(several.region, 10.0)]
    order = []
    tried: frozenset = frozenset()
    while suggestions := Catalog().propose(context(found, tried, device="cuda")):
        mine = [s for s in suggestions if s.change.name == several.name]
        if not mine:
            break
        order.append(mine[0].proposal.backend)
        tried |= {Tried(several.region, several.name, order[-1])}
    assert order == [i.backend for i in several.implementations if "cuda" in i.devices]


def test_only_what_the_device_can_run_is_proposed():
    found = [opportunity(region, 10.0) for region in CATALOGUED]
    for suggestion in Catalog().propose(context(found)):
        chosen = suggestion.change.implementation(suggestion.proposal.backend)
        assert "cpu" in chosen.devices


def test_inductor_proposes_leaves_before_what_contains_them():
    inner, outer = region_of(MODEL.model.layers[0].attn_boundary), region_of(MODEL.model.layers[0])
    found = [opportunity(outer, 1000.0), opportunity(inner, 1.0)]
    names = [s.change.name for s in Inductor().propose(context(found))]
    assert names == [f"inductor:{inner}", f"inductor:{outer}"]


def test_inductor_leaves_out_what_could_not_be_measured():
    region = CATALOGUED[0]
    assert Inductor().propose(context([opportunity(region, 0.25)])) == []
    assert len(Inductor().propose(context([opportunity(region, 0.26)]))) == 1


def test_inductor_leaves_out_single_kernels():
    region = CATALOGUED[0]
    assert Inductor().propose(context([opportunity(region, 5.0, launches_saved=0)])) == []


@pytest.mark.parametrize("which", ["same", "around", "inside"])
def test_a_replaced_node_blocks_its_region_and_what_is_around_or_inside(which):
    boundary = MODEL.model.layers[0].attn_boundary
    layer = MODEL.model.layers[0]
    replaced, asked = {
        "same": (boundary, boundary),
        "around": (boundary, layer),
        "inside": (layer, boundary),
    }[which]
    model = share(MODEL)
    apply_change(model, inductor_change(region_of(replaced)), "inductor")
    found = [opportunity(region_of(asked), 10.0)]
    assert Inductor().propose(context(found)) != []
    assert Inductor().propose(context(found, model=model)) == []


def test_auto_turns_to_compiled_regions_when_the_catalogue_is_exhausted():
    found = [opportunity(region, 10.0) for region in CATALOGUED]
    first = Auto().propose(context(found))
    assert {s.change.name for s in first} <= set(changes())
    everything = frozenset(
        Tried(c.region, c.name, i.backend) for c in changes().values() for i in c.implementations
    )
    every = {region_of(m) for name, m in MODEL.named_modules() if name}
    found += [opportunity(region, 1.0) for region in every.difference(CATALOGUED)]
    then = Auto().propose(context(found, everything))
    compiled = {t.region for t in everything if t.backend == "inductor"}
    assert not compiled & {s.proposal.region for s in then}
    assert then and all(s.change.name.startswith("inductor:") for s in then)


def test_a_region_that_is_partly_inside_replaced_nodes_is_proposed_for_its_rest():
    """A sparse layer's activation lies inside its experts, a dense layer's does not."""
    inner = region_of(MODEL.model.layers[0].mlp.activate)
    outer = region_of(MODEL.model.layers[-1].mlp.experts)
    model = share(MODEL)
    replaced = apply_change(model, inductor_change(outer), "inductor")
    every = nodes(MODEL, inner)
    left = [n for n in every if not any(n.startswith(f"{r}.") for r in replaced)]
    assert 0 < len(left) < len(every)
    found = [opportunity(inner, 30.0)]
    proposal = Inductor().propose(context(found, model=model))[0].proposal
    assert proposal.node_count == len(left)
    assert proposal.predicted_us == pytest.approx(30.0 * len(left) / len(every))
    assert apply_change(model, inductor_change(inner), "inductor") == left


def test_a_change_around_others_waits_for_them_and_is_predicted_to_gain_what_they_left():
    around = next(c for c in changes().values() if c.around and nodes(MODEL, c.region))
    inside = next(c for c in changes().values() if not c.around and nodes(MODEL, c.region))
    whole = replace(opportunity(around.region, 100.0), contains=(inside.region,))
    found = [whole, opportunity(inside.region, 10.0)]
    names = [s.change.name for s in Catalog().propose(context(found, device="cuda"))]
    assert inside.name in names and around.name not in names

    tried = frozenset(Tried(inside.region, inside.name, i.backend) for i in inside.implementations)
    others = [c for c in changes().values() if c.region == inside.region and c is not inside]
    tried |= {Tried(c.region, c.name, i.backend) for c in others for i in c.implementations}
    later = replace(context(found, tried, device="cuda"), gained_us={inside.region: 30.0, "x": 9.0})
    proposals = [s.proposal for s in Catalog().propose(later)]
    assert [p.change for p in proposals] == [around.name]
    assert (proposals[0].predicted_us, proposals[0].bound_us) == (85.0, 170.0)
    far = replace(later, gained_us={inside.region: 150.0})  # more than was predicted for all of it
    proposals = [s.proposal for s in Catalog().propose(far)]
    assert (proposals[0].predicted_us, proposals[0].bound_us) == (25.0, 50.0)


def test_a_change_around_others_takes_nodes_whose_parts_were_replaced():
    model = share(MODEL)
    around = next(c for c in changes().values() if c.around and nodes(MODEL, c.region))
    found = [opportunity(around.region, 100.0)]
    within = {
        region_of(module)
        for name in nodes(model, around.region)
        for module in model.get_submodule(name).modules()
    }
    part = next(c for c in changes().values() if c is not around and c.region in within)
    for name in nodes(model, part.region):
        model.get_submodule(name).applied = part.name
    assert context(found, model=model).free(around.region) == 0.0
    assert context(found, model=model).around(around.region) > 0.0
    for name in nodes(model, around.region):
        model.get_submodule(name).applied = around.name
    assert context(found, model=model).around(around.region) == 0.0


def test_parts_of_a_node_replaced_around_them_are_there_to_take_unless_the_trace_is_older():
    model = share(MODEL)
    around = next(c for c in changes().values() if c.around and nodes(MODEL, c.region))
    inside = next(
        c for c in changes().values() if not c.around and inner_nodes(c.region, around.region)
    )
    names = nodes(model, inside.region)
    for name in nodes(model, around.region):
        node = model.get_submodule(name)
        node.applied, node.around = around.name, True
    traced = context([opportunity(inside.region, 10.0)], model=model, device="cuda")
    within = [n for n in names if n in inner_nodes(inside.region, around.region)]
    assert traced.free(inside.region) == 1.0
    assert inside.name in [s.change.name for s in Catalog().propose(traced)]
    later = replace(traced, kept=frozenset({around.name}))
    assert later.free(inside.region) == 1.0 - len(within) / len(names)


def inner_nodes(region: str, outer: str) -> list[str]:
    """The nodes of `region` inside those of another."""
    outside = tuple(f"{name}." for name in nodes(MODEL, outer))
    return [name for name in nodes(MODEL, region) if name.startswith(outside)]


def test_predictions_learn_what_share_of_the_most_was_realised_on_a_gpu():
    """On an H200 most changes gained nine tenths of the distance to their floors, whatever launches
    and bytes promised; those around parts a tenth."""
    around = next(c for c in changes().values() if c.around and nodes(MODEL, c.region))
    inside = next(c for c in changes().values() if not c.around and nodes(MODEL, c.region))
    seen = [attempt(inside.name, 60.0), attempt(inside.name, 90.0), attempt("mine.py", 500.0)]
    seen += [attempt(around.name, -3.0), attempt(inside.name, None), attempt("c", 1.0, "identity")]
    found = realised(seen, "decode")
    assert found == {False: 0.9, True: 0.0}
    regions = [opportunity(inside.region, 10.0), opportunity(around.region, 15.0)]
    on_gpu = replace(context(regions, device="cuda"), realised=found)
    proposals = {s.change.name: s.proposal for s in Catalog().propose(on_gpu)}
    assert proposals[inside.name].predicted_us == pytest.approx(0.9 * 20.0)
    assert proposals[around.name].predicted_us == 0.0
    on_cpu = replace(on_gpu, device_type="cpu")
    assert on_cpu.expected(regions[0]) == regions[0]
    first = context(regions, device="cuda")
    assert first.expected(regions[0]).predicted_us == pytest.approx(0.9 * 20.0)
    assert first.expected(regions[1], around=True) == regions[1]


def attempt(name: str, gain_us: float | None, control: str | None = None) -> Attempt:
    """One that could have gained 100 us at most."""
    pair = SimpleNamespace(gain_us=gain_us)
    latency = None if gain_us is None else SimpleNamespace(decode=pair)
    told = {"name": name, "bound_us": 100.0, "control": control, "latency": latency}
    return cast(Attempt, SimpleNamespace(**told))
