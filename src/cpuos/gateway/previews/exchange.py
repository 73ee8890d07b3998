"""One request and its answer, between two HTTP/1.1 parsers: what passes is written anew, so that both sides read the
same. After an upgrade to WebSocket the bytes pass as they are.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import h11

from cpuos.errors import PortProblem
from cpuos.gateway.agent.streams import ByteStream
from cpuos.gateway.previews.access import Asked
from cpuos.gateway.previews.headers import (
    Headers,
    Visitor,
    answer_headers,
    comma_values,
    request_headers,
    values_of,
    without_query_token,
)
from cpuos.gateway.previews.paths import sandboxed_headers
from cpuos.gateway.previews.upstream import Upstream, answer_invalid

__all__ = ["Exchange", "feed"]

CONTINUE_S = 1.0
"""A visitor that waits for `100 Continue` gets it from us when the server inside says nothing for so long."""
SLICE_BYTES = 16 << 10
"""Bytes of a chunked body parsed in one go: chunks of one byte must not hold up other visitors."""


class Exchange:
    """For one use. `serve` returns when the answer has been passed on whole; anything else raises."""

    def __init__(
        self, request: h11.Request, asked: Asked, *, visitor: ByteStream, http: h11.Connection, told: Visitor
    ) -> None:
        self._request = request
        self._asked = asked
        self._visitor = visitor
        self._http = http
        self._told = told
        self._websocket = asked.websocket
        self._continued = asyncio.Event()
        """The server inside has said something: whoever waits to send its body may go on or give up."""
        self._late: asyncio.TimerHandle | None = None
        self._is_late = False
        self._chunked = False
        """The answer's body comes in chunks."""
        self.begun = False
        """The answer's head went out: a fault can only be shown by cutting the connection."""
        self.body_sent = False
        """Something of the request's body was passed on."""

    @property
    def repeatable(self) -> bool:
        """Nothing is lost when the request is sent once more to another connection."""
        plain = self._request.method in (b"GET", b"HEAD", b"OPTIONS", b"TRACE") and not self._websocket
        return plain and not self.body_sent and not self.begun and self._http.their_state is h11.DONE

    async def serve(self, upstream: Upstream, *, answer_limit_s: float) -> None:
        """Send the request, pass the answer on; at the end both parsers agree that they are through.

        The answer must begin within the limit, counted from the request's end; then it takes as long as it takes.
        """
        upstream.send(self._make_request())
        pump: asyncio.Task[None] | None = None
        try:
            if self._take_whole_body(upstream):
                self._await_answer(upstream, answer_limit_s)
            else:
                pump = asyncio.get_running_loop().create_task(self._pass_body(upstream, answer_limit_s))
            await self._pass_answer(upstream)
        except PortProblem as error:
            if pump is not None and pump.done() and not pump.cancelled() and pump.exception() is not None:
                raise pump.exception() from error  # type: ignore[misc]  # the visitor's fault came first
            if self._is_late:
                raise answer_invalid(f"it did not begin an answer within {answer_limit_s:g} s") from error
            raise
        finally:
            self._visitor.when_ended = None
            self._answer_began()
            if pump is not None:  # of a server that answered early the rest of the body is not wanted
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)

    # the request

    def _make_request(self) -> h11.Request:
        given = self._asked.headers
        headers = request_headers(given, self._told, websocket=self._websocket)
        headers += _framing(given)
        target = without_query_token(self._asked.target)
        return h11.Request(method=self._request.method, target=target, headers=headers)

    def _take_whole_body(self, upstream: Upstream) -> bool:
        """True when there is no more of the body to come than what has come already: the usual case, without a task."""
        if self._http.they_are_waiting_for_100_continue:
            return False
        if self._http.their_state is h11.DONE:  # read already, for a connection that failed
            upstream.send(h11.EndOfMessage())
            return True
        event = self._http.next_event()
        while isinstance(event, h11.Data):
            self.body_sent = True
            upstream.send(h11.Data(data=event.data))
            event = self._http.next_event()
        if isinstance(event, h11.EndOfMessage):
            upstream.send(h11.EndOfMessage())
            return True
        return False

    async def _pass_body(self, upstream: Upstream, answer_limit_s: float) -> None:
        chunked = bool(comma_values(list(self._request.headers), b"transfer-encoding"))
        try:
            if self._http.they_are_waiting_for_100_continue:
                await self._await_continue()
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    await upstream.stream.drain()
                    await feed(self._http, self._visitor, in_slices=chunked)
                elif isinstance(event, h11.Data):
                    self.body_sent = True
                    upstream.send(h11.Data(data=event.data))
                elif isinstance(event, h11.EndOfMessage):
                    upstream.send(h11.EndOfMessage())
                    self._await_answer(upstream, answer_limit_s)
                    return
                else:
                    raise h11.RemoteProtocolError("the request ended before its body")
        except (h11.RemoteProtocolError, ConnectionError):
            # The visitor is gone or broke HTTP. Where the server inside is gone, its answer tells.
            if not upstream.stream.lost:
                upstream.stream.abort()
                raise

    async def _await_continue(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CONTINUE_S):
                await self._continued.wait()
        if self._http.they_are_waiting_for_100_continue and not self.begun:
            self._send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    def _await_answer(self, upstream: Upstream, limit_s: float) -> None:
        """The request is whole: a visitor that ends the connection now does not want the answer."""

        def give_up() -> None:
            self._is_late = True
            upstream.stream.abort()

        if self._visitor.ended:
            upstream.stream.abort()
        self._visitor.when_ended = upstream.stream.abort
        if not self.begun:
            self._late = asyncio.get_running_loop().call_later(limit_s, give_up)

    def _answer_began(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    # the answer

    async def _pass_answer(self, upstream: Upstream) -> None:
        while True:
            try:
                event = upstream.http.next_event()
                if event is h11.NEED_DATA:
                    await self._more_answer(upstream)
                    continue
            except h11.RemoteProtocolError as error:
                raise answer_invalid(str(error)) from error
            if isinstance(event, h11.InformationalResponse):
                if event.status_code == 101:
                    await self._pipe(upstream, event)
                    return
                self._pass_interim(event)
            elif isinstance(event, h11.Response):
                self._pass_head(event)
            elif isinstance(event, h11.Data):
                self._send(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                self._send(h11.EndOfMessage())
                await self._visitor.drain()
                return
            else:  # PAUSED, ConnectionClosed
                raise answer_invalid("it closed the connection before it had answered")

    async def _more_answer(self, upstream: Upstream) -> None:
        """What came is on its way before more is taken: events arrive at once, and a slow visitor slows the server."""
        if self.begun:
            await self._visitor.drain()
        try:
            came = await feed(upstream.http, upstream.stream, in_slices=self._chunked or not self.begun)
        except ConnectionError as error:
            raise answer_invalid("the connection to it broke") from error
        upstream.answered = upstream.answered or came

    def _pass_interim(self, event: h11.InformationalResponse) -> None:
        self._continued.set()
        if self._request.http_version < b"1.1":
            return
        if event.status_code == 100 and not self._http.they_are_waiting_for_100_continue:
            return
        headers = self._answer_headers(list(event.headers.raw_items()))
        self._send(h11.InformationalResponse(status_code=event.status_code, headers=headers, reason=event.reason))

    def _pass_head(self, event: h11.Response) -> None:
        if event.http_version not in (b"1.0", b"1.1"):
            raise answer_invalid("its version is not HTTP/1.1")
        given = list(event.headers.raw_items())
        headers = self._answer_headers(given) + _framing(given)
        self._chunked = bool(comma_values(given, b"transfer-encoding"))
        self.begun = True
        self._continued.set()
        self._answer_began()
        self._send(h11.Response(status_code=event.status_code, headers=headers, reason=event.reason))

    def _answer_headers(self, given: Headers, *, websocket: bool = False) -> list[tuple[bytes, bytes]]:
        headers = answer_headers(given, websocket=websocket)
        return sandboxed_headers(headers, self._asked.prefix) if self._asked.prefix else headers

    def _send(self, event: h11.Event) -> None:
        pieces = self._http.send_with_data_passthrough(event)
        self._visitor.write_pieces(pieces or [])

    # after an upgrade

    async def _pipe(self, upstream: Upstream, event: h11.InformationalResponse) -> None:
        if not self._websocket:
            raise answer_invalid("it upgraded the connection unasked")
        given = list(event.headers.raw_items())
        headers = self._answer_headers(given, websocket=True)
        self.begun = True
        self._answer_began()
        self._send(h11.InformationalResponse(status_code=101, headers=headers, reason=event.reason))
        self._visitor.when_ended = None
        self._visitor.unread(self._http.trailing_data[0])
        upstream.stream.unread(upstream.http.trailing_data[0])
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_relay(self._visitor, upstream.stream))
                both.create_task(_relay(upstream.stream, self._visitor))
        except* (ConnectionError, OSError):
            pass  # either side is gone: the other is told by the end of its connection
        finally:
            upstream.stream.abort()
            self._visitor.close()


async def feed(http: h11.Connection, stream: ByteStream, *, in_slices: bool) -> bool:
    """Give a parser what comes next; False at the end. Large pieces of many chunks in slices, others in between."""
    data = await stream.read()
    if in_slices and len(data) > SLICE_BYTES:
        stream.unread(data[SLICE_BYTES:])
        data = data[:SLICE_BYTES]
        await asyncio.sleep(0)
    http.receive_data(data)
    return bool(data)


async def _relay(source: ByteStream, target: ByteStream) -> None:
    while data := await source.read():
        target.write(data)
        await target.drain()
    target.write_end()


def _framing(given: Headers) -> list[tuple[bytes, bytes]]:
    """How the body's end is told: as the other side told it, but one way only."""
    if comma_values(given, b"transfer-encoding"):
        return [(b"Transfer-Encoding", b"chunked")]
    lengths = values_of(given, b"content-length")
    return [(b"Content-Length", lengths[0])] if lengths else []
