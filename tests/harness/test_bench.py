"""Steps are timed as what they are: order, budgets, known delays, equals, slowed copies."""

import gc
import itertools
import math
import time

import numpy as np
import pytest
import torch
from torch import nn

from harness.audit import Auditor
from harness.bench import (
    ImpossibleTimeError,
    Step,
    both_clocks,
    compare,
    default_mode,
    empty_us,
    require_possible,
    smallest_effect,
    time_call,
    time_step,
)
from harness.clock import Clock
from harness.errors import UserError
from harness.records import Ceilings

CPU = torch.device("cpu")
CEILINGS = Ceilings(
    device_name="a card",
    read_gb_per_s=1000.0,
    copy_gb_per_s=900.0,
    bf16_tflop_per_s=100.0,
    fp32_tflop_per_s=10.0,
    launch_us=1.0,
)


class SimulatedTime:
    """Time that passes only when a step says so, for figures that no neighbour disturbs."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.rng = np.random.default_rng(0)

    def spend(self, us: float, noise: float = 0.0) -> None:
        self.now_ns += int(1e3 * us * (1 + noise * abs(self.rng.normal())))

    def step(self, us: float, noise: float = 0.0) -> Step:
        return Step(lambda: self.spend(us, noise), (), "eager")


@pytest.fixture
def clock(monkeypatch) -> SimulatedTime:
    simulated = SimulatedTime()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: simulated.now_ns)
    monkeypatch.setattr(time, "perf_counter", lambda: simulated.now_ns / 1e9)
    monkeypatch.setattr(time, "monotonic_ns", lambda: simulated.now_ns)
    return simulated


def small_step() -> Step:
    layer = nn.Linear(256, 256).requires_grad_(False)
    return Step(layer, (torch.ones(16, 256),), "eager")


def test_a_step_runs_the_model_on_its_inputs():
    layer = nn.Linear(3, 2).requires_grad_(False)
    x = torch.ones(1, 3)
    step = Step(layer, (x,), "eager")
    x.fill_(2.0)
    torch.testing.assert_close(step(), layer(x))
    assert step.output is step.output
    step.close()
    assert step.output is None


def test_a_twin_has_its_own_tree_over_the_same_weights():
    step = small_step()
    twin = step.twin()
    assert isinstance(step.model, nn.Linear) and isinstance(twin.model, nn.Linear)
    assert twin.model is not step.model
    assert twin.model.weight is step.model.weight
    assert twin.inputs is step.inputs


def test_nothing_is_recorded_for_gradients():
    step = Step(nn.Linear(3, 2), (torch.ones(1, 3),), "eager")
    assert not step().requires_grad


def test_a_cpu_has_no_graphs():
    with pytest.raises(UserError, match="cpu has no CUDA graphs; use mode 'eager'"):
        Step(nn.Linear(3, 2), (torch.ones(1, 3),), "graph")
    assert default_mode(CPU) == "eager"


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match="mode is 'fast'; choose one of eager, graph"):
        Step(nn.Linear(3, 2), (torch.ones(1, 3),), "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("us", [200.0, 2_000_000.0])
def test_a_known_duration_is_measured(clock, us):
    timing = time_step(clock.step(us), budget_s=0.2)
    assert (timing.median_us, timing.interval_us) == (us, (us, us))
    assert timing.samples >= 5


def test_noise_widens_the_interval_around_the_median(clock):
    timing = time_step(clock.step(1000.0, noise=0.1), budget_s=0.5)
    assert 1000 < timing.interval_us[0] < timing.median_us < timing.interval_us[1] < 1100


def test_a_call_is_timed_without_a_step(clock):
    assert time_call(clock.spend, 300.0, budget_s=0.1) == 300.0


def test_the_real_clock_is_in_microseconds():
    slept = time_call(time.sleep, 0.002, budget_s=0.1)
    assert 2000 <= slept < 100_000


def test_the_budget_is_kept_and_the_minimum_wins(clock):
    step = clock.step(1000.0)
    before = time.perf_counter()
    assert time_step(step, budget_s=0.3).samples > 200
    assert 0.3 <= time.perf_counter() - before < 0.4
    slow = clock.step(1e6)
    assert time_step(slow, budget_s=0.1, min_samples=7).samples == 7


def test_the_two_change_places_block_by_block(clock):
    order: list[str] = []

    def named(name: str) -> Step:
        return Step(lambda: (order.append(name), clock.spend(2000.0)), (), "eager")

    base, candidate = named("A"), named("B")
    pairs = compare(base, candidate, 0.0, budget_s=0.1, min_pairs=8).pairs
    blocks = ["".join(order[i : i + 4]) for i in range(2, len(order), 4)]
    assert blocks[-pairs:][:8] == ["ABBA", "BAAB", "BAAB", "ABBA", "BAAB", "ABBA", "ABBA", "BAAB"]


def test_a_place_in_the_block_gains_nothing(clock):
    """Every second run is slow, whichever step it is."""
    runs = itertools.count()
    step = Step(lambda: clock.spend(1000.0 if next(runs) % 4 in (0, 3) else 900.0), (), "eager")
    pair = compare(step, step, 0.0, budget_s=1.0)
    assert abs(pair.gain_us) <= pair.mde_us


def test_garbage_is_collected_before_timing_and_not_during_it(clock):
    seen: list[bool] = []
    step = Step(lambda: (seen.append(gc.isenabled()), clock.spend(100.0)), (), "eager")
    seen.clear()
    time_step(step, budget_s=0.01)
    assert seen and not any(seen)
    assert gc.isenabled()


def test_a_faster_candidate_shows_its_gain(clock):
    base, candidate = clock.step(1000.0, noise=0.05), clock.step(950.0, noise=0.05)
    effect = smallest_effect(base, budget_s=1.0)
    assert 1 < effect < 25
    pair = compare(base, candidate, effect, budget_s=1.0)
    assert pair.gain_us > pair.mde_us >= effect
    gain_us = 50 * (1 + 0.05 * math.sqrt(2 / math.pi))  # the noise is that of |normal|
    assert pair.gain_interval_us[0] < gain_us < pair.gain_interval_us[1]
    assert pair.base_us - pair.candidate_us == pytest.approx(gain_us, abs=pair.mde_us)
    assert pair.candidate_interval_us[0] <= pair.candidate_us <= pair.candidate_interval_us[1]


def test_a_step_that_is_there_twice_warms_up_once(clock):
    base, candidate = clock.step(4e6), clock.step(2e6)
    counts = {base: 0, candidate: 0}
    for step in counts:
        step.model = lambda *args, step=step, run=step.model: (
            counts.update({step: counts[step] + 1}) or run(*args)
        )
    pair = compare(base, candidate, 0.0, budget_s=1.0, min_pairs=2)
    assert counts == {base: 5, candidate: 5}  # one to warm up, two of each of two pairs
    assert (pair.pairs, round(pair.gain_us)) == (2, 2_000_000)


def test_a_slower_candidate_shows_its_loss(clock):
    pair = compare(clock.step(950.0, noise=0.05), clock.step(1000.0, noise=0.05), 0.0, budget_s=1.0)
    assert pair.gain_us < -pair.mde_us
    assert pair.gain_interval_us[1] < 0


def test_a_base_that_does_nothing_new_has_no_effect_below_its_noise(clock):
    assert smallest_effect(clock.step(1000.0), budget_s=0.1) == 0.0


def test_no_effect_is_smaller_than_the_clock_resolves(clock, monkeypatch):
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock.spend(0.05) or clock.now_ns)
    assert Clock(CPU).resolution_us == 0.05
    assert smallest_effect(clock.step(1000.0), budget_s=0.1) == 0.05


def test_pairs_that_scatter_more_than_calibrated_say_so(clock):
    step = clock.step(1000.0, noise=2.0)
    assert compare(step, step, 0.01, budget_s=1.0).mde_us > 10


def test_a_hundred_comparisons_of_equals_raise_no_alarm():
    """On the real machine, whatever else runs on it."""
    step = small_step()
    effect = smallest_effect(step, budget_s=0.02)
    alarms = 0
    for _ in range(100):
        pair = compare(step, step.twin(), effect, budget_s=0.02)
        alarms += pair.gain_us > pair.mde_us and pair.gain_interval_us[0] > 0
    assert alarms <= 2


@pytest.mark.parametrize(
    ("factor", "word"), [(0.5, "slower"), (2.0, "faster")], ids=["half", "twice"]
)
def test_a_patched_timer_is_told_by_the_other_clock(clock, monkeypatch, factor, word):
    step = clock.step(500.0, noise=0.05)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(factor * clock.now_ns))
    found = both_clocks(step, gap_us=1.0, budget_s=0.2)
    assert found.reason is not None and "two clocks disagree" in found.reason
    assert word in found.reason
    assert found.inside_us == pytest.approx(factor * found.outside_us, rel=0.02)
    assert found.difference_us == pytest.approx(found.outside_us - found.inside_us, abs=10)


@pytest.mark.parametrize("noise", [0.0, 0.05, 5.0])
def test_clocks_of_an_honest_step_agree(clock, noise):
    """On a CPU they watch the same runs, so no noise lies between them."""
    found = both_clocks(clock.step(500.0, noise=noise), gap_us=0.0, budget_s=0.1)
    assert found.reason is None
    assert max(abs(found.difference_us), found.spread_us) < 1e-3  # the clock's nanoseconds
    assert (found.inside_us > 500) == (noise > 0)


def test_real_clocks_agree_on_a_busy_machine():
    step = small_step()
    gap_us = empty_us(CPU)
    reasons = [both_clocks(step, gap_us=gap_us, budget_s=0.02).reason for _ in range(5)]
    assert reasons == [None] * 5


def test_what_starting_a_run_costs_is_allowed_for(clock, monkeypatch):
    """Each reading of the inner clock takes 3 us, and only the second of a run's two is in it."""
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock.spend(3.0) or clock.now_ns)
    found = both_clocks(clock.step(500.0), gap_us=0.0, budget_s=0.1)
    assert found.reason is not None and found.difference_us == 3.0
    assert both_clocks(clock.step(500.0), gap_us=3.0, budget_s=0.1).reason is None


