"""Who is who in the sealed world. Every other address of the fake internet answers too: it owns them all."""

from __future__ import annotations

__all__ = [
    "AZURE",
    "HOST",
    "HOST_GATEWAY",
    "MAIL",
    "METADATA",
    "MIRROR",
    "OTHER_WEB",
    "PRIVATE",
    "RESOLVERS",
    "WEB",
]

HOST = "80.90.100.10"
"""The host's own public address."""
HOST_GATEWAY = "80.90.100.1"
WEB, OTHER_WEB = "93.184.215.14", "93.184.216.99"
RESOLVERS = ("1.1.1.1", "8.8.8.8", "9.9.9.9")
METADATA, AZURE = "169.254.169.254", "168.63.129.16"
PRIVATE = ("10.20.30.40", "172.20.1.1", "192.168.1.10", "100.100.1.1")
MIRROR = "10.77.0.5"
"""A package mirror in the operator's private network: reached by an exception only."""
MAIL = "142.250.27.27"
