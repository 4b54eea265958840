"""What a run's process tells the process that watches it. Torch-free."""

import contextlib
import json
import os
from dataclasses import dataclass
from typing import Any

MOST = 4096  # bytes; a pipe takes a line of at most so many whole or not at all
WORDS = 2000  # letters of one text


@dataclass
class Pulse:
    """One end of a pipe, or nothing where nobody watches.

    Told are `stage`, what begins now; `directory` and `budget` (minutes) of the run; and how the
    process is about to end: `end` with its exit code, `renew` or `broke` with a reason.
    """

    fd: int | None = None

    def tell(self, **facts: Any) -> None:
        """Never waits: what does not fit into the pipe is left out."""
        if self.fd is None:
            return
        short = {k: v[:WORDS] if isinstance(v, str) else v for k, v in facts.items()}
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.fd, json.dumps(short).encode()[: MOST - 1] + b"\n")
