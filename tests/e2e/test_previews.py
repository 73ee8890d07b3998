"""Previews on real sandboxes: case C29, the browser's debugging port, the command line."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import websockets.exceptions
import websockets.sync.client

from cpuos import Client, Sandbox
from cpuos.errors import NotFound, PortProblem, SandboxGone
from cpuos.testing.instance import Instance
from cpuos.testing.memory import resident_mib
from cpuos.testing.waiting import wait_until

pytestmark = pytest.mark.gvisor
SERVER = Path(__file__).parents[1] / "preview_server.py"


@pytest.fixture(scope="module")
def sandbox(client: Client) -> Iterator[Sandbox]:
    with Sandbox.create(client=client, memory="1GiB", disk="512MiB", timeout="30m") as sandbox:
        sandbox.files.write("/workspace/server.py", SERVER.read_bytes())
        start(sandbox, 3000)
        yield sandbox


def start(sandbox: Sandbox, port: int, *, address: str = "127.0.0.1", more: tuple[str, ...] = ()) -> Any:
    job = sandbox.spawn(["python3", "/workspace/server.py", address, str(port), *more])
    deadline = time.monotonic() + 30
    while not job.output():
        assert not job.refresh().status.ended
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return job


class Page:
    """What a visitor does with a URL, on a machine whose resolver does not know names below localhost."""

    def __init__(self, instance: Instance, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.query = parts.netloc, parts.query
        self.port = instance.settings.preview_port
        assert parts.port == self.port

    def ask(
        self, path: str = "/", *, token: bool = True, method: str = "GET", body: Any = None, **headers: str
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = {"Host": self.host, **{name.replace("_", "-"): value for name, value in headers.items()}}
            connection.request(method, self._target(path, token), headers=sent, body=body)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    @contextmanager
    def stream(self, path: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("GET", self._target(path, True), headers={"Host": self.host})
            yield connection.getresponse()
        finally:
            connection.close()

    @contextmanager
    def websocket(self, path: str = "/ws", *, token: bool = True) -> Iterator[websockets.sync.client.ClientConnection]:
        reached = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        target = f"ws://{self.host}{self._target(path, token)}"
        with websockets.sync.client.connect(target, sock=reached, compression=None, proxy=None) as connection:
            yield connection

    def _target(self, path: str, token: bool) -> str:
        if not token or not self.query:
            return path
        return f"{path}{'&' if '?' in path else '?'}{self.query}"


def lines(text: bytes) -> dict[str, str]:
    head = text.decode().split("\r\n")
    return {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head[1:] if line}


@pytest.fixture(scope="module")
def private(instance: Instance, sandbox: Sandbox) -> Page:
    return Page(instance, sandbox.ports.url(3000))


# C29, line by line.


def test_c29_the_host_is_the_same_for_get_and_websocket(private: Page) -> None:
    _, body = private.ask("/")
    with private.websocket() as connection:
        upgraded = lines(str(connection.recv()).encode())
    assert lines(body)["host"] == upgraded["host"] == private.host


def test_c29_a_websocket_passes_with_its_token_and_is_refused_without(private: Page) -> None:
    with private.websocket() as connection:
        connection.recv()
        connection.send("hello")
        assert connection.recv() == "hello"
    refused = pytest.raises(websockets.exceptions.InvalidStatus)
    with refused as raised, private.websocket(token=False):
        pass
    assert raised.value.response.status_code == 401
    assert "location" not in raised.value.response.headers
    answer, body = private.ask("/", token=False)
    assert (answer.status, json.loads(body)["error"]["code"]) == (401, "key_missing")


def test_c29_events_arrive_within_200_ms(private: Page) -> None:
    late = []
    with private.stream("/events?20") as answer:
        while len(late) < 20:
            line = answer.readline()
            if line.startswith(b"data: "):
                late.append(time.time() - float(line[6:]))
    assert statistics.median(late) < 0.2


@pytest.mark.parametrize(
    "size", [200 << 20, pytest.param(2 << 30, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=["200m", "2g"]
)
def test_c29_large_bodies_pass_with_flat_memory(instance: Instance, private: Page, size: int) -> None:
    gateway = instance.pids()["gateway"]
    before, most = resident_mib(gateway), 0.0
    got = 0
    with private.stream(f"/download?{size}") as answer:
        while piece := answer.read(1 << 20):
            got += len(piece)
            if got % (16 << 20) < len(piece):
                most = max(most, resident_mib(gateway))
    assert got == size

    digest = hashlib.sha1()

    def pieces() -> Iterator[bytes]:
        nonlocal most
        for number in range(size >> 20):
            piece = number.to_bytes(4, "big") * (1 << 18)
            digest.update(piece)
            if number % 16 == 0:
                most = max(most, resident_mib(gateway))
            yield piece

    answer, body = private.ask("/upload", method="POST", body=pieces(), Content_Length=str(size))
    assert answer.status == 200
    assert body.decode().split() == [str(size), digest.hexdigest()]
    assert most - before < 32


@pytest.mark.parametrize("address", ["127.0.0.1", "::", "0.0.0.0", "::1"])
def test_c29_whatever_address_the_server_is_bound_to(instance: Instance, sandbox: Sandbox, address: str) -> None:
    job = start(sandbox, 3100, address=address)
    try:
        page = Page(instance, sandbox.ports.url(3100, public=True))
        assert page.ask("/")[0].status == 200
    finally:
        job.kill()
        sandbox.ports.close(3100)


def test_c29_a_port_that_is_not_open_says_so(instance: Instance, sandbox: Sandbox) -> None:
    page = Page(instance, sandbox.ports.url(3999))
    answer, body = page.ask("/")
    assert (answer.status, json.loads(body)["error"]["code"]) == (502, "port_not_open")
    answer, body = page.ask("/", token=False, Accept="text/html", X_Cpuos_Preview_Token=page.query.partition("=")[2])
    assert (answer.status, answer.getheader("content-type")) == (502, "text/html; charset=utf-8")
    assert b"Port is not open" in body
    assert b"3999" in body


def test_c29_closing_a_port_cuts_what_is_open(instance: Instance, sandbox: Sandbox) -> None:
    start(sandbox, 3200)
    page = Page(instance, sandbox.ports.url(3200))
    with page.websocket() as connection:
        connection.recv()
        sandbox.ports.close(3200)
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            connection.recv(timeout=60)
    answer, body = page.ask("/")
    assert (answer.status, json.loads(body)["error"]["code"]) == (401, "ticket_invalid")
    assert Page(instance, sandbox.ports.url(3200)).ask("/")[0].status == 200


def test_c29_the_server_sees_nothing_of_ours(private: Page) -> None:
    token = private.query.partition("=")[2]
    _, body = private.ask("/", Cookie=f"a=1; __Host-cpuos-preview={token}", Authorization=f"Bearer {token}")
    assert token not in body.decode()
    assert "cpuos" not in body.decode().lower()
    assert lines(body)["cookie"] == "a=1"


# Around it.


def test_what_is_published_is_listed_and_closed(instance: Instance, sandbox: Sandbox) -> None:
    sandbox.ports.url(4001)
    sandbox.ports.url(4002, public=True, expires="1h", host="localhost")
    listed = {port.port: port for port in sandbox.ports.list()}
    assert (listed[4001].public, listed[4001].host) == (False, None)
    assert (listed[4002].public, listed[4002].host) == (True, "localhost")
    assert listed[4002].public_until is not None
    assert sandbox.ports.url(4002).startswith(listed[4002].url + "?cpuos_token=")
    assert {port.port for port in sandbox.ports.list() if port.public} >= {4002}  # asking privately leaves it public
    for port in (4001, 4002, 4003):
        sandbox.ports.close(port)
    assert not {4001, 4002} & {port.port for port in sandbox.ports.list()}
    actions = [entry.action for entry in instance.client().audit(sandbox=sandbox.id, limit=1000).entries]
    assert {"port.open", "port.close"} <= set(actions)


def test_a_gateway_that_starts_anew_shows_what_was_public(client: Client) -> None:
    with Instance(runtime="gvisor", max_sandboxes=2) as own, Sandbox.create(client=own.client(), disk="128MiB") as box:
        box.files.write("/workspace/server.py", SERVER.read_bytes())
        start(box, 3000)
        public, private = Page(own, box.ports.url(3000, public=True)), Page(own, box.ports.url(3000))
        own.kill("gateway")
        own.wait_ready()
        deadline = time.monotonic() + 60
        while public.ask("/")[0].status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert private.ask("/")[0].status == 200
        box.ports.close(3000)
        own.restart("gateway")
        own.wait_ready()
        assert public.ask("/")[0].status == 401
        assert private.ask("/")[0].status == 401


def test_the_end_of_a_sandbox_ends_its_previews(instance: Instance, client: Client) -> None:
    with Sandbox.create(client=client, memory="256MiB", disk="128MiB") as box:
        box.files.write("/workspace/server.py", SERVER.read_bytes())
        start(box, 3000)
        page = Page(instance, box.ports.url(3000))
        with page.websocket() as connection:
            connection.recv()
            box.kill()
            with pytest.raises(websockets.exceptions.ConnectionClosed):
                connection.recv(timeout=60)
        answer, body = page.ask("/")
        assert (answer.status, json.loads(body)["error"]["code"]) == (410, "sandbox_stopped")
        with pytest.raises(SandboxGone):
            box.ports.url(3000)
        assert box.ports.list() == []
    with pytest.raises(NotFound):
        Sandbox.connect("nonesuch", client=client)


def test_a_debugging_port_is_reached_by_its_url(sandbox: Sandbox) -> None:
    job = start(sandbox, 9222, more=("--debugger",))
    try:
        url = sandbox.ports.cdp_url(9222)
        with websockets.sync.client.connect(url, compression=None, proxy=None) as connection:
            head = lines(str(connection.recv()).encode())
            assert head["host"] == "localhost:9222"
            connection.send("{}")
            assert connection.recv() == "{}"
    finally:
        job.kill()
    with pytest.raises(PortProblem) as raised:
        sandbox.ports.cdp_url(9222)
    assert raised.value.code == "port_not_open"
    with pytest.raises(PortProblem) as raised:
        sandbox.ports.cdp_url(3000)  # a server, but no browser
    assert raised.value.code == "port_answer_invalid"


def cpuos(instance: Instance, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cpuos.cli", *words],
        env=instance.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_line(instance: Instance, sandbox: Sandbox) -> None:
    done = cpuos(instance, "ports", sandbox.id, "3000")
    assert done.returncode == 0, done.stderr
    assert Page(instance, done.stdout.strip()).ask("/")[0].status == 200
    assert "private, for " in done.stderr
    told = json.loads(cpuos(instance, "ports", sandbox.id, "3300", "--public", "--json").stdout)
    assert (told["port"], told["public"], told["token"]) == (3300, True, None)
    listed = json.loads(cpuos(instance, "ports", sandbox.id, "--json").stdout)["ports"]
    assert {3000, 3300} <= {port["port"] for port in listed}
    assert "3300" in cpuos(instance, "ports", sandbox.id).stdout
    left = json.loads(cpuos(instance, "ports", sandbox.id, "3300", "--close", "--json").stdout)["ports"]
    assert 3300 not in {port["port"] for port in left}
    for words in (("--public",), ("3300", "--close", "--public"), ("1",), ("70000",)):
        wrong = cpuos(instance, "ports", sandbox.id, *words)
        assert wrong.returncode != 0
        assert wrong.stderr.startswith("cannot ")


@pytest.mark.parametrize("auto_resume", [True, False])
def test_c29_a_paused_sandbox_is_waited_for_or_says_that_it_is(
    instance: Instance, client: Client, auto_resume: bool
) -> None:
    with Sandbox.create(client=client, memory="512MiB", auto_resume=auto_resume) as sandbox:
        sandbox.files.write("/workspace/server.py", SERVER.read_bytes())
        job = start(sandbox, 3000)
        page = Page(instance, sandbox.ports.url(3000))
        assert page.ask("/")[0].status == 200
        sandbox.pause()
        assert page.ask("/", token=False)[0].status == 401
        assert sandbox.refresh().state == "paused", "who may not see it wakes nobody"
        if not auto_resume:
            answer, body = page.ask("/")
            assert (answer.status, answer.headers["X-Cpuos-Error"]) == (503, "sandbox_paused")
            assert int(answer.headers["Retry-After"]) > 0
            assert "it is paused" in json.loads(body)["error"]["what"]
            token = page.query.partition("=")[2]
            shown, text = page.ask("/", token=False, Accept="text/html", X_Cpuos_Preview_Token=token)
            assert (shown.status, b"Sandbox is paused" in text) == (503, True)
            assert sandbox.refresh().state == "paused"
            sandbox.resume()
        answer, body = page.ask("/")
        assert (answer.status, lines(body)["host"]) == (200, page.host)
        wait_until(lambda: sandbox.refresh().state == "running")  # it answers before its state is written down
        if auto_resume:
            sandbox.pause()
            with page.websocket() as connection:
                connection.recv()
                connection.send("hello")
                assert connection.recv() == "hello"
        assert not job.refresh().status.ended, "the server that answers is the one from before"
