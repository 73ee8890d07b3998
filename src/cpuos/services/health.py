"""Whether a part answers: one small HTTP request each, over its socket or port."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cpuos.settings import Settings, read_endpoint

__all__ = ["ask", "part_answers"]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def part_answers(name: str, settings: Settings, *, timeout_s: float = 2.0) -> bool:
    """Whether the part `name` answers with success."""
    if name == "node":
        return ask(settings.node_socket, "/v1/node", timeout_s=timeout_s)[0] == 200
    endpoint = settings.server_endpoint if name == "server" else settings.gateway_endpoint
    url = read_endpoint(endpoint)
    return url is not None and ask(url, "/v1/health", timeout_s=timeout_s)[0] == 200


def ask(where: Path | str, path: str, *, method: str = "GET", key: str = "", timeout_s: float = 2.0) -> tuple[int, Any]:
    """Status and JSON of one request to a unix socket or a base URL; status 0 when nobody answers."""
    if isinstance(where, Path):
        connection: http.client.HTTPConnection = _UnixConnection(where, timeout_s=timeout_s)
    else:
        parts = urlsplit(where)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(16 << 20)
    except (OSError, http.client.HTTPException):
        return 0, None
    finally:
        connection.close()
    try:
        return answer.status, json.loads(body) if body else None
    except ValueError:
        return answer.status, None