def known_and_new(clock, known_us: float, new_us: float, noise: float = 0.0):
    """A step that takes `new_us` on inputs that it never met and `known_us` on others; it computes
    what it should either way."""
    met: set[float] = set()

    def forward(x: torch.Tensor) -> torch.Tensor:
        key = float(x[0])
        clock.spend(known_us if key in met else new_us, noise)
        met.add(key)
        return x * 2

    return forward


def drawn_inputs(seed: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, generator=torch.Generator().manual_seed(seed)),)


def compared_with_audit(clock, base_us: float, forward, noise: float = 0.0):
    inputs = drawn_inputs(0)
    base = Step(known_and_new(clock, base_us, base_us, noise), inputs, "eager")
    step = Step(forward, inputs, "eager")
    auditor = Auditor(step, forward, drawn_inputs)
    pair = compare(base, step, 1.0, budget_s=0.1, min_pairs=8, auditor=auditor)
    return pair, auditor


def test_a_result_remembered_by_its_inputs_values_gains_nothing(clock):
    forward = known_and_new(clock, known_us=100.0, new_us=1000.0)
    pair, auditor = compared_with_audit(clock, 1000.0, forward)
    assert pair.gain_us == 900.0  # the audit's call does not count
    assert auditor.time_us == 1000.0
    assert auditor.check().reason == (
        "on inputs that it had not seen it gained 0.0 us, not 900.0: it remembers results"
    )


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_gains_on_any_inputs_are_believed(clock, noise):
    for _ in range(3):
        forward = known_and_new(clock, 900.0, 900.0, noise)
        pair, auditor = compared_with_audit(clock, 1000.0, forward, noise)
        assert pair.gain_us > 0
        assert auditor.check().reason is None


