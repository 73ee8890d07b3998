"""Terminals over WebSocket: binary messages are whole frames both ways. A closed socket leaves the program running."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections import deque
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cpuos.errors import AuthenticationError, CpuosError, InvalidRequest, PlatformError
from cpuos.gateway.access import Gateway, authorize, bearer, journaled
from cpuos.gateway.calls import Call, read_model
from cpuos.gateway.commands import CommandRun
from cpuos.gateway.follow import KEEPALIVE, Follower
from cpuos.gateway.records import RecordedCommand
from cpuos.gateway.sandbox import GatewaySandbox
from cpuos.gateway.signals import signal_number
from cpuos.gateway.tickets import Ticket
from cpuos.types.command import CommandStart, Pty
from cpuos.types.frames import Frame, FrameDecoder, FrameError, FrameKind, encode_frame

__all__ = ["open_pty"]

TICKET_WAIT_S = 10.0
KEEPALIVE_S = 5.0
MAX_UP_FRAME = 64 << 10
TYPED_BYTES = 1 << 20
"""So much may wait for a program that does not read: what is typed after it waits at the client, signals too."""
CLOSED, REFUSED = 1000, 4000


class _TicketMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")

    ticket: str = Field(max_length=8 << 10)


class _Gone(Exception):
    """The client closed the socket."""


async def open_pty(call: Call, gateway: Gateway) -> None:
    """WEBSOCKET …/pty?start=BASE64URL or ?command=ID: errors come as an ERROR frame, then the socket closes."""
    socket = _Socket(call)
    try:
        await socket.accept()
        text = bearer(call) if call.header(b"authorization") else await _first_ticket(socket)
        sandbox, ticket = authorize(gateway, call.values["sandbox"], text, scope="exec")
        await sandbox.awake()
        with gateway.streams.open(ticket), sandbox.slots.hold("ptys"), sandbox.activity.hold():
            recorded = await _command(call, sandbox, ticket)
            run = await sandbox.find_run(recorded.id)
            await _serve(socket, recorded, None if run is None else _Keys(run, gateway, ticket, sandbox))
        await socket.close(CLOSED)
    except _Gone:
        pass
    except CpuosError as error:
        await socket.refuse(error)
    except Exception:
        await socket.refuse(PlatformError("cannot serve the terminal: cpuOS failed", code="internal"))
        raise


class _Socket:
    """ASGI messages of one WebSocket."""

    def __init__(self, call: Call) -> None:
        self._receive = call.receive
        self._send = call.send

    async def accept(self) -> None:
        await self._receive()
        await self._send({"type": "websocket.accept"})

    async def receive(self) -> bytes | str:
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise _Gone
        return message.get("bytes") or message.get("text") or b""

    async def send(self, data: bytes) -> None:
        try:
            await self._send({"type": "websocket.send", "bytes": data})
        except Exception as error:
            raise _Gone from error

    async def close(self, code: int) -> None:
        with suppress(Exception):
            await self._send({"type": "websocket.close", "code": code})

    async def refuse(self, error: CpuosError) -> None:
        with suppress(_Gone):
            await self.send(encode_frame(FrameKind.ERROR, json.dumps(error.body()).encode()))
        await self.close(REFUSED)


async def _first_ticket(socket: _Socket) -> str:
    """For browsers, which cannot set a header: the ticket is the first message."""
    try:
        async with asyncio.timeout(TICKET_WAIT_S):
            message = await socket.receive()
    except TimeoutError:
        message = b""
    try:
        return _TicketMessage.model_validate_json(message).ticket
    except ValidationError:
        raise AuthenticationError(
            "cannot open the terminal without a ticket",
            'send Authorization: Bearer TICKET, or {"ticket": TICKET} as the first message',
            code="key_missing",
        ) from None


async def _command(call: Call, sandbox: GatewaySandbox, ticket: Ticket) -> RecordedCommand:
    command_id, start = call.query("command"), call.query("start")
    if (command_id is None) == (start is None):
        raise InvalidRequest("cannot open the terminal", "give exactly one of the query parameters start and command")
    if command_id is not None:
        return sandbox.store.get(command_id)
    try:
        body = base64.urlsafe_b64decode(start + "=" * (-len(start) % 4))
    except (binascii.Error, ValueError):
        raise InvalidRequest("cannot read start", "it is the base64url form of a JSON body") from None
    request: CommandStart = read_model(CommandStart, body)
    if request.pty is None:
        request = request.model_copy(update={"pty": Pty()})
    recorded, _ = await sandbox.start(request, ticket, key=None, body=body)
    return recorded


async def _serve(socket: _Socket, recorded: RecordedCommand, keys: _Keys | None) -> None:
    """Both directions until the program ends or the client leaves."""
    down = asyncio.create_task(_send_down(socket, recorded))
    up = [asyncio.create_task(_take_up(socket, keys))]
    if keys is not None:
        up.append(asyncio.create_task(keys.type()))
    try:
        await asyncio.wait({down, *up}, return_when=asyncio.FIRST_COMPLETED)
        ended = [down] if down.done() else [task for task in up if task.done()]
        ended[0].result()
    finally:
        for task in (down, *up):
            task.cancel()
        await asyncio.gather(down, *up, return_exceptions=True)


async def _send_down(socket: _Socket, recorded: RecordedCommand) -> None:
    follower = Follower(recorded)
    loop = asyncio.get_running_loop()
    sent_at = loop.time()
    try:
        while not follower.finished:
            batch = bytes(follower.take())
            if not batch and loop.time() - sent_at >= KEEPALIVE_S:
                batch = KEEPALIVE
            if batch:
                await socket.send(batch)
                sent_at = loop.time()
            else:
                await recorded.change(KEEPALIVE_S)
    finally:
        follower.close()


async def _take_up(socket: _Socket, keys: _Keys | None) -> None:
    decoder = FrameDecoder(max_payload=MAX_UP_FRAME)
    while True:
        message = await socket.receive()
        if isinstance(message, str):
            raise InvalidRequest("cannot read the message: it is text", "after the ticket, messages are binary frames")
        try:
            frames = decoder.feed(message)
        except FrameError as error:
            raise InvalidRequest("cannot read the message", str(error)) from None
        for frame in frames:
            if keys is not None:
                await keys.take(frame)


class _Keys:
    """What a client sends to a running program. Signals and sizes do not wait behind what it has typed."""

    def __init__(self, run: CommandRun, gateway: Gateway, ticket: Ticket, sandbox: GatewaySandbox) -> None:
        self._sandbox = sandbox
        self._run = run
        self._gateway = gateway
        self._ticket = ticket
        self._typed: deque[bytes | None] = deque()
        """None: the end of it."""
        self._typed_bytes = 0
        self._changed = asyncio.Event()

    async def type(self) -> None:
        """Pass on what was typed as the program takes it, for ever. A WebSocket keeps order: no offset is needed."""
        while True:
            while not self._typed:
                self._changed.clear()
                await self._changed.wait()
            data = self._typed[0]
            await self._sandbox.awake()
            if data is None:
                self._run.close_stdin()
            else:
                await self._run.write_stdin(data, offset=None)
                self._typed_bytes -= len(data)
            self._typed.popleft()
            self._changed.set()

    async def _queue(self, data: bytes | None) -> None:
        while self._typed_bytes >= TYPED_BYTES:
            self._changed.clear()
            await self._changed.wait()
        self._typed.append(data)
        self._typed_bytes += len(data or b"")
        self._changed.set()

    async def take(self, frame: Frame) -> None:
        run = self._run
        if run.recorded.ended:
            return
        if frame.kind is FrameKind.STDIN:
            await self._queue(frame.payload)
        elif frame.kind is FrameKind.STDIN_END:
            await self._queue(None)
        elif frame.kind is FrameKind.RESIZE:
            size: Pty = read_model(Pty, frame.payload)
            run.resize(size.cols, size.rows)
        elif frame.kind is FrameKind.KILL:
            await self._sandbox.awake()
            number = signal_number(_signal(frame.payload))
            if run.recorded.ended:
                return
            detail = {"signal": number, "reason": "from its terminal"}
            async with journaled(self._gateway, self._ticket, "command.kill", target=run.id, detail=detail):
                await run.kill(number, reason="killed from its terminal")
        elif frame.kind is not FrameKind.KEEPALIVE:
            why = "a client sends STDIN, STDIN_END, RESIZE and KILL"
            raise InvalidRequest(f"cannot take frame {frame.kind.name}", why)


def _signal(payload: bytes) -> Any:
    try:
        value = json.loads(payload or b"{}").get("signal", "KILL")
    except (ValueError, AttributeError):
        value = None
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise InvalidRequest("cannot read the KILL frame", 'its payload is {"signal": name or number}')
    return value
