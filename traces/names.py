"""Names of the profiler ranges that tie kernels to what the recorder saw; torch-free."""

RANGE = "kernelwright:"
STEP = f"{RANGE}step"
OPERATOR, CALL, LAUNCH = (f"{RANGE}{what}:" for what in ("operator", "call", "launch"))


def index_of(name: str) -> int:
    """The index at the end of a range's name."""
    return int(name.rpartition(":")[2])
