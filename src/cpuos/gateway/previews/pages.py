"""What a visitor gets where the server inside has nothing to say: a small page, or JSON, never a cookie."""

from __future__ import annotations

import html
import json

from cpuos.errors import CpuosError

__all__ = ["error_answer", "redirect_answer"]

RETRY_AFTER_S = 2
_TITLES = {
    "sandbox_not_found": "Sandbox not found",
    "sandbox_stopped": "Sandbox has ended",
    "sandbox_lost": "Sandbox has ended",
    "sandbox_paused": "Sandbox is paused",
    "port_not_open": "Port is not open",
    "port_answer_invalid": "No valid answer",
    "key_missing": "This preview is private",
    "ticket_invalid": "This link is not valid",
    "ticket_expired": "This link has expired",
    "limit_reached": "Too many open requests",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:15vh auto;padding:0 1rem;color:#222}}
code{{background:#eee;padding:.1em .3em;overflow-wrap:anywhere}}</style></head>
<body><h1>{title}</h1><p>{what}</p><p>{why}</p><p>Try: <code>{hint}</code></p></body></html>
"""

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]


def error_answer(error: CpuosError, *, page: bool) -> Answer:
    """Status, headers and body; `X-Cpuos-Error` tells programs that it is not the server inside that speaks."""
    if page:
        what, why, hint = error.lines()
        values = {"title": _TITLES.get(error.code, "Cannot show the preview"), "what": what, "why": why, "hint": hint}
        body = _PAGE.format(**{name: html.escape(value) for name, value in values.items()}).encode()
    else:
        body = json.dumps(error.body()).encode()
    headers = [
        (b"Content-Type", b"text/html; charset=utf-8" if page else b"application/json"),
        (b"Content-Security-Policy", b"default-src 'none'; style-src 'unsafe-inline'"),
        (b"X-Cpuos-Error", error.code.encode("ascii")),
        *_NEVER_KEPT,
    ]
    if error.status == 503:
        headers.append((b"Retry-After", b"%d" % RETRY_AFTER_S))
    return error.status, [*headers, (b"Content-Length", b"%d" % len(body))], body


def redirect_answer(location: bytes, *, cookie: bytes | None = None) -> Answer:
    """To the same page by another name. With a cookie: without the token, which the browser keeps from here on."""
    headers = [(b"Location", location), *_NEVER_KEPT, (b"Content-Length", b"0")]
    return 302, [(b"Set-Cookie", cookie), *headers] if cookie is not None else headers, b""


_NEVER_KEPT = [
    (b"Cache-Control", b"no-store"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"X-Content-Type-Options", b"nosniff"),
]
