"""The listeners of previews as settings make them: TLS by `cpuos certs`, path mode, a domain that is refused."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cpuos import Sandbox
from cpuos.testing.instance import Instance
from cpuos.testing.ports import TestPorts
from cpuos.testing.waiting import wait_until

SERVER = Path(__file__).parents[1] / "preview_server.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the gateway's user may look: pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory(prefix="cpuos-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def cpuos(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {f"CPUOS_{name.upper()}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "cpuos.cli", *words], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def ports() -> Iterator[TestPorts]:
    made = TestPorts()
    yield made
    made.close()


def start_server(box: Sandbox, port: int) -> None:
    job = box.spawn(["python3", "-c", SERVER.read_text(), "127.0.0.1", str(port)])
    wait_until(lambda: job.output() or job.refresh().status.ended)
    assert job.output()


def get(connection: http.client.HTTPConnection, target: str, **headers: Any) -> http.client.HTTPResponse:
    connection.request("GET", target, headers=headers)
    return connection.getresponse()


def test_previews_by_tls_and_by_path(folder: Path, ports: TestPorts) -> None:
    state = folder / "state"
    made = cpuos("certs", "--json", state_dir=str(state), data_dir=str(folder / "data"))
    assert made.returncode == 0, made.stderr
    files = json.loads(made.stdout)
    assert files["domain"] == "preview.localhost"
    state.chmod(0o755)
    values = {"preview_tls_cert": files["certificate"], "preview_tls_key": files["key"]}
    values |= {"preview_path_mode": True, "preview_path_port": ports.take()}
    with Instance(runtime="fake", **values) as instance, Sandbox.create(client=instance.client()) as box:
        port = ports.take()
        start_server(box, port)
        url = box.ports.url(port, public=True)
        assert url.startswith("https://")
        place = urlsplit(url)
        trusting = ssl.create_default_context(cafile=files["authority"])
        raw = socket.create_connection(("127.0.0.1", place.port or 0), timeout=20)
        named = http.client.HTTPConnection(place.hostname or "", place.port)
        named.sock = trusting.wrap_socket(raw, server_hostname=place.hostname)
        answer = get(named, "/")
        assert (answer.status, answer.getheader("content-security-policy")) == (200, None)
        assert b"x-forwarded-proto: https" in answer.read().lower()
        named.close()
        # The certificate names previews; by path they come under the listener's address.
        trusting.check_hostname = False
        by_path = http.client.HTTPSConnection(
            "127.0.0.1", instance.settings.preview_path_port, context=trusting, timeout=20
        )
        answer = get(by_path, f"/{box.id}/{port}/cookies")
        assert answer.status == 200
        answer.read()
        assert answer.getheader("set-cookie") is None
        assert (answer.getheader("content-security-policy") or "").startswith("sandbox")
        by_path.close()


def test_path_mode_is_off_unless_asked_for(fake_instance: Instance) -> None:
    assert not fake_instance.settings.preview_path_mode
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", fake_instance.settings.preview_path_port), timeout=5)


@pytest.mark.parametrize("part", ["cpuos.gateway", "cpuos.server"])
def test_a_domain_of_the_api_is_refused_at_start(folder: Path, part: str) -> None:
    values = {"STATE_DIR": str(folder / "state"), "RUN_DIR": str(folder / "run"), "DATA_DIR": str(folder / "data")}
    values |= {"PREVIEW_DOMAIN": "cpuos.example.com", "API_PUBLIC_URL": "https://cpuos.example.com"}
    environment = os.environ | {f"CPUOS_{name}": value for name, value in values.items()}
    done = subprocess.run([sys.executable, "-m", part], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "preview_domain = 'cpuos.example.com'" in done.stderr
    assert "shares cookies with cpuos.example.com" in done.stderr
