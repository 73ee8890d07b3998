"""From the open internet to a list of names, while a program is connected: what the list allows goes on."""

from __future__ import annotations

import time

import pytest

from cpuos import PIPE, Network, Sandbox
from cpuos.testing.sealed import addresses

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

PROGRAM = """
import http.client, sys
def ask(made):
    made.request("GET", "/")
    answer = made.getresponse()
    answer.read()
    return answer.status
opened = [http.client.HTTPConnection(name, 80, timeout=30) for name in ("kept.allowed.example", "cut.example")]
print([ask(made) for made in opened], flush=True)
for made in opened:
    made.auto_open = 0
for line in sys.stdin:
    for made in opened:
        try:
            print(made.host, ask(made), flush=True)
        except (OSError, http.client.HTTPException) as error:
            print(made.host, type(error).__name__, flush=True)
"""


def test_a_connection_to_a_name_that_stays_allowed_goes_on(sealed, sealed_instance):
    sealed.names.set("kept.allowed.example", [addresses.WEB])
    sealed.names.set("cut.example", [addresses.OTHER_WEB])
    with Sandbox.create(client=sealed_instance.client(), template="python") as sandbox:
        job = sandbox.spawn(["python3", "-c", PROGRAM], stdin=PIPE)
        _wait_for(job, b"[200, 200]")
        sandbox.network.update(Network(allow=["*.allowed.example"]))
        job.write_stdin("again\n")
        _wait_for(job, b"kept.allowed.example 200\n")
        _wait_for(job, b"cut.example ConnectionResetError\n")
        sandbox.network.update(Network(deny=["kept.allowed.example"]))
        job.write_stdin("again\n")
        _wait_for(job, b"kept.allowed.example ConnectionResetError\n")
        job.close_stdin()
        job.wait(timeout=60)


def _wait_for(job, text: bytes) -> None:
    deadline = time.monotonic() + 60
    while text not in job.output():
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.02)
