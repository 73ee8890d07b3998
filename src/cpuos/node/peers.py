"""Who is on the other side of a unix socket: the kernel's word, not the peer's."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cpuos.errors import Forbidden

__all__ = ["Peer", "PeerCheckedProtocol", "check_peer", "checked_protocol", "read_peer"]

_UCRED = struct.Struct("3i")


@dataclass(frozen=True, kw_only=True)
class Peer:
    pid: int
    uid: int
    gid: int


def read_peer(connection: socket.socket) -> Peer:
    """Credentials that the kernel kept when the peer connected."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid=pid, uid=uid, gid=gid)


def check_peer(connection: socket.socket, *, allowed_uids: Collection[int]) -> Peer:
    peer = read_peer(connection)
    if peer.uid != 0 and peer.uid not in allowed_uids:
        raise Forbidden(
            "cannot use this socket of the node",
            f"it is for root and user id {', '.join(map(str, sorted(allowed_uids))) or 'none other'}; "
            f"this process has user id {peer.uid}",
        )
    return peer


class PeerCheckedProtocol(HttpToolsProtocol):
    """HTTP for known peers: another uid gets a refusal before a byte of its request is read."""

    allowed_uids: Collection[int] = ()

    def connection_made(self, transport: Any) -> None:
        # A duplicate, because the loop's own socket object may lack getsockopt (uvloop).
        connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        try:
            check_peer(connection, allowed_uids=self.allowed_uids)
        except Forbidden as refusal:
            payload = json.dumps(refusal.body()).encode()
            head = f"HTTP/1.1 403 Forbidden\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
            transport.write(head.encode() + b"Connection: close\r\n\r\n" + payload)
            transport.close()
            self._refused = True
            return
        finally:
            connection.close()
        super().connection_made(transport)

    _refused = False

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._refused:
            super().connection_lost(exc)


def checked_protocol(allowed_uids: Collection[int]) -> type[PeerCheckedProtocol]:
    """The protocol class that uvicorn is given for one socket."""
    return type("NodeProtocol", (PeerCheckedProtocol,), {"allowed_uids": frozenset(allowed_uids)})
