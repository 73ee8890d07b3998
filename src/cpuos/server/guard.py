"""Wraps every route: authenticate → authorize → quota → policy → intent → handler → outcome.

Reading routes end after authorize. A changing route runs in a task of its own: a client that goes away neither stops it
half-way nor leaves it without an outcome.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import Row

from cpuos.errors import Conflict, Forbidden
from cpuos.server.audit import Audit, Intent
from cpuos.server.auth import Actor, Authenticator, Permission
from cpuos.server.clock import Clock
from cpuos.server.db.database import Database
from cpuos.server.envelope import body_of_error
from cpuos.server.idempotency import Claim, Idempotency, body_hash, check_key
from cpuos.server.policies import Policy
from cpuos.server.quotas import Quotas
from cpuos.server.tasks import Tasks
from cpuos.types.audit import AuditResult

__all__ = ["Call", "Guard", "Replay", "Route"]

Handle = Callable[[Request], Awaitable[Response]]
_log = structlog.get_logger("cpuos.server.guard")
# Of what a caller may write as he likes, this much is kept in the audit: the longest name has 63 letters.
_MAX_TARGET, _MAX_TOLD = 128, 500


class Replay(Protocol):
    """How the answer of an idempotent route is kept and given again."""

    def keep(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer without its secrets."""
        ...

    def restore(self, request: Request, kept: dict[str, Any]) -> dict[str, Any]:
        """The answer again, with fresh secrets."""
        ...


@dataclass(frozen=True, kw_only=True)
class Route:
    """One row of the table of routes."""

    method: str
    path: str
    handler: Callable[..., Any]
    permission: Permission | None
    """None: needs no key. The few such routes are listed in a test."""
    audit: str | None = None
    """Kind of its audit entries, noun and verb; None: it changes nothing."""
    status: int = 200
    replay: Replay | None = None
    """Set: the route takes Idempotency-Key."""


@dataclass(kw_only=True)
class Call:
    """What guard tells the handler, and the handler tells guard."""

    actor: Actor
    request_id: str
    intent: Intent | None = None
    sandbox: str | None = None
    """Set by the handler as soon as it knows which one."""
    began: bool = False
    """Something was made: a failure from here on is final for the idempotency key."""
    detail: dict[str, Any] = field(default_factory=dict)

    def begin(self, sandbox_id: str) -> None:
        self.sandbox = sandbox_id
        self.began = True


