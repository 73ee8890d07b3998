"""Sixty sandboxes known and fifty of them paused: those cost disk only, and each answers as one alone would."""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpuos import Sandbox
from cpuos.testing.instance import Instance

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(1200)]

KNOWN, PAUSED, CALLED = 60, 50, 8
SHAPE = {"template": "base", "cpu": 1, "memory": "256MiB", "disk": "64MiB", "timeout": "4h"}


@pytest.fixture
def own():
    with Instance(runtime="gvisor", max_sandboxes=KNOWN, cpu_overcommit=KNOWN, memory_overcommit=4) as instance:
        yield instance


def answer(sandbox: Sandbox, *, own: str) -> float:
    """Seconds until a paused one has answered a call."""
    sandbox.pause()
    since = time.perf_counter()
    assert sandbox.exec("cat own", check=True, timeout=120).stdout == own
    return time.perf_counter() - since


def test_many_are_known_and_few_run(own: Instance) -> None:
    client = own.client()

    def make(number: int) -> Sandbox:
        sandbox = Sandbox.create(client=client, **SHAPE)
        sandbox.files.write("own", str(number).encode())
        if number < PAUSED:
            sandbox.pause()
        return sandbox

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make, range(KNOWN)))
    assert sum(info.state == "paused" for info in Sandbox.list(client=client)) == PAUSED
    room = client.get_json("/v1/capacity")
    assert (room["sandboxes"]["reserved"], room["cpu"]["reserved"]) == (KNOWN - PAUSED, KNOWN - PAUSED)
    alone, among = [], []
    for number in random.Random(5).sample(range(PAUSED), CALLED):  # one of many, and always the same one, in turns
        among.append(answer(made[number], own=str(number)))
        made[number].pause()
        alone.append(answer(made[-1], own=str(KNOWN - 1)))
    assert statistics.median(among) < max(3 * statistics.median(alone), 0.5), (among, alone)
    since = time.perf_counter()
    assert len(Sandbox.list(client=client)) == KNOWN
    assert time.perf_counter() - since < 5
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Sandbox.kill, made))
