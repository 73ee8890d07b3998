"""Handlers of files: the agent's calls of the same names, bodies streamed both ways, every answer checked.

Paths stay the percent-encoded bytes that the client sent; nothing here opens a path.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote_to_bytes

from cpuos.errors import FileProblem, InvalidRequest, LimitReached
from cpuos.gateway.access import Gateway, journaled
from cpuos.gateway.agent.answers import AgentFileList, TreeDone, read_answer, refusal
from cpuos.gateway.agent.connection import AgentConnection, agent_unresponsive
from cpuos.gateway.agent.http import AnswerHead, agent_invalid
from cpuos.gateway.bulk import BULK_BYTES, Carried, Cut, Wire
from cpuos.gateway.calls import Call, ClientGone
from cpuos.gateway.sandbox import GatewaySandbox
from cpuos.gateway.tickets import Ticket
from cpuos.gateway.watch import send_events
from cpuos.types.files import FileInfo, FileList

__all__ = [
    "list_files",
    "make_directory",
    "move_file",
    "read_file",
    "read_tree",
    "remove_file",
    "send_file",
    "shown_bytes",
    "shown_path",
    "stat_file",
    "watch_files",
    "write_file",
    "write_tree",
]

MAX_JSON = 4 << 20
MAX_LIST_JSON = 16 << 20
MAX_SHOWN_PATH = 2000
"""Bytes; escaped it can be four times as long."""
BYTES = (b"content-type", b"application/octet-stream")
NO_SNIFF = (b"x-content-type-options", b"nosniff")


async def read_file(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """GET …/files."""
    query = _query(call, gateway, "path", "offset", "length", "user")
    target = f"/v1/files?{query}"
    async with _journaled(gateway, ticket, "file.read", call) as detail:
        detail["bytes"] = await send_file(call, sandbox, target, headers=[BYTES, NO_SNIFF])


async def send_file(
    call: Call, sandbox: GatewaySandbox, target: str, *, headers: list[tuple[bytes, bytes]], status: int = 200
) -> int:
    """Stream an agent's body of known length to the client; its size."""
    agent = await sandbox.agent()
    with sandbox.slots.hold("transfers"):
        async with agent.exchange("GET", target) as (connection, head):
            if head.status != 200:
                raise refusal(await connection.read_body(head, limit=MAX_JSON), what=f"cannot read {shown_path(call)}")
            if head.length is None:
                raise agent_invalid("a file's body comes without its length")
            lines = [*headers, (b"content-length", b"%d" % head.length)]
            size = head.headers.get(b"x-file-size", b"")
            if size.isdigit() and len(size) <= 16:
                lines.append((b"x-file-size", size))
            await call.begin(status, lines)
            await _send_body(call, connection, head)
            return head.length


async def _send_body(call: Call, connection: AgentConnection, head: AnswerHead) -> None:
    gone = call.gone()
    if call.wire is not None and head.length >= BULK_BYTES:
        await _send_bulk(call, call.wire, connection, head.length)
    else:
        async for piece in connection.body(head):
            await call.put(piece)
            if gone.done():
                raise ClientGone
    await call.put(b"", last=True)


async def _send_bulk(call: Call, wire: Wire, connection: AgentConnection, length: int) -> None:
    gone = call.gone()
    carried = Carried()
    begin = await connection.body_begin(length)
    await call.put(begin)
    target = await wire.lend_answer()
    try:
        with target:
            await connection.body_into(target, length - len(begin), carried=carried, give_up=gone)
    except Cut as cut:
        if cut.source:
            raise agent_unresponsive("it closed the connection before its answer was whole") from cut
        raise ClientGone from cut
    finally:
        wire.return_answer(carried.written)
    if gone.done():
        raise ClientGone


