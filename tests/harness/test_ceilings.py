"""Ceilings are measured, floors follow from them, and the environment says where."""

import subprocess

import pytest
import torch

from harness.ceilings import floor_us, measure_ceilings, rows
from harness.environment import GPU_FIELDS, environment, git_commit
from harness.records import Ceilings, Environment

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return measure_ceilings(CPU)


def test_ceilings_are_of_a_machine(ceilings):
    """Between a very slow and a very fast CPU: wrong units would be a factor of a thousand off."""
    assert 0.5 < ceilings.read_gb_per_s < 2000
    assert 0.5 < ceilings.copy_gb_per_s < 2000
    assert 0.001 < ceilings.fp32_tflop_per_s < 50
    assert 0.001 < ceilings.bf16_tflop_per_s < 500
    assert 0.1 < ceilings.launch_us < 200
    assert ceilings.device_name == environment(CPU).device_name


def test_a_table_has_every_figure_with_its_unit(ceilings):
    figures = [figure for _, figure in rows(ceilings)]
    assert [f.split()[1] for f in figures] == ["GB/s", "GB/s", "TFLOP/s", "TFLOP/s", "us"]


def test_the_floor_is_the_larger_of_bytes_and_operations():
    card = Ceilings(
        device_name="a card",
        read_gb_per_s=4000.0,
        copy_gb_per_s=4000.0,
        bf16_tflop_per_s=800.0,
        fp32_tflop_per_s=60.0,
        launch_us=1.0,
    )
    assert floor_us(8_000_000_000, 0, card) == pytest.approx(2000.0)
    assert floor_us(0, 8 * 10**12, card) == pytest.approx(10_000.0)
    assert floor_us(8_000_000_000, 8 * 10**12, card) == pytest.approx(10_000.0)


def test_the_environment_of_a_cpu():
    here = environment(CPU)
    assert here.device == "cpu"
    assert here.device_name
    assert here.torch == torch.__version__
    assert here.cpu_threads == torch.get_num_threads()
    assert all(getattr(here, name) is None for name in GPU_FIELDS)
    assert Environment.from_json(here.to_json()) == here


def test_the_commit_and_whether_it_was_changed(tmp_path):
    def git(*words: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(tmp_path) is None
    git("init", "-q")
    assert git_commit(tmp_path) is None  # nothing committed yet
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == head
    (tmp_path / "new").write_text("untracked files do not count")
    assert git_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == head + "+dirty"


@pytest.mark.gpu
def test_a_card_reads_faster_than_a_cpu_and_says_who_it_is(ceilings):
    device = torch.device("cuda", 0)
    card, here = measure_ceilings(device), environment(device)
    assert card.read_gb_per_s > ceilings.read_gb_per_s
    assert card.launch_us < ceilings.launch_us
    assert here.gpu_uuid is not None and here.gpu_uuid.startswith("GPU-")
    assert here.cuda == torch.version.cuda
