"""What a command line's numbers, files and folders may be, and the line that says so."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from harness import arguments
from harness.arguments import require_file, require_folder
from harness.errors import UserError

FINE = {
    "seed": {"0": 0, "2147483647": 2**31 - 1},
    "count": {"1": 1},
    "whole": {"0": 0},
    "counts": {"1,8": [1, 8]},
    "positive": {"0.25": 0.25, "3": 3.0},
    "share": {"1": 1.0},
}
BAD = {
    "seed": (("99999999999999999999", "2147483648", "-1", "x", "1.5"), "from 0 to 2147483647"),
    "count": (("0", "-5", "x"), "is not a whole number of at least 1"),
    "whole": (("-1", ""), "is not a whole number of at least 0"),
    "counts": (("1,", "0,1"), "is not a whole number of at least 1"),
    "positive": (("nan", "inf", "-inf", "0", "-1", "x"), "is not a finite number above 0"),
    "share": (("nan", "inf", "0", "1.1", "x"), "is not a share above 0, at most 1"),
}


@pytest.mark.parametrize("kind", FINE)
def test_numbers_in_their_range_are_read(kind: str) -> None:
    assert {text: getattr(arguments, kind)(text) for text in FINE[kind]} == FINE[kind]


@pytest.mark.parametrize(("kind", "text"), [(k, t) for k, (texts, _) in BAD.items() for t in texts])
def test_numbers_outside_it_are_named(kind: str, text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=BAD[kind][1]):
        getattr(arguments, kind)(text)


def test_a_folder_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    require_folder(None)
    require_folder(tmp_path)
    require_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/proc/nope/a", "FILE", "FILE/a"])
def test_a_folder_that_cannot_be_written_into_is_named(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = Path(folder.replace("FILE", str(tmp_path / "file")))
    with pytest.raises(UserError, match=f"^--out {path}: .*; name a folder to write into$"):
        require_folder(path)


def test_a_file_that_can_be_written_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    for file in (None, tmp_path / "old", tmp_path / "new"):
        require_file(file)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (".", "--html . is a folder; name a file"),
        ("/proc/x", "--html /proc/x: .*; name another file"),
        ("no/where", "there is no folder no; make it, or name another file"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(file: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        require_file(Path(file), "--html")
