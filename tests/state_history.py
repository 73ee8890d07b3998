"""All changes of state that the server's database ever saw, written down by the database itself."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from cpuos.server.states import TRANSITIONS
from cpuos.testing.instance import Instance

__all__ = ["StateHistory"]


class StateHistory:
    def __init__(self, instance: Instance) -> None:
        self._path = instance.settings.server_state_dir / "cpuos.db"
        with self._open() as database:
            database.executescript(
                """CREATE TABLE chaos_history (sandbox TEXT, was TEXT, becomes TEXT, reason TEXT);
                CREATE TRIGGER chaos_states AFTER UPDATE OF state ON sandboxes WHEN OLD.state <> NEW.state BEGIN
                INSERT INTO chaos_history VALUES (NEW.id, OLD.state, NEW.state, NEW.reason); END;"""
            )

    def moves(self) -> list[tuple[str, str, str, str]]:
        with self._open() as database:
            return database.execute("SELECT * FROM chaos_history ORDER BY rowid").fetchall()

    def illegal(self) -> list[tuple[str, str, str, str]]:
        legal = {(was.value, then.value) for was, verbs in TRANSITIONS.items() for then in verbs.values()}
        return [move for move in self.moves() if move[1:3] not in legal]

    def open_intents(self) -> int:
        with self._open() as database:
            return int(database.execute("SELECT count(*) FROM open_intents").fetchone()[0])

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """While the server runs: the files beside the database are its own then."""
        database = sqlite3.connect(self._path, timeout=30)
        try:
            with database:
                yield database
        finally:
            database.close()
