"""Download links: one file, by a ticket that stands in the URL. The browser gets it as a download, never as a page."""

from __future__ import annotations

import os
import re
from urllib.parse import quote

from cpuos.errors import AuthenticationError, Forbidden, InvalidRequest
from cpuos.gateway.access import Gateway, in_use, journaled
from cpuos.gateway.agent.answers import read_answer
from cpuos.gateway.calls import Call
from cpuos.gateway.files import send_file, shown_bytes
from cpuos.gateway.sandbox import GatewaySandbox
from cpuos.gateway.tickets import Ticket
from cpuos.types.files import FileInfo

__all__ = ["download"]

_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})?")
_UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9._ -]")


async def download(call: Call, gateway: Gateway) -> None:
    """GET /v1/links/TOKEN, whole or one range."""
    ticket = _link_ticket(gateway, call.values["token"])
    sandbox = gateway.sandboxes.get(ticket.sandbox)
    sandbox.check_generation(ticket)
    path = os.fsencode(ticket.path)
    call.values["path"] = shown_bytes(path)
    headers = _headers(path)
    if call.scope["method"] == "HEAD":
        await call.begin(200, headers)
        await call.put(b"", last=True)
        return
    target = f"/v1/files?path={quote(path)}"
    status = 200
    wanted = _RANGE.fullmatch(call.header(b"range") or "")
    if wanted is not None:
        start, end = int(wanted[1]), int(wanted[2]) if wanted[2] else None
        if end is not None and end < start:
            raise InvalidRequest("cannot read the range", "its end is before its start")
        await sandbox.awake()
        size = await _size(sandbox, path)
        if start < size:
            end = size - 1 if end is None else min(end, size - 1)
            target += f"&offset={start}&length={end - start + 1}"
            headers.append((b"content-range", b"bytes %d-%d/%d" % (start, end, size)))
            status = 206
    await sandbox.awake()
    with gateway.streams.open(ticket), in_use(sandbox, brief=True):
        async with journaled(gateway, ticket, "file.read", target=shown_bytes(path), detail={"link": True}) as detail:
            detail["bytes"] = await send_file(call, sandbox, target, headers=headers, status=status)


def _link_ticket(gateway: Gateway, token: str) -> Ticket:
    try:
        ticket = gateway.verifier.verify(token)
    except AuthenticationError as error:
        if error.code != "ticket_expired":
            raise
        raise AuthenticationError(
            "cannot use the link: it has expired", code="link_expired", hint="ask for a new link"
        ) from None
    if "link" not in ticket.scope or not ticket.path:
        raise Forbidden("cannot use the ticket as a link", "it does not name a file")
    return ticket


async def _size(sandbox: GatewaySandbox, path: bytes) -> int:
    agent = await sandbox.agent()
    told = await agent.call("GET", f"/v1/files/stat?path={quote(path)}", what=f"cannot read {shown_bytes(path)}")
    return read_answer(FileInfo, told).size


def _headers(path: bytes) -> list[tuple[bytes, bytes]]:
    name = path.rstrip(b"/").rpartition(b"/")[2] or b"download"
    plain = _UNSAFE_IN_NAME.sub("_", name.decode("utf-8", "replace"))[:200]
    disposition = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
    return [
        (b"content-type", b"application/octet-stream"),
        (b"content-disposition", disposition.encode("ascii")),
        (b"content-security-policy", b"sandbox"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"private, no-store"),
        (b"referrer-policy", b"no-referrer"),
        (b"accept-ranges", b"bytes"),
    ]
