"""What a run leaves for its readers, built from its ledger alone."""


def frames(run):
    """A run, or the directory of one, as typed pandas DataFrames: `frames(RUN).changes`,
    `.attempts`, `.kernels`, `.latency`, `.samples`, `.others`. UserError for what is no run."""
    from reports.dataframes import tables  # pages are built without pandas

    return tables(run)
