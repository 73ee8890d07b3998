"""Which headers pass, as tables."""

from __future__ import annotations

import base64
import json

import pytest

from cpuos.gateway.previews.headers import (
    Visitor,
    answer_headers,
    query_token,
    request_headers,
    without_query_token,
)

HOST = b"3000-abcdefghij0123456789.preview.localhost:7072"
VISITOR = Visitor(address="192.0.2.7", scheme="https", host=HOST)
TICKET = ".".join(
    base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
    for part in ({"alg": "EdDSA"}, {"iss": "cpuos", "sbx": "x"}, "signature")
)
FOREIGN = ".".join(
    base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
    for part in ({"alg": "RS256"}, {"iss": "https://login.example"}, "signature")
)
KEY = "cpk_0123456789ab_" + "k" * 43
BASIC_KEY = base64.b64encode(f"user:{KEY}".encode()).decode()
BASIC_TICKET = base64.b64encode(f"token:{TICKET}".encode()).decode()
BASIC = base64.b64encode(b"user:password").decode()

ALWAYS = [
    ("Host", HOST.decode()),
    ("X-Forwarded-For", "192.0.2.7"),
    ("X-Forwarded-Host", HOST.decode()),
    ("X-Forwarded-Proto", "https"),
]


def sent(*headers: tuple[str, str], visitor: Visitor = VISITOR, websocket: bool = False) -> list[tuple[str, str]]:
    """What the server inside gets beyond what it always gets."""
    given = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    passed = [
        (name.decode(), value.decode("latin-1")) for name, value in request_headers(given, visitor, websocket=websocket)
    ]
    for row in ALWAYS:
        if visitor is VISITOR:
            passed.remove(row)
    return passed


@pytest.mark.parametrize(
    "header",
    [
        ("Accept", "*/*"),
        ("Cookie", "session=1; theme=dark"),
        ("Authorization", f"Bearer {FOREIGN}"),
        ("Authorization", "Bearer sk-something"),
        ("Authorization", f"Basic {BASIC}"),
        ("Authorization", "Digest username=x"),
        ("X-Api-Key", "theirs"),
        ("Origin", "https://elsewhere.example"),
        ("Referer", "https://elsewhere.example/?q=1"),
        ("Expect", "100-continue"),
        ("Sec-Fetch-Site", "none"),
        ("Range", "bytes=0-1"),
        ("Via", "1.1 somebody"),
        ("x-my_header", "with an underscore"),
    ],
)
def test_what_passes_to_the_server(header: tuple[str, str]) -> None:
    assert sent(header) == [header]


