"""A model file that is none, or does not work: one line with its name and its own line number."""

from pathlib import Path

import pytest

from harness.errors import UserError
from harness.workload import Workload

GOOD = """
import torch
from torch import nn

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, ids, positions, cache):
        return self.embed(ids)[:, -1:]

configs = {"only": 3}

def build(config, device, seed):
    with torch.device(device):
        return Toy()

def cache(config, batch, capacity, device):
    return []
"""
FORWARD = "return self.embed(ids)[:, -1:]"
BAD = {
    "no-configs": ('{"only": 3}', "{}", "configs is {}; it must map at least one name to a"),
    "a-list": ('{"only": 3}', "[3]", r"configs is \[3\]; it must map at least one name to a"),
    "a-number": ('"only": 3', "1: 3", "configs has the name 1; names are text"),
    "no-function": ("\ndef build(", "\nbuild = 3\ndef _(", "build is no function"),
    "build": ("return Toy()", "raise OSError('gone')", r"build raised OSError: gone .*py:17\)"),
    "leaves": ("return Toy()", "raise SystemExit", r"build raised SystemExit: .*py:17\)"),
    "no-module": ("return Toy()", "return {}", "build returned a dict, not an nn.Module"),
    "cache": ("return []", "return [][1]", r"cache raised IndexError: .*py:20\)"),
    "forward": (
        FORWARD,
        "return ids @ ids.nope",
        r"forward of 2 x 4 token\(s\) raised AttributeError: .*py:11\)",
    ),
    "decode": (
        FORWARD,
        "return self.embed(ids)[:, [1]]",
        r"forward of 1 x 1 token\(s\) raised IndexError: .*py:11\)",
    ),
    "nothing": (FORWARD, "return None", "returned nothing, not a tensor of logits"),
    "import": ("import torch\n", "import torch\ntorch.nope\n", r"failed on import: .*py:3\)"),
    "exit": ("import torch\n", "raise SystemExit\n", "ended the program on import"),
}


def load(file: Path, text: str) -> Workload:
    file.write_text(text)
    workload = Workload.load(str(file), "auto", "cpu")
    workload.require_callable()
    return workload


@pytest.mark.parametrize(("old", "new", "says"), BAD.values(), ids=BAD.keys())
def test_what_it_gets_wrong_is_one_line(old: str, new: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "toy.py"
    assert GOOD.count(old) == 1
    with pytest.raises(UserError, match=f"^{file}.*{says}") as error:
        load(file, GOOD.replace(old, new))
    assert "\n" not in str(error.value)


def test_one_that_works_is_called_and_hashed(tmp_path: Path) -> None:
    file = tmp_path / "toy.py"
    workload = load(file, GOOD)
    assert (workload.preset, workload.parameters) == ("only", 32)
    assert getattr(workload.file, "__file__", None) == str(file)


def test_exhausted_memory_is_not_the_files_fault(tmp_path: Path) -> None:
    text = GOOD.replace(FORWARD, "raise MemoryError")
    with pytest.raises(MemoryError):
        load(tmp_path / "toy.py", text)
