"""The plan that a bench is given: its model, and what its changes warn of meanwhile."""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from harness.command_peers import load_plan
from harness.environment import environment
from harness.errors import UserError
from harness.workload import Workload
from optimized.change import share


def planned(a: argparse.Namespace, workload: Workload) -> nn.Module | None:
    """The model with the changes of `--plan`, everywhere with `--beyond-domain`, on the workload's
    weights; None without a plan. Apply it before any graph is captured: packing moves weights.
    UserError if the plan cannot be applied."""
    plan = load_plan(a.plan, workload.name, environment(workload.device).device_name)
    if plan is None:
        return None
    if a.beyond_domain:
        changes = tuple(replace(change, domain=None) for change in plan.changes)
        plan = replace(plan, changes=changes)
    tree = share(workload.model)
    try:
        plan.apply(tree)
    except ValueError as error:
        raise UserError(f"{a.plan}: {error}") from error
    return tree


class Said(logging.Handler):
    """Keeps what the changes warn of once: above all where the reference runs in their place."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (line := record.getMessage()) not in self.lines:
            self.lines.append(line)


@contextmanager
def hearing() -> Iterator[Said]:
    """What the changes say while the context lasts."""
    said = Said()
    logging.getLogger("optimized").addHandler(said)
    try:
        yield said
    finally:
        logging.getLogger("optimized").removeHandler(said)
