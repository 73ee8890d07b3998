"""The server's side of a gateway's control socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx2

from cpuos.answers import read_answer
from cpuos.errors import PlatformError, Unavailable

__all__ = [
    "GatewayControl",
    "JournalPage",
    "Listener",
    "LocalGatewayControl",
    "SandboxActivity",
    "Suspended",
    "Wake",
    "WakesPage",
]

# An attach waits in the gateway; the connection waits this much longer for its answer.
_MARGIN_S = 5.0
# A freeze: 5 s for the processes, and what a slow disk takes to take what was written.
_SUSPEND_S = 60.0
MAX_TEXT = 1000


@dataclass(frozen=True, kw_only=True)
class JournalPage:
    source: str
    """Id of the gateway instance: sequence numbers are unique below it."""
    entries: list[dict[str, Any]]
    next: int


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A port that a program in the sandbox listens on, as the sandbox tells it."""

    port: int
    address: str


@dataclass(frozen=True, kw_only=True)
class Suspended:
    """A frozen sandbox, as it tells itself: its processes, the ports they listen on, its running commands."""

    processes: int
    listeners: list[Listener]
    commands: list[str]
    programs: list[str] = field(default_factory=list)
    """Number and name of each process, of very many not all."""


@dataclass(frozen=True, kw_only=True)
class SandboxActivity:
    busy: bool
    """A command or job runs, a call is served, or a terminal, watch, transfer or preview is open."""
    idle_since: float | None
    """Unix seconds; None while it is busy, suspended or not attached."""
    suspended: bool


@dataclass(frozen=True, kw_only=True)
class Wake:
    """A suspended sandbox was called, and the caller waits."""

    seq: int
    sandbox: str


@dataclass(frozen=True, kw_only=True)
class WakesPage:
    source: str
    """Id of the gateway process: sequence numbers are unique below it, and begin anew with another."""
    wakes: list[Wake]
    next: int


class GatewayControl(Protocol):
    """Errors are those of the table; a gateway out of reach is `gateway_unavailable`."""

    async def attach(
        self,
        sandbox_id: str,
        *,
        generation: int,
        hostname: str,
        wait_s: float,
        starting_s: float = 0.0,
        incomplete: bool = False,
    ) -> list[str]:
        """Return when the sandbox's agent has proved to be it and has answered, `wait_s` after its process runs at the
        latest. For `starting_s` the node may still be making it. A suspended sandbox goes on by this, after a resume by
        the node or without one: whole, or it stays suspended and that is `restore_incomplete`, unless it may be
        `incomplete`. The list says what of it is gone then."""
        ...

    async def suspend(
        self, sandbox_id: str, *, freeze: str, if_idle_since: float | None = None, auto_resume: bool = True
    ) -> Suspended:
        """Freeze its processes and keep its streams and records until the next attach. A repeat answers the same.

        `freeze` is 32 hex digits. With `if_idle_since` (unix seconds): `sandbox_busy` unless nothing was open since
        before then. Refusals change nothing. Where no answer came, an attach makes sure that it goes on. Without
        `auto_resume` calls are refused at once as `sandbox_paused`, and are no wakes.
        """
        ...

    async def activity(self) -> dict[str, SandboxActivity]:
        """Of all living sandboxes that this gateway knows."""
        ...

    async def wakes(self, after: int, *, wait_s: float = 25.0) -> WakesPage:
        """Long poll: the suspended sandboxes that were called since. Start with 0."""
        ...

    async def detach(
        self,
        sandbox_id: str,
        *,
        reason: Literal["stopped", "lost"],
        text: str,
        generation: int,
        session_s: float | None = None,
    ) -> None:
        """End its streams; its running commands become killed or sandbox_lost. `session_s`: because its session of that
        length was over. Nothing there is fine, and a later generation stays."""
        ...

    async def forget(self, sandbox_id: str, *, generation: int) -> None:
        """Remove what is recorded of its commands. Nothing there is fine, and a later generation stays."""
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


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlatformError(f"cannot read the gateway's {what}: the answer is of another form", str(error)) from error


