"""More refusals than are told one by one: all of them are on record while the sandbox that makes them still runs."""

from __future__ import annotations

import time

import pytest

from cpuos import Sandbox
from cpuos.testing.sealed import addresses

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


def told(sandbox: Sandbox) -> int:
    return sum(one.count for one in sandbox.audit.connections(verdict="refused"))


def test_refusals_beyond_the_rate_of_the_log_are_counted_within_seconds(sealed_instance):
    with Sandbox.create(client=sealed_instance.client(), template="python", network="off") as sandbox:
        for floods in range(1, 3):
            code = FLOOD.format(address=addresses.WEB, count=2000)
            sandbox.exec(["python3", "-c", code], check=True)
            ended = time.monotonic()
            while told(sandbox) < 2000 * floods:
                assert time.monotonic() - ended < 60, sandbox.audit.connections()
                time.sleep(0.1)
            assert told(sandbox) == 2000 * floods
        gaps = [one for one in sandbox.audit.connections() if one.kind == "gap"]
        assert {one.verdict for one in gaps} == {"refused"}
        assert sum(one.count for one in gaps) > 3000
    assert told(sandbox) == 4000, "its end tells nothing a second time"
