"""Patches made from texts are what git itself would make of them."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.git import Git
from reports.pr_patch import difference, patch

TIME_S = 1795987250.0
BODY = "Why.\n\nDevice: a card\n\n  before  1 us\n  after   2 us"


def repository(folder: Path, files: dict[str, str]) -> Git:
    folder.mkdir()
    subprocess.run(["git", "init", "-q", folder], check=True)
    for name, text in {"README": "r\n", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    git = Git(folder)
    git.run("add", ".")
    git.run("commit", "-qm", "base", fallback_identity=True)
    return git


def applied(folder: Path, before: dict[str, str], *patches: str) -> Git:
    git = repository(folder / "tree", before)
    for number, text in enumerate(patches):
        file = folder / f"{number}.patch"
        file.write_bytes(text.encode())
        git.run("am", "-q", file, fallback_identity=True)
    return git


def test_new_changed_and_removed_files_and_the_message(tmp_path):
    before = {"plan.toml": "a\nb\nc\n", "old.py": "x = 1\n"}
    after = {"plan.toml": "a\nb\nc\nd", "new/file.py": "y = 'ü'\n\x0cz\n"}
    text = patch(before, after, subject="perf(x): faster", body=BODY, time_s=TIME_S)
    git = applied(tmp_path, before, text)
    assert git.run("ls-tree", "-r", "--name-only", "HEAD").split() == [
        "README", "new/file.py", "plan.toml",
    ]  # fmt: skip
    for path, content in after.items():
        assert git.file("HEAD", path) == content.encode()
    assert (
        git.run("log", "-1", "--format=%s|%an|%at") == f"perf(x): faster|kernelwright|{TIME_S:.0f}"
    )
    assert git.run("log", "-1", "--format=%b") == BODY
    assert git.run("status", "--porcelain") == ""


def test_words_that_look_like_a_patch_stay_words(tmp_path):
    body = "First.\n\ndiff - of two\n\n--- a line\n\nFrom here on"
    text = patch({}, {"a": "1\n"}, subject="[x] s\nt ü", body=body, time_s=TIME_S)
    git = applied(tmp_path, {}, text)
    said = git.run("log", "-1", "--format=%B")
    assert all(words in said for words in ("diff - of two", "--- a line", "From here on"))
    assert git.file("HEAD", "a") == b"1\n"


def test_a_carriage_return_is_refused():
    with pytest.raises(ValueError, match="a.py has carriage returns"):
        patch({}, {"a.py": "x\r\n"}, subject="s", body="b", time_s=TIME_S)


LINES = st.lists(st.sampled_from(["", "a", "b", "- c", "+d", "@@ -1 +1 @@", "-- ", "From x"]))
TEXTS = st.builds(
    lambda lines, end: "\n".join(lines) + end if lines and lines[-1] else "a\n",
    LINES, st.sampled_from(["", "\n"]),
)  # fmt: skip


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(TEXTS, min_size=3, max_size=3, unique=True))
def test_stacked_patches_give_exactly_the_texts(texts, tmp_path_factory):
    first, second, third = ({"f": text} for text in texts)
    made = [
        patch(a, b, subject="s", body="b", time_s=TIME_S)
        for a, b in ((first, second), (second, third))
    ]
    git = applied(tmp_path_factory.mktemp("stack"), first, *made)
    assert [git.file(name, "f") for name in ("HEAD~2", "HEAD~1", "HEAD")] == [
        text.encode() for text in texts
    ]


def test_the_first_difference_is_named():
    assert difference("a\nb\nc", "a\nx\nc") == "line 2"
    assert difference("a\nb\n", "a\nb\nc\n") == "line 3"
