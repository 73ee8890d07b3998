"""The server's side of a gateway's control socket."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx2

from cpuos.errors import PlatformError, Unavailable, error_from_body

__all__ = ["GatewayControl", "JournalPage", "LocalGatewayControl"]

# An attach waits in the gateway; the connection waits this much longer for its answer.
_MARGIN_S = 5.0
MAX_TEXT = 1000


@dataclass(frozen=True, kw_only=True)
class JournalPage:
    source: str
    """Id of the gateway instance: sequence numbers are unique below it."""
    entries: list[dict[str, Any]]
    next: int


class GatewayControl(Protocol):
    """Errors are those of the table; a gateway out of reach is `gateway_unavailable`."""

    async def attach(
        self, sandbox_id: str, *, generation: int, hostname: str, wait_s: float, starting_s: float = 0.0
    ) -> None:
        """Return when the sandbox's agent has proved to be it and has answered, `wait_s` after its process runs at the
        latest. For `starting_s` the node may still be making it."""
        ...

    async def detach(self, sandbox_id: str, *, reason: Literal["stopped", "lost"], text: str) -> None:
        """End its streams; its running commands become killed or sandbox_lost. Nothing there is fine."""
        ...

    async def forget(self, sandbox_id: str) -> None:
        """Remove what is recorded of its commands. Nothing there is fine."""
        ...

    async def journal(self, after: int, *, limit: int) -> JournalPage: ...

    async def revoke(self, **which: str) -> None:
        """Refuse the tickets of a `jti`, a `sandbox` or an `actor` from now on."""
        ...

    async def open_port(
        self,
        sandbox_id: str,
        *,
        port: int,
        epoch: int,
        generation: int,
        public: bool,
        public_until: datetime | None,
        host: str | None,
    ) -> None:
        """Let visitors in: those with a token of this epoch, or everyone."""
        ...

    async def close_port(self, sandbox_id: str, *, port: int, epoch: int) -> None:
        """Let nobody in with a token of this epoch or before, and cut what is open. Nothing there is fine."""
        ...

    async def health(self) -> None: ...

    async def aclose(self) -> None: ...


class LocalGatewayControl:
    def __init__(self, control_socket: Path | str, *, timeout_s: float = 10.0) -> None:
        self._socket = str(control_socket)
        self._timeout_s = timeout_s
        transport = httpx2.AsyncHTTPTransport(uds=self._socket)
        self._http = httpx2.AsyncClient(transport=transport, base_url="http://gateway", trust_env=False)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def attach(
        self, sandbox_id: str, *, generation: int, hostname: str, wait_s: float, starting_s: float = 0.0
    ) -> None:
        body = {"generation": generation, "hostname": hostname, "wait_s": wait_s, "starting_s": starting_s}
        timeout_s = starting_s + wait_s + _MARGIN_S
        await self._call("POST", f"/v1/sandboxes/{sandbox_id}/attach", body=body, timeout_s=timeout_s)

    async def detach(self, sandbox_id: str, *, reason: Literal["stopped", "lost"], text: str) -> None:
        await self._call("POST", f"/v1/sandboxes/{sandbox_id}/detach", body={"reason": reason, "text": text[:MAX_TEXT]})

    async def forget(self, sandbox_id: str) -> None:
        await self._call("DELETE", f"/v1/sandboxes/{sandbox_id}")

    async def journal(self, after: int, *, limit: int) -> JournalPage:
        answer = await self._call("GET", "/v1/journal", query={"after": after, "limit": limit})
        try:
            source, entries, following = answer["instance"], answer["entries"], answer["next"]
        except (KeyError, TypeError) as error:
            raise PlatformError("cannot read the gateway's journal: the answer lacks a field", str(error)) from error
        return JournalPage(source=str(source), entries=list(entries), next=int(following))

    async def revoke(self, **which: str) -> None:
        await self._call("POST", "/v1/tickets/revoke", body=which)

    async def open_port(
        self,
        sandbox_id: str,
        *,
        port: int,
        epoch: int,
        generation: int,
        public: bool,
        public_until: datetime | None,
        host: str | None,
    ) -> None:
        until = None if public_until is None else public_until.timestamp()
        body = {"epoch": epoch, "generation": generation, "public": public, "public_until": until, "host": host}
        await self._call("PUT", f"/v1/sandboxes/{sandbox_id}/ports/{port}", body=body)

    async def close_port(self, sandbox_id: str, *, port: int, epoch: int) -> None:
        await self._call("DELETE", f"/v1/sandboxes/{sandbox_id}/ports/{port}", query={"epoch": epoch})

    async def health(self) -> None:
        await self._call("GET", "/v1/health", timeout_s=2.0)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        try:
            answer = await self._http.request(method, path, json=body, params=query, timeout=timeout)
        except httpx2.TransportError as error:
            raise Unavailable(
                "cannot reach the gateway",
                f"{self._socket}: {str(error) or type(error).__name__}",
                code="gateway_unavailable",
                hint="cpuos status",
            ) from error
        if answer.status_code == 204:
            return None
        try:
            decoded = answer.json()
        except ValueError:
            decoded = None
        if answer.status_code >= 400:
            raise error_from_body(decoded, status=answer.status_code)
        return decoded
