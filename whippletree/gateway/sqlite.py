"""A connection to a SQLite file, in which what is committed is on disk."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path


class File(sqlite3.Connection):
    """A connection to a SQLite file."""

    @classmethod
    def at(cls, path: Path) -> File:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30, factory=cls)
        try:
            for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                _patiently(db, f"PRAGMA {setting}")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def begin(self) -> None:
        self.execute("BEGIN IMMEDIATE")

    def undo(self) -> bool:
        self.rollback()  # does nothing where SQLite ended the transaction by itself, as after some errors
        return True


def _patiently(db: sqlite3.Connection, sql: str) -> None:
    """Run this; the change of the journal is refused at once, whatever the timeout, while another changes it."""
    for _ in range(100):
        try:
            db.execute(sql)
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
        time.sleep(0.05)
    db.execute(sql)
