"""Alarms with real sandboxes: what uses much for long trips one whatever it does to hide, and what rests does not."""

from __future__ import annotations

from contextlib import suppress

import pytest

from cpuos import Sandbox
from cpuos.errors import SandboxGone, Unavailable
from cpuos.services.health import ask
from cpuos.testing.instance import Instance
from cpuos.testing.sealed import addresses
from cpuos.testing.waiting import wait_until

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(600)]

SMALL = {"template": "python", "cpu": 1, "memory": "256MiB", "disk": "64MiB", "timeout": "20m"}
RULE = "cpu=12%/6s"
"""Little: others use the machine too, and what is busy gets what they leave."""
BUSY = "while True: pass"
RESPAWNED = """
import os, time
end = time.monotonic() + 0.05
while time.monotonic() < end: pass
if os.fork() == 0:
    os.setsid()
    os.execv("/proc/self/exe", ["sshd", "-c", open("/workspace/me").read()])
os._exit(0)
"""
"""Each process lives for a moment only, in a session of its own, under another name."""
BURSTY = """
import time
while True:
    end = time.process_time() + 0.02
    while time.process_time() < end: pass
    time.sleep(2)
"""
FLOOD = f"""
import socket, time
made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
while True:
    for _ in range(50):
        made.sendto(b"x" * 1200, ("{addresses.WEB}", 5000))
    time.sleep(0.05)
"""
SCAN = f"""
import socket
for port in range(2000, 2200):
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.sendto(b"x", ("{addresses.WEB}", port))
"""


def create(instance, **values) -> Sandbox:
    return Sandbox.create(client=instance.client(), **SMALL | values)


def rules(sandbox: Sandbox) -> list[str]:
    return [one.rule.text for one in sandbox.refresh().active_alarms]


def used(own, sandbox: Sandbox) -> dict:
    _, body = ask(own.settings.node_socket, "/v1/usage", timeout_s=30)
    return next(one for one in body["usage"] if one["id"] == sandbox.id)


def told(sandbox: Sandbox) -> list[str]:
    return [entry.action for entry in sandbox.audit.entries(action="alarm")]


def test_what_is_sustained_and_what_is_not(sealed_instance):
    with (
        create(sealed_instance, alarms=[RULE]) as busy,
        create(sealed_instance, alarms=[RULE]) as bursty,
        create(sealed_instance, alarms=[RULE]) as idle,
    ):
        idle.spawn("sleep 600")
        bursty.spawn(["python3", "-c", BURSTY])
        job = busy.spawn(["python3", "-c", BUSY])
        wait_until(lambda: rules(busy) == [RULE], within_s=120)
        job.kill()
        wait_until(lambda: rules(busy) == [], within_s=120)  # two windows at least have passed for all
        assert (told(bursty), told(idle)) == ([], [])
        assert told(busy) == ["alarm.begin", "alarm.end"]
        begin, end = busy.audit.entries(action="alarm")
        assert begin.detail["what"].endswith("of its 1 CPU within 6s")
        assert end.detail["cpu_seconds"] > 0.12 * 6
        busy.files.write("me", RESPAWNED.encode())
        busy.spawn(["python3", "-c", RESPAWNED])
        wait_until(lambda: rules(busy) == [RULE], within_s=120)


def test_a_flood_is_paused_until_somebody_resumes_it(sealed_instance):
    with create(sealed_instance, alarms=["sent=1MiB/10s:pause", "connections=100/1m"]) as sandbox:
        sandbox.exec(["python3", "-c", SCAN], check=True)
        wait_until(lambda: rules(sandbox) == ["connections=100/1m"], within_s=60)
        sandbox.spawn(["python3", "-c", FLOOD])
        wait_until(lambda: sandbox.refresh().state == "paused", within_s=120)
        assert sandbox.info.reason.startswith("alarm of the sandbox (sent=1MiB/10s:pause): it sent ")
        with pytest.raises(Unavailable) as refused:
            sandbox.exec("true")
        assert refused.value.code == "sandbox_paused"
        wait_until(lambda: told(sandbox) == ["alarm.begin"] * 2 + ["alarm.end"] * 2)
        sent = [entry.detail["sent_bytes"] for entry in sandbox.audit.entries() if "sent_bytes" in entry.detail]
        assert 1 << 20 <= sent[0] < 64 << 20
        sandbox.resume()
        assert sandbox.exec("true").exit_code == 0
        wait_until(lambda: sandbox.refresh().state == "paused", within_s=120)  # the flood has gone on


def test_pauses_do_not_save_it_from_being_killed(sealed_instance):
    with create(sealed_instance, alarms=["cpu=3%/6s:kill"]) as sandbox:
        sandbox.spawn(["python3", "-c", BUSY])
        with suppress(SandboxGone):  # where that takes long, it has used enough meanwhile
            for _ in range(2):
                sandbox.pause()
                sandbox.resume()
        wait_until(lambda: sandbox.refresh().state == "stopped", within_s=120)
        assert sandbox.info.reason.startswith("alarm of the sandbox (cpu=3%/6s:kill): it used ")
        (outcome,) = wait_until(lambda: [one for one in sandbox.audit.entries(action="sandbox.kill") if one.result])
        assert (outcome.actor, outcome.result) == ("system", "ok")


@pytest.fixture
def own():
    with Instance(runtime="gvisor", max_sandboxes=2, alarm_interval_s=0.5) as instance:
        yield instance


@pytest.mark.slow
def test_a_restarted_node_and_server_go_on(own):
    """What was used while neither looked is counted, and an alarm that goes on is not told twice."""
    with create(own, alarms=["cpu=3%/6s"]) as sandbox:
        sandbox.spawn(["python3", "-c", BUSY])
        wait_until(lambda: rules(sandbox), within_s=120)
        before = used(own, sandbox)
        own.kill("node")
        own.kill("server")
        own.wait_ready()
        after = used(own, sandbox)
        assert after["ran_s"] > before["ran_s"]
        assert after["cpu_seconds"] > before["cpu_seconds"]
        sandbox.exec("pkill -f 'while True'", user="root")
        wait_until(lambda: rules(sandbox) == [], within_s=120)
        assert told(sandbox) == ["alarm.begin", "alarm.end"]
