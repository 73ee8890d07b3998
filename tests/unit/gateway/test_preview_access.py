"""Who is let in to a preview, and when that ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from gateway_rig import SANDBOX, open_rig
from preview_rig import Answer, Headers, Inside, PreviewRig, Visitor, open_previews, serving
from test_preview_proxy import WEBSOCKET, upgrade_and_echo

from cpuos.gateway.previews import visits
from cpuos.gateway.previews.ports import MAX_PORTS

PAGE: Headers = [("Accept", "text/html,application/xhtml+xml,*/*;q=0.8")]
COOKIE = "__Host-cpuos-preview"


def code(answer: Answer) -> str | None:
    return answer.one("x-cpuos-error")


def cookie(token: str) -> Headers:
    return [("Cookie", f"{COOKIE}={token}")]


async def test_private_is_the_default(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        answer = await previews.get(inside.port)
        assert (answer.status, code(answer)) == (401, "key_missing")
        page = await previews.get(inside.port, headers=PAGE)
        assert (page.status, page.one("location")) == (401, None)
        assert b"This preview is private" in page.body
        assert page.all("set-cookie") == []
        assert inside.heads == []


async def test_a_token_opens_by_header_query_and_cookie(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        token = previews.token(inside.port)
        for target, headers in (
            ("/a", [("X-Cpuos-Preview-Token", token)]),
            (f"/a?cpuos_token={token}", []),
            ("/a", cookie(token)),
            ("/a", [("Cookie", f"other=1; {COOKIE}=wrong; {COOKIE}={token}")]),
        ):
            answer = await previews.get(inside.port, target, headers=headers)
            assert (answer.status, answer.all("set-cookie")) == (200, [])
            head = inside.heads[-1]
            assert head.startswith(b"GET /a HTTP/1.1\r\n")
            assert token.encode() not in head
            assert b"cpuos" not in head.lower()


async def test_a_browser_keeps_the_token_as_a_cookie(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        token = previews.token(inside.port)
        answer = await previews.get(inside.port, f"/a?x=1&cpuos_token={token}&y=2", headers=PAGE)
        assert answer.status == 302
        assert answer.one("location") == f"http://{previews.host(inside.port)}/a?x=1&y=2"
        assert answer.one("cache-control") == "no-store"
        assert answer.one("referrer-policy") == "no-referrer"
        kept = answer.one("set-cookie")
        assert kept is not None
        pair, *attributes = kept.split("; ")
        assert pair == f"{COOKIE}={token}"
        assert attributes[:4] == ["Path=/", "Secure", "HttpOnly", "SameSite=Lax"]
        assert 590 <= int(attributes[4].removeprefix("Max-Age=")) <= 600
        assert inside.heads == []
        followed = await previews.get(inside.port, "/a?x=1&y=2", headers=[*PAGE, *cookie(token)])
        assert followed.status == 200


async def test_a_redirect_leads_to_the_same_host_only(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        token = previews.token(inside.port)
        for path in ("//evil.example/", "/\\evil.example", "/@evil.example", "/.evil.example"):
            answer = await previews.get(inside.port, f"{path}?cpuos_token={token}", headers=PAGE)
            assert answer.status == 302
            assert answer.one("location") == f"http://{previews.host(inside.port)}{path}"


async def test_a_browser_without_cookies_is_not_sent_in_circles(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        answer = await previews.get(inside.port, f"/?cpuos_token={previews.token(inside.port)}", headers=PAGE)
        assert answer.one("location") == f"http://{previews.host(inside.port)}/"
        assert (await previews.get(inside.port, "/", headers=PAGE)).status == 401


async def test_a_good_cookie_makes_up_for_a_stale_link(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        stale = previews.token(inside.port, exp=int(time.time()) - 5)
        good = previews.token(inside.port)
        answer = await previews.get(inside.port, f"/a?cpuos_token={stale}", headers=[*PAGE, *cookie(good)])
        assert answer.status == 200
        assert inside.heads[0].startswith(b"GET /a HTTP/1.1\r\n")
        alone = await previews.get(inside.port, f"/a?cpuos_token={stale}", headers=PAGE)
        assert (alone.status, code(alone)) == (401, "ticket_expired")
        assert b"This link has expired" in alone.body


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"exp": 1}, "ticket_expired"),
        ({"sbx": "t" * 20}, "ticket_invalid"),
        ({"gen": 2}, "ticket_invalid"),
        ({"gen": 0}, "ticket_invalid"),
        ({"port": 4000}, "ticket_invalid"),
        ({"port": None}, "ticket_invalid"),
        ({"port": "3000"}, "ticket_invalid"),
        ({"epoch": 2}, "ticket_invalid"),
        ({"epoch": 0}, "ticket_invalid"),
        ({"epoch": None}, "ticket_invalid"),
        ({"epoch": True}, "ticket_invalid"),
        ({"scope": ["exec", "files"]}, "ticket_invalid"),
        ({"scope": ["link"], "path": "/workspace/a"}, "ticket_invalid"),
        ({"scope": ["preview", "root"]}, "ticket_invalid"),
        ({"iss": "elsewhere"}, "ticket_invalid"),
    ],
)
async def test_every_way_a_token_is_refused(previews: PreviewRig, changes: dict[str, Any], refusal: str) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        token = previews.token(inside.port, **changes)
        for headers in ([("X-Cpuos-Preview-Token", token)], cookie(token)):
            answer = await previews.get(inside.port, headers=headers)
            assert (answer.status, code(answer)) == (401, refusal)
        assert inside.heads == []


async def test_a_token_that_was_signed_by_nobody_is_refused(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        good = previews.token(inside.port)
        head, claims, signature = good.split(".")
        for token in (
            "",
            "x",
            "a.b.c",
            f"{head}.{claims}.",
            f"{head}.{claims}.{signature[::-1]}",
            "é" * 10,
            "a" * 9000,
        ):
            answer = await previews.get(inside.port, headers=[("X-Cpuos-Preview-Token", token)])
            assert (answer.status, code(answer)) == (401, "ticket_invalid"), token


async def test_a_preview_token_opens_nothing_else(previews: PreviewRig) -> None:
    token = previews.token(3000)
    async with previews.rig.client(scope=["preview"], port=3000, epoch=1) as client:
        for method, path in (("GET", "/commands"), ("POST", "/commands"), ("GET", "/files?path=/etc/passwd")):
            answer = await client.call(method, path)
            assert answer.status_code == 403
        answer = await client.http.get(f"/v1/links/{token}")
        assert answer.status_code == 403


async def test_what_was_never_published_is_not_opened_by_a_token(previews: PreviewRig) -> None:
    async with serving() as inside:
        answer = await previews.get(inside.port, headers=previews.auth(inside.port))
        assert (answer.status, code(answer)) == (401, "ticket_invalid")


async def test_closing_voids_tokens_and_cuts_what_is_open(previews: PreviewRig) -> None:
    async with serving(upgrade_and_echo) as inside:
        await previews.publish(inside.port)
        await previews.publish(inside.port + 1)
        visitor = await previews.visitor()
        headers = [*WEBSOCKET, *previews.auth(inside.port)]
        lines = [f"{name}: {value}" for name, value in headers]
        await visitor.send(
            "\r\n".join(["GET / HTTP/1.1", f"Host: {previews.host(inside.port)}", *lines, "", ""]).encode()
        )
        await asyncio.wait_for(visitor.reader.readuntil(b"first"), 20)
        assert await previews.close_port(inside.port + 1) == 0
        assert await previews.close_port(inside.port) == 1
        assert await visitor.ended() == b""
        again = await previews.get(inside.port, headers=previews.auth(inside.port))
        assert (again.status, code(again)) == (401, "ticket_invalid")
        await previews.publish(inside.port, epoch=2)
        assert (await previews.get(inside.port, headers=previews.auth(inside.port, epoch=1))).status == 401
        assert (await previews.get(inside.port, headers=previews.auth(inside.port, epoch=2))).status == 502


@pytest.mark.parametrize("which", [{"jti": "mine"}, {"actor": "key:test"}, {"sandbox": SANDBOX}])
async def test_revoking_cuts_what_is_open(previews: PreviewRig, which: dict[str, str]) -> None:
    async with serving(upgrade_and_echo) as inside:
        await previews.publish(inside.port)
        visitor = await previews.visitor()
        token = previews.token(inside.port, jti="mine")
        lines = [f"{name}: {value}" for name, value in [*WEBSOCKET, ("X-Cpuos-Preview-Token", token)]]
        await visitor.send(
            "\r\n".join(["GET / HTTP/1.1", f"Host: {previews.host(inside.port)}", *lines, "", ""]).encode()
        )
        await asyncio.wait_for(visitor.reader.readuntil(b"first"), 20)
        answer = await previews.rig.control.post("/v1/tickets/revoke", json=which)
        assert answer.json() == {"ended_calls": 1}
        assert await visitor.ended() == b""
        refused = await previews.get(inside.port, headers=[("X-Cpuos-Preview-Token", token)])
        assert (refused.status, code(refused)) == (401, "ticket_invalid")


async def open_socket(previews: PreviewRig, port: int, *headers: tuple[str, str]) -> Any:
    visitor = await previews.visitor()
    lines = [f"{name}: {value}" for name, value in [*WEBSOCKET, *headers]]
    await visitor.send("\r\n".join(["GET / HTTP/1.1", f"Host: {previews.host(port)}", *lines, "", ""]).encode())
    await asyncio.wait_for(visitor.reader.readuntil(b"first"), 20)
    return visitor


@pytest.fixture
def later(previews: PreviewRig, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clock that tokens and ports go by so many seconds on."""
    monkeypatch.setattr(visits, "LOOK_AGAIN_S", 0.05)
    doorkeeper = previews.rig.gateway.previews.doorkeeper
    return lambda seconds: monkeypatch.setattr(doorkeeper, "_clock", lambda: time.time() + seconds)


