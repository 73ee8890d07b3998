"""Previews: a request and WebSocket messages through the listener of visitors, and the same to the server itself."""

from __future__ import annotations

import http.client
import os
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.bare import namespace_socket
from benchmarks.results import Measured, compare_times
from benchmarks.stage import Stage
from cpuos.types.port import PortAccess

__all__ = ["preview_messages", "preview_request"]

PORT = 9001
MESSAGES = 2000
IN_FLIGHT = 16
"""Messages sent ahead of their echoes, as a chat or a live view has them."""


def preview_request(stage: Stage) -> Measured:
    """A GET by a kept connection, over the same to the server by a socket from beside the sandbox."""
    with _server(stage) as access:
        host = urlsplit(access.url).netloc
        product = http.client.HTTPConnection("127.0.0.1", stage.instance.settings.preview_port)
        bare = http.client.HTTPConnection("10.0.0.2", PORT)
        bare.sock = namespace_socket(stage.router)
        bare.sock.connect(("10.0.0.2", PORT))
        bare.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        headers = {"Host": host, "X-Cpuos-Preview-Token": access.token or ""}
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(max(520, 120 * stage.rounds)):
            for into, connection, sent in ((times[0], product, headers), (times[1], bare, {})):
                since = time.perf_counter()
                connection.request("GET", "/", headers=sent)
                answer = connection.getresponse()
                body = answer.read()
                if turn >= 20:
                    into.append(time.perf_counter() - since)
                if answer.status != 200 or len(body) != 1000:
                    raise RuntimeError(f"the server was not reached: {answer.status} {body[:200]!r}")
        product.close()
        bare.close()
    return compare_times(*times)


def preview_messages(stage: Stage) -> Measured:
    """Echoed messages a second on one WebSocket; the median of the rounds."""
    with _server(stage) as access:
        rates = [_echo(stage, access) for _ in range(max(5, stage.rounds))]
    return Measured(
        value=statistics.median(rates),
        spread=(min(rates), max(rates)),
        detail={"n": len(rates), "messages": MESSAGES, "in_flight": IN_FLIGHT},
    )


def _echo(stage: Stage, access: PortAccess) -> float:
    with socket.create_connection(("127.0.0.1", stage.instance.settings.preview_port)) as visitor:
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = (
            f"GET / HTTP/1.1\r\nHost: {urlsplit(access.url).netloc}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
            f"X-Cpuos-Preview-Token: {access.token}\r\n\r\n"
        )
        visitor.sendall(head.encode())
        stream = visitor.makefile("rb")
        if b" 101 " not in stream.readline():
            raise RuntimeError("the server was not reached")
        while stream.readline() != b"\r\n":
            pass
        payload = os.urandom(32)
        message = b"\x82\xa0\0\0\0\0" + payload
        echoed = b"\x82\x20" + payload
        since = time.perf_counter()
        visitor.sendall(message * IN_FLIGHT)
        for number in range(MESSAGES):
            if stream.read(len(echoed)) != echoed:
                raise RuntimeError("an echo is wrong")
            if number + IN_FLIGHT < MESSAGES:
                visitor.sendall(message)
        return MESSAGES / (time.perf_counter() - since)


@contextmanager
def _server(stage: Stage) -> Iterator[PortAccess]:
    stage.sandbox.files.write("/tmp/guest_http.py", Path(__file__).with_name("guest_http.py").read_bytes())
    job = stage.sandbox.spawn(["python3", "/tmp/guest_http.py"])
    try:
        while not job.output():
            if job.refresh().status.ended:
                raise RuntimeError("the server in the sandbox did not start")
        yield stage.sandbox.ports.publish(PORT)
    finally:
        job.kill()
        stage.sandbox.ports.close(PORT)
