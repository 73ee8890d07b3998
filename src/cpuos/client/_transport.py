"""How httpx2 is set up and its failures are read, the same for both backends."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from cpuos.client._http import TransportFailure

__all__ = ["CONNECT_TIMEOUT_S", "READ_TIMEOUT_S", "as_failure", "pool_options", "timeouts", "websocket_options"]

CONNECT_TIMEOUT_S = 5.0
# Streams carry a KEEPALIVE each 5 s, and answers come within the gateway's own 30 s towards the agent.
READ_TIMEOUT_S = 40.0

# Raised before the first byte of the request is on its way.
_NOT_SENT = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.PoolTimeout,
    httpx2.ProxyError,
    httpx2.UnsupportedProtocol,
    httpx2.LocalProtocolError,
)


def pool_options(url: str) -> dict[str, Any]:
    """Options of the transport for this origin. Calls to this machine never go through a proxy."""
    parts = urlsplit(url)
    proxied = not _is_local(url) and not proxy_bypass(parts.hostname or "")
    return {
        # Hundreds of commands may stream at once: each has its connection, none waits for another's.
        "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=60.0),
        # Certificates are loaded only where they are used: it takes longer than an exec.
        "verify": parts.scheme == "https",
        "proxy": getproxies().get(parts.scheme) if proxied else None,
    }


def websocket_options(url: str) -> dict[str, Any]:
    """The same for a terminal's WebSocket: no compression, messages as large as a frame."""
    options = {"compression": None, "max_size": 2 << 20, "open_timeout": CONNECT_TIMEOUT_S, "close_timeout": 2.0}
    return {**options, "proxy": None if _is_local(url) else True}


def timeouts(read_s: float | None) -> dict[str, Any]:
    read_s = READ_TIMEOUT_S if read_s is None else read_s
    return {"timeout": {"connect": CONNECT_TIMEOUT_S, "read": read_s, "write": read_s, "pool": None}}


def as_failure(error: Exception) -> TransportFailure:
    reason = str(error) or type(error).__name__
    return TransportFailure(reason, sent=not isinstance(error, _NOT_SENT))


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
