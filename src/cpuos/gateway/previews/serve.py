"""The listener of previews: TLS where asked for, bounded connections."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog

from cpuos.errors import SetupRequired
from cpuos.gateway.agent.streams import ByteStream
from cpuos.gateway.previews.visits import Previews, Visit

__all__ = ["PreviewListener", "serve_previews"]

MAX_CONNECTIONS = 1024
"""Each may hold some hundred KiB on its way, within a process that has 1 GiB."""
BACKLOG = 1024
KEEPALIVE_S = 60
"""A visitor that fell silent is asked by TCP whether it is still there: streams may be silent for hours."""

log = structlog.get_logger("gateway.previews")


@dataclass(frozen=True, kw_only=True)
class PreviewListener:
    """Where previews are listened for, and how visitors come there."""

    host: str = "127.0.0.1"
    port: int = 7072
    public_url: str = ""
    """Of the domain, where a proxy stands in front."""
    tls_cert: str = ""
    tls_key: str = ""
    by_path: bool = False
    """Path mode: places are told by the path, and any host name will do."""


@asynccontextmanager
async def serve_previews(previews: Previews, listener: PreviewListener) -> AsyncIterator[str]:
    """Serve visitors; the preview domain's URL as they see it."""
    secure = _tls(listener)
    listening = _listen(listener)
    port = listening.getsockname()[1]
    scheme = "https" if secure else "http"
    standard = port == (443 if secure else 80)
    name = _shown(listener.host) if listener.by_path else previews.domain
    url = listener.public_url or f"{scheme}://{name}" + ("" if standard else f":{port}")
    connections: dict[asyncio.Task[None], ByteStream] = {}

    def accept() -> _Visitor:
        visit = functools.partial(Visit, previews, scheme=url.partition("://")[0], by_path=listener.by_path)
        return _Visitor(visit, connections, secure=secure is not None)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(accept, sock=listening, backlog=BACKLOG, ssl=secure)
    try:
        yield url
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        previews.upstreams.close()
        with suppress(OSError):
            listening.close()


class _Visitor(ByteStream):
    """A stream that serves its visit as soon as it stands."""

    def __init__(
        self, visit: Callable[[ByteStream], Visit], connections: dict[asyncio.Task[None], ByteStream], *, secure: bool
    ) -> None:
        super().__init__(half_open=not secure)
        self._visit = visit
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._connections) >= MAX_CONNECTIONS:
            log.warning("previews.full", limit=MAX_CONNECTIONS)
            self.abort()
            return
        visitor = transport.get_extra_info("socket")
        if visitor is not None:
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        task = asyncio.get_running_loop().create_task(self._visit(self).serve())
        self._connections[task] = self
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("visit.failed", exc_info=error)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _listen(listener: PreviewListener) -> socket.socket:
    family = socket.AF_INET6 if ":" in listener.host else socket.AF_INET
    try:
        return socket.create_server((listener.host, listener.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SetupRequired(
            f"cannot listen for previews on {listener.host} port {listener.port}",
            error.strerror or str(error),
            hint="CPUOS_PREVIEW_PORT=0 chooses a free port",
        ) from error


def _tls(listener: PreviewListener) -> ssl.SSLContext | None:
    if not listener.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(listener.tls_cert, listener.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise SetupRequired(
            f"cannot serve previews by TLS: {listener.tls_cert}",
            f"certificate or key cannot be used: {error}",
            hint="cpuos certs makes them; the gateway's user must be able to read both",
        ) from error
    return context
