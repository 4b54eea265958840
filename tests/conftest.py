"""What all tests share: fixed seeds, one thread, and the `gpu` marker's skip.

Nothing here imports torch: tests of the torch-free packages run without it.
"""

import gc
import os
import random
import signal
import sys
from pathlib import Path

import pytest

# Read by OpenMP and MKL when torch is first imported, so set before any test module is.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Triton reads it when a kernel is defined: without a GPU, its interpreter runs the kernels.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


# What a shell starts in the background ignores Ctrl-C, and so would the processes that tests start
# and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Each with a fixture or a test of minutes: begun last, it would leave a worker idle.
FIRST = "test_claude_shows.py", "test_offline.py", "test_resume.py"


# What `make slow` and `make long` select, and what a file with such a test says.
SELECTED = {"slow and not long": "mark.slow", "long": "mark.long"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of those selected are not imported: all of them take 12 s."""
    mark = SELECTED.get(config.option.markexpr)
    named = [(config.invocation_params.dir / word.split("::")[0]).resolve() for word in config.args]
    if mark is None or collection_path.suffix != ".py" or collection_path in named:
        return None
    return mark not in collection_path.read_text() or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first. Skip `gpu` tests, with the reason, where PyTorch sees no CUDA device."""
    items.sort(key=lambda item: item.path.name not in FIRST)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        reason = f"needs a CUDA device; torch {torch.__version__} sees none"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def collected_once() -> None:
    """Every measurement collects garbage first. What imports and earlier tests hold, some 600,000
    objects, is not looked through each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_numerics() -> None:
    """The same random numbers for every test, whatever ran before it."""
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(0)
        torch.set_num_threads(1)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
