"""A run whose candidates a model writes works from a checkout of the base commit: oracle, judge and
all else are as committed there, whatever is edited or committed meanwhile. Torch-free.

The program begins anew in that checkout, before anything heavy is imported, so its lives, its
workers and what it starts later find no other files. The checkout is a folder for temporary files,
and borrows the objects of the user's repository, in which nothing is written.
"""

import argparse
import atexit
import fcntl
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from agents import drafts
from agents.claude import options
from agents.mcp_link import MCP
from agents.workspace import detached
from harness.certificate import ROOT
from harness.errors import UserError
from harness.git import Git
from harness.ledger import Ledger

PREFIX = "kernelwright-base-"  # of the folder's name; then this program's process
LOCK = "lock"  # in there, held for as long as the program lives
SAFE = "PYTHONSAFEPATH"  # else the caller's folder, or the script's, comes before PYTHONPATH


def enter(a: argparse.Namespace) -> None:
    """Begin this program anew from the base commit, unless it has, or needs none: that is the
    commit on which a continued run began, or the one that is checked out now. UserError if that
    commit is gone. Without a repository the files are used as they are, which `Drafts` tells.

    Call it with the words of this program's own command line.
    """
    if drafts.origin() == ROOT:
        raise UserError("Python was told to ignore PYTHONPATH; leave out -E and -I")
    if drafts.origin() is not None:
        atexit.register(leave)
        return
    if a.dry_run:
        return
    if a.proposer != MCP and not options.writes_code(a):
        return
    began = None if a.resume is None else began_on(Ledger.open(a.resume))
    try:
        users = Git.open(ROOT)
    except UserError:
        return
    commit = users.commit(began or "HEAD")
    if commit is None and began is not None:
        raise UserError(
            f"{a.resume} began on commit {began}, which {ROOT} does not have; fetch it, or start "
            "a new run"
        )
    if commit is None:
        return
    remove_left()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")).resolve()
    held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.set_inheritable(held, True)
    tree = detached(users, commit, folder)
    paths = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    new = {drafts.ORIGIN: str(ROOT), "PYTHONPATH": paths, SAFE: "1"}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | new)


def began_on(ledger: Ledger) -> str | None:
    """The commit that the run's first candidates were judged by; None before that."""
    found = (e.data["commit"] for e in ledger.events() if e.kind == drafts.EVENT)
    return next(filter(None, found), None)


def leave() -> None:
    """Remove the checkout, at the end of the program that entered it; its children have it, too."""
    if owner(ROOT.parent) == os.getpid():
        shutil.rmtree(ROOT.parent, ignore_errors=True)


def remove_left() -> None:
    """The checkouts of this user's programs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError), (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def owner(folder: Path) -> int | None:
    """The process that a checkout belongs to; None for another folder."""
    number = folder.name.removeprefix(PREFIX).partition("-")[0]
    return int(number) if folder.name.startswith(PREFIX) and number.isdigit() else None
