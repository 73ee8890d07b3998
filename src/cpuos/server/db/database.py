"""One database: SQLite in WAL mode by default, another by its URL. Transactions are short and hold no network call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

__all__ = ["Database"]

BUSY_TIMEOUT_MS = 10_000


class Database:
    """Opened by `async with`. `write()` is one transaction; `read()` sees one statement at a time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._sqlite = url.startswith("sqlite")
        self._engine = create_async_engine(url, pool_size=8, max_overflow=8, pool_reset_on_return=None)
        self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        # Guards SQLite's single writer: waiting here costs nothing, waiting on its file lock holds a thread.
        self._writing = asyncio.Lock()
        if self._sqlite:
            event.listen(self._engine.sync_engine, "connect", _prepare_connection)
            event.listen(self._engine.sync_engine, "begin", _begin_immediate)

    async def __aenter__(self) -> Database:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._engine.dispose()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, committed at the end of the block, rolled back when it raises."""
        if not self._sqlite:
            async with self._engine.begin() as connection:
                yield connection
            return
        async with self._writing, self._engine.begin() as connection:
            yield connection

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        async with self._reading.connect() as connection:
            yield connection


def _prepare_connection(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # the driver starts no transaction by itself: `begin` below does
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # A killed process loses nothing; a power cut may lose the last transactions, and every sandbox with them.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.close()


def _begin_immediate(connection: Connection) -> None:
    # Taking the write lock at once: a transaction that read first could no longer wait for it (SQLITE_BUSY).
    if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
