"""The reader of preview host names, as a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.errors import CpuosError
from cpuos.gateway.previews.hosts import Place, is_plain_address, is_same_origin, parse_host, preview_host

ID = "abcdefghij0123456789"
DOMAIN = "preview.localhost"
PLACE = Place(sandbox=ID, port=3000)


@pytest.mark.parametrize(
    "host",
    [
        f"3000-{ID}.{DOMAIN}",
        f"3000-{ID}.{DOMAIN}:7072",
        f"3000-{ID}.{DOMAIN}:1",
        f"3000-{ID.upper()}.PREVIEW.LocalHost:65535",
    ],
)
def test_spellings_of_one_place(host: str) -> None:
    assert parse_host(host.encode(), DOMAIN) == PLACE


@pytest.mark.parametrize("port", [2, 80, 443, 9222, 65535])
def test_every_port_has_a_host(port: int) -> None:
    place = Place(sandbox=ID, port=port)
    assert parse_host(preview_host(place, DOMAIN).encode(), DOMAIN) == place


@pytest.mark.parametrize(
    "host",
    [
        "",
        DOMAIN,
        f".{DOMAIN}",
        f"{ID}.{DOMAIN}",
        f"3000-{ID}",
        f"3000-{ID}.",
        f"3000-{ID}.{DOMAIN}.",  # the same place to DNS, another one to a browser
        f"3000-{ID}..{DOMAIN}",
        f"x.3000-{ID}.{DOMAIN}",
        f"3000-{ID}.evil.{DOMAIN}",
        f"3000-{ID}.{DOMAIN}.evil.example",
        f"3000-{ID}.evil{DOMAIN}",
        f"3000-{ID}.other.localhost",
        f"3000-{ID[:-1]}.{DOMAIN}",
        f"3000-{ID}a.{DOMAIN}",
        f"3000-{ID[:-1]}-.{DOMAIN}",
        f"3000{ID}.{DOMAIN}",
        f"3000--{ID}.{DOMAIN}",
        f"-3000-{ID}.{DOMAIN}",
        f"+3000-{ID}.{DOMAIN}",
        f"03000-{ID}.{DOMAIN}",
        f"0-{ID}.{DOMAIN}",
        f"65536-{ID}.{DOMAIN}",
        f"99999-{ID}.{DOMAIN}",
        f"300000-{ID}.{DOMAIN}",
        f"0x50-{ID}.{DOMAIN}",
        f"3000-{ID}.{DOMAIN}:",
        f"3000-{ID}.{DOMAIN}:0",
        f"3000-{ID}.{DOMAIN}:65536",
        f"3000-{ID}.{DOMAIN}:7072:80",
        f"3000-{ID}.{DOMAIN}:7O72",
        f"3000-{ID}.{DOMAIN}, 3000-{ID}.{DOMAIN}",
        f"3000-{ID}.{DOMAIN}/",
        f"3000-{ID}.{DOMAIN}?",
        f"user@3000-{ID}.{DOMAIN}",
        f"3000-{ID}.{DOMAIN} ",
        f"3000-{ID}.{DOMAIN}\t",
        f"3000-{ID}%2e{DOMAIN}",
        f"３０００-{ID}.{DOMAIN}",
        f"3000-{ID}.{DOMAIN}\x00",
        "127.0.0.1:7072",
        "[::1]:7072",
        "[::1",
        "::1",
        "localhost",
        "a" * 300,
    ],
)
def test_what_is_no_preview(host: str) -> None:
    with pytest.raises(CpuosError) as raised:
        parse_host(host.encode(), DOMAIN)
    assert raised.value.code == "request_malformed"
    assert raised.value.status == 400


def test_the_agents_port_is_refused() -> None:
    with pytest.raises(CpuosError) as raised:
        parse_host(f"1-{ID}.{DOMAIN}".encode(), DOMAIN)
    assert raised.value.code == "forbidden"


@given(st.binary(max_size=80))
def test_no_bytes_do_more_than_raise_ours(host: bytes) -> None:
    try:
        place = parse_host(host, DOMAIN)
    except CpuosError:
        return
    assert preview_host(place, DOMAIN) == host.decode().lower().partition(":")[0]


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://a.b:7072", "a.b:7072", True),
        ("http://A.b:7072", "a.B:7072", True),
        ("http://a.b", "a.b", True),
        ("http://a.b", "a.b:80", True),
        ("https://a.b", "a.b:443", True),
        ("https://a.b", "a.b", True),
        ("https://a.b", "a.b:80", False),
        ("http://a.b:7072", "a.b", False),
        ("http://a.b:7072", "c.b:7072", False),
        ("http://a.b:7072", "x.a.b:7072", False),
        ("http://a.b:7072.evil", "a.b:7072", False),
        ("http://a.b:7072/", "a.b:7072", False),
        ("http://user@a.b:7072", "a.b:7072", False),
        ("ftp://a.b", "a.b", False),
        ("file://", "a.b", False),
        ("null", "a.b", False),
        ("", "a.b", False),
        ("http://a.b http://c.d", "a.b", False),
    ],
)
def test_same_origins(origin: str, host: str, same: bool) -> None:
    assert is_same_origin(origin.encode(), host.encode()) is same


@pytest.mark.parametrize(
    ("host", "plain"),
    [
        ("127.0.0.1:7072", True),
        ("127.0.0.1", True),
        ("[::1]:7072", True),
        ("localhost:7072", True),
        ("10.1.2.3", True),
        (f"3000-{ID}.{DOMAIN}", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("2130706433", False),
    ],
)
def test_plain_addresses(host: str, plain: bool) -> None:
    assert is_plain_address(host.encode()) is plain
