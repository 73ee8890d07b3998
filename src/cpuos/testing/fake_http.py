"""The little HTTP/1.1 server of the fake agent: heads, bodies of known length or chunked, upgrades."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

__all__ = ["GuestError", "HttpRequest", "HttpResponse", "serve_connection"]

MAX_HEAD_BYTES = 16 << 10
MAX_JSON_BYTES = 2 << 20

_STATUS = {
    "identity_required": 401,
    "identity_refused": 401,
    "not_found": 404,
    "command_not_found": 404,
    "file_not_found": 404,
    "cwd_not_found": 404,
    "port_not_open": 404,
    "port_forbidden": 403,
    "file_permission_denied": 403,
    "file_exists": 409,
    "is_a_directory": 409,
    "not_a_directory": 409,
    "directory_not_empty": 409,
    "file_kind_unsupported": 409,
    "disk_full": 507,
    "limit_reached": 429,
    "frozen": 409,
    "freeze_failed": 409,
    "restore_incomplete": 409,
    "internal": 500,
}


class GuestError(Exception):
    """An error answer of the contract: code, text and, where there is one, the errno."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        errno: int | None = None,
        status: int | None = None,
        missing: list[str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.errno = errno
        self.status = status or _STATUS.get(code, 400)
        self.missing = missing

    def body(self) -> dict[str, Any]:
        told = {"code": self.code, "message": self.message, "errno": self.errno}
        return told if self.missing is None else told | {"missing": self.missing}


@dataclass(kw_only=True)
class HttpRequest:
    method: str
    path: str
    query: dict[str, bytes]
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    body_read: bool = False
    upgraded: bool = False

    def text(self, name: str, default: str = "") -> str:
        return self.query.get(name, default.encode()).decode(errors="surrogateescape")

    def number(self, name: str, default: int = 0) -> int:
        try:
            return int(self.query.get(name, str(default).encode()))
        except ValueError:
            raise GuestError("invalid", f"{name} is not a number") from None

    def flag(self, name: str, *, default: bool) -> bool:
        return self.query.get(name, b"true" if default else b"false") == b"true"

    async def body(self) -> AsyncIterator[bytes]:
        """The body in pieces; ends early with `upload_incomplete` when the peer stops."""
        self.body_read = True
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await self.reader.readline()).split(b";")[0], 16):
                    while size:
                        piece = await self.reader.read(min(size, 256 << 10))
                        if not piece:
                            raise asyncio.IncompleteReadError(b"", size)
                        size -= len(piece)
                        yield piece
                    await self.reader.readexactly(2)
                while (await self.reader.readline()).strip():
                    pass
            else:
                left = int(self.headers.get("content-length", "0"))
                while left:
                    piece = await self.reader.read(min(left, 256 << 10))
                    if not piece:
                        raise asyncio.IncompleteReadError(b"", left)
                    left -= len(piece)
                    yield piece
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise GuestError("upload_incomplete", "the body ended early") from error

    async def json(self) -> Any:
        pieces, size = [], 0
        async for piece in self.body():
            size += len(piece)
            if size > MAX_JSON_BYTES:
                raise GuestError("invalid", "the body is over 2 MiB")
            pieces.append(piece)
        try:
            return json.loads(b"".join(pieces) or b"{}")
        except ValueError as error:
            raise GuestError("invalid", f"the body is not JSON: {error}") from error

    async def upgrade(self) -> None:
        """Answer 101: from here both sides speak the protocol that was asked for."""
        self.upgraded = True
        protocol = self.headers["upgrade"].encode()
        self.writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % protocol)
        await self.writer.drain()

    def wants(self, protocol: str) -> bool:
        return self.headers.get("upgrade", "") == protocol

    @property
    def wants_upgrade(self) -> bool:
        return self.wants("cpuos-frames/1")


@dataclass(kw_only=True)
class HttpResponse:
    status: int = 200
    json: Any = None
    body: AsyncIterator[bytes] | None = None
    headers: dict[str, str] | None = None

    async def send(self, writer: asyncio.StreamWriter) -> None:
        headers = dict(self.headers or {})
        payload = b""
        if self.body is None and self.status != 204:
            payload = json.dumps(self.json).encode()
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        elif self.body is not None and "Content-Length" not in headers:
            headers["Transfer-Encoding"] = "chunked"
        lines = [f"HTTP/1.1 {self.status} Answer", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + payload)
        if self.body is not None:
            await self._send_body(writer, self.body, chunked="Content-Length" not in headers)
        await writer.drain()

    async def _send_body(self, writer: asyncio.StreamWriter, body: AsyncIterator[bytes], *, chunked: bool) -> None:
        async for piece in body:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
        if chunked:
            writer.write(b"0\r\n\r\n")


Handler = Callable[[HttpRequest], Awaitable[HttpResponse | None]]


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, handler: Handler) -> None:
    """Serve requests one after the other until the peer closes or upgrades."""
    try:
        while (request := await _read_request(reader, writer)) is not None:
            if not await _serve_request(request, handler):
                break
    except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        pass
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except (ConnectionError, OSError):
            pass


async def _serve_request(request: HttpRequest, handler: Handler) -> bool:
    try:
        if request.headers.get("expect", "").lower() == "100-continue":
            request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        response = await handler(request)
    except GuestError as error:
        if request.upgraded:
            return False
        response = HttpResponse(status=error.status, json=error.body())
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        traceback.print_exc()
        if request.upgraded:
            return False
        response = HttpResponse(status=500, json=GuestError("internal", repr(error)).body())
    if request.upgraded or response is None:
        return False
    if not request.body_read:
        try:
            async for _ in request.body():
                pass
        except GuestError:
            await response.send(request.writer)
            return False
    await response.send(request.writer)
    return request.headers.get("connection", "").lower() != "close"


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = head[:-4].decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    path, _, query = target.partition("?")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return HttpRequest(
        method=method,
        path=path,
        query={
            name: unquote_to_bytes(value)
            for name, _, value in (part.partition("=") for part in query.split("&") if part)
        },
        headers=headers,
        reader=reader,
        writer=writer,
    )
