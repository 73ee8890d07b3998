"""The dial socket: hands the gateway sockets to agents, so that the process that reads guest bytes needs no rights."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Collection
from dataclasses import dataclass

import structlog

from cpuos.errors import CpuosError, Forbidden, InvalidRequest, PlatformError
from cpuos.node.peers import check_peer
from cpuos.node.service import NodeService

__all__ = ["DialServer"]

log = structlog.get_logger("cpuos.node")

REQUEST_BYTES = 1024
IDLE_S = 60.0
REFUSED_S = 1.0


class DialServer:
    """SOCK_SEQPACKET: one packet asks, one packet answers. The answer to a dial carries a descriptor; asked for
    `limits`, the node says which of the sandbox's are used up."""

    def __init__(self, service: NodeService, *, allowed_uids: Collection[int]) -> None:
        self._service = service
        self._allowed_uids = frozenset(allowed_uids)
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def start(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    async def close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it went away, or no descriptor is free: the next call tries again
            return
        connection.setblocking(False)
        task = asyncio.create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                try:
                    check_peer(connection, allowed_uids=self._allowed_uids)
                except Forbidden as refusal:
                    connection.send(json.dumps(refusal.body()).encode())
                    # Closed with a packet unread, the connection would be reset, and the refusal lost with it.
                    async with asyncio.timeout(REFUSED_S):
                        await _receive(connection)
                    return
                while packet := await _receive(connection):
                    await self._answer(connection, packet)
            except (OSError, TimeoutError):
                return
            except Exception:
                log.exception("dial failed")

    async def _answer(self, connection: socket.socket, packet: bytes) -> None:
        try:
            request = _parse(packet)
            if request.ask == "limits":
                facts = await self._service.limits(request.sandbox, generation=request.generation)
                connection.send(facts.model_dump_json().encode())
                return
            opened = await self._service.dial(request.sandbox, generation=request.generation)
        except CpuosError as error:
            connection.send(json.dumps(error.body()).encode())
            return
        except Exception:
            log.exception("dial failed")
            connection.send(json.dumps(PlatformError("cannot dial the sandbox", "see the node's log").body()).encode())
            return
        with opened.link.socket as guest:
            answer = {
                "address": opened.link.address,
                "statement": base64.b64encode(opened.signed.statement).decode(),
                "signature": base64.b64encode(opened.signed.signature).decode(),
                "session_key": base64.b64encode(opened.session_key).decode(),
            }
            socket.send_fds(connection, [json.dumps(answer).encode()], [guest.fileno()])


async def _receive(connection: socket.socket) -> bytes:
    async with asyncio.timeout(IDLE_S):
        return await asyncio.get_running_loop().sock_recv(connection, REQUEST_BYTES)


@dataclass(frozen=True, kw_only=True)
class _Request:
    sandbox: str
    generation: int
    ask: str


def _parse(packet: bytes) -> _Request:
    try:
        told = json.loads(packet)
        request = _Request(sandbox=told["sandbox"], generation=told["generation"], ask=told.get("ask", "socket"))
        if not isinstance(request.sandbox, str) or type(request.generation) is not int:
            raise TypeError("wrong types")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(
            "cannot read the dial request", 'it must be {"sandbox": id, "generation": number}'
        ) from error
    return request