class Guard:
    def __init__(
        self,
        *,
        database: Database,
        authenticator: Authenticator,
        quotas: Quotas,
        policy: Policy,
        audit: Audit,
        idempotency: Idempotency,
        tasks: Tasks,
        clock: Clock,
        wait_s: float,
    ) -> None:
        self._database = database
        self._authenticator = authenticator
        self._quotas = quotas
        self._policy = policy
        self._audit = audit
        self._idempotency = idempotency
        self._tasks = tasks
        self._clock = clock
        self._wait_s = wait_s

    async def run(self, route: Route, request: Request, handle: Handle) -> Response:
        if route.permission is None:
            return await handle(request)
        actor = await self._authenticator.authenticate(request.headers.get("authorization"))
        call = Call(actor=actor, request_id=request.state.request_id)
        request.state.call = call
        if route.permission not in actor.permissions:
            await self._refuse(route, call, request)
        if route.audit is None:
            return await handle(request)
        # Read here: the connection may be gone by the time the task below wants it.
        body = await request.body()
        return await asyncio.shield(self._tasks.start(self._change(route, request, body, call=call, handle=handle)))

    async def _change(self, route: Route, request: Request, body: bytes, *, call: Call, handle: Handle) -> Response:
        assert route.audit is not None
        target = _target(request)
        with self._quotas.hold_call(call.actor.workspace):
            await self._policy.check(call.actor, action=route.audit, target=target)
            claim = _claim(route, request, body, actor=call.actor)
            kept = await self._begin(route, call, claim=claim, target=target)
            if kept is not None:
                return _replayed(route, request, kept)
            try:
                response = await handle(request)
            except asyncio.CancelledError:
                raise  # the server is ending: the reconciler of the next start says how this ended
            except BaseException as error:
                await self._failed(call, claim, error)
                raise
            await self._done(route, call, claim=claim, response=response)
            return response

    async def _begin(self, route: Route, call: Call, *, claim: Claim | None, target: str) -> Row[Any] | None:
        """Commit the intent, and the hold of the key; or return what the key's first call has answered."""
        assert route.audit is not None
        actor = call.actor
        give_up = asyncio.get_running_loop().time() + self._wait_s
        while True:
            async with self._database.write() as connection:
                held = await self._idempotency.find(connection, claim) if claim else None
                if held is None:
                    call.intent = await self._audit.intend(
                        connection,
                        workspace=actor.workspace,
                        actor=actor.id,
                        action=route.audit,
                        target=target,
                        detail={"request": call.request_id},
                    )
                    if claim is not None:
                        await self._idempotency.hold(connection, claim, intent=call.intent.id)
                    return None
            if held.status is not None:
                return held
            assert claim is not None
            if asyncio.get_running_loop().time() >= give_up:
                raise Conflict(
                    f"cannot answer: the first call with idempotency key {claim.key!r} has not ended",
                    f"waited {self._wait_s:g} s for it",
                    code="idempotency_in_progress",
                    hint="repeat the call later with the same key",
                )
            await self._idempotency.wait(claim)

    async def _done(self, route: Route, call: Call, *, claim: Claim | None, response: Response) -> None:
        assert call.intent is not None
        async with self._database.write() as connection:
            await self._audit.conclude(
                connection, call.intent, result=AuditResult.OK, sandbox=call.sandbox, detail=call.detail
            )
            if claim is not None and route.replay is not None:
                answer = route.replay.keep(json.loads(bytes(response.body)))
                await self._idempotency.finish(
                    connection, intent=call.intent.id, status=response.status_code, answer=answer
                )
        if claim is not None:
            self._idempotency.wake(claim)

    async def _failed(self, call: Call, claim: Claim | None, error: BaseException) -> None:
        assert call.intent is not None
        status, body = body_of_error(error, request_id=call.request_id)
        detail = {**call.detail, "code": body["error"]["code"], "what": body["error"]["what"][:_MAX_TOLD]}
        async with self._database.write() as connection:
            await self._audit.conclude(
                connection, call.intent, result=AuditResult.ERROR, sandbox=call.sandbox, detail=detail
            )
            if claim is not None and call.began:
                await self._idempotency.finish(connection, intent=call.intent.id, status=status, answer=body)
            elif claim is not None:
                await self._idempotency.free(connection, intent=call.intent.id)
        if claim is not None:
            self._idempotency.wake(claim)

    async def _refuse(self, route: Route, call: Call, request: Request) -> None:
        error = Forbidden(
            f"cannot {request.method} {request.url.path[:_MAX_TARGET]}: the key does not grant it",
            f"it needs the permission {route.permission}",
            hint="use a key with that permission",
            details={"permission": str(route.permission)},
        )
        if route.audit is not None:
            async with self._database.write() as connection:
                await self._audit.note(
                    connection,
                    workspace=call.actor.workspace,
                    actor=call.actor.id,
                    action=route.audit,
                    target=_target(request),
                    sandbox=None,
                    result=AuditResult.ERROR,
                    detail={"code": error.code, "request": call.request_id},
                )
        raise error


def _claim(route: Route, request: Request, body: bytes, *, actor: Actor) -> Claim | None:
    key = request.headers.get("idempotency-key")
    if key is None or route.replay is None:
        return None
    return Claim(
        workspace=actor.workspace,
        route=f"{route.method} {route.path}",
        key=check_key(key),
        body_hash=body_hash(body, target=str(request.path_params.get("ref", ""))),
    )


def _target(request: Request) -> str:
    """What the path names, which nobody has looked at yet."""
    named = str(request.path_params.get("ref", ""))[:_MAX_TARGET]
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in named)


def _replayed(route: Route, request: Request, kept: Row[Any]) -> Response:
    assert route.replay is not None
    answer = kept.answer if kept.status >= 400 else route.replay.restore(request, kept.answer)
    return JSONResponse(answer, status_code=kept.status, headers={"idempotency-replayed": "true"})