@pytest.mark.parametrize(
    "header",
    [
        ("Host", "another.example"),
        ("Connection", "keep-alive"),
        ("Keep-Alive", "timeout=5"),
        ("TE", "trailers"),
        ("Trailer", "x"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Length", "5"),
        ("Upgrade", "h2c"),
        ("HTTP2-Settings", "AAA"),
        ("Proxy-Authorization", "Basic eDp5"),
        ("Proxy-Connection", "keep-alive"),
        ("Authorization", f"Bearer {KEY}"),
        ("Authorization", f"bearer   {TICKET}"),
        ("Authorization", f"Bearer {TICKET}"),
        ("Authorization", f"Basic {BASIC_KEY}"),
        ("Authorization", f"Basic {BASIC_TICKET}"),
        ("X-Api-Key", KEY),
        ("Cookie2", KEY),
        ("X-Cpuos-Preview-Token", TICKET),
        ("X-CPUOS-Anything", "1"),
        ("X_Cpuos_Preview_Token", TICKET),
        ("X-Forwarded-For", "10.0.0.1"),
        ("x-forwarded-host", "api.example"),
        ("X_Forwarded_For", "10.0.0.1"),
        ("X-Forwarded-Prefix", "/x"),
        ("X-Forwarded", "for=1"),
        ("Forwarded", "for=10.0.0.1"),
        ("X-Real-IP", "10.0.0.1"),
        ("True-Client-IP", "10.0.0.1"),
        ("X-Original-URL", "/admin"),
        ("Cookie", f"__Host-cpuos-preview={TICKET}"),
        ("Cookie", f"  __Host-cpuos-preview={TICKET} ; __host-CPUOS-session=1;cpuos_session=2; __Secure-cpuos-x=1"),
    ],
)
def test_what_ends_here(header: tuple[str, str]) -> None:
    assert sent(header) == []


def test_own_cookies_are_taken_out_of_the_others() -> None:
    given = ("Cookie", f"a=1; __Host-cpuos-preview={TICKET};b=2;  cpuos-x=3; c=cpuos_")
    assert sent(given) == [("Cookie", "a=1; b=2; c=cpuos_")]


def test_headers_named_by_connection_end_here() -> None:
    assert sent(("Connection", "close, X-Once"), ("X-Once", "1"), ("Connection", "X-Twice"), ("X-Twice", "2")) == []


def test_connection_cannot_name_what_is_set_here() -> None:
    assert sent(("Connection", "Host, X-Forwarded-For, X-Forwarded-Host, X-Forwarded-Proto")) == []


def test_a_token_in_the_referer_is_taken_out() -> None:
    referer = f"https://{HOST.decode()}/a?x=1&cpuos_token={TICKET}&y=2#f"
    assert sent(("Referer", referer)) == [("Referer", f"https://{HOST.decode()}/a?x=1&y=2#f")]


def test_an_upgrade_is_said_anew() -> None:
    given = [("Connection", "keep-alive, Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Key", "k")]
    assert sent(*given, websocket=True) == [
        ("Sec-WebSocket-Key", "k"),
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
    ]


def test_host_and_origin_are_rewritten_together() -> None:
    visitor = Visitor(address="192.0.2.7", scheme="https", host=HOST, rewritten_host=b"localhost:9222")
    passed = sent(("Origin", f"https://{HOST.decode()}"), visitor=visitor)
    assert ("Host", "localhost:9222") in passed
    assert ("Origin", "http://localhost:9222") in passed
    assert ("X-Forwarded-Host", HOST.decode()) in passed
    foreign = sent(("Origin", "https://evil.example"), visitor=visitor)
    assert ("Origin", "https://evil.example") in foreign


def answered(*headers: tuple[str, str]) -> list[tuple[str, str]]:
    given = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return [(name.decode(), value.decode("latin-1")) for name, value in answer_headers(given)]


@pytest.mark.parametrize(
    "header",
    [
        ("Content-Type", "text/html"),
        ("Set-Cookie", "a=1; Path=/; HttpOnly; SameSite=Lax"),
        ("Set-Cookie", "domain=1; Path=/"),
        ("Location", "https://elsewhere.example/"),
        ("Access-Control-Allow-Origin", "*"),
        ("Content-Security-Policy", "default-src 'self'"),
        ("Server", "theirs"),
        ("ETag", '"x"'),
    ],
)
def test_what_passes_to_the_visitor(header: tuple[str, str]) -> None:
    assert answered(header) == [header]


@pytest.mark.parametrize(
    "header",
    [
        ("Connection", "close"),
        ("Keep-Alive", "timeout=5"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Length", "1"),
        ("Trailer", "x"),
        ("Strict-Transport-Security", "max-age=31536000; includeSubDomains; preload"),
        ("Public-Key-Pins", 'pin-sha256="x"'),
        ("Alt-Svc", 'h3=":443"'),
        ("Clear-Site-Data", '"cookies"'),
        ("NEL", "{}"),
        ("Service-Worker-Allowed", "/"),
        ("X-Cpuos-Error", "port_not_open"),
        ("Set-Cookie", "__Host-cpuos-preview=stolen; Path=/; Secure"),
        ("Set-Cookie", "  __HOST-cpuos-session=1"),
        ("Set-Cookie", "cpuos_session=1"),
        ("Set-Cookie", "=__Host-cpuos-preview=stolen; Path=/"),
    ],
)
def test_what_does_not_reach_the_visitor(header: tuple[str, str]) -> None:
    assert answered(header) == []


@pytest.mark.parametrize(
    "attribute",
    [
        "Domain=preview.localhost",
        "domain=.preview.localhost",
        " DOMAIN = localhost ",
        "Domain",
        "\tdomain=x",
        "Domain=",
    ],
)
def test_a_cookie_stays_on_its_host(attribute: str) -> None:
    assert answered(("Set-Cookie", f"a=1; Path=/;{attribute}; HttpOnly")) == [("Set-Cookie", "a=1; Path=/; HttpOnly")]
    assert answered(("Set-Cookie", f"a=1;{attribute};{attribute}")) == [("Set-Cookie", "a=1")]


@pytest.mark.parametrize(
    ("target", "token", "without"),
    [
        ("/", None, "/"),
        ("/?cpuos_token=t", "t", "/"),
        ("/a?cpuos_token=t&b=1", "t", "/a?b=1"),
        ("/a?b=1&cpuos_token=t", "t", "/a?b=1"),
        ("/a?b=1&cpuos_token=t&cpuos_token=u&c", "t", "/a?b=1&c"),
        ("/a?b=%20&&c=1&cpuos_token=", "", "/a?b=%20&&c=1"),
        ("/a?xcpuos_token=1", None, "/a?xcpuos_token=1"),
        ("/cpuos_token=1", None, "/cpuos_token=1"),
        ("/a?b=/?cpuos_token=1", None, "/a?b=/?cpuos_token=1"),
        ("//evil.example/?cpuos_token=t", "t", "//evil.example/"),
    ],
)
def test_tokens_in_queries(target: str, token: str | None, without: str) -> None:
    found = query_token(target.encode())
    assert (None if found is None else found.decode()) == token
    assert without_query_token(target.encode()).decode() == without
