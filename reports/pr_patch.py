"""Patches that `git am` takes, made from texts alone: without git, the same bytes each time."""

import difflib
import re
import textwrap
from collections.abc import Iterator, Mapping
from email.utils import formatdate

from harness.git import WHERE, WHO, blob_id

Tree = Mapping[str, str]  # texts by their path in the repository
WIDTH = 72
NO_END = "\\ No newline at end of file\n"
# In a message, git takes these for the patch's beginning, or for another message.
BEGINS = re.compile(r"^(diff -|Index: |---|From |>From )")


def patch(before: Tree, after: Tree, *, subject: str, body: str, time_s: float) -> str:
    """One commit from `before` to `after` as a message for `git am`; `time_s` is its Unix time.

    Paragraphs of `body` are wrapped, its indented lines are not. ValueError for a text that mail
    would change: one with carriage returns.
    """
    changed = [p for p in sorted({*before, *after}) if before.get(p) != after.get(p)]
    diffs = "".join(_diff(path, before.get(path), after.get(path)) for path in changed)
    head = [
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001",
        f"From: {WHO} <{WHERE}>",
        f"Date: {formatdate(time_s)}",
        f"Subject: [PATCH] {_one_line(subject)}",
        "MIME-Version: 1.0",
        "Content-Type: text/plain; charset=UTF-8",
        "Content-Transfer-Encoding: 8bit",
    ]
    return "\n".join(head) + f"\n\n{wrapped(body)}\n---\n\n{diffs}"


def difference(written: str, made: str) -> str:
    """Where two patches differ, in a few words."""
    pairs = zip(written.split("\n"), made.split("\n"), strict=False)
    for number, (there, here) in enumerate(pairs, start=1):
        if there != here:
            return f"line {number}"
    return f"line {min(written.count(chr(10)), made.count(chr(10))) + 1}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).encode("ascii", "backslashreplace").decode()


def wrapped(body: str) -> str:
    """A message with its paragraphs wrapped, its indented lines as they are, and none that git
    takes for the beginning of a patch."""
    lines: list[str] = []
    for line in body.strip().split("\n"):
        if line.startswith(" ") or not line.strip():
            lines.append(line.rstrip())
        else:
            lines += textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(" " + line if BEGINS.match(line) else line for line in lines)


def _diff(path: str, before: str | None, after: str | None) -> str:
    for text in (before, after):
        if text is not None and "\r" in text:
            raise ValueError(f"{path} has carriage returns, which mail would lose; write \\n alone")
    old, new = "a/" + path, "b/" + path
    lines = [f"diff --git {old} {new}\n"]
    if before is None:
        lines.append("new file mode 100644\n")
    if after is None:
        lines.append("deleted file mode 100644\n")
    mode = " 100644" if before is not None and after is not None else ""
    ids = ("0" * 40 if text is None else blob_id(text.encode()) for text in (before, after))
    lines.append(f"index {'..'.join(ids)}{mode}\n")
    names = (old if before is not None else "/dev/null", new if after is not None else "/dev/null")
    hunks = difflib.unified_diff(_lines(before), _lines(after), *names, lineterm="\n")
    for line in hunks:
        lines.append(line if line.endswith("\n") else f"{line}\n{NO_END}")
    return "".join(lines)


def _lines(text: str | None) -> list[str]:
    """With their ends; only a line feed ends one, as for git."""
    return list(_split(text)) if text else []


def _split(text: str) -> Iterator[str]:
    *whole, rest = text.split("\n")
    yield from (line + "\n" for line in whole)
    if rest:
        yield rest
