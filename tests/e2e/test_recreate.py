"""A part of cpuOS is killed while a lost sandbox is made anew: it runs in the end, and no byte of its files is gone."""

from __future__ import annotations

import random
import threading
import time

import pytest

from cpuos import Client, Sandbox, Snapshot
from cpuos.errors import CpuosError
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from cpuos.types.sandbox import SandboxState

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(400)]

SMALL = {"template": "base", "memory": "256MiB", "disk": "256MiB", "cpu": 1, "timeout": "20m"}


@pytest.mark.parametrize(
    "part", ["node", *(pytest.param(part, marks=pytest.mark.slow) for part in ("server", "gateway"))]
)
def test_a_part_dies_while_one_is_made_anew(instance: Instance, client: Client, part: str) -> None:
    dice = random.Random(f"recreate and {part}")
    with Sandbox.create(client=client, **SMALL) as sandbox:
        data = dice.randbytes(3_000_000)
        sandbox.files.write("data", data)
        sandbox.exec("mkdir -p /opt/kept && echo kept > /opt/kept/file", user="root", check=True)
        sandbox.pause()
        sandbox.resume()
        for number in range(3):
            sandbox.exec(f"echo {number} >> log", check=True)
            generation = sandbox.refresh().generation
            instance.kill_sandbox(sandbox.id)
            wait_until(lambda: sandbox.refresh().state is SandboxState.LOST)
            killer = threading.Timer(dice.uniform(0, 0.5), lambda: instance.kill(part))
            killer.start()
            recreate_at_last(sandbox)
            killer.join()
            instance.wait_ready()
            wait_until(lambda: sandbox.refresh().state is SandboxState.RUNNING)
            assert sandbox.info.generation > generation
            assert sandbox.files.read("data") == data
            assert sandbox.files.read("log").decode().split() == [str(one) for one in range(number + 1)]
            assert sandbox.exec("cat /opt/kept/file", check=True).stdout == "kept\n"
            recreated = sandbox.refresh().recreated
            assert recreated is not None
            assert (recreated.workspace, recreated.root) == ("all", "saved")
    for left in Snapshot.list(sandbox=sandbox.id, client=client):
        Snapshot.get(left.id, client=client).delete()
    wait_until(lambda: instance.leftovers() == [], within_s=60)


def recreate_at_last(sandbox: Sandbox) -> None:
    """As a patient client: what is refused or cut is asked again."""
    deadline = time.monotonic() + 120
    while True:
        try:
            sandbox.recreate()
            return
        except CpuosError:
            assert time.monotonic() < deadline
            time.sleep(0.5)
