"""Path mode: previews by path, without cookies and without an origin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from gateway_rig import SANDBOX
from preview_rig import Answer, Headers, PreviewRig, answering, open_previews, serving
from test_preview_proxy import WEBSOCKET, upgrade_and_echo

from cpuos.errors import CpuosError
from cpuos.gateway.previews.access import Asked
from cpuos.gateway.previews.hosts import Place
from cpuos.gateway.previews.paths import locate

PAGE: Headers = [("Accept", "text/html")]
WITH_COOKIES = answering(
    b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2; Domain=x\r\nContent-Security-Policy: default-src *\r\n"
    b"Location: /next\r\nContent-Length: 2\r\n\r\nok"
)


@pytest.fixture
async def paths(previews: PreviewRig) -> AsyncIterator[PreviewRig]:
    async with open_previews(previews.rig, by_path=True) as paths:
        yield paths


async def ask(paths: PreviewRig, target: str, *, headers: Headers | None = None, host: str = "127.0.0.1") -> Answer:
    return await (await paths.visitor()).request(target=target, host=f"{host}:{paths.port}", headers=headers)


def asked(target: str, host: str = "127.0.0.1:7073") -> Asked:
    return Asked(method=b"GET", target=target.encode(), host=host.encode(), headers=[], websocket=False)


@pytest.mark.parametrize(
    ("target", "port", "inside"),
    [
        (f"/{SANDBOX}/3000/", 3000, "/"),
        (f"/{SANDBOX}/3000/a/b?c=d", 3000, "/a/b?c=d"),
        (f"/{SANDBOX}/65535//x", 65535, "//x"),
        (f"/{SANDBOX}/3000", 3000, ""),
        (f"/{SANDBOX}/3000?a", 3000, "?a"),
        (f"/{SANDBOX}/3000/../../etc", 3000, "/../../etc"),  # the server's own affair: the place is fixed before it
    ],
)
def test_paths_that_name_a_place(target: str, port: int, inside: str) -> None:
    found, place = locate(asked(target))
    assert place == Place(sandbox=SANDBOX, port=port)
    assert (found.target.decode(), found.prefix.decode()) == (inside, f"/{SANDBOX}/{port}")


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "*",
        f"/{SANDBOX}",
        f"/{SANDBOX}/",
        f"/{SANDBOX}/0/",
        f"/{SANDBOX}/03000/",
        f"/{SANDBOX}/65536/",
        f"/{SANDBOX}/3000x/",
        f"/{SANDBOX.upper()}/3000/",
        f"/{SANDBOX[:-1]}/3000/",
        f"//{SANDBOX}/3000/",
        f"/x/{SANDBOX}/3000/",
        f"/{SANDBOX}%2f3000/",
    ],
)
def test_paths_that_name_none(target: str) -> None:
    with pytest.raises(CpuosError) as raised:
        locate(asked(target))
    assert raised.value.code == "request_malformed"


def test_the_agents_port_is_refused() -> None:
    with pytest.raises(CpuosError) as raised:
        locate(asked(f"/{SANDBOX}/1/"))
    assert raised.value.code == "forbidden"


async def test_an_answer_has_no_origin_and_no_cookies(paths: PreviewRig) -> None:
    async with serving(WITH_COOKIES) as inside:
        await paths.publish(inside.port, public=True)
        own = f"/{SANDBOX}/{inside.port}"
        answer = await ask(paths, f"{own}/a?b=c", headers=[("Cookie", "session=1"), *PAGE])
        assert (answer.status, answer.body) == (200, b"ok")
        assert answer.all("set-cookie") == []
        assert answer.all("content-security-policy") == [
            "default-src *",
            "sandbox allow-scripts allow-forms allow-downloads",
        ]
        assert answer.one("location") == f"{own}/next"
        assert inside.heads[0].startswith(b"GET /a?b=c HTTP/1.1\r\n")
        assert inside.header("cookie") is None
        assert inside.header("x-forwarded-prefix") == own
        assert inside.header("host") == f"127.0.0.1:{paths.port}"


async def test_a_path_without_its_slash_is_led_to_it(paths: PreviewRig) -> None:
    async with serving() as inside:
        await paths.publish(inside.port, public=True)
        answer = await ask(paths, f"/{SANDBOX}/{inside.port}?x=1")
        assert (answer.status, answer.one("location")) == (302, f"/{SANDBOX}/{inside.port}/?x=1")
        assert answer.all("set-cookie") == []


async def test_a_private_port_opens_to_programs_only(paths: PreviewRig) -> None:
    async with serving(upgrade_and_echo) as inside:
        await paths.publish(inside.port)
        own, token = f"/{SANDBOX}/{inside.port}", paths.token(inside.port)
        for target, headers in (
            (f"{own}/", []),
            (f"{own}/?cpuos_token={token}", []),
            (f"{own}/?cpuos_token={token}", PAGE),
            (f"{own}/", [("Cookie", f"__Host-cpuos-preview={token}")]),
        ):
            answer = await ask(paths, target, headers=headers)
            assert (answer.status, answer.one("x-cpuos-error")) == (401, "key_missing")
            assert answer.all("set-cookie") == []
        assert inside.heads == []
        visitor = await paths.visitor()
        lines = [f"{name}: {value}" for name, value in WEBSOCKET]
        head = "\r\n".join([f"GET {own}/ws?cpuos_token={token} HTTP/1.1", "Host: localhost", *lines, "", ""])
        await visitor.send(head.encode())
        assert (await asyncio.wait_for(visitor.reader.readuntil(b"first"), 20)).startswith(b"HTTP/1.1 101 ")
        assert inside.heads[0].startswith(b"GET /ws HTTP/1.1\r\n")


async def test_the_two_modes_do_not_mix(previews: PreviewRig, paths: PreviewRig) -> None:
    async with serving() as inside:
        await paths.publish(inside.port, public=True)
        by_path = await (await previews.visitor()).request(
            target=f"/{SANDBOX}/{inside.port}/", host=f"127.0.0.1:{previews.port}"
        )
        assert by_path.status == 400
        by_host = await (await paths.visitor()).request(host=paths.host(inside.port))
        assert by_host.status == 400
        assert paths.url == f"http://127.0.0.1:{paths.port}"
