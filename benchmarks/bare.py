"""The bare tools: gVisor's control socket, `runsc run` and plain TCP, without any of the product's code."""

from __future__ import annotations

import array
import ctypes
import json
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

__all__ = ["ControlExec", "RawTcp", "namespace_socket", "run_detached"]

_CLONE_NEWNET = 0x40000000
_PIECE = 1 << 20
_ORDER_BYTES = 64


class ControlExec:
    """Runs programs through a sandbox's control socket: execute, then wait, each on its own connection."""

    def __init__(self, path: Path, sandbox_id: str) -> None:
        self._path = path
        self._id = sandbox_id
        self._null = os.open("/dev/null", os.O_RDWR)

    def close(self) -> None:
        os.close(self._null)

    def run(self, argv: list[str]) -> int:
        capabilities = {f"{kind}Caps": 0 for kind in ("Permitted", "Inheritable", "Effective", "Bounding", "Ambient")}
        argument = {
            "filename": "",
            "argv": argv,
            "envv": ["PATH=/usr/bin:/bin"],
            "wd": "/",
            "KUID": 1000,
            "KGID": 1000,
            "GuestFDs": [0, 1, 2],
            "ContainerID": self._id,
            "Capabilities": capabilities,
        }
        pid = self._call("containerManager.ExecuteAsync", argument, files=[self._null] * 3)
        return self._call("containerManager.WaitPID", {"PID": pid, "CID": self._id})

    def _call(self, method: str, argument: Any, *, files: list[int] | None = None) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self._path))
            request = json.dumps({"method": method, "arg": argument}).encode()
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
            connection.sendmsg([request], passed)
            answer = b""
            while True:
                answer += connection.recv(65536)
                try:
                    parsed = json.loads(answer)
                except ValueError:
                    continue
                if not parsed["success"]:
                    raise RuntimeError(f"cannot call {method}: {parsed.get('err')}")
                return parsed.get("result")


class RawTcp:
    """The host's side of `guest_tcp.py`."""

    def __init__(self, netns: Path) -> None:
        self._netns = netns
        self._buffer = bytearray(_PIECE)

    def send(self, path: Path, count: int) -> None:
        """`count` bytes of a file to the sink, until it says that all came."""
        with self._ask(f"sink {count}") as connection, path.open("rb", buffering=0) as file:
            view = memoryview(self._buffer)
            while taken := file.readinto(self._buffer):
                connection.sendall(view[:taken])
            if connection.recv(1) != b"k":
                raise RuntimeError("cannot send: the sink closed early")

    def receive(self, count: int) -> None:
        """`count` bytes from the source."""
        self._drain(f"source {count}", count)

    def cat(self, path: str, count: int) -> None:
        """What `cat` writes to its end of the connection."""
        self._drain(f"cat {path}", count)

    def _drain(self, order: str, count: int) -> None:
        left = count
        with self._ask(order) as connection:
            while taken := connection.recv_into(self._buffer):
                left -= taken
        if left:
            raise RuntimeError(f"cannot receive: {left} of {count} bytes are missing")

    def _ask(self, order: str) -> socket.socket:
        connection = namespace_socket(self._netns)
        connection.connect(("10.0.0.2", 9000))
        connection.sendall(order.encode().ljust(_ORDER_BYTES))
        return connection


def namespace_socket(netns: Path) -> socket.socket:
    """A TCP socket made inside a network namespace."""
    made: list[socket.socket] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        namespace = os.open(netns, os.O_RDONLY)
        try:
            if libc.setns(namespace, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {netns}")
            made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        finally:
            os.close(namespace)

    worker = threading.Thread(target=make)
    worker.start()
    worker.join()
    return made[0]


def run_detached(command: list[str]) -> None:
    """`runsc run -detach …` to its end; waits by the process's descriptor, since polling adds up to 50 ms."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if process.wait() != 0:
        raise RuntimeError(f"cannot run: {' '.join(command[:2])} … ended with {process.returncode}")
