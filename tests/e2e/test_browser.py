"""Chromium inside a real sandbox, driven from outside through a private preview. Needs the template `browser`
(`make templates`), which not every machine has built."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from cpuos import Sandbox
from cpuos.client import Client
from cpuos.errors import CpuosError
from cpuos.settings import load_settings
from cpuos.testing.waiting import wait_until

pytestmark = [
    pytest.mark.gvisor,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (load_settings().template_dir / "browser" / "root.erofs").exists(),
        reason="the template 'browser' is not built here; `make templates`",
    ),
]
PNG = b"\x89PNG\r\n\x1a\n"
BROWSER = "chromium --headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync" + (
    " --disable-background-networking --disable-component-update --remote-debugging-port=9222"
    " --user-data-dir=/tmp/profile about:blank"
)
PAGE = "data:text/html,<title>begun</title><body style='background:red'>hello <b id=name>there</b></body>"


class Debugger:
    """As much of the DevTools protocol as these tests need."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._session = ""
        self._number = 0

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": values}
        self._connection.send(json.dumps(asked | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = json.loads(self._connection.recv(timeout=60))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def evaluate(self, code: str) -> Any:
        return self.call("Runtime.evaluate", expression=code, returnByValue=True)["result"].get("value")


@pytest.fixture(scope="module")
def browsing(instance):
    client = instance.client()
    with Sandbox.create(client=client, template="browser", memory="2GiB", disk="1GiB", timeout="10m") as sandbox:
        sandbox.spawn(BROWSER)
        yield sandbox


def browser_url(sandbox: Sandbox) -> str:
    """Empty while the browser does not answer yet."""
    try:
        return sandbox.ports.cdp_url(9222)
    except CpuosError:
        return ""


def debugger(sandbox: Sandbox) -> ClientConnection:
    url = wait_until(lambda: browser_url(sandbox), within_s=90)
    return connect(url, max_size=64 << 20, open_timeout=60)


def test_a_page_is_opened_read_clicked_and_seen(browsing: Sandbox) -> None:
    with debugger(browsing) as connection:
        page = Debugger(connection)
        assert "Chrome" in page.call("Browser.getVersion")["product"]
        page.open(PAGE)
        wait_until(lambda: page.evaluate("document.title") == "begun", within_s=90)
        assert page.evaluate("document.body.innerText.trim()") == "hello there"
        page.evaluate("document.getElementById('name').onclick = () => { document.title = 'clicked' }")
        page.evaluate("document.getElementById('name').click()")
        assert page.evaluate("document.title") == "clicked"
        picture = base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])
        assert picture.startswith(PNG)
        assert len(picture) > 1000


def test_the_browser_goes_on_after_a_pause(browsing: Sandbox, client: Client) -> None:
    with debugger(browsing) as connection:
        page = Debugger(connection)
        page.open(PAGE)
        wait_until(lambda: page.evaluate("document.title") == "begun", within_s=90)
        page.evaluate("document.title = 'kept'")
    browsing.pause()
    with debugger(browsing) as connection:
        page = Debugger(connection)
        titles = {one["title"] for one in page.call("Target.getTargets")["targetInfos"]}
        assert "kept" in titles


PLAYWRIGHT = """
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(channel="chrome", args=["--no-sandbox", "--disable-gpu"])
    page = browser.new_page()
    page.set_content("<title>inside</title><button onclick='document.title = 1 + 1'>press</button>")
    page.click("button")
    print(page.title(), len(page.screenshot()) > 1000)
    browser.close()
"""


def test_playwright_drives_it_from_outside_through_a_private_preview(browsing: Sandbox) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed here")
    url = wait_until(lambda: browser_url(browsing), within_s=90)
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.connect_over_cdp(url, timeout=120_000)
        page = browser.new_context().new_page()
        page.goto(PAGE)
        assert page.title() == "begun"
        assert page.locator("#name").inner_text() == "there"
        page.evaluate("document.title = 'driven'")
        assert page.title() == "driven"
        assert page.screenshot().startswith(PNG)
        browser.close()


def test_playwright_drives_it_from_inside(browsing: Sandbox) -> None:
    browsing.files.write("/workspace/drive.py", PLAYWRIGHT)
    done = browsing.exec("python3 drive.py", timeout="2m")
    assert (done.stdout, done.exit_code) == ("2 True\n", 0), done.stderr


def test_nobody_drives_it_without_the_token(browsing: Sandbox) -> None:
    url = wait_until(lambda: browser_url(browsing), within_s=90)
    for wrong in (url.partition("?")[0], f"{url[:-8]}AAAAAAAA"):
        with pytest.raises(InvalidStatus) as refused:
            connect(wrong, open_timeout=60)
        assert refused.value.response.status_code in (400, 401)
    other = browsing.ports.cdp_url(9222)
    browsing.ports.close(9222)
    with pytest.raises(InvalidStatus) as refused:
        connect(other, open_timeout=60)
    assert refused.value.response.status_code == 401
