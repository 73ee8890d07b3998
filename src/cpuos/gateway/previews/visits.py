"""One visitor's connection: reads requests, lets them in, passes them on, says why not."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import h11
import structlog

from cpuos.errors import AgentFailure, CpuosError, InvalidRequest, PlatformError, PortProblem
from cpuos.gateway.agent.streams import ByteStream
from cpuos.gateway.previews.access import Admission, Asked, Doorkeeper, is_program
from cpuos.gateway.previews.exchange import Exchange, feed
from cpuos.gateway.previews.headers import (
    COOKIE,
    TOKEN_HEADER,
    Visitor,
    comma_values,
    query_token,
    values_of,
    without_query_token,
)
from cpuos.gateway.previews.hosts import Place, is_plain_address, parse_host
from cpuos.gateway.previews.pages import Answer, error_answer, redirect_answer
from cpuos.gateway.previews.paths import locate
from cpuos.gateway.previews.upstream import Upstream, Upstreams
from cpuos.gateway.streams import OpenStreams

__all__ = ["PreviewTimes", "Previews", "Visit"]

MAX_HEAD_BYTES = 32 << 10
LINGER_BYTES = 1 << 20
LOOK_AGAIN_S = 60.0
"""The clock that tokens go by may be set: what ends later is looked at this often."""

log = structlog.get_logger("gateway.previews")


@dataclass(frozen=True, kw_only=True)
class PreviewTimes:
    """In seconds. A body may take as long as it takes."""

    head_s: float = 30.0
    """From a connection's begin, or a request's first byte, to its head's end."""
    idle_s: float = 75.0
    """Between two requests of a connection."""
    answer_s: float = 300.0
    """From a request's end to the begin of the answer."""
    linger_s: float = 2.0
    """How long the rest of a refused request is read, so that its sender sees the refusal."""


@dataclass(kw_only=True)
class Previews:
    """What the visits of all connections share."""

    domain: str
    doorkeeper: Doorkeeper
    streams: OpenStreams
    times: PreviewTimes = field(default_factory=PreviewTimes)
    upstreams: Upstreams = field(default_factory=Upstreams)
    admitted: dict[asyncio.Task[None], Admission] = field(default_factory=dict)
    """What is open now."""
    _timers: dict[asyncio.Task[None], asyncio.TimerHandle] = field(default_factory=dict)

    @contextmanager
    def admission(self, admission: Admission) -> Iterator[None]:
        """For the time of one request."""
        task = asyncio.current_task()
        assert task is not None
        self.admitted[task] = admission
        self._end_in_time(task, admission)
        try:
            with admission.sandbox.slots.hold("previews"), admission.sandbox.activity.hold():
                if admission.ticket is None:
                    yield
                else:
                    with self.streams.open(admission.ticket):
                        yield
        finally:
            del self.admitted[task]
            timer = self._timers.pop(task, None)
            if timer is not None:
                timer.cancel()

    def _end_in_time(self, task: asyncio.Task[None], admission: Admission) -> None:
        """What is still open as its token or the port's time ends is cut: a link for an hour opens an hour."""
        left_s = self.doorkeeper.time_left(admission)
        if left_s is None:
            self._timers.pop(task, None)
        elif left_s <= 0:
            task.cancel()
        else:
            loop = asyncio.get_running_loop()
            self._timers[task] = loop.call_later(min(left_s, LOOK_AGAIN_S), self._end_in_time, task, admission)

    def cut_unadmitted(self, place: Place) -> int:
        """End what is open of a port that would not be let in any more; how many."""
        over = [
            task
            for task, admission in self.admitted.items()
            if admission.place == place and not self.doorkeeper.still_admits(admission)
        ]
        for task in over:
            task.cancel()
        return len(over)


