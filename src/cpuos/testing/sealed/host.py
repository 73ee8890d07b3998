"""The process that holds the sealed host's namespace: `python -m cpuos.testing.sealed.host FD`.

It carries connections that come to listening sockets of the test's own namespace to the same ports of 127.0.0.1
inside, which is the only way in, and none out: the API's and the gateway's ports of an instance.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from pathlib import Path

from cpuos.node import syscalls
from cpuos.node.network.netlink import RouteNetlink

__all__ = ["main"]

_PIECE = 1 << 18


class _Forwarder:
    def __init__(self) -> None:
        self._servers: dict[int, asyncio.Server] = {}
        self._carried: set[asyncio.Task[None]] = set()

    async def open(self, listener: socket.socket, *, port: int) -> None:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._carried.add(task)  # nobody else holds it
            task.add_done_callback(self._carried.discard)
            try:
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.transport.abort()
                return
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))

        self._servers[port] = await asyncio.start_server(carry, sock=listener, backlog=256)

    def close(self, port: int) -> None:
        server = self._servers.pop(port, None)
        if server is not None:
            server.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()


async def _serve(control: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    forwarder = _Forwarder()
    folder = ""
    control.setblocking(False)
    await loop.sock_sendall(control, b'{"answer": "ready"}\n')
    while True:
        readable = loop.create_future()
        loop.add_reader(control, lambda: readable.done() or readable.set_result(None))  # noqa: B023
        await readable
        loop.remove_reader(control)
        packet, descriptors, _, _ = socket.recv_fds(control, 4096, 4)
        if not packet:
            _remove(folder)
            os._exit(0)  # what is still carried ends with the world
        question = json.loads(packet)
        if question["op"] == "folder":
            folder = question["path"]
        elif question["op"] == "forward":
            await forwarder.open(socket.socket(fileno=descriptors[0]), port=question["port"])
        else:
            forwarder.close(question["port"])
        await loop.sock_sendall(control, b'{"answer": null}\n')


def _remove(folder: str) -> None:
    """What slots of the world have on disk; also when the test was killed."""
    if folder:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            point = line.split()[4]
            if point.startswith(f"{folder}/"):
                syscalls.umount(point, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    syscalls.unshare(syscalls.CLONE_NEWNET)
    for name in ("all", "default"):
        Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("0")
    with RouteNetlink() as own:
        own.set_up("lo")
    asyncio.run(_serve(control))


if __name__ == "__main__":
    main()