async def write_file(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """PUT …/files: the whole file or nothing."""
    query = _query(call, gateway, "path", "mode", "create_parents", "exclusive", "user")
    async with _journaled(gateway, ticket, "file.write", call) as detail:
        told, detail["bytes"] = await _upload(call, sandbox, f"/v1/files?{query}", gateway)
        info: FileInfo = read_answer(FileInfo, told)
        await call.answer_model(200, info)


async def write_tree(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """PUT …/files/tree: a tar, unpacked below the path."""
    query = _query(call, gateway, "path", "user")
    async with _journaled(gateway, ticket, "file.write_tree", call) as detail:
        told, detail["bytes"] = await _upload(call, sandbox, f"/v1/files/tree?{query}", gateway)
        done: TreeDone = read_answer(TreeDone, told)
        await call.answer_model(200, done)


async def _upload(call: Call, sandbox: GatewaySandbox, target: str, gateway: Gateway) -> tuple[bytes, int]:
    """Pass the client's body on; the agent's answer and the count of bytes."""
    length = call.content_length
    if length is not None and length > gateway.limits.file_bytes:
        raise LimitReached(f"cannot take the body: it is over {gateway.limits.file_bytes} bytes", code="body_too_large")
    agent = await sandbox.agent()
    what = f"cannot write {shown_path(call)}"
    with sandbox.slots.hold("transfers"):
        async with agent.upload("PUT", target, length=length) as connection:
            sent = await _pass_body(call, connection, length, gateway.limits.file_bytes)
            head = await connection.read_head(limit_s=agent.times.slow_answer_s)
            told = await connection.read_body(head, limit=MAX_JSON)
    if not 200 <= head.status < 300:
        raise refusal(told, what=what)
    if length is not None and sent != length:
        raise agent_invalid("it answered before the body was whole")
    return told, sent


async def _pass_body(call: Call, connection: AgentConnection, length: int | None, limit: int) -> int:
    """Send the client's body; stops early when the agent answers early. The count of bytes taken from the client."""
    sent = 0
    try:
        async for piece in call.pieces():
            sent += len(piece)
            if sent > limit:
                raise LimitReached(f"cannot take the body: it is over {limit} bytes", code="body_too_large")
            if connection.answer_came or connection.closing:
                return sent
            await connection.send(piece if length is not None else b"%x\r\n%b\r\n" % (len(piece), piece))
            if length is not None and length - sent >= BULK_BYTES and call.wire is not None:
                return sent + await _pass_bulk(call.wire, connection, length - sent)
    except ClientGone:
        raise FileProblem(
            "cannot write the file: its body ended early", f"{sent} bytes came", code="upload_incomplete"
        ) from None
    if length is None:
        await connection.send(b"0\r\n\r\n")
    return sent


async def _pass_bulk(wire: Wire, connection: AgentConnection, count: int) -> int:
    """The next `count` bytes of the client's body, all that come; how many were taken from it."""
    carried = Carried()
    come, source = wire.lend_request()
    try:
        with source:
            if come:
                await connection.send(come)
            if not (connection.answer_came or connection.closing):
                await connection.send_from(source, count - len(come), carried)
    except Cut as cut:
        if cut.source:
            raise ClientGone from cut
    finally:
        wire.return_request(count - len(come) - carried.read)
    return len(come) + carried.read


async def remove_file(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """DELETE …/files."""
    query = _query(call, gateway, "path", "recursive", "user")
    async with _journaled(gateway, ticket, "file.remove", call):
        agent = await sandbox.agent()
        await agent.call(
            "DELETE", f"/v1/files?{query}", what=f"cannot remove {shown_path(call)}", limit_s=agent.times.slow_answer_s
        )
        await call.answer(204, headers=[])


async def stat_file(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """GET …/files/stat."""
    query = _query(call, gateway, "path", "follow", "user")
    agent = await sandbox.agent()
    told = await agent.call("GET", f"/v1/files/stat?{query}", what=f"cannot look at {shown_path(call)}")
    await call.answer_model(200, read_answer(FileInfo, told))


async def list_files(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """GET …/files/list."""
    query = _query(call, gateway, "path", "depth", "user")
    agent = await sandbox.agent()
    what = f"cannot list {shown_path(call)}"
    told = await agent.call(
        "GET", f"/v1/files/list?{query}", what=what, limit=MAX_LIST_JSON, limit_s=agent.times.slow_answer_s
    )
    listed: AgentFileList = read_answer(AgentFileList, told)
    await call.answer_model(200, FileList(entries=listed.entries, truncated=listed.truncated))


async def make_directory(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """POST …/files/mkdir."""
    query = _query(call, gateway, "path", "parents", "mode", "user")
    await _change(call, sandbox, ticket, gateway, f"mkdir?{query}", action="file.mkdir", verb="make")


async def move_file(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """POST …/files/move."""
    query = _query(call, gateway, "path", "to", "overwrite", "user")
    if not any(name == b"to" for name, _ in call.query_pairs()):
        raise InvalidRequest("cannot move the file without to", "give the new path as the query parameter to")
    await _change(call, sandbox, ticket, gateway, f"move?{query}", action="file.move", verb="move")


async def _change(
    call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway, target: str, *, action: str, verb: str
) -> None:
    """A small call that changes something: an answer may be a FileInfo or nothing."""
    async with _journaled(gateway, ticket, action, call):
        agent = await sandbox.agent()
        told = await agent.call("POST", f"/v1/files/{target}", what=f"cannot {verb} {shown_path(call)}")
        if told.strip() in (b"", b"{}", b"null"):
            await call.answer(204, headers=[])
        else:
            await call.answer_model(200, read_answer(FileInfo, told))


async def read_tree(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """GET …/files/tree: the folder as a tar."""
    query = _query(call, gateway, "path", "user")
    async with _journaled(gateway, ticket, "file.read_tree", call) as detail:
        agent = await sandbox.agent()
        with sandbox.slots.hold("transfers"):
            async with agent.exchange("GET", f"/v1/files/tree?{query}", limit_s=agent.times.slow_answer_s) as (
                connection,
                head,
            ):
                if head.status != 200:
                    told = await connection.read_body(head, limit=MAX_JSON)
                    raise refusal(told, what=f"cannot read {shown_path(call)}")
                await call.begin(200, [(b"content-type", b"application/x-tar"), NO_SNIFF])
                detail["bytes"] = 0
                gone = call.gone()
                async for piece in connection.body(head):
                    detail["bytes"] += len(piece)
                    await call.put(piece)
                    if gone.done():
                        raise ClientGone
            await call.put(b"", last=True)


async def watch_files(call: Call, sandbox: GatewaySandbox, ticket: Ticket, gateway: Gateway) -> None:
    """GET …/files/watch: EVENT frames until the client leaves."""
    query = _query(call, gateway, "path", "recursive", "user")
    await call.body(limit=0)
    agent = await sandbox.agent()
    with sandbox.slots.hold("watches"):
        what = f"cannot watch {shown_path(call)}"
        await send_events(call, agent, f"/v1/files/watch?{query}", what=what, explain=sandbox.explain)


def _query(call: Call, gateway: Gateway, *known: str) -> str:
    """The query for the agent: the known parameters, their bytes untouched."""
    names = {name.encode() for name in known}
    kept: dict[bytes, bytes] = {}
    for name, value in call.query_pairs():
        if name not in names:
            raise InvalidRequest(
                f"cannot read query parameter {name[:64].decode('ascii')!r}", f"known are {', '.join(known)}"
            )
        if name in kept:
            raise InvalidRequest(f"cannot read query parameter {name.decode()!r}: it comes twice")
        kept[name] = value
    if not kept.get(b"path"):
        raise InvalidRequest("cannot find the file without path", "give the query parameter path")
    query = b"&".join(b"%b=%b" % pair for pair in kept.items())
    if len(query) > gateway.limits.url_bytes:
        raise FileProblem(
            "cannot use the path: it is too long",
            f"the query is over {gateway.limits.url_bytes} bytes",
            code="file_name_invalid",
        )
    return query.decode("ascii")


def shown_path(call: Call, name: bytes = b"path") -> str:
    """The path for texts and the journal: undecodable and zero bytes are shown as escapes."""
    for key, value in call.query_pairs():
        if key == name:
            return shown_bytes(unquote_to_bytes(value))
    return call.values.get("path", "")


def shown_bytes(path: bytes) -> str:
    return path[:MAX_SHOWN_PATH].decode("utf-8", "backslashreplace").replace("\x00", "\\x00")


@asynccontextmanager
async def _journaled(gateway: Gateway, ticket: Ticket, action: str, call: Call) -> AsyncIterator[dict[str, Any]]:
    target = shown_path(call)
    detail: dict[str, Any] = {}
    to = shown_path(call, b"to")
    if to:
        detail["to"] = to
    async with journaled(gateway, ticket, action, target=target, detail=detail) as shared:
        yield shared
