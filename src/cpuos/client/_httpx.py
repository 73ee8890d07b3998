"""How httpx2 is set up for TLS and proxies and how its failures are read, the same for both worlds."""

from __future__ import annotations

from typing import Any

import httpx2

from cpuos.client._http import CONNECT_TIMEOUT_S, TransportFailure, proxy_of

__all__ = ["as_failure", "pool_options", "timeouts"]

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
    """Options of the transport for this origin."""
    return {
        # Hundreds of commands may stream at once: each has its connection, none waits for another's.
        "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=60.0),
        "proxy": proxy_of(url),
    }


def timeouts(read_s: float) -> dict[str, Any]:
    return {"timeout": {"connect": CONNECT_TIMEOUT_S, "read": read_s, "write": read_s, "pool": None}}


def as_failure(error: Exception) -> TransportFailure:
    reason = str(error) or type(error).__name__
    return TransportFailure(reason, sent=not isinstance(error, _NOT_SENT))
