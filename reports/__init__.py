"""What a run leaves for its readers, built from its ledger alone."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reports.dataframes import Frames
    from reports.run import Run


def frames(run: "Run | Path | str") -> "Frames":
    """A run, or the one in a directory, as typed pandas DataFrames: `frames(RUN).changes`,
    `.attempts`, `.kernels`, `.latency`, `.samples`, `.others`. UserError for what is no run."""
    from reports.dataframes import tables  # pages are built without pandas

    return tables(run)
