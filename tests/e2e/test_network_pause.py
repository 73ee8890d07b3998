"""The network of a sandbox over a pause: the newest policy holds, names are asked anew, and records go on."""

from __future__ import annotations

import pytest

from cpuos import Network, Sandbox
from cpuos.testing.sealed import addresses
from cpuos.testing.waiting import wait_until

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

FLOOD = """
import socket
made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sent = 0
while sent < {count}:
    try:
        sent += made.sendto(b"x", ("{address}", 5000))
    except OSError:
        pass
"""
CONNECT = "import socket; socket.create_connection(({place!r}, 80), 20).close(); print('connected')"
GET = """
import urllib.request
print(urllib.request.urlopen("http://web.allowed.example/", timeout=20).status)
"""


def run(sandbox: Sandbox, code: str) -> str:
    return sandbox.exec(["python3", "-c", code]).stdout.strip()


def refused(sandbox: Sandbox) -> int:
    return sum(one.count for one in sandbox.audit.connections(verdict="refused"))


def test_a_flood_after_a_resume_is_counted_as_one_before(sealed_instance):
    with Sandbox.create(client=sealed_instance.client(), template="python", network="off") as sandbox:
        for round_number in range(1, 3):
            run(sandbox, FLOOD.format(address=addresses.WEB, count=1000))
            wait_until(lambda done=round_number: refused(sandbox) >= 1000 * done)
            assert refused(sandbox) == 1000 * round_number
            sandbox.pause()
            assert refused(sandbox) == 1000 * round_number, "the end of its router tells nothing twice"
            sandbox.resume()


def test_a_policy_that_was_changed_meanwhile_holds_and_names_are_asked_anew(sealed, sealed_instance):
    sealed.names.set("web.allowed.example", [addresses.WEB])
    client = sealed_instance.client()
    with Sandbox.create(client=client, template="python", network=Network(allow=["*.allowed.example"])) as sandbox:
        assert run(sandbox, GET) == "200"
        sandbox.pause()
        changed = sandbox.network.update(Network(allow=["web.allowed.example", f"{addresses.OTHER_WEB}:80"]))
        assert changed.policy.allow == ["web.allowed.example", f"{addresses.OTHER_WEB}:80"]
        sandbox.resume()
        assert run(sandbox, CONNECT.format(place=addresses.OTHER_WEB)) == "connected"
        assert run(sandbox, CONNECT.format(place=addresses.WEB)) == ""
        assert run(sandbox, GET) == "200"
        wait_until(lambda: sandbox.network.get().applied)
        seen = sandbox.audit.connections(verdict="allowed")
        assert [one.name or one.address for one in seen if one.kind == "tcp"] == [
            "web.allowed.example",
            addresses.OTHER_WEB,
            "web.allowed.example",
        ]
