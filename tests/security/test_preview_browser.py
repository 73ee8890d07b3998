"""Previews in a real Chromium: what the visitor's own page may, and what a hostile page of another sandbox tries."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets.exceptions
import websockets.sync.client

from cpuos import Client, Sandbox
from cpuos.errors import PortProblem
from cpuos.testing.instance import Instance

CHROMIUM = shutil.which("chromium") or ""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium at /usr/bin/chromium: apt-get install chromium")
SERVER = Path(__file__).parents[1] / "preview_server.py"
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
    *("--disable-dev-shm-usage", "--no-proxy-server"),
)
COOKIE = "__Host-cpuos-preview"


class Tab:
    """One page, driven by the debugging protocol."""

    def __init__(self, connection: websockets.sync.client.ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Network.enable")

    def call(self, method: str, **values: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": values}
        if self._session is not None:
            message["sessionId"] = self._session
        self._connection.send(json.dumps(message))
        while True:
            told = json.loads(self._connection.recv(timeout=60))
            if told.get("id") == number:
                assert "error" not in told, told
                return told["result"]

    def open(self, url: str) -> None:
        told = self.call("Page.navigate", url=url)
        assert "errorText" not in told, told
        deadline = time.monotonic() + 30
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise's value."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def cookies(self, url: str) -> list[dict[str, Any]]:
        return self.call("Network.getCookies", urls=[url])["cookies"]


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    """Of a browser without any history."""
    process = subprocess.Popen(
        [CHROMIUM, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    try:
        found = tmp_path / "profile" / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not found.exists() or found.read_text().count("\n") < 1:
            assert process.poll() is None, "Chromium ended"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        port, path = found.read_text().split("\n")[:2]
        url = f"ws://127.0.0.1:{port}{path}"
        with websockets.sync.client.connect(url, max_size=None, compression=None, proxy=None) as connection:
            yield Tab(connection)
    finally:
        process.kill()
        process.wait()


class Shown:
    """A server inside a sandbox, and what it was asked."""

    def __init__(self, box: Sandbox, port: int) -> None:
        self.box, self.port = box, port
        box.files.write("/workspace/server.py", SERVER.read_bytes())
        folder = box.exec("pwd").stdout.strip()
        self.job = box.spawn(["python3", f"{folder}/server.py", "127.0.0.1", str(port), "--log"])
        deadline = time.monotonic() + 30
        while b"ready" not in self.job.output():
            assert not self.job.refresh().status.ended
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.base = box.ports.publish(port).url.rstrip("/")

    def url(self, path: str = "/") -> str:
        base, _, token = self.box.ports.url(self.port).partition("?")
        return f"{base.rstrip('/')}{path}?{token}"

    def asked(self, *, until: str) -> list[str]:
        """Request lines that reached the server, up to one that is known to be the last."""
        deadline = time.monotonic() + 20
        while until not in "\n".join(lines := self._lines()):
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
        return lines

    def _lines(self) -> list[str]:
        return [line for line in self.job.output().decode().splitlines() if line.startswith(("GET ", "POST "))]


@pytest.fixture(scope="module")
def boxes(instance: Instance, client: Client) -> Iterator[tuple[Shown, Shown]]:
    with (
        Sandbox.create(client=client, memory="512MiB", disk="128MiB", timeout="20m") as mine,
        Sandbox.create(client=client, memory="512MiB", disk="128MiB", timeout="20m") as hostile,
    ):
        yield Shown(mine, 38320), Shown(hostile, 38321)


def test_a_private_link_opens_and_leaves_no_token_behind(tab: Tab, boxes: tuple[Shown, Shown]) -> None:
    mine, _ = boxes
    tab.open(mine.url("/hello"))
    assert tab.run("location.href") == f"{mine.base}/hello"
    assert "GET /hello HTTP/1.1" in tab.run("document.body.innerText")
    (kept,) = [cookie for cookie in tab.cookies(mine.base) if cookie["name"] == COOKIE]
    assert (kept["httpOnly"], kept["secure"], kept["sameSite"], kept["path"]) == (True, True, "Lax", "/")
    assert not kept["domain"].startswith(".")
    assert "cpuos" not in tab.run("document.cookie")
    assert "cpuos" not in tab.run("document.documentElement.outerHTML").lower()
    assert tab.run("document.referrer") == ""
    tab.open(f"{mine.base}/again")
    assert "GET /again HTTP/1.1" in tab.run("document.body.innerText")
    assert tab.run("fetch('/upload', {method: 'POST', body: 'abc'}).then(answer => answer.text())").startswith("3 ")
    own_socket = """new Promise(done => {
        const socket = new WebSocket(location.origin.replace('http', 'ws') + '/ws');
        socket.onmessage = event => done(event.data.split('\\r\\n')[0]);
        socket.onerror = () => done('refused');
    })"""
    assert tab.run(own_socket) == "GET /ws HTTP/1.1"


def test_a_preview_without_its_link_shows_why_not(tab: Tab, boxes: tuple[Shown, Shown]) -> None:
    mine, _ = boxes
    tab.open(f"{mine.base}/x")
    assert "This preview is private" in tab.run("document.body.innerText")
    assert tab.cookies(mine.base) == []


# Each returns what the page could find out. The victim is logged in to its own preview in the same browser.
ATTACKS = {
    "fetch": "fetch(VICTIM + '/stolen-fetch', {credentials: 'include'}).then(a => a.text()).catch(() => 'refused')",
    "no_cors": """fetch(VICTIM + '/stolen-no-cors', {credentials: 'include', mode: 'no-cors'})
        .then(a => a.type === 'opaque' ? 'refused' : 'read').catch(() => 'refused')""",
    "post": """fetch(VICTIM + '/stolen-post', {method: 'POST', credentials: 'include', mode: 'no-cors', body: 'x'})
        .then(a => a.type === 'opaque' ? 'refused' : 'read').catch(() => 'refused')""",
    "image": """new Promise(done => { const image = new Image(); image.onload = () => done('read');
        image.onerror = () => done('refused'); image.src = VICTIM + '/stolen-image'; })""",
    "script": """new Promise(done => { const script = document.createElement('script');
        script.onload = () => done('read'); script.onerror = () => done('refused');
        script.src = VICTIM + '/stolen-script'; document.body.append(script); })""",
    "frame": """new Promise(done => { const frame = document.createElement('iframe');
        frame.onload = () => { try { done(frame.contentDocument.body.innerText) } catch { done('refused') } };
        frame.src = VICTIM + '/stolen-frame'; document.body.append(frame); })""",
    "form": """new Promise(done => { const frame = document.createElement('iframe'); frame.name = 'into';
        const form = document.createElement('form'); form.method = 'POST'; form.target = 'into';
        form.action = VICTIM + '/stolen-form'; document.body.append(frame, form);
        frame.onload = () => { try { frame.contentDocument.title; done("read") } catch { done("refused") } };
        form.submit(); })""",
    "websocket": """new Promise(done => { const socket = new WebSocket(VICTIM.replace('http', 'ws') + '/stolen-ws');
        socket.onopen = () => done('open'); socket.onerror = () => done('refused'); })""",
    "worker": """navigator.serviceWorker.register(VICTIM + '/stolen-worker')
        .then(() => 'registered').catch(() => 'refused')""",
    "event_source": """new Promise(done => {
        const source = new EventSource(VICTIM + '/stolen-events', {withCredentials: true});
        source.onopen = () => done('open'); source.onerror = () => { source.close(); done('refused') }; })""",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_page_of_another_sandbox_reaches_nothing(tab: Tab, boxes: tuple[Shown, Shown], name: str) -> None:
    mine, hostile = boxes
    tab.open(mine.url("/"))
    tab.open(hostile.url("/"))
    told = tab.run(ATTACKS[name].replace("VICTIM", json.dumps(mine.base)))
    assert told == "refused"
    tab.open(f"{mine.base}/still-mine-{name}")
    assert f"GET /still-mine-{name}" in tab.run("document.body.innerText")
    assert not [line for line in mine.asked(until=f"still-mine-{name}") if "stolen" in line]


def test_cookies_that_a_page_throws_at_its_siblings_open_nothing(tab: Tab, boxes: tuple[Shown, Shown]) -> None:
    mine, hostile = boxes
    tab.open(mine.url("/"))
    tab.open(hostile.url("/cookies"))
    for text in (
        f"{COOKIE}=evil; Secure; Path=/; Domain=preview.localhost",
        f"{COOKIE}=evil; Secure; Path=/",
        f"={COOKIE}=evil; Secure; Path=/; Domain=preview.localhost",
        "cpuos-session=evil; Domain=preview.localhost; Path=/",
        f"{COOKIE.lower()}=evil; Domain=preview.localhost; Path=/",
    ):
        tab.run(f"document.cookie = {json.dumps(text)}")
    assert [one["domain"] for one in tab.cookies(mine.base) if one["name"] == COOKIE] == [
        mine.base.removeprefix("http://").partition(":")[0]
    ]
    tab.open(f"{mine.base}/still-mine")
    seen = tab.run("document.body.innerText")
    assert "GET /still-mine" in seen
    assert "evil" not in seen
    assert [one["name"] for one in tab.cookies(hostile.base) if one["name"] == "a"] == ["a"]  # its own, for itself
    assert "a" not in [one["name"] for one in tab.cookies(mine.base)]


def test_a_page_cannot_go_to_the_platforms_own_origins(
    tab: Tab, boxes: tuple[Shown, Shown], instance: Instance
) -> None:
    _, hostile = boxes
    tab.open(hostile.url("/"))
    settings = instance.settings
    for url in (
        f"http://127.0.0.1:{settings.api_port}/v1/health",
        f"http://127.0.0.1:{settings.gateway_port}/v1/health",
        f"http://127.0.0.1:{settings.preview_port}/",
    ):
        told = tab.run(f"fetch({json.dumps(url)}).then(a => a.text()).catch(() => 'refused')")
        assert told == "refused"


def test_no_page_is_shown_under_the_listeners_address(tab: Tab, boxes: tuple[Shown, Shown], instance: Instance) -> None:
    """There the pages of all sandboxes would be of one origin."""
    mine, _ = boxes
    token = mine.box.ports.publish(mine.port).token
    tab.open(f"http://127.0.0.1:{instance.settings.preview_port}/shown?cpuos_token={token}")
    assert "GET /shown" not in tab.run("document.body.innerText")
    tab.open(mine.url("/not-shown"))
    assert not [line for line in mine.asked(until="/not-shown") if "/shown" in line]


def test_a_chromium_inside_is_driven_from_outside(fake_instance: Instance, tmp_path: Path) -> None:
    """By its debugging port, which answers to nobody but localhost, through a private preview."""
    program = Path("/usr/lib/chromium/chromium")
    if not program.exists():
        pytest.skip(f"{CHROMIUM} is not Debian's")
    options = [option for option in OPTIONS if "debugging-port" not in option]
    port = 38330
    with Sandbox.create(client=fake_instance.client()) as box:
        profile = f"--user-data-dir={tmp_path / 'inside'}"
        tmp_path.chmod(0o777)
        box.spawn([str(program), *options, f"--remote-debugging-port={port}", profile], env={"HOME": str(tmp_path)})
        deadline = time.monotonic() + 60
        while True:
            try:
                url = box.ports.cdp_url(port)
                break
            except PortProblem:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        with websockets.sync.client.connect(url, max_size=None, compression=None, proxy=None) as connection:
            inside = Tab(connection)
            inside.open("data:text/html,<title>inside</title><h1>hello</h1>")
            assert inside.run("document.title") == "inside"
            assert len(inside.call("Page.captureScreenshot")["data"]) > 1000
            box.ports.close(port)
            with pytest.raises(websockets.exceptions.ConnectionClosed):
                inside.call("Page.captureScreenshot")
