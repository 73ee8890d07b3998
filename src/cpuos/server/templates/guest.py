"""Commands and files of one sandbox, through its gateway as any client has them: with a ticket, and no other right."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx2
from pydantic import ValidationError
from sqlalchemy import Row

from cpuos.errors import AgentFailure, Unavailable, error_from_body
from cpuos.server.tickets import TicketSigner
from cpuos.types.command import Command
from cpuos.types.sandbox import Access

__all__ = ["Gate", "Guest"]

_CALL_S = 30.0
_POLL_S = 20.0
_PIECE = 1 << 20
# Tickets live some minutes and a build may take hours.
_TICKET_S = 300.0


class Gate:
    """The gateway as the server reaches it, with tickets of the one on whose behalf it calls."""

    def __init__(self, tickets: TicketSigner, url: Callable[[], str]) -> None:
        self._tickets = tickets
        self._url = url
        self._opened: httpx2.AsyncClient | None = None

    def guest(self, row: Row[Any], *, actor: str) -> Guest:
        def access() -> Access:
            return self._tickets.access(
                data_url=self._url(),
                workspace=row.workspace,
                sandbox=row.id,
                generation=row.generation,
                actor=actor,
                task=row.task,
                scope=("exec", "files"),
            )

        if self._opened is None:  # not before it is needed: a tenth of a second goes into whom its TLS trusts
            self._opened = httpx2.AsyncClient(trust_env=False)
        return Guest(self._opened, row.id, access=access)

    async def aclose(self) -> None:
        if self._opened is not None:
            await self._opened.aclose()


class Guest:
    """Of one sandbox. All that it answers is the guest's word."""

    def __init__(self, http: httpx2.AsyncClient, sandbox_id: str, *, access: Callable[[], Access]) -> None:
        """`access` makes a fresh ticket."""
        self._http = http
        self._root = f"/v1/sandboxes/{sandbox_id}"
        self._make_access = access
        self._access: Access | None = None
        self._fresh_until = 0.0

    async def start(
        self,
        script: str,
        *,
        name: str,
        cwd: str = "/",
        env: dict[str, str] | None = None,
        user: str = "root",
        shell: str = "bash",
    ) -> str:
        """Put the script into a file and run it by `bash -e`; answers the command's id."""
        await self.put(name, script.encode(), mode=0o700 if user == "root" else 0o755)
        body = {"argv": [shell, "-e", name], "cwd": cwd, "env": env or {}, "user": user, "detach": True}
        return _parsed(await self._call("POST", "/commands", json=body)).id

    async def wait(self, command_id: str) -> Command:
        """The ended command."""
        while True:
            query = {"timeout_s": _POLL_S}
            answer = await self._call("GET", f"/commands/{command_id}/wait", params=query, timeout=_POLL_S + _CALL_S)
            command = _parsed(answer)
            if command.status.ended:
                return command

    async def output_end(self, command_id: str, *, stream: str, limit: int) -> bytes:
        """The last bytes of what the gateway has recorded."""
        path = f"/commands/{command_id}/output"
        first = await self._call("GET", path, params={"stream": stream, "offset": 0, "limit": 1})
        total = int(first.headers.get("x-output-total", "0"))
        query = {"stream": stream, "offset": max(0, total - limit), "limit": limit}
        return (await self._call("GET", path, params=query)).content

    async def put(self, path: str, content: bytes, *, mode: int = 0o700) -> None:
        query = {"path": path, "mode": f"{mode:o}", "create_parents": "true", "user": "root"}
        await self._call("PUT", "/files", params=query, content=content)

    async def read(self, path: str, *, limit: int) -> bytes:
        """A small file; what is over the limit is left out."""
        pieces, size = [], 0
        async with self.open(path) as content:
            async for piece in content:
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    break
        return b"".join(pieces)[:limit]

    @asynccontextmanager
    async def open(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """A file's bytes as they come."""
        url = self._url(f"/files?path={quote(path)}&user=root")
        try:
            async with self._http.stream("GET", url, headers=self._headers(), timeout=_CALL_S) as answer:
                if answer.status_code >= 400:
                    raise error_from_body(_decoded(answer, await answer.aread()), status=answer.status_code)
                yield answer.aiter_bytes(_PIECE)
        except httpx2.TransportError as error:
            raise _unreachable(error) from error

    async def await_port(self, port: int, *, wait_s: float, shell: str = "bash") -> str:
        """Id of a command that exits with 0 when something takes connections at a port of the sandbox's loopback."""
        probe = f"(exec 3<>/dev/tcp/127.0.0.1/{port} || exec 3<>/dev/tcp/::1/{port}) 2> /dev/null"
        if shell != "bash":  # which alone can connect; what listens can be seen as well
            probe = f"cat /proc/net/tcp /proc/net/tcp6 2> /dev/null | grep -q ':{port:04X} [0-9A-F]*:0000 0A '"
        body = {"argv": [shell, "-c", f"until {probe}; do sleep 0.1; done"], "cwd": "/", "user": "root"}
        answer = await self._call("POST", "/commands", json={**body, "detach": True, "timeout_s": wait_s})
        return _parsed(answer).id

    async def _call(self, method: str, path: str, **options: Any) -> httpx2.Response:
        options.setdefault("timeout", _CALL_S)
        try:
            answer = await self._http.request(method, self._url(path), headers=self._headers(), **options)
        except httpx2.TransportError as error:
            raise _unreachable(error) from error
        if answer.status_code >= 400:
            raise error_from_body(_decoded(answer, answer.content), status=answer.status_code)
        return answer

    def _url(self, path: str) -> str:
        return f"{self._ticket().data_url}{self._root}{path}"

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._ticket().ticket}"}

    def _ticket(self) -> Access:
        if self._access is None or time.monotonic() > self._fresh_until:
            self._access = self._make_access()
            self._fresh_until = time.monotonic() + _TICKET_S
        return self._access


def _parsed(answer: httpx2.Response) -> Command:
    try:
        return Command.model_validate_json(answer.content)
    except ValidationError as error:
        raise AgentFailure("cannot read what the gateway answered of a command", str(error)) from error


def _decoded(answer: httpx2.Response, body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _unreachable(error: Exception) -> Unavailable:
    why = str(error) or type(error).__name__
    return Unavailable("cannot reach the gateway", why, code="gateway_unavailable", hint="cpuos status")
