"""Idempotency keys: the first call with a key does the work, every other gets its answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Row, bindparam, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from cpuos.errors import Conflict, InvalidRequest
from cpuos.server.clock import Clock
from cpuos.server.db.models import IdempotencyRow

__all__ = ["Claim", "Idempotency", "body_hash", "check_key"]

MAX_KEY = 255
KEEP = timedelta(hours=24)
# Events wake the waiters; a repeat that waits for an earlier process looks by itself this often.
_LOOK_S = 0.25

_keys = IdempotencyRow.__table__
_UNFINISHED = (_keys.c.intent == bindparam("of_intent"), _keys.c.status.is_(None))
_FIND = select(_keys.c.body_hash, _keys.c.status, _keys.c.answer).where(
    _keys.c.workspace == bindparam("in_workspace"),
    _keys.c.route == bindparam("on_route"),
    _keys.c.key == bindparam("with_key"),
)
_HOLD = insert(_keys)
_FINISH = update(_keys).where(*_UNFINISHED).values(status=bindparam("status"), answer=bindparam("answer"))
_FREE = delete(_keys).where(*_UNFINISHED)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One key in its scope, bound to one path and body."""

    workspace: str
    route: str
    key: str
    body_hash: str

    @property
    def scope(self) -> tuple[str, str, str]:
        return self.workspace, self.route, self.key


class Idempotency:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[tuple[str, str, str], asyncio.Event] = {}

    async def find(self, connection: AsyncConnection, claim: Claim) -> Row[Any] | None:
        """What the key is bound to; None when it is free. Another request under the same key is an error."""
        scope = {"in_workspace": claim.workspace, "on_route": claim.route, "with_key": claim.key}
        row = (await connection.execute(_FIND, scope)).one_or_none()
        if row is not None and row.body_hash != claim.body_hash:
            raise Conflict(
                f"cannot use idempotency key {claim.key!r} again: the request is another",
                "the key is bound to the path and body that it was first sent with",
                code="idempotency_mismatch",
                hint="use a new key for a new request",
            )
        return row

    async def hold(self, connection: AsyncConnection, claim: Claim, *, intent: int) -> None:
        """Bind the free key to this call; in the transaction of its intent."""
        values = {"workspace": claim.workspace, "route": claim.route, "key": claim.key, "body_hash": claim.body_hash}
        await connection.execute(_HOLD, {"intent": intent, "created_at": self._clock(), **values})

    async def finish(self, connection: AsyncConnection, *, intent: int, status: int, answer: dict[str, Any]) -> None:
        """Keep the answer of the call; its repeats get it."""
        await connection.execute(_FINISH, {"of_intent": intent, "status": status, "answer": answer})

    async def free(self, connection: AsyncConnection, *, intent: int) -> None:
        """The call did nothing: a repeat may try again."""
        await connection.execute(_FREE, {"of_intent": intent})

    async def prune(self, connection: AsyncConnection) -> None:
        old = (_keys.c.created_at < self._clock() - KEEP, _keys.c.status.is_not(None))
        await connection.execute(delete(_keys).where(*old))

    def wake(self, claim: Claim) -> None:
        """After the commit that finished or freed the key."""
        event = self._waiting.pop(claim.scope, None)
        if event is not None:
            event.set()

    async def wait(self, claim: Claim) -> None:
        """Until the key may have been finished or freed."""
        event = self._waiting.setdefault(claim.scope, asyncio.Event())
        try:
            async with asyncio.timeout(_LOOK_S):
                await event.wait()
        except TimeoutError:
            pass


def check_key(key: str) -> str:
    if not 1 <= len(key) <= MAX_KEY or not key.isprintable():
        raise InvalidRequest(
            f"cannot use the idempotency key: {key[:64]!r}",
            f"a key is 1 to {MAX_KEY} printable characters",
            details={"field": "Idempotency-Key"},
        )
    return key


def body_hash(body: bytes, *, target: str = "") -> str:
    """Equal for equal JSON, whatever its spacing and order of fields, that is sent to the same thing: a fork of one
    sandbox is no answer to who asked for one of another."""
    try:
        canonical = json.dumps(json.loads(body), sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        canonical = body
    named = b"%b\0" % target.encode() if target else b""
    return hashlib.sha256(named + canonical).hexdigest()
