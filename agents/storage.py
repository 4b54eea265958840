"""Where the trials of launch knobs are kept: a journal in the run's directory, or a database.

A database's password stays in this process: neither the ledger nor a message has it. Torch-free.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.ledger import Ledger
from harness.record import content_hash

JOURNAL = "optuna.journal"
HIDDEN = "***"
FORM = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"


def add(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--storage",
        metavar="URL",
        help="a database for Optuna's studies of launch knobs, as SQLAlchemy names it; default a "
        "journal in the run's directory",
    )


def check(a: argparse.Namespace, *, confined: bool) -> None:
    """UserError for what cannot work; a `confined` run's process reaches no database."""
    if a.storage is None:
        return
    if confined:
        raise UserError(
            "--storage cannot be had where the run's process gives up the network and writes in "
            "its own directory only (--require-sandbox, or changes that a model writes); leave it "
            "out: the run keeps a journal"
        )
    require_driver(a.storage)


def require_driver(url: str) -> None:
    """UserError unless `url` is one and its database's driver is installed."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise UserError(f"--storage is no database URL; give {FORM}") from error
    try:
        parsed.get_dialect().import_dbapi()
    except NoSuchModuleError as error:
        raise UserError(
            f"--storage names a database that SQLAlchemy does not know, {parsed.drivername!r}; "
            f"give {FORM}"
        ) from error
    except ModuleNotFoundError as error:
        raise UserError(
            f"--storage {shown(url)} needs the driver {error.name}, which is not installed; "
            f"pip install {PACKAGES.get(error.name or '', error.name)}"
        ) from error


def require_reachable(a: argparse.Namespace) -> None:
    """UserError where the database cannot be used; makes Optuna's tables in a new one."""
    if a.storage is not None:
        Studies(Path(JOURNAL), _absolute(a.storage)).open()


# Of a driver's module.
PACKAGES = {
    "psycopg": "'psycopg[binary]'",
    "psycopg2": "psycopg2-binary",
    "MySQLdb": "mysqlclient",
}


def shown(url: str) -> str:
    """The URL without its password and without its query, which may hold one, too."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return HIDDEN
    query = f"?{HIDDEN}" if parsed.query else ""
    return parsed.set(query={}).render_as_string(hide_password=True) + query


def recorded(a: argparse.Namespace) -> dict[str, Any]:
    """For the ledger."""
    if a.storage is None:
        return {}
    return {"storage": shown(_absolute(a.storage))}


def recall(a: argparse.Namespace, options: dict[str, Any]) -> None:
    """A continued run goes on with its database; it has to be told again what was not kept."""
    known = options.get("storage")
    if known is None:
        if a.storage is not None:
            raise UserError("this run keeps its trials in its own directory; leave --storage out")
        return
    if a.storage is None:
        if HIDDEN in known:
            raise UserError(
                f"this run's trials are in {known}, and its password was not kept; give --storage "
                "again"
            )
        a.storage = known
    elif shown(_absolute(a.storage)) != known:
        raise UserError(
            f"this run's trials are in {known}; give that as --storage, or leave it out"
        )


def without(words: list[str], url: str | None) -> list[str]:
    """A command line's words without the URL's secrets."""
    return words if url is None else [word.replace(url, shown(url)) for word in words]


def _absolute(url: str) -> str:
    """A SQLite file's URL by the file's full path: a run may be continued from elsewhere."""
    head, sep, path = url.partition(":///")
    if not head.startswith("sqlite") or not sep or not path or path.startswith(("/", ":")):
        return url
    return f"{head}:///{os.path.abspath(path)}"


@dataclass(frozen=True)
class Studies:
    """Of one run. In a database their names begin with the run's mark: times of two machines, or of
    two versions of a kernel, are never mixed."""

    journal: Path
    url: str | None = None
    mark: str = ""

    @classmethod
    def of(cls, ledger: Ledger, url: str | None = None) -> "Studies":
        if url is None:
            return cls(ledger.directory / JOURNAL)
        first = next(iter(ledger.events()))
        mark = content_hash([first.time_s, first.data])
        return cls(ledger.directory / JOURNAL, _absolute(url), f"{mark}:")

    def open(self) -> Any:
        """Optuna's storage; UserError where the database cannot be reached."""
        if self.url is None:
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend

            return JournalStorage(JournalFileBackend(str(self.journal)))
        from optuna.storages import RDBStorage

        require_driver(self.url)
        with self.reached():
            return RDBStorage(self.url)

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """What the database fails at meanwhile is a UserError: no fault of what is tuned."""
        if self.url is None:
            yield
            return
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (SQLAlchemyError, StorageInternalError) as error:
            kind = type(getattr(error, "orig", None) or error).__name__
            raise UserError(
                f"the database {shown(self.url)} cannot be used ({kind}); check its address, name, "
                "user and password, and give --storage again"
            ) from None
