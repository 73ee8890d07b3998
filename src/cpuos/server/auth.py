"""API keys: made once, stored as a hash, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.errors import AuthenticationError
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.db.models import ApiKey

__all__ = ["Actor", "Authenticator", "Permission", "create_key"]

PREFIX = "cpk_"
# A key that was revoked by another process is refused at the latest after this.
CACHE_S = 5.0
CACHE_KEYS = 1024
_NO_HASH = hashlib.sha256(b"").hexdigest()


class Permission(StrEnum):
    """What a key may do; every route asks for one."""

    SANDBOXES_READ = "sandboxes.read"
    SANDBOXES_WRITE = "sandboxes.write"
    """The answer to who makes, copies or recreates a sandbox holds the way into it."""
    SANDBOXES_ACCESS = "sandboxes.access"
    """Tickets and links: the way into a sandbox."""
    WORKSPACE_WRITE = "workspace.write"
    """What holds for all sandboxes of the workspace, such as its network policy."""
    AUDIT_READ = "audit.read"
    NODES_READ = "nodes.read"
    NODES_WRITE = "nodes.write"
    """The operator's: what all workspaces have on the nodes, and what of it goes."""


@dataclass(frozen=True, kw_only=True)
class Actor:
    """Who calls."""

    workspace: str
    id: str
    """`key:` and the key's id, as it stands in audit entries and tickets."""
    permissions: frozenset[Permission]
    name: str = ""
    """The key's name, for texts that people read."""

    @property
    def shown(self) -> str:
        return f"the key {self.name!r}" if self.name else self.id


async def create_key(
    connection: AsyncConnection,
    *,
    workspace: str,
    name: str,
    clock: Clock,
    permissions: Collection[Permission] = tuple(Permission),
) -> str:
    """Make a key and return it: the only time that anyone sees it."""
    key_id = secrets.token_hex(6)
    key = f"{PREFIX}{key_id}_{secrets.token_urlsafe(32)}"
    values = {
        "id": key_id,
        "workspace": workspace,
        "name": name,
        "secret_hash": _hash(key),
        "permissions": [permission.value for permission in permissions],
        "created_at": clock(),
    }
    await connection.execute(insert(ApiKey).values(**values))
    return key


class Authenticator:
    def __init__(self, database: Database) -> None:
        self._database = database
        # Hash of the key to (until when, actor): no plain key is kept.
        self._cache: dict[str, tuple[float, Actor]] = {}

    async def authenticate(self, authorization: str | None) -> Actor:
        """The caller behind an Authorization header."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError(
                "cannot authenticate: no API key was sent",
                "the call needs the header Authorization: Bearer cpk_…",
                code="key_missing",
                hint="export CPUOS_API_KEY=…, or cpuos up",
            )
        hashed = _hash(key)
        cached = self._cache.get(hashed)
        if cached is not None and cached[0] > time.monotonic():
            return cached[1]
        actor = await self._look_up(key, hashed)
        if len(self._cache) >= CACHE_KEYS:
            self._cache.clear()
        self._cache[hashed] = (time.monotonic() + CACHE_S, actor)
        return actor

    async def _look_up(self, key: str, hashed: str) -> Actor:
        key_id = key.removeprefix(PREFIX).partition("_")[0]
        columns = select(ApiKey.workspace, ApiKey.name, ApiKey.secret_hash, ApiKey.permissions, ApiKey.revoked_at)
        async with self._database.read() as connection:
            row = (await connection.execute(columns.where(ApiKey.id == key_id[:16]))).one_or_none()
        # Compared also when there is no such id: both answers take the same time.
        good = hmac.compare_digest(hashed, row.secret_hash if row else _NO_HASH)
        if row is None or not good or row.revoked_at is not None:
            raise AuthenticationError(
                "cannot authenticate: the API key is not known",
                "it was mistyped, revoked, or belongs to another installation",
                hint="check CPUOS_API_KEY and ~/.config/cpuos/credentials.json; cpuos up writes a key",
            )
        known = frozenset(Permission(name) for name in row.permissions if name in set(Permission))
        return Actor(workspace=row.workspace, id=f"key:{key_id}", permissions=known, name=row.name)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
