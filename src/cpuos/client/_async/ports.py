"""A sandbox's published ports: URLs for visitors, and the way to a browser inside."""

from __future__ import annotations

import builtins
import json
import re
from typing import Any
from urllib.parse import quote, urlsplit

from cpuos.client._async.connection import AsyncServer
from cpuos.client._async.http import AsyncHttp
from cpuos.client._http import TransportFailure, answer_error, unreachable
from cpuos.client._parse import make_request, parse_answer
from cpuos.errors import PortProblem
from cpuos.types.port import Port, PortAccess, PortCreate, PortList
from cpuos.types.units import parse_duration_s

__all__ = ["AsyncPorts"]

# What a debugger says of itself is small; a longer answer is not its.
MAX_VERSION_BYTES = 64 << 10
_BROWSER_PATH = re.compile(r"/devtools/browser/[A-Za-z0-9-]{1,64}")


class AsyncPorts:
    """`sbx.ports`: servers inside the sandbox, shown to visitors under a host name of their own."""

    def __init__(self, server: AsyncServer, http: AsyncHttp, *, sandbox_id: str) -> None:
        self._server = server
        self._http = http
        self._path = f"/v1/sandboxes/{quote(sandbox_id, safe='')}/ports"

    async def url(
        self, port: int, *, public: bool = False, expires: str | float | None = None, host: str | None = None
    ) -> str:
        """A URL that shows what listens on the port; private unless `public`, with the token that opens it.

        A browser that opens a private URL keeps the token as a cookie and shows the address without it. The token is
        good for an hour, or for `expires`; a public port stays public until it is closed, or for `expires`.
        `host="localhost"` is for servers that answer only to that name.
        """
        access = await self.publish(port, public=public, expires=expires, host=host)
        return access.url if access.token is None else f"{access.url}?cpuos_token={access.token}"

    async def publish(
        self, port: int, *, public: bool = False, expires: str | float | None = None, host: str | None = None
    ) -> PortAccess:
        """As `url`, with the parts apart: programs send `token` in the header `X-Cpuos-Preview-Token`."""
        values: dict[str, Any] = {"port": port, "public": public}
        if expires is not None:
            values["expires_s"] = parse_duration_s(expires, name="expires")
        if host is not None:
            values["host"] = host
        body = make_request(PortCreate, values, doing="publish the port")
        return parse_answer(PortAccess, (await self._server.call("POST", self._path, content=body)).body)

    async def list(self) -> builtins.list[Port]:
        """The published ports."""
        return parse_answer(PortList, (await self._server.call("GET", self._path)).body).ports

    async def close(self, port: int) -> None:
        """Stop showing the port: its tokens are void, what is open is cut. Closing a closed one changes nothing."""
        await self._server.call("DELETE", f"{self._path}/{port}")

    async def cdp_url(self, port: int = 9222, *, expires: str | float = "1h") -> str:
        """The debugging URL of a Chromium inside that runs with `--remote-debugging-port`, private.

        For Playwright's `connect_over_cdp` and the like.
        """
        access = await self.publish(port, expires=expires, host="localhost")
        place = _reachable(access.url)
        told = await self._ask_browser(f"{place}/json/version", access.token or "")
        path = _browser_path(told)
        return f"{place.replace('http', 'ws', 1)}{path}?cpuos_token={access.token}"

    async def _ask_browser(self, url: str, token: str) -> bytes:
        headers = {"x-cpuos-preview-token": token, "accept": "application/json"}
        try:
            answer = await self._http.open("GET", url, headers=headers)
            try:
                pieces: builtins.list[bytes] = []
                async for piece in answer.chunks():
                    pieces.append(piece)
                    if sum(map(len, pieces)) > MAX_VERSION_BYTES:
                        raise _no_browser("its answer is too long")
            finally:
                await answer.close()
        except TransportFailure as failure:
            raise unreachable("gateway_unavailable", url=url, reason=failure.reason, sent=failure.sent) from None
        body = b"".join(pieces)
        if answer.status >= 400 and "x-cpuos-error" in answer.headers:
            raise answer_error(answer.status, body)
        if answer.status != 200:
            raise _no_browser(f"it answers {answer.status}")
        return body


def _reachable(url: str) -> str:
    """The preview's URL without its slash.

    Not every resolver knows the names below `localhost`, which are all this machine: with a token in hand a program may
    come by the address as well.
    """
    parts = urlsplit(url)
    if parts.scheme == "http" and (parts.hostname or "").endswith(".localhost"):
        return f"http://127.0.0.1:{parts.port or 80}"
    return url.rstrip("/")


def _browser_path(told: bytes) -> str:
    """The path of the browser's debugging socket: all that is taken from its answer."""
    try:
        path = urlsplit(json.loads(told)["webSocketDebuggerUrl"]).path
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_browser("its answer names no debugging socket") from error
    if not _BROWSER_PATH.fullmatch(path):
        raise _no_browser("its answer names no debugging socket")
    return path


def _no_browser(why: str) -> PortProblem:
    return PortProblem(
        "cannot find a browser to debug on the port",
        why,
        code="port_answer_invalid",
        hint="start Chromium in the sandbox with --remote-debugging-port=9222",
    )
