"""The first start: a workspace, and the one key that is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.server.auth import create_key
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.db.models import ApiKey, Workspace

__all__ = ["DEFAULT_WORKSPACE", "make_first_key", "make_key", "write_first_key"]

DEFAULT_WORKSPACE = "default"


async def make_first_key(database: Database, clock: Clock) -> str | None:
    """The default workspace with an API key, if there is none yet; None at every later start."""
    async with database.write() as connection:
        await _ensure_workspace(connection, clock)
        if (await connection.execute(select(ApiKey.id).limit(1))).one_or_none() is not None:
            return None
        return await create_key(connection, workspace=DEFAULT_WORKSPACE, name="first", clock=clock)


async def make_key(database: Database, clock: Clock, *, name: str) -> str:
    """One more key of the default workspace."""
    async with database.write() as connection:
        await _ensure_workspace(connection, clock)
        return await create_key(connection, workspace=DEFAULT_WORKSPACE, name=name, clock=clock)


def write_first_key(path: Path, key: str) -> None:
    """Leave the key (0600) for `cpuos up`, which hands it to its caller and removes the file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"api_key": key}, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


async def _ensure_workspace(connection: AsyncConnection, clock: Clock) -> None:
    known = select(Workspace.id).where(Workspace.id == DEFAULT_WORKSPACE)
    if (await connection.execute(known)).one_or_none() is None:
        values = {"id": DEFAULT_WORKSPACE, "name": DEFAULT_WORKSPACE, "created_at": clock()}
        await connection.execute(insert(Workspace).values(**values))