class LocalGatewayControl:
    def __init__(self, control_socket: Path | str, *, timeout_s: float = 10.0) -> None:
        self._socket = str(control_socket)
        self._timeout_s = timeout_s
        # No TLS there, and to load whom it would trust takes longer than most calls.
        transport = httpx2.AsyncHTTPTransport(uds=self._socket, verify=False)
        self._http = httpx2.AsyncClient(transport=transport, base_url="http://gateway", trust_env=False)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def attach(
        self,
        sandbox_id: str,
        *,
        generation: int,
        hostname: str,
        wait_s: float,
        starting_s: float = 0.0,
        incomplete: bool = False,
    ) -> list[str]:
        body = {"generation": generation, "hostname": hostname, "wait_s": wait_s, "starting_s": starting_s}
        if incomplete:
            body["incomplete"] = True
        timeout_s = starting_s + wait_s + _MARGIN_S
        answer = await self._call("POST", f"/v1/sandboxes/{sandbox_id}/attach", body=body, timeout_s=timeout_s)
        with _reading("attach"):
            return [str(one) for one in answer.get("missing", [])]

    async def suspend(
        self, sandbox_id: str, *, freeze: str, if_idle_since: float | None = None, auto_resume: bool = True
    ) -> Suspended:
        body = {"freeze": freeze, "if_idle_since": if_idle_since, "auto_resume": auto_resume}
        answer = await self._call("POST", f"/v1/sandboxes/{sandbox_id}/suspend", body=body, timeout_s=_SUSPEND_S)
        with _reading("suspension"):
            return Suspended(
                processes=int(answer["processes"]),
                listeners=[Listener(port=int(one["port"]), address=str(one["address"])) for one in answer["listeners"]],
                commands=[str(one) for one in answer["commands"]],
                programs=[f"{int(one['pid'])} {one['name']}" for one in answer.get("programs", [])],
            )

    async def activity(self) -> dict[str, SandboxActivity]:
        answer = await self._call("GET", "/v1/activity")
        with _reading("activity"):
            return {str(name): SandboxActivity(**told) for name, told in answer["sandboxes"].items()}

    async def wakes(self, after: int, *, wait_s: float = 25.0) -> WakesPage:
        query = {"after": after, "wait_s": wait_s}
        answer = await self._call("GET", "/v1/wakes", query=query, timeout_s=wait_s + _MARGIN_S)
        with _reading("wakes"):
            wakes = [Wake(seq=int(one["seq"]), sandbox=str(one["sandbox"])) for one in answer["wakes"]]
            return WakesPage(source=str(answer["source"]), wakes=wakes, next=int(answer["next"]))

    async def detach(
        self,
        sandbox_id: str,
        *,
        reason: Literal["stopped", "lost"],
        text: str,
        generation: int,
        session_s: float | None = None,
    ) -> None:
        body: dict[str, Any] = {"reason": reason, "text": text[:MAX_TEXT], "generation": generation}
        if session_s is not None:
            body["session_s"] = session_s
        await self._call("POST", f"/v1/sandboxes/{sandbox_id}/detach", body=body)

    async def forget(self, sandbox_id: str, *, generation: int) -> None:
        await self._call("DELETE", f"/v1/sandboxes/{sandbox_id}", query={"generation": generation})

    async def journal(self, after: int, *, limit: int) -> JournalPage:
        answer = await self._call("GET", "/v1/journal", query={"after": after, "limit": limit})
        with _reading("journal"):
            return JournalPage(
                source=str(answer["instance"]), entries=list(answer["entries"]), next=int(answer["next"])
            )

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
            raise self._unreachable(str(error) or type(error).__name__) from error
        return read_answer(answer.status_code, answer.content, away=self._unreachable)

    def _unreachable(self, why: str) -> Unavailable:
        return Unavailable(
            "cannot reach the gateway", f"{self._socket}: {why}", code="gateway_unavailable", hint="cpuos status"
        )
