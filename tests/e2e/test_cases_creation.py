"""Concurrent creation and the death of clients (C25), on real sandboxes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from cpuos import AsyncClient, AsyncSandbox, Client, Sandbox
from cpuos.errors import CapacityExceeded
from cpuos.testing.instance import Instance

pytestmark = pytest.mark.gvisor
SMALL = {"template": "base", "memory": "128MiB", "disk": "64MiB", "cpu": 1, "timeout": "10m", "max_processes": 32}


@pytest.mark.timeout(400)
async def test_c25_a_hundred_creates_with_room_for_sixty() -> None:
    room, wanted = 60, 100

    async def create(client: AsyncClient) -> AsyncSandbox | CapacityExceeded:
        try:
            return await AsyncSandbox.create(client=client, **SMALL)
        except CapacityExceeded as error:
            return error

    with Instance(runtime="gvisor", max_sandboxes=room, cpu_overcommit=64) as roomy:
        async with roomy.async_client() as client:
            answers = await asyncio.gather(*(create(client) for _ in range(wanted)))
            made = [answer for answer in answers if isinstance(answer, AsyncSandbox)]
            refused = [answer for answer in answers if isinstance(answer, CapacityExceeded)]
            assert (len(made), len(refused)) == (room, wanted - room)
            assert all("sandboxes" in str(error) for error in refused)
            results = await asyncio.gather(*(sandbox.exec("echo here") for sandbox in made))
            assert [result.stdout for result in results] == ["here\n"] * room
            await asyncio.gather(*(sandbox.kill() for sandbox in made))
            assert await AsyncSandbox.list(client=client, state="running") == []
        deadline = time.monotonic() + 90
        while roomy.leftovers() and time.monotonic() < deadline:  # noqa: ASYNC110 (the host is looked at, nobody tells)
            await asyncio.sleep(0.2)
        assert roomy.leftovers() == []


@pytest.mark.timeout(300)
def test_c25_clients_that_die_in_mid_create(instance, client: Client) -> None:
    before = {box.id for box in Sandbox.list(client=client)}
    script = (
        "from cpuos import Sandbox\n"
        "Sandbox.create(template='base', memory='128MiB', disk='64MiB', cpu=1, timeout='10s')"
    )
    for number in range(20):
        process = subprocess.Popen([sys.executable, "-c", script], env=instance.environment())
        time.sleep(0.25 + 0.02 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        left = [box for box in Sandbox.list(client=client) if box.id not in before]
        if not left:
            break
        time.sleep(0.5)
    assert left == []
    while instance.leftovers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert instance.leftovers() == []


def test_c25_one_key_at_the_same_time(instance, client: Client) -> None:
    key = f"same-{os.getpid()}-{time.time_ns()}"

    async def both() -> list[str]:
        async with instance.async_client() as first, instance.async_client() as second:
            boxes = await asyncio.gather(
                *(AsyncSandbox.create(client=one, idempotency_key=key, **SMALL) for one in (first, second, first))
            )
            return [box.id for box in boxes]

    ids = asyncio.run(both())
    assert len(set(ids)) == 1
    Sandbox.connect(ids[0], client=client).kill()


async def test_c25_two_hundred_commands_in_one_loop(async_client) -> None:
    async with await AsyncSandbox.create(client=async_client, template="base", memory="1GiB", disk="512MiB") as sandbox:
        gate = asyncio.Semaphore(60)  # the sandbox's own limit of running commands is 64

        async def run(number: int) -> str:
            async with gate:
                return (await sandbox.exec(f"echo {number}", timeout=60)).stdout

        answers = await asyncio.gather(*(run(number) for number in range(200)))
        assert answers == [f"{number}\n" for number in range(200)]
