"""One HTTP call as a handler sees it: path values, query bytes, bounded body, answers; on bare ASGI for speed."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

import structlog
from pydantic import BaseModel, ValidationError

from cpuos.errors import CpuosError, InvalidRequest, LimitReached, NotFound, PlatformError
from cpuos.gateway.bulk import Wire
from cpuos.types.problems import invalid_request

__all__ = ["Call", "ClientGone", "Message", "Receive", "Route", "Routes", "Send", "answer_error", "read_model"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = structlog.get_logger("gateway.calls")

_SOON = (b"retry-after", b"2")
_JSON = (b"content-type", b"application/json")
_PLAIN_QUERY = frozenset(range(0x21, 0x7F))


class ClientGone(Exception):
    """The client closed the connection before its request was whole; nobody is there to answer."""


class Call:
    """A request and the way to answer it once."""

    def __init__(self, scope: Message, receive: Receive, send: Send, *, values: dict[str, str]) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.values = values
        """Path values by name."""
        self.begun = False
        """The answer's head went out."""
        self._gone: asyncio.Task[Any] | None = None

    # request

    def header(self, name: bytes) -> str | None:
        for key, value in self.scope["headers"]:
            if key == name:
                return value.decode("latin-1")
        return None

    @property
    def content_length(self) -> int | None:
        value = self.header(b"content-length")
        return int(value) if value is not None and value.isdigit() else None

    @property
    def wire(self) -> Wire | None:
        """The connection itself, for large bodies; None where another server than ours runs the application."""
        return self.scope.get("extensions", {}).get("cpuos.wire")

    def query_pairs(self) -> list[tuple[bytes, bytes]]:
        """Names and values as they came: percent-encoded bytes."""
        query: bytes = self.scope["query_string"]
        if not _PLAIN_QUERY.issuperset(query):
            raise InvalidRequest("cannot read the query", "it holds bytes that are not percent-encoded")
        pairs = []
        for part in query.split(b"&"):
            if part:
                name, _, value = part.partition(b"=")
                pairs.append((name, value))
        return pairs

    def query(self, name: str) -> str | None:
        wanted = name.encode()
        for key, value in self.query_pairs():
            if key == wanted:
                return unquote_to_bytes(value).decode("utf-8", "replace")
        return None

    def number(self, name: str, *, default: int | None = None, most: int = (1 << 63) - 1) -> int | None:
        """A whole number of the query."""
        value = self.query(name)
        if value is None:
            return default
        if not value.isascii() or not value.isdigit() or len(value) > 19 or int(value) > most:
            raise InvalidRequest(f"cannot read {name}: {value[:64]!r}", f"it is a whole number from 0 to {most}")
        return int(value)

    def seconds(self, name: str, *, default: float, most: float) -> float:
        """A time of the query; a longer one than may be is shortened."""
        text = self.query(name)
        try:
            seconds = float(text) if text else default
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < 1e9:
            raise InvalidRequest(f"cannot read {name}: {str(text)[:32]!r}", "it is a number of seconds")
        return min(seconds, most)

    async def body(self, *, limit: int) -> bytes:
        """The whole body."""
        length = self.content_length
        if length is not None and length > limit:
            raise _too_large(limit)
        first = await self.receive()
        if first["type"] == "http.disconnect":
            raise ClientGone
        body = first.get("body", b"")
        if not first.get("more_body"):
            if len(body) > limit:
                raise _too_large(limit)
            return body
        pieces = [body]
        size = len(body)
        async for piece in self.pieces():
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            pieces.append(piece)
        return b"".join(pieces)

    async def pieces(self) -> Any:
        """The body as it comes."""
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body = message.get("body", b"")
            if body:
                yield body
            if not message.get("more_body"):
                return

    def gone(self) -> asyncio.Task[Any]:
        """Done when the client has left; only after the body was read."""
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_task(self._wait_gone())
        return self._gone

    @property
    def is_gone(self) -> bool:
        """The client has left, and `gone` was there to see it."""
        return self._gone is not None and self._gone.done()

    async def _wait_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def finish(self) -> None:
        """Called when the handler is through."""
        if self._gone is not None and not self._gone.done():
            self._gone.cancel()

    # answers

    async def answer(self, status: int, body: bytes = b"", *, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """The whole answer; JSON unless `headers` say otherwise."""
        lines = [_JSON] if headers is None else headers
        if status != 204:
            lines = [*lines, (b"content-length", b"%d" % len(body))]
        await self.begin(status, lines)
        await self.send({"type": "http.response.body", "body": body})

    async def answer_model(self, status: int, model: BaseModel) -> None:
        await self.answer(status, model.model_dump_json().encode())

    async def answer_json(self, status: int, value: Any) -> None:
        await self.answer(status, json.dumps(value).encode())

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def put(self, body: bytes | memoryview, *, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": not last})


Handler = Callable[[Any, Call], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Route:
    """One row of an API: `scope` is what the ticket must grant, `action` how the journal calls it (None: no entry)."""

    method: str
    path: str
    handler: Any
    scope: str | None = None
    action: str | None = None


class Routes:
    """Finds the row for a method and a path."""

    def __init__(self, rows: tuple[Route, ...]) -> None:
        self.rows = rows
        self._by_shape: dict[tuple[str, int], list[tuple[list[tuple[int, str]], list[tuple[int, str]], Route]]] = {}
        for row in rows:
            segments = row.path.split("/")
            fixed = [(index, text) for index, text in enumerate(segments) if not text.startswith("{")]
            values = [(index, text[1:-1]) for index, text in enumerate(segments) if text.startswith("{")]
            self._by_shape.setdefault((row.method, len(segments)), []).append((fixed, values, row))

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        segments = path.split("/")
        for fixed, values, row in self._by_shape.get((method, len(segments)), ()):
            if all(segments[index] == text for index, text in fixed):
                return row, {name: segments[index] for index, name in values}
        raise NotFound(f"cannot find {method} {path[:200]}", "the gateway has no such route")


def read_model(cls: type[Any], body: bytes) -> Any:
    """A request body as its type; the error names the field."""
    try:
        return cls.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False)) from None


async def answer_error(call: Call, error: BaseException) -> None:
    """Answer with the error's body; once the answer has begun, the cut connection says it."""
    if isinstance(error, ClientGone):
        return
    if not isinstance(error, CpuosError):
        number = secrets.token_hex(8)
        log.error("call.failed", path=_logged_path(call), request=number, exc_info=error)
        error = PlatformError(
            "cannot serve the call: cpuOS failed", f"the gateway's log has it under {number}", code="internal"
        )
    if call.begun:
        log.warning("call.cut", path=_logged_path(call), code=error.code, why=error.why)
        raise error
    headers = [_JSON, _SOON] if error.code == "sandbox_paused" else None
    with suppress(RuntimeError):
        await call.answer(error.status, json.dumps(error.body()).encode(), headers=headers)


def _logged_path(call: Call) -> str:
    """Without the ticket that a link's path holds."""
    path: str = call.scope.get("path", "")
    return "/v1/links/…" if path.startswith("/v1/links/") else path[:200]


def _too_large(limit: int) -> LimitReached:
    return LimitReached(
        f"cannot take the body: it is over {limit} bytes", code="body_too_large", details={"limit_bytes": limit}
    )
