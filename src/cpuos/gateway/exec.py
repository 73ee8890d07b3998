"""Handlers of commands: start, stream, stdin, kill, resize, wait, output."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

from pydantic import Field

from cpuos.errors import Conflict, CpuosError, InvalidRequest
from cpuos.gateway.access import Gateway, journaled
from cpuos.gateway.calls import Call, ClientGone, read_model
from cpuos.gateway.follow import KEEPALIVE, Follower
from cpuos.gateway.records import RecordedCommand
from cpuos.gateway.sandbox import GatewaySandbox
from cpuos.gateway.signals import signal_number
from cpuos.gateway.tickets import Ticket
from cpuos.types.base import Request
from cpuos.types.command import CommandList, CommandStart, Pty
from cpuos.types.frames import FrameKind, encode_frame

__all__ = [
    "get_command",
    "get_output",
    "kill_command",
    "list_commands",
    "resize_command",
    "start_command",
    "stream_command",
    "wait_command",
    "write_stdin",
]

FRAMES = [(b"content-type", b"application/vnd.cpuos.frames"), (b"cache-control", b"no-store")]
FIRST_ANSWER_S = 0.02
"""A command that ends within it is answered in one piece: fewer wake-ups on both sides. Not where stdin is to come."""
KEEPALIVE_S = 5.0
MAX_WAIT_S = 300.0
MAX_LISTED = 500
OUTPUT_PIECE = 256 << 10
STALLED_S = 600.0
"""A client that takes nothing for so long is cut off; it may resume at its offsets."""


class _KillRequest(Request):
    signal: str | int = "KILL"
    reason: Annotated[str, Field(max_length=1000)] = ""


async def start_command(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """POST …/commands: start, and stream until the end; with `detach` answer the record."""
    body = await call.body(limit=gateway.limits.json_bytes)
    request: CommandStart = read_model(CommandStart, body)
    tail = call.number("tail")
    key = call.header(b"idempotency-key")
    if key is not None and not 0 < len(key) <= 255:
        raise InvalidRequest("cannot read Idempotency-Key", "it has 1 to 255 characters")
    if request.detach:
        recorded, _ = await sandbox.start(request, ticket, key=key, body=body)
        await call.answer_model(201, recorded.command())
        return
    with sandbox.slots.hold("streams"):
        recorded, _ = await sandbox.start(request, ticket, key=key, body=body)
        await _send_stream(call, recorded, Follower(recorded, tail=tail))


async def stream_command(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """GET …/stream: frames again, from the offsets on."""
    recorded = sandbox.store.get(call.values["command"])
    stdout, stderr = call.number("stdout", default=0), call.number("stderr", default=0)
    tail = call.number("tail")
    await call.body(limit=0)
    with sandbox.slots.hold("streams"):
        await _send_stream(call, recorded, Follower(recorded, stdout=stdout, stderr=stderr, tail=tail))


async def _send_stream(call: Call, recorded: RecordedCommand, follower: Follower) -> None:
    loop = asyncio.get_running_loop()
    first_until = loop.time() + (0.0 if recorded.record.stdin_open else FIRST_ANSWER_S)
    sent_at = loop.time()
    try:
        while not call.is_gone:
            if not call.begun:
                # Wait for the first news beside STARTED, for a moment.
                while not recorded.ended and not _has_output(recorded) and (left := first_until - loop.time()) > 0:
                    await recorded.change(left, or_when=call.gone())
                    if call.is_gone:
                        return
            batch = follower.take()
            if not call.begun:
                await call.begin(200, FRAMES)
            if batch or follower.finished:
                async with asyncio.timeout(STALLED_S):
                    await call.put(batch, last=follower.finished)
                sent_at = loop.time()
                if follower.finished:
                    return
                call.gone()  # a short command is through by now, and nobody asks for it
            elif loop.time() - sent_at >= KEEPALIVE_S:
                await call.put(KEEPALIVE)
                sent_at = loop.time()
            else:
                await recorded.change(KEEPALIVE_S, or_when=call.gone())
    except TimeoutError:
        raise ClientGone from None
    except CpuosError as error:
        if not call.begun:
            raise
        await call.put(encode_frame(FrameKind.ERROR, json.dumps(error.body()).encode()), last=True)
    finally:
        follower.close()


def _has_output(recorded: RecordedCommand) -> bool:
    return any(stream.total for stream in recorded.streams.values())


async def list_commands(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """GET …/commands: the newest first."""
    limit = call.number("limit", default=MAX_LISTED, most=MAX_LISTED)
    commands = [recorded.command() for recorded in sandbox.store.newest(limit)]
    await call.answer_model(200, CommandList(commands=commands))


async def get_command(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """GET …/commands/ID."""
    await call.answer_model(200, sandbox.store.get(call.values["command"]).command())


async def wait_command(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """GET …/wait: long poll; the record, ended or not, when it ends or the time is over."""
    recorded = sandbox.store.get(call.values["command"])
    seconds = call.seconds("timeout_s", default=60.0, most=MAX_WAIT_S)
    await call.body(limit=0)
    loop = asyncio.get_running_loop()
    gone = call.gone()
    until = loop.time() + seconds
    while not recorded.ended and (left := until - loop.time()) > 0:
        await recorded.change(left, or_when=gone)
        if gone.done():
            return
    await call.answer_model(200, recorded.command())


async def get_output(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """GET …/output: recorded bytes. The dropped middle is left out of the body and named in X-Output-Gap."""
    recorded = sandbox.store.get(call.values["command"])
    name = call.query("stream") or "stdout"
    if name not in ("stdout", "stderr"):
        raise InvalidRequest(f"cannot read stream {name[:32]!r}", "a command has stdout and stderr")
    stream = recorded.streams[name]
    offset, limit = call.number("offset", default=0), call.number("limit")
    recorded.users += 1
    try:
        total, gap = stream.total, stream.gap
        if offset > total:
            raise InvalidRequest(f"cannot read {name} from {offset}", f"the program wrote {total} bytes")
        parts = _parts(offset, total, gap, limit)
        if recorded.record.outputs_removed and total:
            stream.read(0, 1)  # says why
        length = sum(end - start for start, end in parts)
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % length),
            (b"x-output-next", b"%d" % (parts[-1][1] if parts else offset)),
            (b"x-output-total", b"%d" % total),
        ]
        if gap and offset < gap[1] and (parts and parts[-1][1] >= gap[0]):
            headers.append((b"x-output-gap", b"%d-%d" % gap))
        await call.begin(200, headers)
        for start, end in parts:
            position = start
            while position < end:
                piece = stream.read(position, min(OUTPUT_PIECE, end - position))
                position += len(piece)
                await call.put(piece)
        await call.put(b"", last=True)
    finally:
        recorded.release()


def _parts(offset: int, total: int, gap: tuple[int, int] | None, limit: int | None) -> list[tuple[int, int]]:
    """The recorded ranges from `offset` on, `limit` bytes of them."""
    ranges = [(offset, total)] if gap is None else [(offset, gap[0]), (max(offset, gap[1]), total)]
    left = total if limit is None else limit
    parts = []
    for start, end in ranges:
        end = min(end, start + left)
        if end > start:
            parts.append((start, end))
            left -= end - start
    return parts


async def write_stdin(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """POST …/stdin: bytes at an offset; a repeat is skipped. Answered when the program has taken them or is gone."""
    run = await sandbox.find_run(call.values["command"])
    if not sandbox.store.get(call.values["command"]).record.stdin_open:
        raise Conflict("cannot take stdin: the command was started without it", hint='start it with "stdin": "open"')
    offset = call.number("offset", default=0)
    end = call.query("end") == "true"
    length = call.content_length
    if length is not None and length > gateway.limits.stdin_bytes:
        await call.body(limit=gateway.limits.stdin_bytes)
    if run is None:
        await call.body(limit=gateway.limits.stdin_bytes)
        await call.answer_json(200, {"offset": offset, "open": False})
        return
    with sandbox.slots.hold("stdin_bodies"):
        async for piece in call.pieces():
            await run.write_stdin(piece, offset=offset)
            offset += len(piece)
        if end and not run.recorded.ended:
            run.close_stdin()
        await run.flush_stdin()
    is_open = run.stdin.closed_at is None and not run.recorded.ended
    await call.answer_json(200, {"offset": run.stdin.accepted, "open": is_open})


async def kill_command(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """POST …/kill: KILL ends the whole tree, and the answer is its end."""
    run = await sandbox.find_run(call.values["command"])
    request: _KillRequest = read_model(_KillRequest, await call.body(limit=gateway.limits.json_bytes))
    number = signal_number(request.signal)
    if run is not None and not run.recorded.ended:  # it may have ended and not be saved yet
        detail = {"signal": number, "reason": request.reason}
        async with journaled(gateway, ticket, "command.kill", target=run.id, detail=detail):
            await run.kill(number, reason=request.reason or f"killed by {ticket.actor}")
    await call.answer_model(200, sandbox.store.get(call.values["command"]).command())


async def resize_command(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """POST …/resize: the size of a pty."""
    run = await sandbox.find_run(call.values["command"])
    size: Pty = read_model(Pty, await call.body(limit=gateway.limits.json_bytes))
    if run is not None:
        if not run.recorded.record.command.pty:
            raise InvalidRequest("cannot resize the command", "it was started without a pty")
        run.resize(size.cols, size.rows)
    await call.answer_model(200, sandbox.store.get(call.values["command"]).command())
