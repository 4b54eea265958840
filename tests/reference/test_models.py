"""Finding a model file by name or path, and what is said when it can't be used."""

import sys
from pathlib import Path

import pytest

from reference import beam, models

GOOD = """
configs = {"only": 3}

def build(config, device, seed):
    return config, device, seed

def cache(config, batch, capacity, device):
    return None
"""


def message(model: str | Path) -> str:
    with pytest.raises(ValueError) as error:
        models.load(str(model))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_known_names_are_the_model_files_only() -> None:
    assert "beam" in models.names()
    assert not {"beam-config", "beam-moe", "cache", "layers", "models"} & set(models.names())


@pytest.mark.parametrize("name", models.names())
def test_every_shipped_model_has_the_protocol(name: str) -> None:
    file = models.load(name)
    assert file.configs
    assert all(callable(getattr(file, part)) for part in ("build", "cache"))


def test_beam_by_name() -> None:
    assert models.load("beam") is beam


def test_a_name_may_be_spelt_as_its_file_is() -> None:
    assert models.load("muse_spark") is models.load("muse-spark")


def test_a_file_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    file = models.load(str(path))
    assert file.configs == {"only": 3}
    assert file.build(3, "cpu", 7) == (3, "cpu", 7)


def test_unknown_name() -> None:
    said = message("beem")
    assert said.startswith("unknown model 'beem'; known: beam")
    assert "path of a model file" in said


def test_no_such_file(tmp_path: Path) -> None:
    assert message(tmp_path / "absent.py").startswith(f"no model file at {tmp_path / 'absent.py'}")


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder.py"
    folder.mkdir()
    assert message(folder).startswith(f"no model file at {folder}")


def test_a_file_without_the_protocol(tmp_path: Path) -> None:
    path = tmp_path / "partial.py"
    path.write_text("configs = {}\n")
    assert message(path) == (
        f"{path} is not a model file: it lacks build, cache; it must define configs, build, cache"
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import not_a_module_of_anyone\n", "ModuleNotFoundError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("raise ValueError('first line\\nsecond line')\n", "ValueError: first line second line"),
    ],
    ids=["syntax", "import", "arithmetic", "two-lines"],
)
def test_a_file_that_fails_on_import(tmp_path: Path, code: str, reason: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(code)
    said = message(path)
    assert said.startswith(f"{path} failed on import: ") and reason in said


def test_a_failed_import_leaves_nothing_behind(tmp_path: Path) -> None:
    """The same path can be mended and loaded again."""
    path = tmp_path / "mended.py"
    path.write_text("1 / 0\n")
    message(path)
    assert "model_file_mended" not in sys.modules
    path.write_text(GOOD)
    assert models.load(str(path)).configs == {"only": 3}


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(GOOD.replace("3", str(value)))
    one, two = (models.load(str(tmp_path / folder / "same.py")) for folder in "ab")
    assert (one.configs, two.configs) == ({"only": 1}, {"only": 2})
