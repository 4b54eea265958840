"""What is no change file is refused by its text, and by its own errors before the self-test."""

from pathlib import Path

import pytest

from harness.__main__ import main
from harness.change_file import require_change
from harness.errors import UserError

TOY = str(Path(__file__).with_name("toy_model.py"))
BAD = {
    "empty": (b"", "change.py is empty; a change file defines one CHANGE"),
    "words": (b"x = 1\n", "change.py defines no CHANGE; a change file defines one CHANGE"),
    "binary": (bytes(range(256)), "change.py is no text of Python .*0x80"),
    "null": (b"CHANGE = 1\0", "change.py.* is n.* null byte"),
    "syntax": (b"x = 1\nCHANGE = (\n", "change.py:2 is not Python: '\\(' was never closed"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD.keys())
def test_a_text_that_is_no_change_file_is_named(text: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "change.py"
    file.write_bytes(text)
    with pytest.raises(UserError, match=says):
        require_change(file)


@pytest.mark.parametrize("text", ["CHANGE = 1", "from x import *", "from x import y as CHANGE"])
def test_a_text_that_may_define_one_is_left_to_the_sandbox(text: str, tmp_path: Path) -> None:
    file = tmp_path / "change.py"
    file.write_text(text)
    require_change(file)


def test_verify_refuses_before_the_self_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.py"
    for text, says in (
        ("", "broken.py is empty"),
        ("import nothing_like_it\nCHANGE = 1\n", "broken.py failed on import: ModuleNotFoundError"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=says):
            main(["verify", str(file), "--model", TOY])
    assert "self-test" not in capsys.readouterr().err
