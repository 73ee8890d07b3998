"""Which headers pass between a visitor and a server inside, and which end here. Pure.

Out of the visitor's request go the platform's own secrets and everything a proxy may vouch for; out of the answer goes
what would reach beyond the page's own host name.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cpuos.gateway.previews.hosts import is_same_origin

__all__ = [
    "COOKIE",
    "QUERY_NAME",
    "TOKEN_HEADER",
    "Headers",
    "Visitor",
    "answer_headers",
    "comma_values",
    "cookie_values",
    "query_token",
    "request_headers",
    "values_of",
    "without_query_token",
]

Headers = Sequence[tuple[bytes, bytes]]

COOKIE = b"__Host-cpuos-preview"
TOKEN_HEADER = b"x-cpuos-preview-token"
QUERY_NAME = b"cpuos_token"

_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"}
    | {b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings", b"content-length"}
)
# What only a proxy may say; a visitor that says it pretends. So do names that become equal in a CGI environment.
_VOUCHED = re.compile(rb"x-forwarded(?:-.*)?|forwarded|x-real-ip|x-cpuos-.*|true-client-ip|x-client-ip|x-original-.*")
# Answers to one host must not speak for its siblings or for later visits of them.
_BEYOND_THE_HOST = frozenset(
    {b"strict-transport-security", b"public-key-pins", b"public-key-pins-report-only", b"expect-ct"}
    | {b"alt-svc", b"clear-site-data", b"nel", b"report-to", b"set-cookie2", b"service-worker-allowed"}
)
# A cookie without a name may carry one in its value, which is sent back the same.
_OWN_COOKIE = re.compile(rb"[= \t]*(?:__host-|__secure-|__http-|__host-http-)?cpuos[-_]", re.IGNORECASE)
_API_KEY = re.compile(rb"cpk_[0-9a-f]{4,}_")
_BEARER = re.compile(rb"bearer[ \t]+(\S+)", re.IGNORECASE)
_BASIC = re.compile(rb"basic[ \t]+(\S+)", re.IGNORECASE)
_DOMAIN = re.compile(rb"\s*domain\s*(?:=.*)?", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Visitor:
    """What is told to the server inside of who asks."""

    address: str
    scheme: str
    host: bytes
    """The Host header as the visitor sent it."""
    rewritten_host: bytes | None = None
    """What the server inside gets as Host instead, and in Origin where that was the preview's own."""
    prefix: bytes = b""
    """Path mode: the path under which the server is shown."""


def request_headers(headers: Headers, visitor: Visitor, *, websocket: bool = False) -> list[tuple[bytes, bytes]]:
    """The visitor's headers for the server inside, without the body's framing."""
    dropped = _HOP_BY_HOP | frozenset(comma_values(headers, b"connection"))
    passed = [(b"Host", visitor.rewritten_host or visitor.host)]
    for name, value in headers:
        told = name.lower().replace(b"_", b"-")
        if told == b"host" or told in dropped or _VOUCHED.fullmatch(told) or _is_ours(told, value):
            continue
        if told == b"cookie":
            value = _without_own_cookies(value)
            if not value:
                continue
        elif told == b"origin" and visitor.rewritten_host and is_same_origin(value, visitor.host):
            value = b"http://" + visitor.rewritten_host
        elif told == b"referer":
            value = _without_token_in_referer(value)
        passed.append((name, value))
    if websocket:
        passed += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
    passed += [
        (b"X-Forwarded-For", visitor.address.encode("ascii")),
        (b"X-Forwarded-Host", visitor.host),
        (b"X-Forwarded-Proto", visitor.scheme.encode("ascii")),
    ]
    return [*passed, (b"X-Forwarded-Prefix", visitor.prefix)] if visitor.prefix else passed


def answer_headers(headers: Headers, *, websocket: bool = False) -> list[tuple[bytes, bytes]]:
    """The server's headers for the visitor, without the body's framing."""
    dropped = _HOP_BY_HOP | frozenset(comma_values(headers, b"connection"))
    passed = []
    for name, value in headers:
        told = name.lower()
        if told in dropped or told in _BEYOND_THE_HOST or told.startswith(b"x-cpuos-"):
            continue
        if told == b"set-cookie":
            value = _for_this_host(value)
            if not value:
                continue
        passed.append((name, value))
    if websocket:
        passed += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
    return passed


def values_of(headers: Headers, name: bytes) -> list[bytes]:
    """All values of a header; `name` is lower case."""
    return [value for key, value in headers if key.lower() == name]


def comma_values(headers: Headers, name: bytes) -> list[bytes]:
    """The parts of a header that is a list, in lower case."""
    values = b",".join(values_of(headers, name)).lower().split(b",")
    return [value.strip() for value in values if value.strip()]


def cookie_values(headers: Headers) -> list[bytes]:
    """Values of the platform's cookie. A browser sends one; whoever sends more may be right with any."""
    found = []
    for line in values_of(headers, b"cookie"):
        for part in line.split(b";"):
            name, _, value = part.strip().partition(b"=")
            if name == COOKIE:
                found.append(value)
    return found


def query_token(target: bytes) -> bytes | None:
    """The token in the query of a request target."""
    for part in _query_parts(target):
        name, _, value = part.partition(b"=")
        if name == QUERY_NAME:
            return value
    return None


def without_query_token(target: bytes) -> bytes:
    """The target as the server inside and the address bar see it; everything else of it stays as it was."""
    path, mark, _ = target.partition(b"?")
    if not mark or QUERY_NAME not in target:
        return target
    kept = [part for part in _query_parts(target) if part.partition(b"=")[0] != QUERY_NAME]
    return path + b"?" + b"&".join(kept) if kept else path


def _query_parts(target: bytes) -> Iterable[bytes]:
    _, mark, query = target.partition(b"?")
    return query.split(b"&") if mark else ()


def _is_ours(name: bytes, value: bytes) -> bool:
    """A header that carries an API key or a ticket of this platform."""
    if b"cpk_" in value and _API_KEY.search(value):
        return True
    if name != b"authorization":
        return False
    if match := _BEARER.fullmatch(value.strip()):
        return _is_ticket(match[1])
    if match := _BASIC.fullmatch(value.strip()):
        try:
            pair = base64.b64decode(match[1])
        except (binascii.Error, ValueError):
            return False
        return _API_KEY.search(pair) is not None or any(_is_ticket(part) for part in pair.split(b":"))
    return False


def _is_ticket(text: bytes) -> bool:
    """Whether it says to be of this platform; whether it is good does not matter here."""
    parts = text.split(b".")
    if len(parts) != 3:
        return False
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + b"=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return False
    return isinstance(claims, dict) and claims.get("iss") == "cpuos"


def _without_own_cookies(value: bytes) -> bytes:
    kept = [part.strip() for part in value.split(b";")]
    return b"; ".join(part for part in kept if part and not _OWN_COOKIE.match(part))


def _without_token_in_referer(value: bytes) -> bytes:
    base, mark, fragment = value.partition(b"#")
    return without_query_token(base) + mark + fragment


def _for_this_host(value: bytes) -> bytes:
    """A Set-Cookie that holds for the page's own host only; empty when it would be one of ours."""
    first, *attributes = value.split(b";")
    if _OWN_COOKIE.match(first.strip()):
        return b""
    return b";".join([first, *(part for part in attributes if not _DOMAIN.fullmatch(part))])