def test_a_step_that_is_slow_with_all_new_inputs_keeps_its_gain(clock):
    """Caches are cold for both then."""
    forward = known_and_new(clock, 900.0, 1100.0)
    inputs = drawn_inputs(0)
    base = Step(known_and_new(clock, 1000.0, 1200.0), inputs, "eager")
    step = Step(forward, inputs, "eager")
    auditor = Auditor(step, forward, drawn_inputs)
    pair = compare(base, step, 1.0, budget_s=0.1, min_pairs=8, auditor=auditor)
    assert auditor.time_us == 1100.0 > pair.candidate_us
    assert auditor.check().reason is None


def test_a_time_below_the_floor_is_an_error():
    require_possible("decode", 2000.0, nbytes=10**9, flops=10**11, ceilings=CEILINGS)
    with pytest.raises(ImpossibleTimeError, match="decode took 900.0 us, but .* need 1000.0 us"):
        require_possible("decode", 900.0, nbytes=10**9, flops=10**11, ceilings=CEILINGS)


def test_warm_up_ends_when_times_settle(clock):
    slow_runs = iter([5000.0] * 12)
    step = Step(lambda: clock.spend(next(slow_runs, 100.0)), (), "eager")
    assert Clock(CPU).warm_up([step], limit_s=5.0) == 5000.0 or next(slow_runs, None) is None
    assert Clock(CPU).warm_up([step], limit_s=5.0) == 100.0


def test_warm_up_ends_at_its_limit(clock):
    growing = itertools.count(1)
    step = Step(lambda: clock.spend(1000.0 * next(growing) ** 2), (), "eager")
    before = time.perf_counter()
    Clock(CPU).warm_up([step], limit_s=0.5)
    assert 0.5 <= time.perf_counter() - before < 1.0


@pytest.mark.gpu
class TestGpu:
    """The same on a card: one captured graph, events, cold L2."""

    @staticmethod
    def step(width: int = 2048) -> Step:
        layer = nn.Linear(width, width, device="cuda").requires_grad_(False)
        return Step(layer, (torch.ones(4, width, device="cuda"),), "graph")

    def test_a_graph_replays_on_fresh_values(self):
        step = self.step()
        (x,) = step.args
        x.normal_()
        torch.testing.assert_close(step(), step.model(x))

    def test_closing_gives_the_memory_back(self):
        step = self.step()
        before = torch.cuda.mem_get_info()[0]
        step.close()
        assert torch.cuda.mem_get_info()[0] > before
        with pytest.raises(ValueError, match="was closed"):
            step()

    def test_inside_and_outside_agree(self):
        step = self.step(8192)
        found = both_clocks(step, gap_us=empty_us(step.device))
        assert found.reason is None
        assert found.inside_us == pytest.approx(time_step(step).median_us, rel=0.1)

    def test_a_cold_l2_shows(self):
        step = self.step()
        warm, cold = time_step(step), time_step(step, cold_l2=True)
        assert cold.interval_us[0] > warm.interval_us[1]

    def test_equals_raise_no_alarm(self):
        step = self.step()
        effect = smallest_effect(step, budget_s=0.2)
        pairs = [compare(step, step.twin(), effect, budget_s=0.2) for _ in range(20)]
        assert sum(p.gain_us > p.mde_us and p.gain_interval_us[0] > 0 for p in pairs) == 0