class Visit:
    """One connection, to its end."""

    def __init__(self, previews: Previews, stream: ByteStream, *, scheme: str, by_path: bool = False) -> None:
        self._previews = previews
        self._by_path = by_path
        self._stream = stream
        self._scheme = scheme
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self) -> None:
        """Returns when the connection is over; cancelling cuts it."""
        times = self._previews.times
        self._give_up_after(times.head_s)
        try:
            while (request := await self._next_request()) is not None:
                self._stop_timer()
                if not await self._serve_request(request):
                    await self._linger()
                    return
                self._http.start_next_cycle()
                self._give_up_after(times.idle_s)
        except (ConnectionError, h11.LocalProtocolError):
            return  # the visitor is gone, or its connection is past saving
        finally:
            self._stop_timer()
            self._stream.abort()

    async def _next_request(self) -> h11.Request | None:
        first = True
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse_malformed(error)
                return None
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            if await feed(self._http, self._stream, in_slices=True) and first:
                first = False
                self._give_up_after(self._previews.times.head_s)

    async def _refuse_malformed(self, error: h11.RemoteProtocolError) -> None:
        """What cannot be parsed is answered where that is possible, and the connection ends."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        # Without what the parser quotes: nothing of a request stands in an answer of ours.
        await self._answer(error_answer(_malformed(str(error).partition(":")[0][:100]), page=False))
        await self._linger()

    # one request

    async def _serve_request(self, request: h11.Request) -> bool:
        """True when the connection bears another."""
        asked: Asked | None = None
        exchange: Exchange | None = None
        try:
            asked = _read_request(request)
            if self._by_path:
                asked, place = locate(asked)
            else:
                place = self._place(asked)
            admission = self._previews.doorkeeper.admit(asked, place)
            with self._previews.admission(admission):
                if not asked.target.startswith((b"/", b"*")):
                    await self._answer(redirect_answer(asked.prefix + b"/" + asked.target))
                elif admission.cookie is not None:
                    await self._answer(self._redirect(asked, admission))
                else:
                    exchange = self._exchange(request, asked, admission)
                    await self._pass_on_awake(exchange, admission)
        except h11.RemoteProtocolError as error:
            if exchange is not None and exchange.begun:
                return False
            await self._refuse_malformed(error)
            return False
        except Exception as error:
            if isinstance(error, ConnectionError) or (exchange is not None and exchange.begun):
                return False  # only a cut connection tells it now
            await self._answer(error_answer(_as_ours(error), page=asked is not None and asked.wants_page))
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    def _place(self, asked: Asked) -> Place:
        if is_plain_address(asked.host) and is_program(asked):
            token = (values_of(asked.headers, TOKEN_HEADER) or [query_token(asked.target) or b""])[0]
            return self._previews.doorkeeper.holder(token)
        return parse_host(asked.host, self._previews.domain)

    def _exchange(self, request: h11.Request, asked: Asked, admission: Admission) -> Exchange:
        told = Visitor(
            address=self._stream.peer_address,
            scheme=self._scheme,
            host=asked.host,
            rewritten_host=admission.rewritten_host,
            prefix=asked.prefix,
        )
        return Exchange(request, asked, visitor=self._stream, http=self._http, told=told)

    async def _pass_on_awake(self, exchange: Exchange, admission: Admission) -> None:
        """To a sandbox that runs: one that is paused is waited for, and what a pause cuts says so."""
        try:
            await admission.sandbox.awake()
            await self._pass_on(exchange, admission)
        except (AgentFailure, PortProblem) as error:
            if admission.sandbox.gate.paused and not exchange.begun:
                raise admission.sandbox.gate.refusal() from error
            raise

    async def _pass_on(self, exchange: Exchange, admission: Admission) -> None:
        """A kept connection may have met its server's end of it: then once more, by a new one."""
        limit_s = self._previews.times.answer_s
        upstream = await self._previews.upstreams.take(admission.sandbox, admission.place)
        try:
            async with self._held(upstream, admission):
                await exchange.serve(upstream, answer_limit_s=limit_s)
            return
        except PortProblem:
            if admission.sandbox.ended is not None and not exchange.begun:
                raise admission.sandbox.gone() from None
            if not upstream.used or upstream.answered or not exchange.repeatable or self._stream.lost:
                raise
        upstream = await self._previews.upstreams.take(admission.sandbox, admission.place, fresh=True)
        async with self._held(upstream, admission):
            await exchange.serve(upstream, answer_limit_s=limit_s)

    @asynccontextmanager
    async def _held(self, upstream: Upstream, admission: Admission) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            upstream.stream.abort()
            raise
        self._previews.upstreams.give(upstream, admission.sandbox, admission.place)

    def _redirect(self, asked: Asked, admission: Admission) -> Answer:
        """Absolute, so that a path of two slashes names no other host."""
        assert admission.ticket is not None
        assert admission.cookie is not None
        left_s = max(0, int(admission.ticket.expires_at - time.time()))
        location = self._scheme.encode() + b"://" + asked.host + without_query_token(asked.target)
        cookie = b"%b=%b; Path=/; Secure; HttpOnly; SameSite=Lax; Max-Age=%d" % (COOKIE, admission.cookie, left_s)
        return redirect_answer(location, cookie=cookie)

    # answers of ours

    async def _answer(self, answer: Answer) -> None:
        status, headers, body = answer
        whole = self._http.their_state is h11.SEND_BODY and self._take_rest_of_body()
        if self._http.their_state in (h11.SEND_BODY, h11.ERROR) and not whole:
            headers = [*headers, (b"Connection", b"close")]
        sent = [h11.Response(status_code=status, headers=headers)]
        sent += [h11.Data(data=body)] if body else []
        for event in [*sent, h11.EndOfMessage()]:
            self._stream.write_pieces(self._http.send_with_data_passthrough(event) or [])
        await self._stream.drain()

    def _take_rest_of_body(self) -> bool:
        """True when the rest of the request is here already, so that the connection can bear another."""
        if self._http.they_are_waiting_for_100_continue:
            return False
        try:
            while isinstance(event := self._http.next_event(), h11.Data):
                pass
        except h11.RemoteProtocolError:
            return False
        return isinstance(event, h11.EndOfMessage)

    async def _linger(self) -> None:
        """Read what the visitor is still sending for a moment: closing at once would reset the answer away."""
        if self._stream.lost:
            return
        self._stream.write_end()
        self._give_up_after(self._previews.times.linger_s)
        read = 0
        while read < LINGER_BYTES and (data := await self._stream.read()):
            read += len(data)

    # time

    def _give_up_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._stream.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _read_request(request: h11.Request) -> Asked:
    """The facts of a request's head; what a proxy could read in two ways is refused."""
    headers = list(request.headers.raw_items())
    hosts = values_of(headers, b"host")
    codings = comma_values(headers, b"transfer-encoding")
    if request.http_version not in (b"1.0", b"1.1"):
        raise _malformed("its version is not HTTP/1.1")
    if len(hosts) != 1:
        raise _malformed("it needs one Host header")
    if request.method == b"CONNECT" or not (request.target.startswith(b"/") or request.target == b"*"):
        raise _malformed("its target is not a path")
    if codings and (values_of(headers, b"content-length") or request.http_version < b"1.1"):
        raise _malformed("it tells its length in two ways")
    upgrades = comma_values(headers, b"upgrade")
    websocket = b"websocket" in upgrades and b"upgrade" in comma_values(headers, b"connection")
    websocket = websocket and request.method == b"GET" and request.http_version >= b"1.1"
    return Asked(method=request.method, target=request.target, host=hosts[0], headers=headers, websocket=websocket)


def _malformed(why: str) -> InvalidRequest:
    return InvalidRequest("cannot read the request", why, code="request_malformed")


def _as_ours(error: Exception) -> CpuosError:
    if isinstance(error, CpuosError):
        return error
    number = secrets.token_hex(8)
    log.error("preview.failed", request=number, exc_info=error)
    return PlatformError("cannot serve the preview: cpuOS failed", f"the gateway's log has it under {number}")
