"""Calls to the server and to a sandbox's gateway: errors in answers raise, failures are repeated where that is safe."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping
from typing import Any

from cpuos.client._async.http import AsyncHttp, AsyncStreamAnswer
from cpuos.client._backend_async import Lock, sleep
from cpuos.client._http import (
    BRIEF,
    PATIENT,
    Answer,
    Once,
    QueryValue,
    Retry,
    Ticket,
    TransportFailure,
    answer_error,
    encode_query,
    unreachable,
)
from cpuos.client._parse import parse_answer
from cpuos.errors import CpuosError
from cpuos.types.sandbox import Access

__all__ = ["AsyncConnection", "AsyncGateway", "AsyncServer", "Content", "make_ticket"]

# A function makes the body anew for each attempt.
Content = bytes | Once | Callable[[], AsyncIterable[bytes]] | None


class AsyncConnection:
    """What server and gateway have in common."""

    _error_code = "server_unavailable"

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http
        self._patience = BRIEF

    async def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, QueryValue] | None = None,
        headers: Mapping[str, str] | None = None,
        content: Content = None,
        repeatable: bool = True,
        read_timeout_s: float | None = None,
    ) -> AsyncStreamAnswer:
        """An answer under 400, its body still to come. `repeatable`: sending it twice is the same as once."""
        once = isinstance(content, Once)
        target = path + encode_query(query) if query else path
        retry = Retry(self._patience, repeatable=repeatable and not once)
        renewed = False
        while True:
            base_url, authorization = await self._authorize(once)
            try:
                answer = await self._http.open(
                    method,
                    base_url + target,
                    headers={**authorization, **headers} if headers else authorization,
                    content=content.chunks
                    if isinstance(content, Once)
                    else content()
                    if callable(content)
                    else content,
                    read_timeout_s=read_timeout_s,
                )
                self._patience = PATIENT
                if answer.status < 400:
                    return answer
                error = await _read_error(answer)
            except TransportFailure as failure:
                delay = retry.after_failure(failure)
                if delay is None:
                    raise unreachable(
                        self._error_code, url=base_url, reason=failure.reason, sent=failure.sent
                    ) from None  # its reason says all that the transport's own errors do
            else:
                delay = retry.after_error(error)
                if not once and not renewed and self.renews(error, authorization):
                    renewed, delay = True, 0.0
                if delay is None:
                    raise error
            if delay:
                await sleep(delay)

    async def call(
        self, method: str, path: str, *, content: Content = None, repeatable: bool = True, **options: Any
    ) -> Answer:
        """The whole answer, for bodies that are small."""
        retry = Retry(self._patience, repeatable=repeatable and not isinstance(content, Once))
        while True:
            answer = await self.open(method, path, content=content, repeatable=repeatable, **options)
            try:
                return Answer(status=answer.status, headers=answer.headers, body=await answer.read())
            except TransportFailure as failure:
                delay = retry.after_failure(failure)
                if delay is None:
                    raise unreachable(self._error_code, url=path, reason=failure.reason, sent=True) from None
            finally:
                await answer.close()
            await sleep(delay)

    async def _authorize(self, once: bool) -> tuple[str, Mapping[str, str]]:
        """Base URL and headers for the next attempt."""
        raise NotImplementedError

    def renews(self, error: CpuosError, authorization: Mapping[str, str]) -> bool:
        """True when the call would pass with a new ticket."""
        return False


class AsyncServer(AsyncConnection):
    """The control plane, opened by the API key."""

    def __init__(self, http: AsyncHttp, *, url: str, key: str) -> None:
        super().__init__(http)
        self._url = url
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    async def _authorize(self, once: bool) -> tuple[str, Mapping[str, str]]:
        return self._url, self._headers


class AsyncGateway(AsyncConnection):
    """The data plane of one sandbox, opened by a ticket that the server renews."""

    _error_code = "gateway_unavailable"

    def __init__(self, http: AsyncHttp, server: AsyncServer, *, sandbox_id: str, ticket: Ticket | None = None) -> None:
        super().__init__(http)
        self._server = server
        self._patience = PATIENT
        self._ticket = ticket
        # Guards the renewal: hundreds of calls that find the ticket stale ask for one new one.
        self._renewal = Lock()
        self.sandbox_id = sandbox_id
        self.root = f"/v1/sandboxes/{sandbox_id}"

    def take_ticket(self, ticket: Ticket) -> None:
        """Use this one from now on."""
        self._ticket = ticket

    async def websocket_target(self) -> tuple[str, Mapping[str, str]]:
        """Base URL and headers for a connection that is made elsewhere."""
        return await self._authorize(True)

    async def _authorize(self, once: bool) -> tuple[str, Mapping[str, str]]:
        ticket = self._ticket
        if ticket is None or (once and not ticket.fresh):
            ticket = await self._renew(ticket)
        return ticket.data_url, ticket.headers

    async def _renew(self, stale: Ticket | None) -> Ticket:
        async with self._renewal:
            if self._ticket is None or self._ticket is stale:
                answer = await self._server.call("POST", f"{self.root}/access")
                access = parse_answer(Access, answer.body)
                self._ticket = make_ticket(access, answer)
            return self._ticket

    def renews(self, error: CpuosError, authorization: Mapping[str, str]) -> bool:
        if error.code not in ("ticket_expired", "ticket_invalid"):
            return False
        # Another call may have renewed it already.
        if self._ticket is not None and self._ticket.headers is authorization:
            self._ticket = None
        return True


def make_ticket(access: Access, answer: Answer) -> Ticket:
    return Ticket(
        data_url=access.data_url,
        ticket=access.ticket,
        expires_at=access.expires_at,
        date=answer.headers.get("date"),
    )


async def _read_error(answer: AsyncStreamAnswer) -> CpuosError:
    try:
        return answer_error(answer.status, await answer.read())
    finally:
        await answer.close()
