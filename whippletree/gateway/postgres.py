"""The store in a PostgreSQL database, which several gateways, on several machines, may write at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from whippletree.gateway.store import Store, StoreError

if TYPE_CHECKING:
    import psycopg

UNHEARD = {"connect_timeout": 10, "tcp_user_timeout": 30_000}  # seconds; milliseconds. An address may say otherwise
ONE_AT_A_TIME = 0x77686970  # names the lock under which a database is prepared


class PostgresStore(Store):
    """Rollouts and their turns in the database at `address` (postgresql://USER@HOST/DATABASE).

    A connection that was lost is made anew by the next write or read. A write during which it is lost raises
    StoreError; if that was in the moment of its commit, the database may have kept it.

    Raises:
        ImportError: psycopg is not installed.
        StoreError: the database cannot be reached.
        ValueError: a newer version wrote it.
    """

    def __init__(self, address: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise ImportError(
                "a store in PostgreSQL needs the library psycopg: pip install 'whippletree[postgres]'"
            ) from error
        self.errors = (psycopg.Error,)
        try:
            lock = _Link(address)
        except psycopg.Error as error:
            raise StoreError(f"the PostgreSQL database cannot be reached: {error}") from error
        with closing(lock):  # which lets others in
            lock.execute("SELECT pg_advisory_lock(?)", (ONE_AT_A_TIME,))
            self._start(lambda: _Link(address), lock.name)

    def _read(self, sql: str, values: Sequence[Any]) -> list[Any]:
        assert isinstance(self._reader, _Link)
        try:
            return self._reader.read(sql, values)
        except self.errors as error:
            raise StoreError(f"{self.name} could not be read: {error}") from error


class _Link:
    """A connection to the database, made anew where it was lost."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._db = self._connected()
        self.name = f"the PostgreSQL database {self._db.info.dbname}"

    def _connected(self) -> psycopg.Connection[Any]:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        settings: dict[str, Any] = {**UNHEARD, **conninfo_to_dict(self._address)}
        db: psycopg.Connection[Any] = psycopg.connect(**settings, autocommit=True)
        # what is committed must be on disk, whatever the server does by default
        db.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
        return db

    def begin(self) -> None:
        self._again("BEGIN", ())

    def read(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return list(self._again(_translated(sql), values).fetchall())

    def _again(self, sql: str, values: Sequence[Any]) -> Any:
        """Run this; where it finds the connection lost, run it on a new one."""
        import psycopg

        try:
            return self._db.execute(sql.encode(), values)
        except psycopg.OperationalError:
            if not self._db.closed:
                raise
        self._db = self._connected()
        return self._db.execute(sql.encode(), values)

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Any:
        return self._db.execute(_translated(sql).encode(), values)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Any:
        self._db.cursor().executemany(_translated(sql).encode(), rows)

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def undo(self) -> bool:
        import psycopg

        with suppress(psycopg.Error):
            self._db.execute("ROLLBACK")
        return not self._db.closed

    def close(self) -> None:
        self._db.close()


def _translated(sql: str) -> str:
    if sql.lstrip().startswith(("CREATE", "ALTER")):  # text sorts by its bytes, as in SQLite
        return sql.replace("BLOB", "BYTEA").replace(" TEXT", ' TEXT COLLATE "C"')
    return sql.replace("?", "%s")
