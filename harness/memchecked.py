"""What `harness.memcheck` runs under a tool: `python -m harness.memchecked [--plain] FOLDER...`."""

import sys
from pathlib import Path

import torch
from torch import nn

from harness.memcheck import CALLS_FILE, OPTIONS_FILE
from harness.worker import find
from optimized.change import apply_change
from optimized.plan import Enabled, make_knobs
from reference import models


def make_calls(folder: Path, plain: bool) -> None:
    """Make the calls that lie in the folder, with the change or without it."""
    options = torch.load(folder / OPTIONS_FILE)
    models.load(options["model"])  # its classes are in what was handed over
    holder, attribute, calls = torch.load(folder / CALLS_FILE, weights_only=False)
    model = nn.Module()
    model.holder = holder
    if not plain:
        change, backend = find(options["change"]), options["backend"]
        enabled = Enabled(name=change.name, backend=backend, knobs=options["knobs"])
        apply_change(model, change, backend, make_knobs(change, enabled))
    node = model.holder.get_submodule(attribute)
    with torch.no_grad():
        for args, kwargs in calls:
            node(*args, **kwargs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    words = sys.argv[1:]
    for place in (word for word in words if word != "--plain"):
        make_calls(Path(place), "--plain" in words)