async def still_open(visitor: Visitor) -> bool:
    visitor.writer.write(b"still")
    return bool(await asyncio.wait_for(visitor.reader.readuntil(b"STILL"), 20))


async def test_what_is_open_is_cut_as_its_token_expires(previews: PreviewRig, later: Callable[[float], None]) -> None:
    async with serving(upgrade_and_echo) as inside:
        await previews.publish(inside.port)
        short, long = (previews.token(inside.port, exp=int(time.time()) + seconds) for seconds in (600, 6000))
        cut = await open_socket(previews, inside.port, ("X-Cpuos-Preview-Token", short))
        kept = await open_socket(previews, inside.port, ("X-Cpuos-Preview-Token", long))
        later(590)
        assert await still_open(cut)
        later(601)
        assert await cut.ended() == b""
        assert await still_open(kept)


async def test_what_is_open_is_cut_as_a_public_port_ends_and_not_where_that_was_put_off(
    previews: PreviewRig, later: Callable[[float], None]
) -> None:
    async with serving(upgrade_and_echo) as ending, serving(upgrade_and_echo) as put_off:
        for inside in (ending, put_off):
            await previews.publish(inside.port, public=True, public_until=time.time() + 600)
        cut, kept = await open_socket(previews, ending.port), await open_socket(previews, put_off.port)
        await previews.publish(put_off.port, public=True, public_until=time.time() + 6000)
        later(601)
        assert await cut.ended() == b""
        assert await still_open(kept)


