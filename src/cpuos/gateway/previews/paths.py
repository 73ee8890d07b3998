"""Path mode: `/SANDBOX/PORT/…` under one host name, for where names below a domain cannot be had. Pure.

The pages of all sandboxes would be of one origin there, so they are shown without any: `Content-Security-Policy:
sandbox` on every answer, and no cookie passes either way. A private port is shown to programs only, by the token in the
header.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from cpuos.errors import Forbidden, InvalidRequest
from cpuos.gateway.previews.access import Asked
from cpuos.gateway.previews.headers import without_query_token
from cpuos.gateway.previews.hosts import AGENT_PORT, Place, split_port

__all__ = ["SANDBOXED", "locate", "sandboxed_headers"]

SANDBOXED = (b"Content-Security-Policy", b"sandbox allow-scripts allow-forms allow-downloads")
_PATH = re.compile(rb"(/([a-z0-9]{20})/([1-9][0-9]{0,4}))([/?].*)?", re.DOTALL)


def locate(asked: Asked) -> tuple[Asked, Place]:
    """The request as the server inside gets it, and the place that its path names.

    A target that begins with no slash asks for the path without its last one, from where relative links lead astray.
    """
    split_port(asked.host)
    match = _PATH.fullmatch(asked.target)
    port = int(match[3]) if match else 0
    if match is None or port > 65535:
        raise InvalidRequest("cannot find a preview for the path", "it is /SANDBOX/PORT/…", code="request_malformed")
    if port == AGENT_PORT:
        raise Forbidden(f"cannot show port {port} of the sandbox", "it is the sandbox's agent's own")
    target = match[4] or b""
    if not asked.websocket:
        target = without_query_token(target)
    headers = [(name, value) for name, value in asked.headers if name.lower() != b"cookie"]
    place = Place(sandbox=match[2].decode("ascii"), port=port)
    return replace(asked, target=target, headers=headers, prefix=match[1]), place


def sandboxed_headers(headers: Sequence[tuple[bytes, bytes]], prefix: bytes) -> list[tuple[bytes, bytes]]:
    """An answer's headers: without cookies, within its own path, and of no origin."""
    passed = []
    for name, value in headers:
        told = name.lower()
        if told == b"set-cookie":
            continue
        if told == b"location" and value.startswith(b"/") and not value.startswith(b"//"):
            value = prefix + value
        passed.append((name, value))
    return [*passed, SANDBOXED]
