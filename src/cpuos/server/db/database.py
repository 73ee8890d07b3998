"""One database: SQLite in WAL mode by default, another by its URL. Transactions are short and hold no network call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from cpuos.server.db.sqlite import connect

__all__ = ["Database", "begin_immediate", "prepare_connection"]

BUSY_TIMEOUT_MS = 10_000


class Database:
    """Opened by `async with`. `write()` is one transaction; `read()` sees one statement at a time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._sqlite = url.startswith("sqlite")
        # Guards SQLite's single writer: waiting here costs nothing, waiting on its file lock holds a thread.
        self._writing = asyncio.Lock()
        if self._sqlite:
            self._engine = _sqlite_engine(url, pool_size=1)
            self._reading = _sqlite_engine(url, pool_size=8)
            event.listen(self._engine.sync_engine, "begin", begin_immediate)
        else:
            self._engine = self._reading = create_async_engine(url, pool_size=8)

    async def __aenter__(self) -> Database:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._engine.dispose()
        if self._reading is not self._engine:
            await self._reading.dispose()

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


def _sqlite_engine(url: str, *, pool_size: int) -> AsyncEngine:
    engine = create_async_engine(
        url, async_creator=lambda: connect(url), pool_size=pool_size, max_overflow=0, pool_reset_on_return=None
    )
    event.listen(engine.sync_engine, "connect", prepare_connection)
    return engine


def prepare_connection(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # no transaction by the driver: a reader sees each statement by itself
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # A killed process loses nothing; a power cut may lose the last transactions, and every sandbox with them.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.close()


def begin_immediate(connection: Connection) -> None:
    # Taking the write lock at once: a transaction that read first could no longer wait for it (SQLITE_BUSY).
    connection.exec_driver_sql("BEGIN IMMEDIATE")