async def test_nothing_is_left_of_the_time_of_what_has_ended(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        assert (await previews.get(inside.port, headers=previews.auth(inside.port))).status == 200
        shared = previews.rig.gateway.previews
        assert (shared.admitted, shared._timers) == ({}, {})


async def test_public_needs_no_token_until_it_ends(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port, public=True, public_until=time.time() + 60)
        assert (await previews.get(inside.port)).status == 200
        wrong = await previews.get(inside.port, "/?cpuos_token=wrong", headers=[("X-Cpuos-Preview-Token", "wrong")])
        assert wrong.status == 200
        assert b"wrong" not in inside.heads[-1]
        await previews.publish(inside.port, public=True, public_until=time.time() - 1)
        assert (await previews.get(inside.port)).status == 401
        assert (await previews.get(inside.port, headers=previews.auth(inside.port))).status == 200


async def test_no_longer_public_cuts_visitors_without_a_token(previews: PreviewRig) -> None:
    async with serving(upgrade_and_echo) as inside:
        await previews.publish(inside.port, public=True)
        visitor = await previews.visitor()
        lines = [f"{name}: {value}" for name, value in WEBSOCKET]
        await visitor.send(
            "\r\n".join(["GET / HTTP/1.1", f"Host: {previews.host(inside.port)}", *lines, "", ""]).encode()
        )
        await asyncio.wait_for(visitor.reader.readuntil(b"first"), 20)
        await previews.publish(inside.port, public=False)
        assert await visitor.ended() == b""


async def test_what_is_published_survives_a_restart(previews: PreviewRig, dialler: Any) -> None:
    async with serving() as public, serving() as private, serving() as closed:
        await previews.publish(public.port, public=True)
        await previews.publish(private.port, epoch=3)
        await previews.publish(closed.port, public=True)
        await previews.close_port(closed.port)
        folder, mint = previews.rig.folder, previews.rig.mint
        (folder / "second").mkdir()
        (folder / "state").rename(folder / "second" / "state")
        async with open_rig(folder / "second", dialler, mint=mint) as rig, open_previews(rig) as after:
            assert (await after.get(public.port)).status == 200
            assert (await after.get(private.port)).status == 401
            assert (await after.get(private.port, headers=after.auth(private.port, epoch=3))).status == 200
            assert (await after.get(closed.port)).status == 401
            # What was on its way when the port was closed does not open it again.
            answer = await rig.control.put(
                f"/v1/sandboxes/{SANDBOX}/ports/{closed.port}", json={"epoch": 1, "generation": 1, "public": True}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "wrong_state")


async def test_another_generation_begins_closed(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port, public=True)
        assert (await previews.rig.attach(generation=2)).status_code == 200
        assert (await previews.get(inside.port)).status == 401
        token = previews.token(inside.port, gen=2)
        assert (await previews.get(inside.port, headers=[("X-Cpuos-Preview-Token", token)])).status == 401
        await previews.publish(inside.port, epoch=1, generation=2)
        assert (await previews.get(inside.port, headers=[("X-Cpuos-Preview-Token", token)])).status == 200
        assert (await previews.get(inside.port, headers=previews.auth(inside.port))).status == 401


async def test_a_sandbox_publishes_so_many_ports(previews: PreviewRig) -> None:
    for port in range(2, MAX_PORTS + 2):
        await previews.publish(port)
    body = {"epoch": 1, "generation": 1}
    answer = await previews.rig.control.put(f"/v1/sandboxes/{SANDBOX}/ports/60000", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "limit_reached")
    await previews.close_port(2)
    await previews.publish(2, epoch=2)
    await previews.close_port(60000)


@pytest.mark.parametrize("port", ["1", "0", "65536", "99999999999", "-3000", "3000x", "٣"])
async def test_ports_that_are_none_are_not_published(previews: PreviewRig, port: str) -> None:
    body = {"epoch": 1, "generation": 1}
    answer = await previews.rig.control.put(f"/v1/sandboxes/{SANDBOX}/ports/{port}", json=body)
    assert answer.status_code == 422


async def test_the_agents_own_port_is_refused(previews: PreviewRig) -> None:
    token = previews.token(1)
    answer = await previews.get(1, headers=[("X-Cpuos-Preview-Token", token)])
    assert (answer.status, code(answer)) == (403, "forbidden")


# Which pages a browser may take its cookie to. Each row: the headers that the browser adds, and whether it is let in.
def fetched(site: str, mode: str, destination: str) -> Headers:
    return [("Sec-Fetch-Site", site), ("Sec-Fetch-Mode", mode), ("Sec-Fetch-Dest", destination)]


@pytest.mark.parametrize(
    ("method", "headers", "admitted"),
    [
        ("GET", [], True),
        ("GET", fetched("none", "navigate", "document"), True),
        ("GET", fetched("same-origin", "cors", "empty"), True),
        ("POST", [*fetched("same-origin", "cors", "empty"), ("Origin", "OWN")], True),
        ("POST", [("Origin", "OWN")], True),
        ("GET", fetched("cross-site", "navigate", "document"), True),  # a link in a chat
        ("GET", fetched("same-site", "navigate", "document"), True),
        ("GET", fetched("same-site", "navigate", "iframe"), False),  # framed by another sandbox's page
        ("GET", fetched("same-site", "no-cors", "image"), False),
        ("GET", fetched("same-site", "cors", "empty"), False),
        ("GET", [*fetched("same-site", "cors", "empty"), ("Origin", "SIBLING")], False),
        ("POST", [*fetched("same-site", "navigate", "document"), ("Origin", "SIBLING")], False),  # a form
        ("POST", fetched("cross-site", "navigate", "document"), False),
        ("POST", [("Origin", "SIBLING")], False),
        ("POST", [("Origin", "null")], False),
        ("GET", [("Origin", "http://evil.example")], False),
        ("GET", [("Origin", "OWN"), ("Origin", "OWN")], False),
    ],
)
async def test_a_cookie_opens_to_the_previews_own_pages(
    previews: PreviewRig, method: str, headers: Headers, admitted: bool
) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        names = {
            "OWN": f"http://{previews.host(inside.port)}",
            "SIBLING": f"http://{previews.host(inside.port, sandbox='t' * 20)}",
        }
        sent = [(name, names.get(value, value)) for name, value in headers] + cookie(previews.token(inside.port))
        answer = await previews.get(inside.port, headers=sent, method=method)
        assert answer.status == (200 if admitted else 403)
        assert len(inside.heads) == admitted
        # A token that was put there on purpose is no browser's doing.
        on_purpose = [(name, names.get(value, value)) for name, value in headers] + previews.auth(inside.port)
        assert (await previews.get(inside.port, headers=on_purpose, method=method)).status == 200


@pytest.mark.parametrize(
    ("origin", "shown", "status"),
    [
        ("OWN", "cookie", 101),
        ("SIBLING", "cookie", 403),
        ("http://evil.example", "cookie", 403),
        ("null", "cookie", 403),
        (None, "cookie", 403),
        ("OWN", "nothing", 401),
        (None, "nothing", 401),
        (None, "header", 101),
        ("http://evil.example", "header", 101),
        (None, "query", 101),
        ("OWN", "query", 101),
    ],
)
async def test_websockets_are_let_in_or_refused_never_redirected(
    previews: PreviewRig, origin: str | None, shown: str, status: int
) -> None:
    async with serving(upgrade_and_echo) as inside:
        await previews.publish(inside.port)
        token = previews.token(inside.port)
        names = {
            "OWN": f"http://{previews.host(inside.port)}",
            "SIBLING": f"http://{previews.host(inside.port, sandbox='t' * 20)}",
        }
        headers = [*WEBSOCKET, *PAGE]
        headers += [("Origin", names.get(origin, origin))] if origin else []
        headers += {"cookie": cookie(token), "header": [("X-Cpuos-Preview-Token", token)]}.get(shown, [])
        target = f"/ws?cpuos_token={token}" if shown == "query" else "/ws"
        lines = [f"{name}: {value}" for name, value in headers]
        visitor = await previews.visitor()
        head = "\r\n".join([f"GET {target} HTTP/1.1", f"Host: {previews.host(inside.port)}", *lines, "", ""])
        await visitor.send(head.encode())
        answer = await asyncio.wait_for(visitor.reader.readuntil(b"\r\n\r\n"), 20)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"location" not in answer.lower()
        assert all(b"cpuos" not in seen.lower() and seen.startswith(b"GET /ws HTTP") for seen in inside.heads)


async def test_programs_come_by_the_address_with_a_token(previews: PreviewRig) -> None:
    """Names below localhost do not resolve everywhere; what a browser could show never comes this way."""
    async with serving() as inside:
        await previews.publish(inside.port)
        token = previews.token(inside.port)

        async def ask(host: str, target: str = "/", headers: Headers | None = None) -> Answer:
            return await (await previews.visitor()).request(target=target, host=host, headers=headers)

        for host in (f"127.0.0.1:{previews.port}", "localhost", "[::1]:7072"):
            assert (await ask(host, headers=[("X-Cpuos-Preview-Token", token)])).status == 200
            for target, headers in (
                ("/", []),
                (f"/?cpuos_token={token}", []),
                (f"/?cpuos_token={token}", PAGE),
                ("/", cookie(token)),
                ("/", [("X-Cpuos-Preview-Token", token), ("Origin", "http://evil.example")]),
                ("/", [("X-Cpuos-Preview-Token", token), ("Sec-Fetch-Mode", "cors")]),
                (f"/?cpuos_token={token}", [*WEBSOCKET, ("Origin", "http://127.0.0.1")]),
                (f"/?cpuos_token={token}", [*WEBSOCKET, ("Sec-Fetch-Mode", "websocket")]),
            ):
                answer = await ask(host, target, headers)
                assert (answer.status, code(answer)) == (400, "request_malformed")
        assert (await ask("127.0.0.1", headers=[("X-Cpuos-Preview-Token", "x")])).status == 401
        exec_ticket = previews.rig.mint.ticket()
        assert (await ask("127.0.0.1", headers=[("X-Cpuos-Preview-Token", exec_ticket)])).status == 401
        assert (await ask("evil.example", headers=[("X-Cpuos-Preview-Token", token)])).status == 400


async def test_a_debuggers_websocket_comes_by_the_address(previews: PreviewRig) -> None:
    async with serving(upgrade_and_echo) as inside:
        await previews.publish(inside.port)
        token = previews.token(inside.port, host="localhost")
        lines = [f"{name}: {value}" for name, value in WEBSOCKET]
        visitor = await previews.visitor()
        target = f"/devtools/browser/x?cpuos_token={token}"
        await visitor.send("\r\n".join([f"GET {target} HTTP/1.1", "Host: 127.0.0.1:7072", *lines, "", ""]).encode())
        answer = await asyncio.wait_for(visitor.reader.readuntil(b"\r\n\r\n"), 20)
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert inside.header("host") == f"localhost:{inside.port}"


def test_inside_keeps_what_it_was_sent() -> None:
    inside = Inside(heads=[b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n"])
    assert (inside.header("host"), inside.header("x"), inside.header("z")) == ("a", "y", None)
