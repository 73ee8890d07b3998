"""Who may use the node's sockets is the kernel's word."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys

import pytest

from cpuos.testing.node import fake_node, fake_settings

A = "a" * 20
NOBODY = 65534
CALLS = {
    "api": (socket.SOCK_STREAM, b"GET /v1/sandboxes HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"),
    "dial": (socket.SOCK_SEQPACKET, b'{"sandbox": "aaaaaaaaaaaaaaaaaaaa", "generation": 1}'),
}
SCRIPT = """
import os, socket, sys
kind, uid, path, call = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], bytes.fromhex(sys.argv[4])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
connection = socket.socket(socket.AF_UNIX, kind)
try:
    connection.connect(path)
    try:
        connection.sendall(call)
    except BrokenPipeError:
        pass  # the refusal came first
    print(connection.recv(4096).decode())
except PermissionError:
    print("no right")
"""


async def call_as(uid: int, call: str, path: str) -> str:
    """The answer to a raw call of this user, or "no right"."""
    kind, request = CALLS[call]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, str(int(kind)), str(uid), path, request.hex(), stdout=subprocess.PIPE
    )
    return (await process.communicate())[0].decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("call", ["api", "dial"])
async def test_another_user_is_refused(call):
    async with fake_settings() as settings, fake_node(settings) as node:
        path = {"api": settings.node_socket, "dial": settings.dial_socket}[call]
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert "no right" in await call_as(NOBODY, call, str(path))  # neither on the folder nor on the file
        for opened in (settings.run_dir.parent, settings.run_dir):
            opened.chmod(0o755)
        path.chmod(0o666)
        assert {"api": "HTTP/1.1 403", "dial": '"forbidden"'}[call] in await call_as(NOBODY, call, str(path))
        assert {"api": "HTTP/1.1 200", "dial": "sandbox_not_found"}[call] in await call_as(0, call, str(path))
        assert await node.client.list() == []


async def test_dial_requests_out_of_form(node):
    for packet in (b"{}", b"not json", b'{"sandbox": 7, "generation": 1}', b'{"sandbox": "x", "generation": true}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            connection.connect(str(node.settings.dial_socket))
            connection.send(packet)
            answer = json.loads(await asyncio.get_running_loop().sock_recv(connection, 4096))
            assert answer["error"]["code"] == "invalid_request"
