"""One assembler for all of torch.compile's processes, so that they find each other's kernels.

To choose a matrix product, torch.compile has worker processes compile the candidates and then times
them in this process. The workers assemble with the `ptxas` that comes with torch, this process with
Triton's, and what Triton keeps on disk is filed under the assembler's version: where those differ
(13.0 of torch 2.11, 12.8 of Triton 3.6) nothing is found, and each candidate is compiled again, one
after the other. So the sources of both say; half a second for each of 19 candidates was seen on an
H200 (2026-11-30).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

VARIABLE = "TRITON_PTXAS_PATH"


@contextmanager
def torchs_assembler() -> Iterator[None]:
    """Assemble with torch's `ptxas` here, too, where torch has one and the user named none."""
    own = Path(torch.__file__).parent / "bin" / "ptxas"
    if VARIABLE in os.environ or not os.access(own, os.X_OK):
        yield
        return
    os.environ[VARIABLE] = str(own)
    _forget_version()
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        _forget_version()


def _forget_version() -> None:
    """Triton asks the assembler for its version once."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version
    except ImportError:
        return
    forget = getattr(get_ptxas_version, "cache_clear", None)
    if forget is not None:
        forget()
