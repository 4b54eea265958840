"""Where the trials of launch knobs are kept, and that no password of a database is."""

import importlib.util
from functools import partial
from pathlib import Path

import optuna
import pytest
from sqlalchemy import create_engine, text

from agents import run, storage
from agents.storage import Studies
from agents.tuner import tune
from harness.errors import UserError
from harness.ledger import Ledger
from tests.agents.test_tuner import CHANGE, applied, step

SECRET = "s3cr3t"
POSTGRES = f"postgresql://me:{SECRET}@127.0.0.1:1/studies"
SHOWN = "postgresql://me:***@127.0.0.1:1/studies"


def test_trials_are_kept_in_a_database_under_the_runs_mark(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", {"target": "decode-bs1"})
    url = f"sqlite:///{tmp_path}/studies.db"
    studies = Studies.of(ledger, url)
    model = applied()
    run_step = partial(step, model)
    found = tune(model, CHANGE, "torch", run_step, studies=studies, seconds=20.0)
    assert found == {"F=512": {"ms": 1}}
    (name,) = optuna.get_all_study_names(url)
    assert name == f"{studies.mark}waiting:torch:F=512" and len(studies.mark) == 13
    before = optuna.load_study(study_name=name, storage=url).trials
    assert len(before) >= 2
    kept = Studies.of(ledger, url)
    again = tune(model, CHANGE, "torch", run_step, studies=kept, seconds=20.0)
    assert again == found
    after = optuna.load_study(study_name=name, storage=url).trials
    assert [t.value for t in after[: len(before)]] == [t.value for t in before]
    assert len(after) <= 4  # what there is to try
    assert not (ledger.directory / storage.JOURNAL).exists()
    other = Ledger.create(tmp_path / "other")
    other.append("run", {"target": "decode-bs1"})
    assert Studies.of(other, url).mark != studies.mark


BAD = {
    "no-url": ("studies.db", "--storage is no database URL; give sqlite:///FILE or"),
    "unknown-database": (f"nosql://me:{SECRET}@host/db", "does not know, 'nosql'; give sqlite"),
    "bad-port": (f"postgresql://me:{SECRET}@host:port/db", "--storage is no database URL"),
}


@pytest.mark.parametrize(("url", "says"), BAD.values(), ids=BAD.keys())
def test_bad_urls_are_one_line_without_their_password(url: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as told:
        run.words(["--target", "decode-bs1", "--storage", url])
    assert SECRET not in str(told.value) and "\n" not in str(told.value)


@pytest.mark.skipif(
    importlib.util.find_spec("psycopg") is not None, reason="the driver is installed"
)
def test_a_missing_driver_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as told:
        run.words(["--target", "decode-bs1", "--storage", POSTGRES])
    assert str(told.value) == (
        f"--storage {SHOWN} needs the driver psycopg, which is not installed; "
        "pip install 'psycopg[binary]'"
    )
    assert SECRET not in "".join(capsys.readouterr())


def test_a_database_that_cannot_be_used_is_named_without_its_password(tmp_path: Path) -> None:
    studies = Studies(tmp_path / "unused", f"sqlite:///{tmp_path}/nowhere/studies.db?timeout=1")
    with pytest.raises(UserError, match=r"studies\.db\?\*\*\* cannot be used \(OperationalError\)"):
        studies.open()


def test_a_database_that_is_lost_is_no_fault_of_the_change(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    with (
        pytest.raises(UserError, match=r"studies\.db cannot be used \(OperationalError\)"),
        Studies(tmp_path / "unused", url).reached(),
    ):
        with create_engine(url).connect() as connection:
            connection.execute(text("select * from trials"))


@pytest.mark.parametrize("words", [["--require-sandbox"], ["--proposer", "claude"]])
def test_a_confined_run_takes_no_database(words: list[str], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    with pytest.raises(UserError, match="gives up the network and writes in its own directory"):
        run.words(["--target", "decode-bs1", "--storage", url, *words])


def test_the_ledger_holds_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    a = run.parser().parse_args(["--storage", POSTGRES])
    assert storage.recorded(a) == {"storage": SHOWN}
    words = ["--storage", POSTGRES, f"--storage={POSTGRES}", "--seed", "1"]
    assert storage.without(words, POSTGRES) == [
        "--storage",
        SHOWN,
        f"--storage={SHOWN}",
        "--seed",
        "1",
    ]
    assert storage.shown(f"postgresql://host/db?password={SECRET}") == "postgresql://host/db?***"
    monkeypatch.chdir("/tmp")
    a = run.parser().parse_args(["--storage", "sqlite:///studies.db"])
    assert storage.recorded(a) == {"storage": "sqlite:////tmp/studies.db"}


def test_a_continued_run_goes_on_with_its_database() -> None:
    a = run.parser().parse_args([])
    storage.recall(a, {"storage": "sqlite:////tmp/studies.db"})
    assert a.storage == "sqlite:////tmp/studies.db"
    with pytest.raises(UserError, match="its password was not kept; give --storage again"):
        storage.recall(run.parser().parse_args([]), {"storage": SHOWN})
    a = run.parser().parse_args(["--storage", POSTGRES])
    storage.recall(a, {"storage": SHOWN})
    assert a.storage == POSTGRES
    other = run.parser().parse_args(["--storage", "sqlite:///other.db"])
    with pytest.raises(UserError, match=r"trials are in postgresql://me:\*\*\*@"):
        storage.recall(other, {"storage": SHOWN})
    with pytest.raises(UserError, match="trials in its own directory; leave --storage out"):
        storage.recall(other, {})
