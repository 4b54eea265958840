"""Seeds of verdicts: drawn anew for each, and recorded in it. Torch-free.

Who wants a verdict again passes the seed that it was given with.
"""

import secrets

BITS = 31  # noise replays multiply a seed and must stay in 64 bits


def draw() -> int:
    """The seed of one verdict, from the system's entropy."""
    return secrets.randbits(BITS)
